"""AdamW with its parameter groups, and the learning rate schedule."""

import importlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from trainer.common.errors import UserError, first_line
from trainer.common.packages import how_to_install
from trainer.config import RunSpec


def make_optimizer(spec: RunSpec, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return fused AdamW, or AdamW of bitsandbytes with 8-bit moments (https://arxiv.org/abs/2110.02861).

    Weight decay applies only to matrices, not to norms and biases. Raises UserError: adamw8bit is unavailable on this
    host.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if spec.optimizer == "adamw8bit":
        return import_bitsandbytes("optimizer: adamw8bit").optim.AdamW8bit(groups, lr=spec.lr)
    return torch.optim.AdamW(groups, lr=spec.lr, fused=True)


def import_bitsandbytes(needed_by: str) -> Any:
    """Import bitsandbytes, late because few runs need it. It also works on CPUs, slowly.

    `needed_by`: the field and value of the spec that need it, for the error message. Raises UserError: it is not
    installed or does not work on this host.
    """
    try:
        return importlib.import_module("bitsandbytes")
    except Exception as error:  # without a matching CUDA it raises the errors of the libraries that it loads
        field = needed_by.partition(":")[0]
        raise UserError(
            f"{needed_by} needs bitsandbytes ({first_line(error)}): {how_to_install('bitsandbytes', 'gpu')}; or remove {field}"
        ) from None


def learning_rate(spec: RunSpec, step: int, steps: int) -> float:
    """Return the learning rate of `step` (from 0) of `steps`: linear warmup, then cosine or linear decay to 0, or constant."""
    # A warmup of one step means that the first step has the peak rate.
    warmup = max(1.0, spec.warmup if spec.warmup >= 1 else spec.warmup * steps)
    if step + 1 < warmup:
        return spec.lr * (step + 1) / warmup
    if spec.schedule == "constant":
        return spec.lr
    remaining = 1 - (step + 1 - warmup) / max(1.0, steps - warmup + 1)
    return spec.lr * (remaining if spec.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * remaining)))
