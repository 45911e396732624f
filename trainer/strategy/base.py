"""The seam between the loop and the ways to share a model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from trainer.config.run_spec import RunSpec
from trainer.data.order import share
from trainer.distributed.world import World
from trainer.model import TokenLoss

Rows = list[list[int]]
_DTYPES = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


class Batch(NamedTuple):
    """One micro-batch on this rank's device: int64 [rows, T] each (see `trainer.data.encode.collate`)."""

    ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor


class Update(NamedTuple):
    """The rows of one update of the optimiser: those of all ranks that share its gradient, and this rank's of them."""

    rows: Rows
    mine: Rows


class Stopped(Exception):
    """Somebody wanted the run to stop before its first step."""


class Writing(Protocol):
    """A checkpoint that is being written while the training goes on."""

    def done(self) -> bool:
        """Tell whether this rank has nothing left to write."""
        ...

    def finish(self) -> None:
        """Wait for it. Every rank calls it, at the same step. Raises what went wrong on any of them."""
        ...


class Strategy(ABC):
    """Owns the module, its optimizer and all that has to be the same on every rank.

    The loop calls, for every update of a step: `backward` once a micro-batch, then `step` once. Every rank makes the same
    calls, a rank without rows too (with a batch that has no loss). After a step at which ranks `sync`, the model is the
    same on all of them. A new strategy is a class with these methods, a file beside ddp.py, and a word in
    `RunSpec.strategy`.
    """

    # Files of a checkpoint of which every host keeps its own.
    per_host_files: tuple[str, ...] = ()
    # The rows that every rank took in the last step, where they are divided by one plan.
    rows: Sequence[int] = ()
    # Every forward and backward pass is a collective: ranks must take equally many micro-batches, empty ones too.
    lockstep = False
    # Ranks write a checkpoint in parts, each its own, beside the training (see `save`).
    sharded_checkpoint = False

    def __init__(self, spec: RunSpec, world: World, module: TokenLoss) -> None:
        """`world` is that of all ranks; `self.world` that of those which share steps, records and checkpoints."""
        self.spec, self.world, self.plain = spec, world, module

    def local_rows(self, rows: Rows) -> Rows:
        """Return the rows of a step that the ranks of `self.world` take."""
        return rows

    def updates(self, step: int, rows: Rows) -> list[Update]:
        """Return the updates of the optimiser in `step` (from 0): one, of all its rows."""
        return [Update(rows, rows[share(len(rows), self.shares(len(rows)), self.world.rank)])]

    def is_sync_step(self, step: int) -> bool:
        """Tell whether ranks meet after step number `step` (from 1); after the last one they always do."""
        return True

    def join(
        self,
        start: str,
        steps: int,
        run_dir: Path,
        checkpoint_state: Callable[[], dict[str, Any]],
        waiting: Callable[[], bool],
    ) -> bool:
        """Find the others before the first step, where several torchruns share a run.

        Args:
            start: the name of this start of the run, in hexadecimal digits.
            steps: those of the whole run.
            checkpoint_state: returns what a checkpoint of the newest meeting says besides the weights.
            waiting: may be called while others are awaited; tells whether somebody wants this run to stop.

        Returns:
            Whether there is a checkpoint now that they are at, and these ranks have not loaded.

        Raises:
            Stopped: somebody wants the run to stop before it came to that.
        """
        return False

    def sync(self, waiting: Callable[[], bool], flags: list[float]) -> None:  # noqa: B027  most ranks never part
        """Make the model the same on all ranks again; `waiting` may be called while slower ranks are awaited.

        `flags`: the first numbers that `sum` is going to be asked for.
        """

    @property
    def present(self) -> list[str]:
        """The starts (see `join`) of all who were at the last meeting, if it is not all ranks by itself."""
        return []

    def sum(self, values: list[float]) -> list[float]:
        """Sum the loop's numbers over ranks, after they have met. The first number says who wants to stop."""
        return self.world.sum(values)

    def all_finished(self, finished: bool, waiting: Callable[[], bool]) -> bool:
        """Tell whether all ranks have taken their last step, given whether this one has."""
        return finished

    def merge_replicas(
        self, totals: dict[str, Any], loss: float | None, evaluate: Callable[[], float | None]
    ) -> dict[str, Any]:
        """Bring together what the ranks have trained, when `all_finished` holds; return what it adds to the result.

        Args:
            totals: the loop's counts for the ranks of `self.world`.
            loss: the model's loss on what was held out, found by the ranks of `self.world`.
            evaluate: finds it again.
        """
        return {}

    def shares(self, rows: int) -> list[int]:
        """Return in what proportion the ranks take `rows` rows: equal here, by measured speed where that can be told."""
        return [1] * self.world.size

    def rank_seconds(self) -> float:
        """Return the seconds that this rank has computed since the last call, without waiting for others; 0 if unknown."""
        return 0.0

    def update_shares(self, seconds: list[float]) -> None:  # noqa: B027  not every strategy shares by speed
        """Take up what every rank has spent, as `rank_seconds` reports it, at a synchronization."""

    def autocast(self) -> torch.autocast:
        """Return the context of a forward pass in the spec's precision."""
        dtype = _DTYPES.get(self.spec.precision)
        return torch.autocast(self.world.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)

    def rounds(self, rows: int) -> int:
        """Return how many micro-batches every rank takes at least, of `rows` rows over all ranks."""
        if not self.lockstep:
            return 1
        shares = self.shares(rows)
        most = max(len(range(rows)[share(rows, shares, rank)]) for rank in range(self.world.size))
        return max(1, -(-most // self.spec.batch_size))

    @abstractmethod
    def backward(self, batch: Batch, tokens: int, last: bool) -> torch.Tensor:
        """Add one micro-batch's gradient, weighed so that the step's gradient is that of the mean over `tokens`.

        Args:
            tokens: tokens with loss in the whole step, over all ranks.
            last: the step's last micro-batch on this rank: after this call the gradients are those of all ranks.

        Returns:
            The micro-batch's summed loss, detached, a float32 scalar.
        """

    @abstractmethod
    def step(self, lr: float) -> float:
        """Clip, take one optimiser step with learning rate `lr`, clear gradients; return the norm before clipping."""

    @abstractmethod
    def loss(self, batch: Batch) -> torch.Tensor:
        """Return a micro-batch's summed loss without gradients, for evaluation."""

    def weights(self) -> dict[str, torch.Tensor] | None:
        """Return what the run was for, by the model's names, whole and in the host's memory; None if `plain` has it so.

        Every rank calls it; what it returns counts on the first rank of every host.
        """
        return None

    @abstractmethod
    def save(self, folder: Path) -> Writing | None:
        """Write all that `load` needs into `folder`; called on the first rank of every host at the same step.

        With `lockstep` it is called on every rank, because what is whole must be put together: the first of a host
        writes it. With `sharded_checkpoint` every rank writes what it owns.

        Returns:
            With `sharded_checkpoint`: what is still to be written. Else None, and everything is.
        """

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Take back what `save` wrote, on every rank; the run goes on as if it had never stopped.

        `state.json` in `folder` tells the step.
        """
