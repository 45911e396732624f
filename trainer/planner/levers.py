"""The levers of a strategy: changes of a spec that save memory or communication, and what each of them costs. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.config import RunSpec

_MICRO_BATCHES = 6  # maximum number of smaller micro-batches that are tried
# How many times faster a plan must be to justify the lever.
ROUNDED = 1.5  # values in transit or in the optimizer are rounded
CHANGED = 2.0  # the model or the algorithm is another one
_SMALLER = 1.05  # of half the rows in a micro-batch: no cost model counts how well a device is used


@dataclass(frozen=True)
class Lever:
    """One change of a spec.

    Attributes:
        fields: values of fields of the run spec.
        cost: what the change costs in exactness or speed, in words; empty if nothing.
        gain: how many times faster the plan must be than one without the change. The cost model counts speed; `gain` counts
            what it does not: exactness, packages, and the use of a device.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    cost: str = ""
    gain: float = 1.0


def shown(value: Any) -> str:
    """Return the value of a field as flags and ``-e`` write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


NONE = Lever()
# Levers that exclude each other. A plan uses one of them.
Levers = Sequence[Lever]


def switch(spec: RunSpec, name: str, value: Any, cost: str, gain: float = 1.0) -> Levers:
    """Return the levers of a field that is left as it is, or set to `value`."""
    return [NONE] if getattr(spec, name) == value else [NONE, Lever({name: value}, cost, gain)]


def micro_batch_levers(spec: RunSpec) -> Levers:
    """Return the levers of smaller micro-batches. The rows of a step stay the same."""
    levers, rows, gain = [NONE], spec.batch_size, 1.0
    accumulation = spec.gradient_accumulation
    while rows > 1 and rows % 2 == 0 and len(levers) <= _MICRO_BATCHES:
        rows, gain = rows // 2, gain * _SMALLER
        fields: dict[str, Any] = {"batch_size": rows}
        if accumulation:
            accumulation *= 2
            fields["gradient_accumulation"] = accumulation
        levers.append(Lever(fields, "smaller matrices use a device less well", gain))
    return levers


def activation_levers(spec: RunSpec) -> list[Levers]:
    """Return the levers that save activations under every strategy."""
    return [
        switch(spec, "gradient_checkpointing", True, "activations are computed twice"),
        micro_batch_levers(spec),
    ]


def whole_model_levers(spec: RunSpec) -> list[Levers]:
    """Return the levers of a strategy that needs the full model on every rank."""
    return [quantize_levers(spec), *optimizer_levers(spec)]


def quantize_levers(spec: RunSpec) -> Levers:
    """Return the levers of the frozen base model's data type; none without LoRA."""
    if not spec.lora_r:
        return [NONE]
    cost = "the frozen weights are rounded to 4 bits, and every pass unpacks them; requires bitsandbytes"
    return switch(spec, "quantize", "nf4", cost, CHANGED)


def optimizer_levers(spec: RunSpec) -> list[Levers]:
    """Return the levers of the optimizer's moments."""
    cost = "the moments of the optimizer are rounded to 8 bits; requires bitsandbytes"
    return [switch(spec, "optimizer", "adamw8bit", cost, ROUNDED)]


def gradient_levers(spec: RunSpec) -> list[Levers]:
    """Return the levers of gradients in transit."""
    return [switch(spec, "gradient_comm_dtype", "bf16", "gradients are rounded to bfloat16 in transit", ROUNDED)]


@dataclass(frozen=True)
class Variant:
    """A spec with some levers. `levers`: those that change it."""

    spec: RunSpec
    levers: tuple[Lever, ...]

    @property
    def gain(self) -> float:
        """How many times faster the plan must be than one without the levers."""
        found = 1.0
        for lever in self.levers:
            found *= lever.gain
        return found

    @property
    def costs(self) -> list[str]:
        """What the levers cost, in words."""
        return [lever.cost for lever in self.levers if lever.cost]


def variants(spec: RunSpec, groups: Sequence[Levers]) -> Iterator[Variant]:
    """Yield `spec` with every combination of levers, one from each group, that the fields of a spec permit.

    The first variant has no lever. `spec` has the strategy whose levers these are.
    """
    from trainer.config.combinations import check_combinations

    for chosen in product(*groups):
        used = tuple(lever for lever in chosen if lever.fields)
        changed: dict[str, Any] = {}
        for lever in used:
            changed |= lever.fields
        variant = spec.model_copy(update=changed)
        try:
            check_combinations(variant)
        except ValueError:
            continue  # the fields exclude each other
        yield Variant(variant, used)
