"""The share of a device's peak that a step uses: model FLOPs utilisation (MFU), against a measured product of matrices.

Chowdhery et al., PaLM, appendix B: https://arxiv.org/abs/2204.02311. What gradient checkpointing computes again does not count.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import torch

from trainer.common.errors import UserError
from trainer.config import RunSpec
from trainer.costs.cost import RowStats, row_flops
from trainer.model_files.model_shape import Shape, shape_of

_SIZES = {"cpu": 1024, "cuda": 4096}  # rows and columns of the matrices
_LIMIT = 0.1  # seconds
_DTYPES = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


def peak_flops(precision: str, device: torch.device) -> float:
    """Return the operations per second of a product of matrices in the precision of a run, on this device."""
    size, dtype = _SIZES.get(device.type, 1024), _DTYPES.get(precision, torch.float32)
    one = torch.full((size, size), 0.5, dtype=dtype, device=device)
    fewest, began = float("inf"), time.perf_counter()
    while fewest == float("inf") or time.perf_counter() - began < _LIMIT:
        _wait(device)
        started = time.perf_counter()
        torch.mm(one, one)
        _wait(device)
        fewest = min(fewest, time.perf_counter() - started)
    return float(2 * size**3 / fewest)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Utilisation:
    """What a step of this rank needs at the peak of its device. `peak`: operations per second."""

    spec: RunSpec
    shape: Shape
    peak: float

    @classmethod
    def of(cls, spec: RunSpec, device: torch.device) -> Utilisation | None:
        """Measure the device; None for a model that the planner does not know."""
        try:
            shape = shape_of(spec)
        except UserError:
            return None
        return cls(spec, shape, peak_flops(spec.precision, device))

    def seconds(self, tokens: int, trained: int, samples: int) -> float:
        """Return the seconds at the peak for the tokens of samples, of which some have a loss, forward and backward."""
        if not tokens:
            return 0.0
        mean = tokens / samples
        return samples * row_flops(self._plain, self.shape, RowStats(mean, mean, trained / tokens)) / self.peak

    @functools.cached_property
    def _plain(self) -> RunSpec:
        return self.spec.model_copy(update={"gradient_checkpointing": False})
