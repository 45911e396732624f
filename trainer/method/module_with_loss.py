"""The model as the strategies call it: a micro-batch in, the loss of the method out."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainer.data.packing import IGNORED
from trainer.method.method_base import Batch, Method
from trainer.method.sft import SFT
from trainer.models.chunked_loss import Tail
from trainer.models.router_loss import RouterLoss
from trainer.models.sample_rope import SampleRope


class ModelWithLoss(nn.Module):
    """A causal language model whose forward returns the *sum* of the losses of tokens or samples, so that ranks can be weighted exactly."""

    def __init__(self, model: nn.Module, *, compiled: bool = False, method: Method | None = None) -> None:
        """`method`: computes the loss; None: supervised fine-tuning."""
        super().__init__()
        self.model, self.method = model, method or SFT()
        self._loss_positions: torch.Tensor | None = None
        self._balance: torch.Tensor | None = None  # the auxiliary loss of the last pass with gradients
        self.part: float | None = None  # the weight of a micro-batch for it, in the update; None: its labels
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        # Flash attention separates packed samples by their positions only within a single row.
        self._single_row = getattr(base.config, "_attn_implementation", "") == "flash_attention_2"
        self.router_loss, self._rope = RouterLoss(base), SampleRope(base)
        head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
        self._tail = Tail.of(base, compiled=compiled)
        whole = compiled and self._tail is None  # what is compiled has no hooks
        self._run = torch.compile(model) if whole else model
        if head is not None and not whole:
            head.register_forward_pre_hook(self._select_loss_positions)
        self.training = model.training  # parts of the model may have another mode
        if self.training and not self.method.keeps_dropout:
            _switch_off_dropout(model)

    def train(self, mode: bool = True) -> "ModelWithLoss":
        """Set the mode. In training, a method other than sft has no dropout of the model's own, as in TRL; that of the adapters stays."""
        super().train(mode)
        if mode and not self.method.keeps_dropout:
            _switch_off_dropout(self.model)
        return self

    def _select_loss_positions(self, _: nn.Module, hidden: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Pass only positions with a loss to the output head: the logits are the largest tensor of a step."""
        if self._loss_positions is None:
            return hidden
        return (hidden[0].flatten(0, -2)[self._loss_positions][None],)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        labels: torch.Tensor,
        extra: Any = None,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the summed loss of a micro-batch, a float32 scalar.

        `ids`, `positions`, `labels`: int64 [rows, T]; labels are -100 where there is no loss; positions restart at 0
        with every packed sample, by which transformers separates them (this requires ``use_cache=False``), and are the
        complement in padding. `extra`, `places`: see `Batch`.
        """
        loss = self.method.loss(self, Batch(ids, positions, labels, extra, places))
        balance, self._balance = self._balance, None
        if balance is None:
            return loss
        return loss + balance * ((labels[:, 1:] != IGNORED).sum() if self.part is None else self.part)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next tokens, [n, V], at the selected places of the flattened micro-batch or at all.

        `ids`, `positions`: see `forward`. `selected`: int64 [n].
        """
        return self._output(ids, positions, selected).flatten(0, 1)

    def summed_cross_entropy(
        self, ids: torch.Tensor, positions: torch.Tensor, selected: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Return the cross entropy of the tokens after the selected places, a float32 scalar.

        The logits of all places exist only if transformers does not know the model's decoder. `ids`, `positions`,
        `selected`: see `logits`. `targets`: int64 [n]; -100 where there is no loss.
        """
        if self._tail:
            with self._tail.loss_wanted(selected, targets):
                found = self._output(ids, positions, None)
            if not found.dim():
                return found
            logits = found.flatten(0, 1)[selected]
        else:
            logits = self.selected_logits(ids, positions, selected)
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")

    def _output(self, ids: torch.Tensor, positions: torch.Tensor, selected: torch.Tensor | None) -> torch.Tensor:
        """Return what the model returns as its logits. `selected`: the places that its head receives; None: all."""
        if self._single_row:
            ids, positions = ids.view(1, -1), positions.view(1, -1)
        balanced = self.router_loss.weight and torch.is_grad_enabled()
        options = {"output_router_logits": True} if balanced else {}
        self._loss_positions = selected
        try:
            with self._tail.running() if self._tail else nullcontext(), self.placed(positions) as places:
                found = self._run(input_ids=ids, position_ids=places, use_cache=False, **options)
        finally:
            self._loss_positions = None
        if balanced and found.router_logits:
            self._balance = self.router_loss(found.router_logits, positions < 0)
        return found.logits  # type: ignore[no-any-return]

    @contextmanager
    def placed(self, positions: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the positions as the model takes them, for a pass within the block. `positions`: see `forward`."""
        padding = positions < 0
        places = torch.where(padding, ~positions, positions)
        with self._rope.lengths(places, padding):
            yield places

    def selected_logits(self, ids: torch.Tensor, positions: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next tokens at the selected places alone, [n, V]; arguments as for `logits`."""
        found = self.logits(ids, positions, selected)
        return found[selected] if len(found) == ids.numel() else found


def _switch_off_dropout(model: nn.Module) -> None:
    """Let a model in training compute as in evaluation, except for the dropout of its adapters and the layers that recompute activations."""
    adapters = [module.lora_dropout for module in model.modules() if hasattr(module, "lora_dropout")]
    kept = {id(part) for adapter in adapters for part in adapter.modules()}
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            rates = {name: 0.0 for name, value in vars(module).items() if "drop" in name and isinstance(value, float)}
            vars(module).update(rates)
        elif id(module) not in kept:
            module.training = False
