"""The seam between the loop and the ways to share a model."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import NamedTuple

import torch

from trainer.config import RunSpec
from trainer.model import TokenLoss
from trainer.world import World


class Batch(NamedTuple):
    """One micro-batch on this rank's device: int64 [rows, T] each (see `trainer.encode.collate`)."""

    ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor


class Strategy(ABC):
    """Owns the module, its optimizer and all that has to be the same on every rank.

    The loop calls, for every step: `backward` once a micro-batch, then `step` once. Every rank makes the same calls, a
    rank without rows too (with a batch that has no loss). A new strategy is a class with these methods, a file beside
    ddp.py, and a word in `RunSpec.strategy`.
    """

    def __init__(self, spec: RunSpec, world: World, module: TokenLoss) -> None:
        self.spec, self.world, self.plain = spec, world, module

    def shares(self) -> list[int]:
        """Return how many parts of a step's rows every rank takes (equal here; by measured speed where ranks are unlike)."""
        return [1] * self.world.size

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
