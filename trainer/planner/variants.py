"""The specs that the planner compares: a spec with every combination of alternatives. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from trainer.config import RunSpec
from trainer.costs.alternatives import Alternative, Alternatives
from trainer.spec import check_spec


@dataclass(frozen=True)
class Variant:
    """A spec with some alternatives. `alternatives`: those that change it."""

    spec: RunSpec
    alternatives: tuple[Alternative, ...]


def variants(spec: RunSpec, groups: Sequence[Alternatives]) -> Iterator[Variant]:
    """Yield `spec` with every combination of alternatives, one from each group, that the fields of a spec permit.

    The first variant has no alternative. `spec` has the strategy whose alternatives these are.
    """
    for chosen in product(*groups):
        used = tuple(alternative for alternative in chosen if alternative.fields)
        changed: dict[str, Any] = {}
        for alternative in used:
            changed |= alternative.fields
        variant = spec.model_copy(update=changed)
        try:
            check_spec(variant)
        except ValueError:
            continue  # the fields exclude each other
        yield Variant(variant, used)
