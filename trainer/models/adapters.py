"""The factors of LoRA updates: the weighted sum of several updates, exact or of a lower rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class LoraFactors:
    """The factors of one layer's update, scaling * b @ a. `a`: [rank, in, ...]; `b`: [out, rank, ...]."""

    layer: Any
    adapter: str

    @property
    def a(self) -> torch.Tensor:
        return self._parameter("A").data

    @property
    def b(self) -> torch.Tensor:
        return self._parameter("B").data

    @property
    def scaling(self) -> float:
        return float(self.layer.scaling[self.adapter])

    def replace(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Set both factors, of any rank, with a scaling of 1."""
        for side, value in (("A", a), ("B", b)):
            parameter = self._parameter(side)
            parameter.grad = None
            parameter.data = value
        self.layer.r[self.adapter] = self.layer.lora_alpha[self.adapter] = len(a)
        self.layer.scaling[self.adapter] = 1.0

    def _parameter(self, side: str) -> nn.Parameter:
        embedding = getattr(self.layer, f"lora_embedding_{side}")
        found: nn.Parameter = (
            embedding[self.adapter]
            if self.adapter in embedding
            else getattr(self.layer, f"lora_{side}")[self.adapter].weight
        )
        return found


def lora_factors(model: nn.Module) -> list[LoraFactors]:
    """Return the factors of all layers with an active adapter, in the order of the modules."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    return [LoraFactors(layer, name) for layer in layers for name in layer.active_adapters if name in layer.scaling]


def concatenate(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of the sum of the updates b @ a of all parts. The ranks add up, and the sum is exact."""
    return torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts], dim=1)


def truncate(a: torch.Tensor, b: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Return the factors of the best approximation of b @ a that has `rank`, by the Frobenius norm.

    The singular values are those of the small matrix between two QR decompositions, so b @ a is never formed:
    https://doi.org/10.1137/090771806, section 5. `a`: [r, in, ...] with r > rank. `b`: [out, r, ...]. Returns the new
    factors, the square of the error's norm, and the square of the norm of b @ a.
    """
    flat_a, flat_b = a.double().flatten(1), b.double().flatten(1)
    q_a, r_a = torch.linalg.qr(flat_a.T)
    q_b, r_b = torch.linalg.qr(flat_b)
    u, s, vh = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    roots = s[:rank].sqrt()
    kept = len(roots)  # fewer than `rank` in a layer that is narrower
    new_a, new_b = a.new_zeros(rank, *a.shape[1:]), b.new_zeros(len(b), rank, *b.shape[2:])
    new_a[:kept] = (roots[:, None] * (vh[:rank] @ q_a.T)).reshape(kept, *a.shape[1:])
    new_b[:, :kept] = ((q_b @ u[:, :rank]) * roots).reshape(len(b), kept, *b.shape[2:])
    return new_a, new_b, float(s[rank:].square().sum()), float(s.square().sum())
