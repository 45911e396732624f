"""The auxiliary loss that balances the experts of a model, with the weight of its config, as TRL adds it by default."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch

_WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef", "aux_loss_alpha", "router_z_loss_coef")  # in configs of models


class RouterLoss:
    """The auxiliary loss of a model without adapters. `weight`: that of its config; 0 if transformers cannot compute the loss."""

    def __init__(self, model: Any) -> None:
        config: Any = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
        if (
            known := function is not None and len(inspect.signature(function).parameters) == 4
        ):  # as __call__ passes them
            self._function, self._chosen = (
                function,
                getattr(model, "num_experts_per_tok", None) or text.num_experts_per_tok,
            )
        named = {name: float(getattr(text, name, 0) or 0) for name in _WEIGHTS}
        self.weight = named.pop("router_aux_loss_coef") if known else 0.0
        self.left_out = ", ".join(f"{name} {value:g}" for name, value in named.items() if value)

    def __call__(self, logits: tuple[torch.Tensor, ...], padding: torch.Tensor) -> torch.Tensor:
        """Return the weighted loss of a micro-batch, a float32 scalar; 0 if it is empty.

        `logits`: of the routers, [rows * T, experts] of each layer. `padding`: bool [rows, T].
        """
        empty = padding.all()
        found: torch.Tensor = self._function(logits, logits[0].shape[-1], self._chosen, (~padding | empty).long())
        return self.weight * found.float() * ~empty
