"""The cross entropy of next tokens in chunks of places, so that the logits of a whole micro-batch never exist.

The idea of Cut Cross-Entropy (https://arxiv.org/abs/2411.09009) and of Liger's fused linear cross entropy, for any model: what
follows the decoder, such as the head and the scaling of logits, runs once per chunk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from trainer.costs.cost import LOSS_CHUNK
from trainer.data.packing import IGNORED

LossOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Tail:
    """The part of a causal language model behind its decoder, which returns the loss as its logits where that is wanted.

    It is computed by hooks while the model runs, because a strategy gathers the weights of the head for that time only.
    """

    def __init__(self, model: Any, decoder: Any, compiled: Callable[..., Any] | None = None) -> None:
        """`compiled`: the compiled forward pass of the decoder, for the passes of `running`."""
        inside = {id(part) for part in decoder.modules()}
        self._parts = [part for part in model.modules() if id(part) not in inside]
        self._model, self._decoder, self._compiled = model, decoder, compiled
        self._vocabulary = int(model.config.get_text_config().vocab_size)
        self._wanted: tuple[torch.Tensor, torch.Tensor] | None = None
        self._hidden: torch.Tensor | None = None
        self._output_type: type[ModelOutput] = ModelOutput
        decoder.register_forward_hook(self._take_hidden)
        model.register_forward_hook(self._return_loss)

    @classmethod
    def of(cls, model: Any, *, compiled: bool = False) -> Tail | None:
        """Return the tail of a model, or None if transformers does not know where it starts. `compiled`: compile what is before it."""
        if not isinstance(model, PreTrainedModel):
            return None
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        # Ranks of a pipeline without the head have a module without weights in its place.
        if decoder is model or not hasattr(head, "weight"):
            return None
        return cls(model, decoder, torch.compile(decoder.forward) if compiled else None)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the passes of the model within the block be those that are compiled: others have other shapes, such as generation."""
        with self._replaced(self._compiled) if self._compiled else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def _replaced(self, forward: Callable[..., Any]) -> Iterator[None]:
        before = vars(self._decoder).get("forward")
        self._decoder.forward = forward
        try:
            yield
        finally:
            del self._decoder.forward
            if before:
                self._decoder.forward = before

    @contextlib.contextmanager
    def loss_wanted(self, selected: torch.Tensor, targets: torch.Tensor) -> Iterator[None]:
        """Let the next pass of the model return the summed cross entropy, a float32 scalar, if its decoder has a known output.

        `selected`: places of the flattened micro-batch, int64 [n]. `targets`: the tokens after them, int64 [n]; -100
        where there is no loss.
        """
        self._wanted = (selected, targets)
        try:
            yield
        finally:
            self._wanted = self._hidden = None

    def _take_hidden(self, _: nn.Module, args: Any, output: Any) -> Any:
        """Take the output of the decoder, and leave no place of it: a head would copy its weights for a single one on a CPU."""
        if self._wanted is None or not isinstance(output, ModelOutput):
            return output
        self._hidden = output[0].flatten(0, -2)[self._wanted[0]]
        self._output_type = type(output)
        routers = {"router_logits": found} if (found := getattr(output, "router_logits", None)) is not None else {}
        return self._output_type(last_hidden_state=self._hidden[None, :0], **routers)

    def _return_loss(self, _: nn.Module, args: Any, output: Any) -> Any:
        if self._wanted is not None and self._hidden is not None:
            targets, self._wanted = self._wanted[1], None
            output.logits = self._loss_in_chunks(self._hidden, targets)
        return output

    def _loss_in_chunks(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        size = max(1, LOSS_CHUNK // self._vocabulary)
        if len(hidden) <= size:
            return self._loss(hidden, targets)
        device = hidden.device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
            # Gradients in float16 need the scale of the loss, which only the backward pass knows: compute chunks again there.
            parts = zip(hidden.split(size), targets.split(size), strict=True)
            each = [checkpoint(self._loss, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
            return torch.stack(each).sum()
        weights = [weight for part in self._parts for weight in part.parameters(recurse=False) if weight.requires_grad]
        return _SummedLoss.apply(self._loss, size, hidden, targets, *dict.fromkeys(weights))

    def _loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self._logits(hidden)
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the model with a decoder that returns `hidden`, [n, H] to [n, V]."""
        with self._replaced(lambda *_, **__: self._output_type(last_hidden_state=hidden[None])):
            ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
            found: torch.Tensor = self._model.forward(input_ids=ids, use_cache=False).logits
        return found[0]


class _SummedLoss(torch.autograd.Function):
    """The sum over chunks. The forward pass also computes the gradients, so that a chunk's logits are freed before the next."""

    @staticmethod
    def forward(
        ctx: Any, loss_of: LossOf, size: int, hidden: torch.Tensor, targets: torch.Tensor, *weights: nn.Parameter
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        wanted = [place for place, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        inputs = [hidden, targets, *weights]
        gradients = {place: torch.zeros_like(inputs[place]) for place in wanted}
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            inputs[0] = hidden[part].detach().requires_grad_(0 in wanted)
            with torch.set_grad_enabled(bool(wanted)):
                loss = loss_of(inputs[0], targets[part])
            total += loss.detach()
            found = torch.autograd.grad(loss, [inputs[place] for place in wanted]) if wanted else ()
            for place, gradient in zip(wanted, found, strict=True):
                (gradients[place][part] if place == 0 else gradients[place]).add_(gradient)
        ctx.wanted = wanted
        ctx.save_for_backward(*gradients.values())
        return total

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        found: list[torch.Tensor | None] = [None] * (len(ctx.needs_input_grad))
        for place, gradient in zip(ctx.wanted, ctx.saved_tensors, strict=True):
            found[2 + place] = gradient * scale
        return tuple(found)
