"""Values in 4 bits with error feedback: the form of the pseudo-gradients with `diloco_comm_dtype=int4`.

A block of 512 values has one bfloat16 scale, so that a value takes 4.03125 bits. The rounding error is added to the
values of the next exchange (https://arxiv.org/abs/1901.09847).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.common.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")

BLOCK = 512  # values that share a scale
BYTES_PER_VALUE = 0.5 + 2 / BLOCK
RESIDUAL_FILE = "residual.safetensors"
_LARGEST = 7  # values are -7 to 7 times the scale of their block
_OFFSET = 8


def pack(values: torch.Tensor) -> torch.Tensor:
    """Return `values`, shape (n,), float32 and finite, as uint8: all pairs of 4-bit values, then the scales of the blocks."""
    blocks = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = (blocks.abs().amax(dim=1) / _LARGEST).to(torch.bfloat16)
    divisors = scales.float().unsqueeze(1)
    # The scale of a block whose values are all (almost) zero is zero.
    rounded = torch.where(divisors > 0, blocks / divisors, 0).round_().clamp_(-_LARGEST, _LARGEST)
    nibbles = (rounded + _OFFSET).to(torch.uint8).view(-1, 2)
    return torch.cat([nibbles[:, 0] | (nibbles[:, 1] << 4), scales.view(torch.uint8)])


def unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` values that `pack` packed, shape (count,), float32. The result is bit-equal on all CPUs."""
    blocks = -(-count // BLOCK)
    pairs, scales = packed.split([blocks * BLOCK // 2, 2 * blocks])
    nibbles = torch.stack([pairs & 15, pairs >> 4], dim=1).float().view(-1, BLOCK)
    # The clone aligns the scales, which may begin at an odd byte of memory.
    return ((nibbles - _OFFSET) * scales.clone().view(torch.bfloat16).float().unsqueeze(1)).flatten()[:count]


def unpack_sum(parts: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """Return the sum of what was packed in all `parts`, in their order, so that it is bit-equal on all hosts."""
    total = torch.zeros(count)
    for part in parts:
        total += unpack(part.cpu(), count)
    return total


def pack_with_feedback(values: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Pack `values` plus `residual`, and set `residual` to what rounding lost. Both have shape (n,)."""
    wanted = values + residual
    packed = pack(wanted)
    residual.copy_(wanted - unpack(packed, len(wanted)))
    return packed


def write_residual(folder: Path, residual: torch.Tensor, replica: int, replicas: int) -> None:
    """Write the residual of a replica to its checkpoint, unless it is empty."""
    from safetensors.torch import save_file

    if not len(residual):
        return
    save_file({"residual": residual}, folder / RESIDUAL_FILE, {"replica": f"{replica} of {replicas}"})


def read_residual(folder: Path, residual: torch.Tensor, replica: int, replicas: int) -> None:
    """Set `residual` to that of the checkpoint, or to zeros if the checkpoint has that of another replica.

    A host that lost its checkpoint receives that of another replica, which sends its residual itself. An empty residual is not read.
    """
    from safetensors import safe_open

    if not len(residual):
        return
    with safe_open(folder / RESIDUAL_FILE, "pt") as file:
        own = (file.metadata() or {}).get("replica") == f"{replica} of {replicas}"
        residual.copy_(file.get_tensor("residual") if own else torch.zeros_like(residual))
