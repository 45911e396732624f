"""Full state dicts of sharded strategies: every host keeps a full checkpoint, as under ddp."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's state of every weight, as PyTorch and DeepSpeed name it

KINDS = ("trained", *MOMENTS)  # one file each in a checkpoint

State = dict[str, "dict[str, torch.Tensor]"]  # kind -> name of the weight -> float32


def write_full(
    folder: Path, kind: str, shapes: Mapping[str, torch.Size], values: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write trained weights, or one of their moments, as float32. Only one tensor is in memory at a time.

    `shapes`: {name: shape} of all tensors, in the order of `values`. `values`: (name, tensor in host memory); nothing
    on ranks that do not write, which only take part in assembling them. Raises OSError: the disk is full or not
    writable; RuntimeError: the values are not those that `shapes` names, an error of the strategy.
    """
    import torch

    expected = iter(shapes.items())
    with contextlib.ExitStack() as files:
        file = None
        for name, value in values:
            if file is None:
                file = files.enter_context((folder / f"{kind}.safetensors").open("wb"))
                file.write(_header(shapes))
            if (known := next(expected, None)) != (name, value.shape):
                raise RuntimeError(f"checkpoint: {kind} has {name} {list(value.shape)}, expected {known}")
            file.write(value.to(torch.float32).contiguous().numpy().data)
        if file and (known := next(expected, None)):
            raise RuntimeError(f"checkpoint: {kind} lacks {known[0]}")


def _header(shapes: Mapping[str, torch.Size]) -> bytes:
    """Return the start of a file with float32 tensors of these shapes. https://huggingface.co/docs/safetensors"""
    places = pairwise(accumulate((4 * math.prod(shape) for shape in shapes.values()), initial=0))
    header = {
        name: {"dtype": "F32", "shape": list(shape), "data_offsets": place}
        for (name, shape), place in zip(shapes.items(), places, strict=True)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_full(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Return what `write_full` wrote, mapped into memory: only those numbers of a tensor that are used are read."""
    from safetensors.torch import load_file

    return load_file(folder / f"{kind}.safetensors")


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers of a model. They are part of its files and not sharded."""
    kept = set(model.state_dict())
    return {name: buffer.cpu() for name, buffer in model.named_buffers() if name in kept}


def create_moments(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor], folder: Path) -> None:
    """Create Adam's state of parameters for the step of a checkpoint, with moments of zeros, which the caller overwrites."""
    import torch

    step = torch.tensor(float(json.loads((folder / "state.json").read_text(encoding="utf-8"))["step"]))
    for parameter in parameters:
        moments = {kind: torch.zeros_like(parameter) for kind in MOMENTS}
        optimizer.state[parameter] = {"step": step.to(parameter.device, copy=True), **moments}
