"""The interface between the training loop and the strategies."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from trainer.common.lazy import LazyModule
from trainer.data.shares import share
from trainer.method.method_base import Batch

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainer.config import RunSpec
    from trainer.distributed.world import World
    from trainer.method.module_with_loss import ModelWithLoss
else:
    torch = LazyModule("torch")

Rows = list[list[int]]
_AUTOCAST_DTYPES = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}


class Update(NamedTuple):
    """The rows of one optimizer update: those of all ranks that share its gradient, and this rank's part of them.

    `passed`: the rows that pass through this rank, if not `mine`, the rows that its metrics count.
    """

    rows: Rows
    mine: Rows
    passed: Rows | None = None

    @property
    def computed(self) -> Rows:
        return self.mine if self.passed is None else self.passed


def check_norm(norm: float) -> float:
    """Return the gradient norm. Raises FloatingPointError if it is not finite."""
    if not math.isfinite(norm):
        raise FloatingPointError("the gradient norm is not finite")
    return norm


def autocast(spec: RunSpec, device: torch.device) -> torch.autocast:
    """Return the context of a forward pass in the spec's precision."""
    name = _AUTOCAST_DTYPES.get(spec.precision)
    return torch.autocast(device.type, dtype=getattr(torch, name or "bfloat16"), enabled=name is not None)


class Writing(Protocol):
    """A checkpoint that is written while training continues."""

    def done(self) -> bool:
        """Return whether this rank has finished writing."""
        ...

    def finish(self) -> None:
        """Wait for the checkpoint. Every rank calls it at the same step. Raises the error of any rank."""
        ...


class Strategy(ABC):
    """Owns the module, its optimizer and all state that must be equal on every rank.

    For every update of a step the loop calls `backward` once per micro-batch, then `step` once. Every rank makes the same
    calls. A rank without rows passes a batch without loss. After a step at which the ranks synchronize (`sync`), the model
    is equal on all of them.
    """

    # Files of a checkpoint that differ between hosts.
    per_host_files: tuple[str, ...] = ()
    # The number of rows that each rank had in the last step, if one division applies to all ranks.
    rows: Sequence[int] = ()
    # Every forward and backward pass is a collective: all ranks must run the same number of micro-batches.
    lockstep = False
    # All rows of a replica pass through all of its ranks.
    staged = False
    # Every rank writes its own shard of a checkpoint while training continues (see `save`).
    sharded_checkpoint = False
    # Returns the weight of rows in the mean loss (see MethodPlan.weights); set by the loop.
    weigh: Callable[[Rows], int]
    # The number of steps of the run; set by the loop.
    steps = 0

    def __init__(self, spec: RunSpec, world: World, module: ModelWithLoss) -> None:
        """`world`: all ranks. `self.world`: the ranks that share steps, records and checkpoints."""
        self.spec, self.world, self.plain = spec, world, module

    def local_rows(self, rows: Rows) -> Rows:
        return rows

    def updates(self, step: int, rows: Rows) -> list[Update]:
        """Return the optimizer updates of `step` (from 0): by default one update of all rows."""
        return [self.divide(rows)]

    def divide(self, rows: Rows) -> Update:
        return Update(rows, rows[share(len(rows), self.shares(len(rows)), self.world.rank)])

    def divide_among(self, rows: Rows, group: World) -> Update:
        """Return this rank's part of the rows of the ranks in `group`, one replica."""
        return Update(rows, rows[share(len(rows), [1] * group.size, group.rank)])

    def is_sync_step(self, step: int) -> bool:
        """Return whether ranks synchronize after step number `step` (from 1). They always synchronize after the last
        step."""
        return True

    def sync(self, waiting: Callable[[], bool]) -> None:  # noqa: B027  most strategies never diverge
        """Make the model equal on all ranks. `waiting` is called repeatedly while slower ranks are awaited."""

    def sum(self, values: list[float]) -> list[float]:
        """Sum the loop's values over ranks after `sync`. The first value counts the ranks that should stop."""
        return self.world.sum(values)

    @property
    def update_group(self) -> World:
        return self.world

    def all_finished(self, finished: bool, waiting: Callable[[], bool]) -> bool:
        """Return whether all ranks have finished their last step. `finished`: whether this rank has."""
        return finished

    def merge_replicas(
        self, totals: dict[str, Any], loss: float | None, evaluate: Callable[[], float | None]
    ) -> dict[str, Any]:
        """Merge the weights of all replicas after `all_finished`, and return fields to add to the result.

        `totals`: the loop's counts for the ranks of `self.world`. `loss`: evaluation loss of the ranks of `self.world`.
        `evaluate`: computes the evaluation loss again.
        """
        return {}

    def shares(self, rows: int) -> list[int]:
        """Return the relative shares of `rows` rows per rank: equal, or by measured speed if the strategy measures it."""
        return [1] * self.world.size

    def rank_seconds(self) -> float:
        """Return the seconds of computation of this rank since the last call, without waiting; 0 if not measured."""
        return 0.0

    def comm_seconds(self) -> float | None:
        """Return the seconds since the last call in which a step of this rank waited for communication; None if not measured."""
        return None

    def update_shares(self, seconds: list[float]) -> None:  # noqa: B027  not every strategy shares by speed
        """Update the shares from the `rank_seconds` of every rank, after `sync`."""

    def autocast(self) -> torch.autocast:
        return autocast(self.spec, self.world.device)

    def rounds(self, rows: int) -> int:
        """Return the minimum number of micro-batches of every rank for `rows` rows over all ranks."""
        if not self.lockstep:
            return 1
        shares = self.shares(rows)
        most = max(len(range(rows)[share(rows, shares, rank)]) for rank in range(self.world.size))
        return max(1, -(-most // self.spec.batch_size))

    @abstractmethod
    def backward(self, batch: Batch, total: float, last: bool) -> torch.Tensor:
        """Accumulate the gradient of one micro-batch, scaled so that the step's gradient is that of the mean over `total`.

        `total`: weight of the update over the ranks that share its gradient: tokens with loss, or samples (see
        MethodPlan.weights). `last`: the last micro-batch of the step on this rank. After this call the gradients are
        reduced over all ranks. Returns the summed loss of the micro-batch, detached, a float32 scalar; or 0, and that
        of the update with its last one.
        """

    @abstractmethod
    def step(self, lr: float) -> float:
        """Clip gradients, run the optimizer with learning rate `lr`, clear gradients. Return the norm before clipping.

        Raises FloatingPointError: the norm is not finite (see `check_norm`). All ranks that share the gradient raise
        it, before the optimizer changes a weight. Steps that a gradient scaler skips do not count.
        """

    @abstractmethod
    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the summed loss of a micro-batch without gradients, for evaluation; 0 on a rank without the output head."""

    def weights_finite(self) -> bool:
        from trainer.common.finite import all_finite

        return all_finite(parameter for parameter in self.plain.parameters() if parameter.requires_grad)

    def weights(self) -> Iterable[tuple[str, torch.Tensor]] | None:
        """Return (name, trained weight in host memory), or None if `plain` holds them. Every rank calls it, and iterates.

        Sharded weights are assembled one at a time while a rank iterates, so that no host needs memory for all of them. Only
        the first rank of every host receives them.
        """
        return None

    def model_to_save(self) -> nn.Module:
        """Return the model whose names and configuration `weights` are saved with; its own weights are not read then."""
        return self.plain.model

    @abstractmethod
    def save(self, folder: Path) -> Writing | None:
        """Write all state that `load` needs into `folder`. The first rank of every host calls it at the same step.

        With `lockstep` every rank calls it, because sharded state is gathered; the first rank of a host writes it. With
        `sharded_checkpoint` every rank writes its own shard. Returns With `sharded_checkpoint` the checkpoint in
        progress, otherwise None.
        """

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Restore the state that `save` wrote, on every rank. `state.json` in `folder` holds the step."""
