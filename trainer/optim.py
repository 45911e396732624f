"""AdamW's parameter groups and the learning rate as a function of the step."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from trainer.config import RunSpec


def make_optimizer(spec: RunSpec, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return fused AdamW; weight decay goes to matrices only, as is usual (norms and biases have nothing to shrink)."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=spec.lr, fused=True)


def learning_rate(spec: RunSpec, step: int, steps: int) -> float:
    """Return the learning rate of step `step` (from 0) of `steps`: linear warmup, then cosine or linear to 0, or constant."""
    # At least one: the peak is reached in the first step then.
    warmup = max(1.0, spec.warmup if spec.warmup >= 1 else spec.warmup * steps)
    if step + 1 < warmup:
        return spec.lr * (step + 1) / warmup
    if spec.schedule == "constant":
        return spec.lr
    left = 1 - (step + 1 - warmup) / max(1.0, steps - warmup + 1)
    return spec.lr * (left if spec.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left)))
