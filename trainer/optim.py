"""AdamW, its parameter groups, and the learning rate as a function of the step."""

import importlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from trainer.config import RunSpec
from trainer.errors import UserError


def make_optimizer(spec: RunSpec, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return fused AdamW, or bitsandbytes' with 8-bit moments (https://arxiv.org/abs/2110.02861).

    Weight decay goes to matrices only, as is usual (norms and biases have nothing to shrink).

    Raises:
        UserError: adamw8bit cannot be had here.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if spec.optimizer == "adamw8bit":
        return bitsandbytes("optimizer: adamw8bit").optim.AdamW8bit(groups, lr=spec.lr)
    return torch.optim.AdamW(groups, lr=spec.lr, fused=True)


def bitsandbytes(wish: str) -> Any:
    """Import bitsandbytes for `wish` ("field: value"), as late as this: few runs want it. It knows CPUs too, slowly.

    Raises:
        UserError: it is not installed, or cannot be used here.
    """
    try:
        return importlib.import_module("bitsandbytes")
    except Exception as error:  # without a fitting CUDA it raises what its libraries raise
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(
            f"{wish} needs bitsandbytes ({why[0]}): pip install 'trainyard[gpu]', or leave it out"
        ) from None


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
