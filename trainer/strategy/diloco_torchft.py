"""DiLoCo with torchft: replicas may fail and rejoin. torchft tracks their membership and transfers state to a rejoining one.

https://meta-pytorch.org/torchft. Every replica has its own torchrun and is represented by its first rank. At a synchronization
the replicas form a quorum at the lighthouse, exchange their counts, and sum their pseudo-gradients. All of them apply the
outer step. After an error none does, and they form a new quorum without the failed replica. A replica that returns later waits
for the next synchronization, receives the checkpoint of the last one, joins the completed round without having
trained in it, and applies the outer step with the other replicas.
"""

import datetime
import logging
import os
import socket
import tempfile
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from trainer.common.errors import UserError
from trainer.common.files import write_atomic
from trainer.common.formats import counted
from trainer.config import RunSpec
from trainer.distributed.store import RunStore
from trainer.distributed.world import World
from trainer.method.module_with_loss import ModelWithLoss
from trainer.records.checkpoint import write_checkpoint
from trainer.strategy.base import Rows, Stopped, Update
from trainer.strategy.diloco_fixed import DiLoCo
from trainer.strategy.replicas import apportion, check_rows

os.environ.setdefault("RUST_LOG", "warn")  # the default logs every message
logging.getLogger("torchft.manager").setLevel(logging.ERROR)
try:
    from torch.distributed import ReduceOp
    from torchft import Manager, ProcessGroupGloo
    from torchft.checkpointing import HTTPTransport
    from torchft.checkpointing._serialization import _streaming_load
except ImportError:
    raise UserError(
        "diloco_membership: torchft is not installed: add it to python_extras and run site.yml, or set diloco_membership=fixed"
    ) from None

_CHUNK = 4 << 20  # numbers of one all-reduce; a slow link carries them within _STALL_LIMIT
_STALL_LIMIT = 60.0  # seconds without progress after which a synchronization starts over
_REJOIN_LIMIT = 60.0  # seconds that the last synchronization waits for missing replicas
_POLL_INTERVAL = 0.02  # seconds between two checks of a pending quorum
_RETRY_INTERVAL = 0.2  # seconds between two quorums while replicas are missing
_COLUMNS = 5  # fields of Membership


class Membership(NamedTuple):
    """The shared state of the replicas of a quorum: one value per configured replica; zeros for a missing one."""

    starts: list[float]  # identifies the start of each replica
    sizes: list[float]  # number of ranks
    patient: list[float]  # whether the replica would wait for missing ones
    joining: list[float]  # whether the replica has not trained yet
    checksums: list[float]  # of the weights; 0 if they were just received

    @property
    def present(self) -> list[int]:
        """The indices of the replicas in the quorum."""
        return [number for number, start in enumerate(self.starts) if start]


class Transport(HTTPTransport):
    """The HTTP transport of torchft, announced at the cluster address, that refuses pickled code."""

    def __init__(self, address: str, timeout: datetime.timedelta) -> None:
        self._host = address
        super().__init__(timeout, num_chunks=0)

    def address(self) -> str:
        return f"http://{self._host}:{self._server.socket.getsockname()[1]}/checkpoint/"

    def disallow_checkpoint(self) -> None:
        super().disallow_checkpoint()
        self._state_dict = self._chunks = None  # no peer can request it now

    @classmethod
    def _load_from_address(cls, address: str, timeout: datetime.timedelta) -> object:
        import urllib.request

        with urllib.request.urlopen(address, timeout=timeout.total_seconds()) as answer:
            return _streaming_load(answer, weights_only=True)


class DiLoCoTorchFT(DiLoCo):
    """One of several replicas, of which some may be missing."""

    def __init__(self, spec: RunSpec, world: World, module: ModelWithLoss) -> None:
        self.replica = world.replica
        super().__init__(spec, world, module)
        self.membership: Membership | None = None  # of the last synchronization, or of the current one
        self._synced_step = 0  # the step of the last synchronization
        self._quorum_pending = False  # a quorum was formed, but its outer step has not run yet
        self._observing = False  # this replica joined after the round had started
        self._synced_sums: list[float] = []
        self._received_state: dict[str, Any] | None = None
        self._joined = False
        self._executor = ThreadPoolExecutor(1)

    def find_replicas(self, spec: RunSpec, world: World) -> list[list[int]]:
        count = self.replica.count
        check_rows(spec, count)
        self.sizes, self.mine = [1.0] * count, self.replica.number
        return [list(range(world.size))]

    # Joining ----------------------------------------------------------------------------------------------------------

    def join(
        self,
        start: str,
        steps: int,
        run_dir: Path,
        checkpoint_state: Callable[[], dict[str, Any]],
        waiting: Callable[[], bool],
    ) -> bool:
        """Wait for all replicas at the start of a run, or for the next synchronization of a run in progress.

        Raises:
            UserError: the replicas have different states of the same step.
            Stopped: the run was stopped while the replica waited.
        """
        self._start, self._run_dir, self._checkpoint_state = float(int(start, 16)), run_dir, checkpoint_state
        self._synced_step, self._steps = checkpoint_state()["step"], steps
        count = 4 + _COLUMNS * self.replica.count
        found: list[float] = []
        if self.world.rank == 0:
            try:
                self._connect()
                found = [0.0, *self._find_peers(waiting)]
            except Stopped:
                found = [1.0] * count
        stopped, received, observing, step, *membership = self._share(found, count, waiting)
        if stopped:
            raise Stopped
        self._synced_step, self.membership = int(step), self._unpack(membership)
        self._received_state, self._joined = None, True
        self._observing = self._quorum_pending = bool(observing)
        if self.world.rank == 0:
            self._set_manager_step()
        self._report()
        return bool(received)

    def _find_peers(self, waiting: Callable[[], bool]) -> list[float]:
        """Return whether state was received, whether a round is in progress, the last synchronized step, and the membership."""
        self.membership = seen = self._gather(self.spec.collective_timeout, waiting)
        if self.replica.restarted and seen.present == [self.mine] and self.replica.count > 1:
            raise RuntimeError("no other replica is running")
        # At the start of a run the weights are equal without a transfer, unless hosts initialized them differently.
        checksums = {seen.checksums[number] for number in seen.present} - {0.0}
        state = self._received_state
        if state and not state["step"] and self._checksum() in checksums:
            state = None
        if not state and len(checksums) > 1:
            raise UserError(
                f"checkpoint: the replicas have different states of step {self._synced_step}: "
                "remove the checkpoints of all hosts but one"
            )
        if state:
            self._write(state)
        observing = not all(seen.joining[number] for number in seen.present)
        step = state["step"] if state else self._synced_step
        return [float(state is not None), float(observing), float(step), *self._flat()]

    def _connect(self) -> None:
        """Connect to the lighthouse and to the other replicas."""
        host, _, port = self.replica.lighthouse.partition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:  # nothing is sent
            route.connect((host, int(port)))
            address = route.getsockname()[0]
        timeout = datetime.timedelta(seconds=self.spec.collective_timeout)
        # A new store per start: entries of an earlier start of this replica would be wrong.
        self._store = RunStore(address, 0, is_master=True, wait_for_workers=False)
        self.group = ProcessGroupGloo(
            timeout=datetime.timedelta(seconds=min(_STALL_LIMIT, self.spec.collective_timeout))
        )
        self.manager = Manager(
            pg=self.group,
            load_state_dict=self._receive_state,
            state_dict=self._state,
            min_replica_size=1,
            use_async_quorum=False,
            timeout=timeout,
            quorum_timeout=datetime.timedelta(days=30),  # slower replicas are awaited
            connect_timeout=timeout,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=self._store.port,
            lighthouse_addr=f"http://{self.replica.lighthouse}",
            replica_id=f"replica{self.mine}",
            hostname=address,
            checkpoint_transport=Transport(address, timeout),
            init_sync=False,
            quorum_retries=5,
        )
        self._set_manager_step()

    def _set_manager_step(self) -> None:
        """Report progress to torchft, which transfers state to replicas that are behind. On the first start all receive the state of replica 0."""
        initialized = self._joined or self._synced_step or self.mine == 0
        syncs = 1 + -(-self._synced_step // self.spec.local_steps) if initialized else 0
        self.manager.load_state_dict({"step": syncs, "batches_committed": 0})

    def _state(self) -> dict[str, Any]:
        """Return the contents of a checkpoint of the last synchronization, for a replica that rejoins."""
        with tempfile.TemporaryDirectory(dir=self._run_dir) as folder:
            self.save(Path(folder))
            files = {
                file.name: torch.from_numpy(np.fromfile(file, dtype=np.uint8))
                for file in sorted(Path(folder).iterdir())
            }
        metrics = self._run_dir / "metrics.jsonl"
        return {
            "files": files,
            "metrics": metrics.read_text(encoding="utf-8") if metrics.exists() else "",
            **self._checkpoint_state(),
        }

    def _receive_state(self, state: dict[str, Any]) -> None:
        if self._joined:
            # This round started from weights that the other replicas no longer have.
            raise RuntimeError("the other replicas continued without this one: start it again")
        self._received_state = state

    def _write(self, state: dict[str, Any]) -> None:
        """Write received state as a checkpoint of this replica."""
        kept = {name: value for name, value in state.items() if name not in ("files", "metrics")}
        print(f"checkpoint: step {kept['step']} was received from another replica")

        def save(folder: Path) -> None:
            for name, content in state["files"].items():
                (folder / Path(name).name).write_bytes(content.numpy().tobytes())

        step = kept.pop("step")
        write_checkpoint(self._run_dir / "checkpoints", step, kept, save, self.spec.checkpoint_keep)
        write_atomic(self._run_dir / "metrics.jsonl", state["metrics"])

    def save(self, folder: Path) -> None:
        super().save(folder)
        # The weights of the last synchronization: this replica may have trained since.
        synced = {name: parameter.detach().contiguous() for name, parameter in self.outer.items()}
        save_file(synced, folder / "trained.safetensors")

    # Synchronization --------------------------------------------------------------------------------------------------

    def updates(self, step: int, rows: Rows) -> list[Update]:
        if self._observing:
            self._step = step
            return []
        return super().updates(step, rows)

    def assign(self, turns: int) -> list[int]:
        """Distribute a round among the replicas of the last synchronization."""
        assert self.membership
        present = self.membership.present
        sizes, costs = [self.membership.sizes[n] for n in present], [self.costs[n] for n in present]
        return [present[place] for place in apportion(turns, self._speeds(sizes, costs))]

    def sync(self, waiting: Callable[[], bool], flags: list[float]) -> None:
        """Run the outer step with the replicas that are present.

        Raises:
            NonFiniteError: the weights of a rank of this replica are not finite; the other replicas do not receive them.
        """
        count, length = self.replica.count, self.spec.local_steps
        self._next_synced_step = min(self._synced_step + length - self._synced_step % length, self._steps)
        *flags, not_finite = self.world.sum([*flags, float(not self.weights_finite())])
        self.reject_not_finite(not_finite)
        self.local_params = self.inside.full_params()
        numbers = self._exchange(flags, waiting) if self.world.rank == 0 else []
        numbers = self._share(numbers, (_COLUMNS + 1) * count + len(flags), waiting)
        before = self.membership
        self.membership = self._unpack(numbers)
        rest = numbers[_COLUMNS * count :]
        self.end_round(rest[:count])
        self._synced_sums = rest[count:]
        if self.world.is_host_leader and self.host_leaders.size > 1:
            for names in self.chunks(_CHUNK):
                gradient = torch.empty(sum(self.outer[name].numel() for name in names))
                if self.world.rank == 0:
                    gradient = torch.cat([self.outer[name].grad.flatten() for name in names])
                self.broadcast_gradient(names, gradient)
        self.outer_step()
        self._synced_step, self._observing, self._quorum_pending = self._next_synced_step, False, False
        if self.world.rank == 0:
            self._set_manager_step()
        if before and before.present != self.membership.present:
            self._report()

    def _exchange(self, flags: list[float], waiting: Callable[[], bool]) -> list[float]:
        """Sum counts and pseudo-gradients over the replicas, on the first rank of this one. Retry until no replica fails."""
        count = self.replica.count
        tokens, cost = self.round_counts()
        while True:
            if not self._quorum_pending:
                self.membership = self._gather(_REJOIN_LIMIT if self._next_synced_step == self._steps else 0.0, waiting)
            self._quorum_pending = False
            mine = [0.0] * (2 * count)
            mine[self.mine], mine[count + self.mine] = tokens, cost
            numbers = self._sum(torch.tensor([*mine, *flags], dtype=torch.float64)).tolist()
            weight = tokens / max(1.0, sum(numbers[:count]))
            for names in self.chunks(_CHUNK):
                gradient = self._sum(self.pseudo_gradient(names, weight, torch.device("cpu")))
                self.set_gradient(names, gradient)
            if self._committed():
                return [*self._flat(), *numbers[count:]]

    def sum(self, values: list[float]) -> list[float]:
        """Return the sums of `sync`, and sum the remaining values over the ranks of this replica."""
        return [*self._synced_sums, *self.world.sum(values[len(self._synced_sums) :])]

    @property
    def present(self) -> list[str]:
        return [f"{int(name):x}" for name in self.membership.starts if name] if self.membership else []

    def _gather(self, patience: float, waiting: Callable[[], bool]) -> Membership:
        """Form a quorum and return its membership. Wait up to `patience` seconds for missing replicas if all others also wait."""
        deadline, known = time.monotonic() + patience, self.replica.count
        while True:
            quorum = self._executor.submit(self.manager.start_quorum)
            while not quorum.done():
                if waiting() and not self._joined:
                    raise Stopped
                time.sleep(_POLL_INTERVAL)
            quorum.result()
            values = [0.0] * (_COLUMNS * self.replica.count)
            received = self._received_state is not None
            mine = (
                self._start,
                self.replica_group.size,
                time.monotonic() < deadline,
                not self._joined,
                0 if received else self._checksum(),
            )
            values[self.mine :: self.replica.count] = map(float, mine)
            seen = self._unpack(self._sum(torch.tensor(values, dtype=torch.float64)).tolist())
            if self.manager.errored():
                self._committed()
                continue
            if len(seen.present) == self.replica.count or not all(seen.patient[number] for number in seen.present):
                return seen
            if len(seen.present) != known:
                known = len(seen.present)
                missing = sorted({*range(self.replica.count)} - {*seen.present})
                print(
                    f"waiting for {counted(len(missing), 'replica')}, of {self.replica.count}: {', '.join(map(str, missing))}"
                )
            time.sleep(_RETRY_INTERVAL)

    def _committed(self) -> bool:
        """Return whether no replica has failed in this synchronization. After a failure the next quorum reconnects."""
        if self.manager.errored():
            self.group.abort()  # the other replicas detect the failure immediately
        return bool(self.manager.should_commit())

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the quorum, in place. `_committed` reports whether that failed."""
        self.manager.allreduce(values, reduce_op=ReduceOp.SUM).wait()
        return values

    def _share(self, values: list[float], count: int, waiting: Callable[[], bool]) -> list[float]:
        """Pass `count` values from the first rank of this replica to all its ranks. Has no timeout."""
        return self.world.sum_without_timeout(values or [0.0] * count, waiting)

    def _checksum(self) -> float:
        digest = 0
        for parameter in self.outer.values():
            digest = zlib.crc32(parameter.detach().contiguous().view(torch.uint8).numpy(), digest)
        return float(digest)

    def _unpack(self, numbers: list[float]) -> Membership:
        count = self.replica.count
        return Membership(*(numbers[count * place : count * (place + 1)] for place in range(_COLUMNS)))

    def _flat(self) -> list[float]:
        assert self.membership
        return [number for column in self.membership for number in column]

    def _report(self) -> None:
        if self.world.rank == 0 and self.membership:
            present = self.membership.present
            listed = ", ".join(map(str, present))
            print(f"replicas from step {self._synced_step} on: {listed} ({len(present)} of {self.replica.count})")

    def merge_replicas(
        self, totals: dict[str, Any], loss: float | None, evaluate: Callable[[], float | None]
    ) -> dict[str, Any]:
        """Return the replicas of the last synchronization."""
        assert self.membership
        return {
            "world_size": int(sum(self.membership.sizes)),
            "replicas": {"configured": self.replica.count, "at_the_end": self.membership.present},
        }
