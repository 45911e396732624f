"""The seam between the loop and the ways to share a model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trainer.config import RunSpec
from trainer.model import TokenLoss
from trainer.order import share
from trainer.world import World

Rows = list[list[int]]


class Batch(NamedTuple):
    """One micro-batch on this rank's device: int64 [rows, T] each (see `trainer.encode.collate`)."""

    ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor


class Update(NamedTuple):
    """The rows of one update of the optimiser: those of all ranks that share its gradient, and this rank's of them."""

    rows: Rows
    mine: Rows


class Strategy(ABC):
    """Owns the module, its optimizer and all that has to be the same on every rank.

    The loop calls, for every update of a step: `backward` once a micro-batch, then `step` once. Every rank makes the same
    calls, a rank without rows too (with a batch that has no loss). After a step at which ranks `meet`, the model is the
    same on all of them. A new strategy is a class with these methods, a file beside ddp.py, and a word in
    `RunSpec.strategy`.
    """

    # Files of a checkpoint of which every host keeps its own.
    own: tuple[str, ...] = ()
    # The rows that every rank took in the last step, where they are divided by one plan.
    rows: Sequence[int] = ()

    def __init__(self, spec: RunSpec, world: World, module: TokenLoss) -> None:
        """`world` is that of all ranks; `self.world` that of those which share steps, records and checkpoints."""
        self.spec, self.world, self.plain = spec, world, module

    def part(self, rows: Rows) -> Rows:
        """Return the rows of a step that the ranks of `self.world` take."""
        return rows

    def updates(self, step: int, rows: Rows) -> list[Update]:
        """Return the updates of the optimiser in `step` (from 0): one, of all its rows."""
        return [Update(rows, rows[share(len(rows), self.shares(len(rows)), self.world.rank)])]

    def meets(self, step: int) -> bool:
        """Tell whether ranks meet after step number `step` (from 1); after the last one they always do."""
        return True

    def meet(self, waiting: Callable[[], None]) -> None:  # noqa: B027  most ranks never part
        """Make the model the same on all ranks again; `waiting` may be called while slower ranks are awaited."""

    def sum(self, values: list[float]) -> list[float]:
        """Sum the loop's numbers over ranks, after they have met. The first number says who wants to stop."""
        return self.world.sum(values)

    def ended(self, finished: bool, waiting: Callable[[], None]) -> bool:
        """Tell whether all ranks have taken their last step, given whether this one has."""
        return finished

    def finish(
        self, totals: dict[str, Any], loss: float | None, evaluate: Callable[[], float | None]
    ) -> dict[str, Any]:
        """Bring together what the ranks have trained, when all have `ended`; return what it adds to the result.

        Args:
            totals: the loop's counts for the ranks of `self.world`.
            loss: the model's loss on what was held out, found by the ranks of `self.world`.
            evaluate: finds it again.
        """
        return {}

    def shares(self, rows: int) -> list[int]:
        """Return in what proportion the ranks take `rows` rows: equal here, by measured speed where that can be told."""
        return [1] * self.world.size

    def spent(self) -> float:
        """Return the seconds that this rank has computed since the last call, without waiting for others; 0 if unknown."""
        return 0.0

    def learn(self, seconds: list[float]) -> None:  # noqa: B027  not every strategy shares by speed
        """Take up what every rank has `spent`, after they have met."""

    @abstractmethod
    def backward(self, batch: Batch, tokens: int, last: bool) -> torch.Tensor:
        """Add one micro-batch's gradient, weighed so that the step's gradient is that of the mean over `tokens`.

        Args:
            tokens: tokens with loss in the whole step, over all ranks.
            last: the step's last micro-batch on this rank: gradients are shared in this call, and in no other.

        Returns:
            The micro-batch's summed loss, detached, a float32 scalar.
        """

    @abstractmethod
    def step(self, lr: float) -> float:
        """Clip, take one optimiser step with learning rate `lr`, clear gradients; return the norm before clipping."""

    @abstractmethod
    def loss(self, batch: Batch) -> torch.Tensor:
        """Return a micro-batch's summed loss without gradients, for evaluation."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write all that `load` needs into `folder`; called on the first rank of every host at the same step."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Take back what `save` wrote, on every rank; the run goes on as if it had never stopped."""
