"""Checkpoints of a strategy that takes the model apart, put together again: every host keeps a whole one, as under ddp."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

MOMENTS = ("exp_avg", "exp_avg_sq")  # what Adam keeps of every weight, as torch and DeepSpeed name it

KINDS = ("trained", *MOMENTS)  # what a checkpoint holds of every weight, a file each: one at a time is whole in memory

State = dict[str, dict[str, torch.Tensor]]  # kind -> name of the weight -> float32


def write_whole(folder: Path, kind: str, values: dict[str, torch.Tensor]) -> None:
    """Write what is trained, or a moment of it, by name: for any number of ranks. Ranks that have none of it write nothing."""
    if values:
        save_file({name: value.contiguous() for name, value in values.items()}, folder / f"{kind}.safetensors")


def read_whole(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Read what `write_whole` wrote, into the host's memory."""
    return load_file(folder / f"{kind}.safetensors")


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what belongs to a model's files besides its weights: every rank has it whole."""
    kept = set(model.state_dict())
    return {name: buffer.cpu() for name, buffer in model.named_buffers() if name in kept}


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint, which is how often its optimizer has stepped."""
    return int(json.loads((folder / "state.json").read_text())["step"])
