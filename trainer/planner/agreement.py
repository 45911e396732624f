"""The automatic fields of a run as all its ranks decide them together, after they have met."""

from __future__ import annotations

from typing import Any

from trainer.config import RunSpec
from trainer.config.automatic import AUTOMATIC
from trainer.distributed.world import World
from trainer.planner.decisions import GAIN, common
from trainer.planner.measure import bfloat16_gain


def agree(spec: RunSpec, world: World) -> RunSpec:
    """Return the spec with automatic fields that are the same on all ranks. Every rank calls it.

    On CPUs the ranks measure whether they are faster in bfloat16.
    """
    mine: dict[str, Any] = {name: getattr(spec, name) for name in AUTOMATIC}
    gain = _gain(spec) if "precision" in spec.automatic else 0.0
    gains, decided = world.gather(gain), common(world.gather(mine))
    spec = spec.model_copy(update={**decided, "automatic": ()})
    if not any(gains):
        return spec
    least = min(gains)
    precision = "bf16-mixed" if least >= GAIN else "32-true"
    if world.rank == 0:
        found = (
            f"its layers are {least:.1f} times as fast in bfloat16"
            if least >= GAIN
            else "bfloat16 is hardly faster here"
        )
        print(f"auto: precision={precision}: {found}")
    return spec.model_copy(update={"precision": precision})


def _gain(spec: RunSpec) -> float:
    try:
        return bfloat16_gain(spec)
    except Exception:  # of any library: a model that cannot be loaded has its one-line error when it is
        return 1.0
