"""Rotary embeddings that depend on the length of a text (LongRoPE, dynamic NTK), by the length of each sample of a micro-batch.

transformers takes the longest position of the micro-batch for all of its samples: the loss of one would depend on those beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class SampleRope:
    """The rotary embeddings of a model that depend on the length."""

    def __init__(self, model: nn.Module) -> None:
        kinds = {part: str(getattr(part, "rope_type", "")) for part in model.modules()}
        self._modules: list[Any] = [part for part, kind in kinds.items() if "longrope" in kind or "dynamic" in kind]
        self._spans: list[tuple[int, int]] = []
        self._positions = torch.empty(0)
        for module in self._modules:
            module.forward = self._by_sample(module, module.forward)

    @contextlib.contextmanager
    def lengths(self, positions: torch.Tensor, padding: torch.Tensor) -> Iterator[None]:
        """Let passes within the block compute every sample by its length. `positions`: int64 [rows, T]; `padding`: bool [rows, T]."""
        if self._modules:
            starts = (positions.flatten() == 0).nonzero().flatten().tolist()
            self._spans = list(zip(starts, [*starts[1:], positions.numel()], strict=True))
            self._positions = positions.masked_fill(padding, 0).view(1, -1)
        try:
            yield
        finally:
            self._spans = []

    def _by_sample(self, module: Any, forward: Any) -> Any:
        @torch.compiler.disable
        def compute(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self._spans or position_ids.numel() != self._positions.numel():
                return forward(x, position_ids, *args, **kwargs)
            found, longest = [], [name for name in vars(module) if name.endswith("max_seq_len_cached")]
            for start, end in [*self._spans, (0, 1)]:  # the last one leaves no frequencies of a long text
                vars(module).update(dict.fromkeys(longest, 0))  # of the longest text until now
                found.append(forward(x, self._positions[:, start:end], *args, **kwargs))
            del found[-1]
            parts = zip(*(each if isinstance(each, tuple) else (each,) for each in found), strict=True)
            made = tuple(torch.cat(part, 1).view(*position_ids.shape, -1) for part in parts)
            return made if isinstance(found[0], tuple) else made[0]

        return compute
