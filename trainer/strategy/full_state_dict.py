"""Full state dicts of sharded strategies: every host keeps a full checkpoint, as under ddp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's state of every weight, as PyTorch and DeepSpeed name it

KINDS = ("trained", *MOMENTS)  # one file each in a checkpoint; only one at a time is in memory

State = dict[str, "dict[str, torch.Tensor]"]  # kind -> name of the weight -> float32


def write_full(folder: Path, kind: str, values: dict[str, torch.Tensor]) -> None:
    """Write trained weights, or one of their moments, by name. Ranks without values write nothing."""
    from safetensors.torch import save_file

    if values:
        save_file({name: value.contiguous() for name, value in values.items()}, folder / f"{kind}.safetensors")


def read_full(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Read what `write_full` wrote into host memory."""
    from safetensors.torch import load_file

    return load_file(folder / f"{kind}.safetensors")


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers of a model. They are part of its files and not sharded."""
    kept = set(model.state_dict())
    return {name: buffer.cpu() for name, buffer in model.named_buffers() if name in kept}


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint, the number of steps of its optimizer."""
    return int(json.loads((folder / "state.json").read_text())["step"])
