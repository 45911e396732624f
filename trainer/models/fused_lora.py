"""LoRA in fewer passes over the activations than peft makes: its product is scaled and added where it is computed."""

import functools
from typing import Any

import torch
from peft.tuners.lora import Linear, LoraLayer
from torch import nn


def fuse_adapters(model: nn.Module) -> None:
    """Let the linear layers of a model with adapters compute so: plain ones, and those that bitsandbytes has in 4 bits.

    The sum is rounded once; peft rounds the product, the scaled product, and the sum.
    """
    for module in model.modules():
        base = module.get_base_layer() if isinstance(module, LoraLayer) else None
        kind: Any = type(module)
        if (kind is Linear and type(base) is nn.Linear) or hasattr(base, "quant_state"):
            module.__class__ = _fused(kind)


@functools.cache
def _fused(kind: Any) -> Any:
    """Return a class of layers like a class of peft."""

    def forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what the layer of peft returns, [..., out] for [..., in]."""
        name = _single_adapter(layer, x)
        if name is None or args or kwargs:
            found: torch.Tensor = kind.forward(layer, x, *args, **kwargs)
            return found
        rows = x.flatten(0, -2)
        result: torch.Tensor = layer.base_layer(rows)
        low = layer.lora_A[name](rows).to(result.dtype)
        result.addmm_(low, layer.lora_B[name].weight.to(result.dtype).t(), alpha=layer.scaling[name])
        return result.unflatten(0, x.shape[:-1])

    return type(f"Fused{kind.__name__}", (kind,), {"forward": forward})


def _single_adapter(layer: Any, x: torch.Tensor) -> str | None:
    """Return the name of a layer's adapter, if it is the only one and like those that the trainer makes; else None."""
    names = layer.active_adapters
    if layer.disable_adapters or layer.merged or len(names) != 1 or names[0] not in layer.lora_A:
        return None
    name: str = names[0]
    factor = layer.lora_B[name]
    if factor.bias is not None or factor.weight.dim() != 2:  # ZeRO 3 gathers a weight when its module runs
        return None
    if layer.lora_variant or not isinstance(layer.lora_dropout[name], nn.Identity):
        return None
    same = x.dtype == factor.weight.dtype == layer.lora_A[name].weight.dtype
    return name if same or torch.is_autocast_enabled(x.device.type) else None
