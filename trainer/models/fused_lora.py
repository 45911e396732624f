"""LoRA in fewer passes over the activations than peft makes: its product is scaled and added where it is computed."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import nn


class FusedLinear(Linear):
    """A linear layer with an adapter. The sum is rounded once; peft rounds the product, the scaled product, and the sum."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what the layer of peft returns, [..., out] for [..., in]."""
        name = self._single_adapter(x)
        if name is None or args or kwargs:
            return super().forward(x, *args, **kwargs)
        rows = x.flatten(0, -2)
        result: torch.Tensor = self.base_layer(rows)
        low = self.lora_A[name](rows)
        result.addmm_(low, self.lora_B[name].weight.to(result.dtype).t(), alpha=self.scaling[name])
        return result.unflatten(0, x.shape[:-1])

    def _single_adapter(self, x: torch.Tensor) -> str | None:
        """Return the name of the adapter, if it is the only one and like those that the trainer makes; else None."""
        names = self.active_adapters
        if self.disable_adapters or self.merged or len(names) != 1 or names[0] not in self.lora_A:
            return None
        name = names[0]
        factor = self.lora_B[name]
        if factor.bias is not None or factor.weight.dim() != 2:  # ZeRO 3 gathers a weight when its module runs
            return None
        if self.lora_variant or not isinstance(self.lora_dropout[name], nn.Identity):
            return None
        same = x.dtype == factor.weight.dtype == self.lora_A[name].weight.dtype
        return name if same or torch.is_autocast_enabled(x.device.type) else None


def fuse_adapters(model: nn.Module) -> None:
    """Let the plain linear layers of a model with adapters compute as `FusedLinear`. Those in 4 bits stay as they are."""
    for module in model.modules():
        if type(module) is Linear and type(module.get_base_layer()) is nn.Linear:
            module.__class__ = FusedLinear
