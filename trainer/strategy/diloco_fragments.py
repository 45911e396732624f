"""DiLoCo whose replicas exchange parts of the model, one after the other, while they train (Streaming DiLoCo).

https://arxiv.org/abs/2501.18512. The trained tensors are divided into fragments of about the same size. The exchange of a
fragment starts at its place in every round of `local_steps` steps. Its result is applied `diloco_delay` steps later. In
between, the replica trains. At the end of a round no exchange is in progress. The last round exchanges all fragments at its end.

The outer weights are equal on all hosts. The weights of a replica differ from them: of every fragment, the replica keeps
the part `diloco_mixing` of its own weights. Evaluation and checkpoints use the outer weights.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from trainer.distributed.world import Transfers, World, start_exchange, wait_for
from trainer.strategy import four_bits
from trainer.strategy.base import Rows, Update
from trainer.strategy.ddp import DDP
from trainer.strategy.diloco_fixed import DiLoCo
from trainer.strategy.replicas import CHUNK, Replicas

if TYPE_CHECKING:
    from trainer.config import RunSpec
    from trainer.method.module_with_loss import ModelWithLoss

LOCAL_FILE = "local.safetensors"


def divide(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Divide tensors of these sizes into at most `count` groups of consecutive tensors with about the same sum.

    Returns the indices of the tensors of every group. No group is empty.
    """
    total, before = sum(sizes), 0
    groups: list[list[int]] = [[] for _ in range(count)]
    for index, size in enumerate(sizes):
        middle = before + size / 2
        groups[min(count - 1, int(middle * count / max(1, total)))].append(index)
        before += size
    return [group for group in groups if group]


class Part(NamedTuple):
    """Some tensors of a fragment in transit. `received`: their sum, or the packed values of every replica."""

    names: list[str]
    received: list[torch.Tensor]
    work: dist.Work | Transfers | None


class DiLoCoFragments(DiLoCo):
    """Replicas whose fragments synchronize at different steps of a round."""

    per_host_files = (*DiLoCo.per_host_files, LOCAL_FILE)
    inside: DDP  # the plan excludes fsdp

    def __init__(self, spec: RunSpec, world: World, module: ModelWithLoss) -> None:
        super().__init__(spec, world, module)
        ranks = Replicas.find(spec, world).ranks
        # gloo's threads exchange the fragments while this thread trains.
        self.exchange_group = world.subgroup([[group[0] for group in ranks]], None, "gloo")
        self.replica_ranks = world.subgroup(ranks, None, "gloo")
        params = self.inside.full_params()
        names = list(params)
        self.fragments = [
            [names[index] for index in group]
            for group in divide([params[name].numel() for name in names], spec.diloco_fragments)
        ]
        # The first step of every fragment's exchange in a round.
        self.starts = [number * spec.local_steps // len(self.fragments) for number in range(len(self.fragments))]
        # The tokens of every replica since the last exchange of each fragment.
        self.fragment_tokens = [[0.0] * len(self.sizes) for _ in self.fragments]
        self.places: dict[str, int] = {}  # of the tensors in the residual
        place = 0
        for name in names:
            self.places[name] = place
            place += params[name].numel()
        self.in_transit: tuple[int, list[Part]] | None = None
        self._due = self._waited = 0.0
        self._waiting: Callable[[], bool] = lambda: False

    def join(
        self,
        start: str,
        steps: int,
        run_dir: Path,
        checkpoint_state: Callable[[], dict[str, Any]],
        waiting: Callable[[], bool],
    ) -> bool:
        self._waiting = waiting
        return super().join(start, steps, run_dir, checkpoint_state, waiting)

    def updates(self, step: int, rows: Rows) -> list[Update]:
        place, last = step % self.spec.local_steps, (self._steps - 1) // self.spec.local_steps
        if self.in_transit and step >= self._due:
            self._finish(self.spec.diloco_mixing)
        for number, start in enumerate(self.starts):
            if start == place and step > 0 and step // self.spec.local_steps < last:
                self._start(number)
                self._due = step + self.spec.diloco_delay
                if not self.spec.diloco_delay:
                    self._finish(self.spec.diloco_mixing)
        updates = super().updates(step, rows)
        for owner, portion in self.portions(step, rows):
            tokens = self.weigh(portion)
            for counts in self.fragment_tokens:
                counts[owner] += tokens
        return updates

    def comm_seconds(self) -> float | None:
        within, waited, self._waited = self.inside.comm_seconds(), self._waited, 0.0
        return None if within is None else within + waited

    # Exchange -----------------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        """Send this replica's change of a fragment, weighted by its tokens since the last exchange of that fragment.

        Every rank knows the tokens of all replicas, because it knows all rows.
        """
        tokens = self.fragment_tokens[number]
        self.fragment_tokens[number] = [0.0] * len(tokens)
        parts = []
        if self.world.is_host_leader:
            self.local_params = self.inside.full_params()
            weight = tokens[self.mine] / max(1.0, sum(tokens))
            parts = [self._send(names, weight) for names in self.chunks(CHUNK, self.fragments[number])]
            self.local_params = {}
        self.in_transit = number, parts

    def _send(self, names: list[str], weight: float) -> Part:
        group, values = self.exchange_group, self.pseudo_gradient(names, weight, torch.device("cpu"))
        if self.spec.diloco_comm_dtype != "int4":
            work = dist.all_reduce(values, group=group.group, async_op=True) if group.size > 1 else None
            return Part(names, [values], work)
        place = self.places[names[0]]
        packed = four_bits.pack_with_feedback(values, self.residual[place : place + len(values)])
        return Part(names, *start_exchange(packed, group))

    def _finish(self, mixing: float) -> None:
        """Wait for the fragment in transit, and run the outer step of its weights, bit-equal on every host.

        Args:
            mixing: the part of its own weights that the replica keeps.

        Raises:
            NonFiniteError: the weights of a replica are not finite. Their scale, and so every sum with it, is not either.
        """
        assert self.in_transit
        number, parts = self.in_transit
        self.in_transit = None
        names, began = self.fragments[number], time.perf_counter()
        sums = [self._receive(part) for part in parts]
        finite = all(bool(torch.isfinite(values).all()) for values in sums)
        not_finite, *_ = self.replica_ranks.sum_without_timeout([float(not finite)], self._waiting)
        self._waited += time.perf_counter() - began
        self.reject_not_finite(not_finite)
        if self.world.is_host_leader:
            for part, values in zip(parts, sums, strict=True):
                self.broadcast_gradient(part.names, values.to(self.world.device))
            self.update_outer()
            local = self.inside.full_params()
            with torch.no_grad():
                mixed = {name: self.outer[name].to(local[name].device).lerp(local[name], mixing) for name in names}
        self.inside.set_params(mixed if self.world.is_host_leader else None, self.host, names)

    def _receive(self, part: Part) -> torch.Tensor:
        """Return the sum of the replicas' values of a part, float32."""
        if part.work:
            wait_for(part.work, self._waiting)
        if self.spec.diloco_comm_dtype != "int4":
            return part.received[0].float()
        return four_bits.unpack_sum(part.received, sum(self.outer[name].numel() for name in part.names))

    def sync(self, waiting: Callable[[], bool], flags: list[float]) -> None:
        """End a round: all fragments of the round are applied. After the last step all weights are exchanged and equal.

        Raises:
            NonFiniteError: the weights of a rank are not finite; all ranks raise it.
        """
        if self.in_transit:
            self._finish(self.spec.diloco_mixing)
        self.exchange_counts(waiting)
        if self._step + 1 == self._steps:
            for number in range(len(self.fragments)):
                self._start(number)
                self._finish(mixing=0.0)

    # Outer weights and checkpoints --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def synchronized(self) -> Iterator[None]:
        with torch.no_grad():
            kept = {name: value.clone() for name, value in self.inside.full_params().items()}
            self.inside.set_params(self.outer if self.world.is_host_leader else None, self.host)
            try:
                yield
            finally:
                self._set_local(kept)

    def _set_local(self, values: dict[str, torch.Tensor]) -> None:
        """Set the weights of this rank to `values`."""
        with torch.no_grad():
            for name, parameter in self.inside.full_params().items():
                parameter.copy_(values[name])

    def save(self, folder: Path) -> None:
        super().save(folder)
        (folder / "trained.safetensors").rename(folder / LOCAL_FILE)
        outer = {name: parameter.detach().contiguous() for name, parameter in self.outer.items()}
        save_file(outer, folder / "trained.safetensors")

    def outer_state(self) -> dict[str, Any]:
        return super().outer_state() | {"fragment_tokens": self.fragment_tokens}

    def load(self, folder: Path) -> None:
        super().load(folder)
        self._set_local(load_file(folder / LOCAL_FILE, device=str(self.world.device)))
        count = len(self.sizes)
        for number, tokens in enumerate(torch.load(folder / "outer.pt", weights_only=True)["fragment_tokens"]):
            # Other replicas than before continue from these weights: they share the tokens.
            self.fragment_tokens[number] = tokens if len(tokens) == count else [sum(tokens) / count] * count
