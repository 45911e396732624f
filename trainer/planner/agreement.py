"""The automatic fields of a run as all its ranks decide them together, after they have met: before they load data, and before the model."""

from trainer.common.errors import UserError
from trainer.config import RunSpec
from trainer.config.automatic import DECIDED
from trainer.distributed.world import World
from trainer.planner.decisions import COMPILE_STEPS, common


def agree(spec: RunSpec, started: bool, world: World) -> RunSpec:
    """Return the spec with automatic fields that are the same on all ranks. Every rank calls it, also one that decides nothing.

    A rank with an earlier start of the run, or with the spec that another rank has written, has what the others take.
    `started`: whether this rank decided nothing: its spec came with all fields, or an earlier start kept them. Raises
    UserError: `strategy=auto`, and ranks chose different ones.
    """
    found = world.gather({name: getattr(spec, name) for name in DECIDED} | {"started": started})
    values = next((values for values in found if values["started"]), None)
    if values is None:
        if len({each["strategy"] for each in found}) > 1:
            raise UserError(
                "strategy: auto chooses differently on different hosts: set a strategy, or start with train.yml"
            )
        open_fields = [name for name in found[0]["automatic"] if all(name in each["automatic"] for each in found)]
        values = common(found) | {"automatic": open_fields}
    decided = {name: values[name] for name in DECIDED}
    return spec.model_copy(update=decided | {"automatic": tuple(values["automatic"])})


def agree_compile(spec: RunSpec, steps: int, world: World) -> RunSpec:
    """Return the spec with torch_compile decided, if it is still automatic. Every rank calls it.

    `steps`: number of steps of the run, about.
    """
    if "torch_compile" not in spec.automatic:
        return spec
    compiled, why = steps >= COMPILE_STEPS, f"the run has about {steps:,} steps"
    if "cpu" in world.gather(world.device.type):
        compiled, why = False, "a rank trains on a CPU"
    if world.rank == 0:
        print(f"auto: torch_compile={str(compiled).lower()}: {why}")
    rest = tuple(name for name in spec.automatic if name != "torch_compile")
    return spec.model_copy(update={"torch_compile": compiled, "automatic": rest})
