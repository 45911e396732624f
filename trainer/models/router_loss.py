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
        self._function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
        known = self._function and len(inspect.signature(self._function).parameters) == 4  # as __call__ passes them
        self.weight = (
            getattr(text, "router_aux_loss_coef", 0.0) if known and hasattr(text, "output_router_logits") else 0.0
        )
        self._chosen = getattr(model, "num_experts_per_tok", None) or getattr(text, "num_experts_per_tok", 0)
        named = {name: getattr(text, name, None) for name in _WEIGHTS[1 if self.weight else 0 :]}
        self.left_out = ", ".join(
            f"{name} {value:g}" for name, value in named.items() if isinstance(value, float) and value
        )

    def __call__(self, logits: tuple[torch.Tensor, ...], padding: torch.Tensor) -> torch.Tensor:
        """Return the weighted loss of a micro-batch, a float32 scalar; 0 if it is empty.

        Args:
            logits: of the routers, [rows * T, experts] of each layer.
            padding: bool [rows, T].
        """
        empty = padding.all()
        assert self._function
        found: torch.Tensor = self._function(logits, logits[0].shape[-1], self._chosen, (~padding | empty).long())
        return self.weight * found.float() * ~empty
