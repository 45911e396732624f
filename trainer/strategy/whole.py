"""Checkpoints of a strategy that takes the model apart, put together again: every host keeps a whole one, as under ddp."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

MOMENTS = ("exp_avg", "exp_avg_sq")  # what Adam keeps of every weight, as torch and DeepSpeed name it

State = dict[str, dict[str, torch.Tensor]]  # kind ("trained" or a moment) -> name of the weight -> float32, whole


def write_whole(folder: Path, state: State) -> None:
    """Write what is trained and its moments, by name: for any number of ranks."""
    save_file({name: value.contiguous() for name, value in state["trained"].items()}, folder / "trained.safetensors")
    moments = {f"{kind}.{name}": value.contiguous() for kind in MOMENTS for name, value in state[kind].items()}
    save_file(moments, folder / "optimizer.safetensors")


def read_whole(folder: Path) -> State:
    """Read what `write_whole` wrote, into the host's memory."""
    state: State = {"trained": load_file(folder / "trained.safetensors"), **{kind: {} for kind in MOMENTS}}
    for key, value in load_file(folder / "optimizer.safetensors").items():
        kind, _, name = key.partition(".")
        state[kind][name] = value
    return state


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return what belongs to a model's files besides its weights: every rank has it whole."""
    kept = set(model.state_dict())
    return {name: buffer.cpu() for name, buffer in model.named_buffers() if name in kept}


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint, which is how often its optimizer has stepped."""
    return int(json.loads((folder / "state.json").read_text())["step"])
