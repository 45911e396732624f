"""The alternatives of a strategy: changes of a spec that save memory or communication, and what each of them costs. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.config import RunSpec

_MICRO_BATCHES = 6  # maximum number of smaller micro-batches that are tried


@dataclass(frozen=True)
class Alternative:
    """One change of a spec.

    Attributes:
        fields: values of fields of the run spec.
        cost: description of the loss of exactness or speed; empty if there is none.
        concessions: number of things that the change gives up beside speed, such as the exactness of a result.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    cost: str = ""
    concessions: int = 0


def shown(value: Any) -> str:
    """Return the value of a field as flags and ``-e`` write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


NONE = Alternative()
# Alternatives that exclude each other. A plan uses one of them.
Alternatives = Sequence[Alternative]


def switch(spec: RunSpec, name: str, value: Any, cost: str, concessions: int = 0) -> Alternatives:
    """Return the alternatives of a field that is left as it is, or set to `value`."""
    return [NONE] if getattr(spec, name) == value else [NONE, Alternative({name: value}, cost, concessions)]


def rounded_in_transit(spec: RunSpec) -> Alternatives:
    """Return the alternatives of how hidden states travel between the stages of a pipeline.

    Also where they have 16 bits and travel as they are: those of a base in 4 bits have 32.
    """
    cost = "activations and their gradients are rounded to bfloat16 in transit"
    return switch(spec, "pipeline_comm_dtype", "bf16", cost, 1)


def micro_batch_alternatives(spec: RunSpec) -> Alternatives:
    """Return the alternatives of smaller micro-batches. The rows of a step stay the same."""
    alternatives, rows = [NONE], spec.batch_size
    accumulation = spec.gradient_accumulation
    while rows > 1 and rows % 2 == 0 and len(alternatives) <= _MICRO_BATCHES:
        rows //= 2
        fields: dict[str, Any] = {"batch_size": rows}
        if accumulation:
            accumulation *= 2
            fields["gradient_accumulation"] = accumulation
        alternatives.append(Alternative(fields, "smaller matrices use a device less well"))
    return alternatives


def activation_alternatives(spec: RunSpec) -> list[Alternatives]:
    """Return the alternatives that save activations under every strategy."""
    return [
        switch(spec, "gradient_checkpointing", True, "activations are computed twice"),
        micro_batch_alternatives(spec),
    ]


def whole_model_alternatives(spec: RunSpec) -> list[Alternatives]:
    """Return the alternatives of a strategy that needs the full model on every rank."""
    cost = "the moments of the optimizer are rounded to 8 bits; requires bitsandbytes"
    return [quantize_alternatives(spec), switch(spec, "optimizer", "adamw8bit", cost, 1)]


def quantize_alternatives(spec: RunSpec) -> Alternatives:
    """Return the alternatives of the frozen base model's data type; none without LoRA."""
    if not spec.lora_r:
        return [NONE]
    cost = "the frozen weights are rounded to 4 bits, and every pass unpacks them; requires bitsandbytes"
    return switch(spec, "quantize", "nf4", cost, 1)


def gradient_alternatives(spec: RunSpec) -> list[Alternatives]:
    """Return the alternatives of gradients in transit."""
    return [switch(spec, "gradient_comm_dtype", "bf16", "gradients are rounded to bfloat16 in transit", 1)]
