"""DiLoCo whose replicas may leave and come back: torchft tells at every meeting who is there, and heals who was away.

https://meta-pytorch.org/torchft. Every replica is a torchrun of its own; its first rank speaks for it. At a meeting the
replicas form a quorum at the lighthouse, tell each other their numbers, sum their ways over it, and all take the outer
step, or none that saw it fail: then they meet again, without whoever is gone. One that comes back waits for the next
meeting of the others and gets what a checkpoint of their last one would hold; it walks with them into the round that
they have just ended, without rows, and takes the outer step with them.
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

from trainer.checkpoint import write_checkpoint
from trainer.config.run_spec import RunSpec
from trainer.distributed.world import World
from trainer.errors import UserError
from trainer.files import write_atomic
from trainer.model import TokenLoss
from trainer.strategy.base import Rows, Stopped, Update
from trainer.strategy.diloco import DiLoCo
from trainer.strategy.replicas import check_rows, deal

os.environ.setdefault("RUST_LOG", "warn")  # it tells of every word otherwise
logging.getLogger("torchft.manager").setLevel(logging.ERROR)
try:  # beside the extra
    from torch.distributed import ReduceOp
    from torchft import Manager, ProcessGroupGloo
    from torchft.checkpointing import HTTPTransport
    from torchft.checkpointing._serialization import _streaming_load
except ImportError:
    raise UserError(
        "diloco_members: torchft is not installed here: pip install 'trainyard[torchft]', or diloco_members=fixed"
    ) from None

_CHUNK = 4 << 20  # numbers in one all-reduce, small enough for a slow link to carry within _STUCK
_STUCK = 60.0  # seconds without a byte after which a meeting is begun anew
_BACK = 60.0  # seconds that the last meeting waits for replicas that are away
_LOOK = 0.02  # seconds between two looks at a quorum that is awaited
_AGAIN = 0.2  # seconds between two meetings that wait for more replicas


class Seen(NamedTuple):
    """What all at a meeting know of each other, by replica; zeros for those who are away."""

    names: list[float]  # of their starts
    sizes: list[float]  # in ranks
    patient: list[float]  # whether they would rather wait for those who are away
    joining: list[float]  # whether they have not begun
    weights: list[float]  # a checksum of where they are, if they have not just been healed

    @property
    def here(self) -> list[int]:
        return [number for number, name in enumerate(self.names) if name]


class Transport(HTTPTransport):
    """torchft's own, but at the address that peers know, and taking nothing that runs code when it is read."""

    def __init__(self, address: str, timeout: datetime.timedelta) -> None:
        self._host = address
        super().__init__(timeout, num_chunks=0)

    def address(self) -> str:
        return f"http://{self._host}:{self._server.socket.getsockname()[1]}/checkpoint/"

    def disallow_checkpoint(self) -> None:
        super().disallow_checkpoint()
        self._state_dict = self._chunks = None  # nobody can ask for it any more

    @classmethod
    def _load_from_address(cls, address: str, timeout: datetime.timedelta) -> object:
        import urllib.request

        with urllib.request.urlopen(address, timeout=timeout.total_seconds()) as answer:
            return _streaming_load(answer, weights_only=True)


class DiLoCoTorchFT(DiLoCo):
    """One replica among those that are there."""

    def __init__(self, spec: RunSpec, world: World, module: TokenLoss) -> None:
        self.replica = world.replica
        super().__init__(spec, world, module)
        self.seen: Seen | None = None  # at the last meeting, or at one that is going on
        self._at = 0  # the step of the last meeting
        self._meeting = False  # a quorum has been formed, and its outer step is still to be taken
        self._watching = False  # this round was begun without us
        self._told: list[float] = []
        self._taken_over: dict[str, Any] | None = None
        self._joined = False
        self._aside = ThreadPoolExecutor(1)

    def find(self, spec: RunSpec, world: World) -> list[list[int]]:
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
        """Meet the others: wait for all replicas at the start of a run, for the next meeting of one that goes on.

        Raises:
            UserError: the replicas have unlike states of one step.
            Stopped: somebody wants the run to stop before it came to that.
        """
        self._name, self._run_dir, self._checkpoint_state = float(int(start, 16)), run_dir, checkpoint_state
        self._at, self._steps = checkpoint_state()["step"], steps
        told: list[float] = []
        if self.world.rank == 0:
            self._open()
            try:
                told = [0.0, *self._find_others(waiting)]
            except Stopped:
                told = [1.0] * (4 + 5 * self.replica.count)
        told = self._pass_on(told, 4 + 5 * self.replica.count, waiting)
        if told[0]:
            raise Stopped
        healed, self._watching, self._at, self.seen = bool(told[1]), bool(told[2]), int(told[3]), self._seen(told[4:])
        self._taken_over, self._joined, self._meeting = None, True, self._watching
        if self.world.rank == 0:
            self._number_meetings()
        self._say()
        return healed

    def _find_others(self, waiting: Callable[[], bool]) -> list[float]:
        """Return whether we took over their state, whether they are in a round, the step of it all, and who is there."""
        self.seen = seen = self._gather(self.spec.collective_timeout, waiting)
        if self.replica.restarted and seen.here == [self.mine] and self.replica.count > 1:
            raise RuntimeError("no other replica is there any more")
        # At the very start all are alike without being healed, unless unlike machines drew unlike weights.
        checksums = {seen.weights[number] for number in seen.here} - {0.0}
        state = self._taken_over
        if state and not state["step"] and self._checksum() in checksums:
            state = None
        if not state and len(checksums) > 1:
            raise UserError(
                f"checkpoint: the replicas have unlike states of step {self._at}: remove those of all but one host"
            )
        if state:
            self._write(state)
        watching = not all(seen.joining[number] for number in seen.here)
        return [float(state is not None), float(watching), float(state["step"] if state else self._at), *self._flat()]

    def _open(self) -> None:
        """Begin to speak with the lighthouse and the other replicas."""
        host, _, port = self.replica.lighthouse.partition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
            probe.connect((host, int(port)))
            address = probe.getsockname()[0]
        patience = datetime.timedelta(seconds=self.spec.collective_timeout)
        # Its own, new with every start: what an earlier one of this replica left in a store is wrong.
        self._store = torch.distributed.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self.group = ProcessGroupGloo(timeout=datetime.timedelta(seconds=min(_STUCK, self.spec.collective_timeout)))
        self.manager = Manager(
            pg=self.group,
            load_state_dict=self._heal,
            state_dict=self._state,
            min_replica_size=1,
            use_async_quorum=False,
            timeout=patience,
            quorum_timeout=datetime.timedelta(days=30),  # slower replicas are waited for
            connect_timeout=patience,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=self._store.port,
            lighthouse_addr=f"http://{self.replica.lighthouse}",
            replica_id=f"replica{self.mine}",
            hostname=address,
            checkpoint_transport=Transport(address, patience),
            init_sync=False,
            quorum_retries=5,
        )
        self._number_meetings()

    def _number_meetings(self) -> None:
        """Tell torchft how far we are: who has come less far is healed. At the very start all take what the first has."""
        begun = self._joined or self._at or self.mine == 0
        meetings = 1 + -(-self._at // self.spec.local_steps) if begun else 0
        self.manager.load_state_dict({"step": meetings, "batches_committed": 0})

    def _state(self) -> dict[str, Any]:
        """Return what a checkpoint of the last meeting holds, for one that was away."""
        with tempfile.TemporaryDirectory(dir=self._run_dir) as folder:
            self.save(Path(folder))
            files = {
                file.name: torch.from_numpy(np.fromfile(file, dtype=np.uint8))
                for file in sorted(Path(folder).iterdir())
            }
        metrics = self._run_dir / "metrics.jsonl"
        return {"files": files, "metrics": metrics.read_text() if metrics.exists() else "", **self._checkpoint_state()}

    def _heal(self, state: dict[str, Any]) -> None:
        if self._joined:
            # It began from a model that the others have left behind, so what it did is worth nothing.
            raise RuntimeError("the other replicas went on without this one: it has to start again")
        self._taken_over = state

    def _write(self, state: dict[str, Any]) -> None:
        """Write what was taken over as a checkpoint of ours."""
        kept = {name: value for name, value in state.items() if name not in ("files", "metrics")}
        print(f"checkpoint: step {kept['step']} is taken over from another replica")

        def save(folder: Path) -> None:
            for name, content in state["files"].items():
                (folder / Path(name).name).write_bytes(content.numpy().tobytes())

        step = kept.pop("step")
        write_checkpoint(self._run_dir / "checkpoints", step, kept, save, self.spec.checkpoint_keep)
        write_atomic(self._run_dir / "metrics.jsonl", state["metrics"])

    def save(self, folder: Path) -> None:
        super().save(folder)
        # As the replicas had them when they last met: this one may have gone on since.
        met = {name: parameter.detach().contiguous() for name, parameter in self.outer.items()}
        save_file(met, folder / "trained.safetensors")

    # Meeting ----------------------------------------------------------------------------------------------------------

    def updates(self, step: int, rows: Rows) -> list[Update]:
        if self._watching:
            self._step = step
            return []
        return super().updates(step, rows)

    def deal(self, turns: int) -> list[int]:
        """Deal a round among those who were at the meeting before it."""
        assert self.seen
        here = self.seen.here
        places = deal(turns, self._speeds([self.seen.sizes[n] for n in here], [self.costs[n] for n in here]))
        return [here[place] for place in places]

    def sync(self, waiting: Callable[[], bool], flags: list[float]) -> None:
        """Take the outer step with those who are there."""
        count = self.replica.count
        self._at_next = min(self._at + self.spec.local_steps - self._at % self.spec.local_steps, self._steps)
        flags = self.world.sum(flags)
        self.come = self.inside.whole()
        numbers = self._speak(flags, waiting) if self.world.rank == 0 else []
        numbers = self._pass_on(numbers, 5 * count + count + len(flags), waiting)
        before = self.seen
        self.seen, costs, self._told = self._seen(numbers), numbers[5 * count : 6 * count], numbers[6 * count :]
        self.learned(costs)
        if self.world.is_host_leader and self.keepers.size > 1:
            for names in self.chunks(_CHUNK):
                ways = [self.outer[name].grad for name in names] if self.world.rank == 0 else []
                size = sum(self.outer[name].numel() for name in names)
                self.take(names, torch.cat([way.flatten() for way in ways]) if ways else torch.empty(size))
        self.outer_step()
        self._at, self._watching, self._meeting = self._at_next, False, False
        if self.world.rank == 0:
            self._number_meetings()
        if before and before.here != self.seen.here:
            self._say()

    def _speak(self, flags: list[float], waiting: Callable[[], bool]) -> list[float]:
        """Bring the replicas' numbers and their ways together, on the rank that speaks for this one; again until it holds."""
        count = self.replica.count
        tokens, cost = self.round()
        while True:
            if not self._meeting:
                self.seen = self._gather(_BACK if self._at_next == self._steps else 0.0, waiting)
            self._meeting = False
            mine = [0.0] * (2 * count)
            mine[self.mine], mine[count + self.mine] = tokens, cost
            numbers = self._sum(torch.tensor([*mine, *flags], dtype=torch.float64)).tolist()
            weight = tokens / max(1.0, sum(numbers[:count]))
            for names in self.chunks(_CHUNK):
                way = self._sum(self.way(names, weight, torch.device("cpu")))
                self.set(names, way)
            if self._holds():
                return [*self._flat(), *numbers[count:]]

    def sum(self, values: list[float]) -> list[float]:
        """Sum over the ranks of this replica what the meeting has not brought together already."""
        told = self._told
        return [*told, *self.world.sum(values[len(told) :])]

    @property
    def present(self) -> list[str]:
        return [f"{int(name):x}" for name in self.seen.names if name] if self.seen else []

    def _gather(self, patience: float, waiting: Callable[[], bool]) -> Seen:
        """Form a quorum and see who is there; wait up to `patience` seconds for those who are not, if all others do."""
        deadline = time.monotonic() + patience
        while True:
            asked = self._aside.submit(self.manager.start_quorum)
            while not asked.done():
                if waiting() and not self._joined:
                    raise Stopped
                time.sleep(_LOOK)
            asked.result()
            about = [0.0] * (5 * self.replica.count)
            healed = self._taken_over is not None
            mine = (
                self._name,
                self.crew.size,
                time.monotonic() < deadline,
                not self._joined,
                0 if healed else self._checksum(),
            )
            about[self.mine :: self.replica.count] = map(float, mine)
            seen = self._seen(self._sum(torch.tensor(about, dtype=torch.float64)).tolist())
            if self.manager.errored():
                self._holds()
                continue
            if len(seen.here) == self.replica.count or not all(seen.patient[number] for number in seen.here):
                return seen
            time.sleep(_AGAIN)

    def _holds(self) -> bool:
        """Tell whether the meeting has held so far; if not, the next quorum connects anew."""
        if self.manager.errored():
            self.group.abort()  # so that the others see at once that it is over
        return bool(self.manager.should_commit())

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the quorum, in place; what comes of a failure is known by `_holds`."""
        self.manager.allreduce(values, reduce_op=ReduceOp.SUM).wait()
        return values

    def _pass_on(self, values: list[float], count: int, waiting: Callable[[], bool]) -> list[float]:
        """Give the ranks of this replica what its first one has, however long that takes to come."""
        return self.world.sum_without_timeout(values or [0.0] * count, waiting)

    def _checksum(self) -> float:
        digest = 0
        for parameter in self.outer.values():
            digest = zlib.crc32(parameter.detach().contiguous().view(torch.uint8).numpy(), digest)
        return float(digest)

    def _seen(self, numbers: list[float]) -> Seen:
        count = self.replica.count
        return Seen(*(numbers[count * place : count * (place + 1)] for place in range(5)))

    def _flat(self) -> list[float]:
        assert self.seen
        return [number for column in self.seen for number in column]

    def _say(self) -> None:
        if self.world.rank == 0 and self.seen:
            here = self.seen.here
            print(
                f"replicas from step {self._at} on: {', '.join(map(str, here))} ({len(here)} of {self.replica.count})"
            )

    def merge_replicas(
        self, totals: dict[str, Any], loss: float | None, evaluate: Callable[[], float | None]
    ) -> dict[str, Any]:
        """Tell who was there at the end."""
        assert self.seen
        return {
            "world_size": int(sum(self.seen.sizes)),
            "replicas": {"configured": self.replica.count, "at_the_end": self.seen.here},
        }
