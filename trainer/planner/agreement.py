"""The automatic fields of a run as all its ranks decide them together, after they have met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.common.errors import UserError
from trainer.config import RunSpec
from trainer.config.automatic import AUTOMATIC
from trainer.distributed.world import World
from trainer.planner.decisions import GAIN, common
from trainer.planner.measure import bfloat16_gain
from trainer.spec import check_spec

_FIELDS = (*AUTOMATIC, "automatic")


def agree(spec: RunSpec, started: bool, world: World) -> RunSpec:
    """Return the spec with automatic fields that are the same on all ranks. Every rank calls it, also one that decides nothing.

    A rank with an earlier start of the run, or with the spec that another rank has written, has what the others take. On CPUs the
    ranks measure whether they are faster in bfloat16.

    Args:
        started: whether this rank decided nothing: its spec came with all fields, or an earlier start kept them.

    Raises:
        UserError: `strategy=auto`, and ranks chose different ones.
    """
    found = world.gather({name: getattr(spec, name) for name in _FIELDS} | {"started": started})
    kept = next((values for values in found if values["started"]), None)
    values = kept or _decided(found)
    spec = spec.model_copy(update={name: values[name] for name in AUTOMATIC})
    if "precision" not in values["automatic"]:
        return spec.model_copy(update={"automatic": ()})
    gains = world.gather(gain_here(spec))  # as every rank does: `values` are the same on all
    spec, line = with_precision(spec, min(gains))
    if world.rank == 0:
        print(line)
    return spec


def _decided(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if len({values["strategy"] for values in found}) > 1:
        raise UserError(
            "strategy: auto chooses differently on different hosts: set a strategy, or start with train.yml"
        )
    open_fields = [name for name in found[0]["automatic"] if all(name in values["automatic"] for values in found)]
    return common(found) | {"automatic": open_fields}


def with_precision(spec: RunSpec, gain: float) -> tuple[RunSpec, str]:
    """Return the spec with the precision of ranks on CPUs, and a line. `gain`: how many times faster bfloat16 is on the slowest."""
    half = spec.model_copy(update={"precision": "bf16-mixed", "automatic": ()})
    why = f"its layers are {gain:.1f} times as fast in bfloat16" if gain >= GAIN else "bfloat16 is hardly faster here"
    try:
        check_spec(half)
    except ValueError as error:
        gain, why = 0.0, str(error)
    chosen = half if gain >= GAIN else half.model_copy(update={"precision": "32-true"})
    return chosen, f"auto: precision={chosen.precision}: {why}"


def gain_here(spec: RunSpec) -> float:
    """Return how many times faster this CPU is in bfloat16; 1 if the model cannot be measured."""
    try:
        return bfloat16_gain(spec)
    except Exception:  # of any library: a model that cannot be loaded has its one-line error when it is
        return 1.0
