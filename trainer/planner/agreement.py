"""The automatic fields of a run as all its ranks decide them together, after they have met: before they load data, and before the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.common.errors import UserError, first_line
from trainer.config import RunSpec
from trainer.config.automatic import DECIDED
from trainer.distributed.world import World
from trainer.model_files.model_shape import shape_of
from trainer.planner.decisions import GAIN, common, own_size, this_host, with_rows
from trainer.planner.measure import bfloat16_gain, layers_seconds
from trainer.spec import check_spec
from trainer.strategy import plan_of

SHORTEST = 300.0  # s in the layers of the model, below which compiling is not measured: it takes about a minute itself
COMPILES = 3  # times that a model is compiled: for training, for a smaller last micro-batch, and for evaluations
COMPILE_GAIN = 1.1  # how many times faster layers must be


def agree(spec: RunSpec, started: bool, world: World) -> RunSpec:
    """Return the spec with automatic fields that are the same on all ranks. Every rank calls it, also one that decides nothing.

    A rank with an earlier start of the run, or with the spec that another rank has written, has what the others take. On CPUs the
    ranks measure whether they are faster in bfloat16.

    Args:
        started: whether this rank decided nothing: its spec came with all fields, or an earlier start kept them.

    Raises:
        UserError: `strategy=auto`, and ranks chose different ones.
    """
    found = world.gather({name: getattr(spec, name) for name in DECIDED} | {"started": started})
    kept = next((values for values in found if values["started"]), None)
    values = kept or _decided(found)
    decided = {name: values[name] for name in DECIDED}
    spec = spec.model_copy(update=decided | {"automatic": tuple(values["automatic"])})
    if "precision" in spec.automatic:
        gains = world.gather(gain_here(spec))  # as every rank does: `values` are the same on all
        spec, line = with_precision(spec, min(gains))
        if world.rank == 0:
            print(line)
    return spec


def agree_compile(spec: RunSpec, steps: int, world: World) -> RunSpec:
    """Return the spec with torch_compile decided, if it is still automatic: whether it saves more time than it takes. Every rank calls it.

    Args:
        steps: number of steps of the run, about.
    """
    if "torch_compile" not in spec.automatic:
        return spec
    passes = steps * -(-spec.rows_per_step // (spec.batch_size * world.size))
    compiled, why = _saves_time(spec, passes, world)
    if world.rank == 0:
        print(f"auto: torch_compile={str(compiled).lower()}: {why}")
    rest = tuple(name for name in spec.automatic if name != "torch_compile")
    return spec.model_copy(update={"torch_compile": compiled, "automatic": rest})


def with_own_rows(spec: RunSpec, world: World) -> RunSpec:
    """Return the spec with the largest micro-batch that the memory of this rank has room for, with ddp_larger_batches. Every rank calls it.

    On the same host it is the same in every start of a run, because it depends on the size of the memory, not on what is free.
    """
    if spec.ddp_larger_batches is not True or not plan_of(spec).shares_rows_by_speed:
        return spec  # with other strategies, such as one that the hosts chose, all ranks pass the same rows
    hosts = [this_host() | {"processes": world.local_size}] * sum(world.gather(world.is_host_leader))
    rows = own_size(spec, hosts, shape_of(spec))
    if rows > spec.batch_size and world.is_host_leader:
        print(f"auto: batch_size={rows} on this host, which has more memory than others")
    return with_rows(spec, rows)


def _saves_time(spec: RunSpec, passes: int, world: World) -> tuple[bool, str]:
    """Return whether compiling saves time on all ranks, and why. `passes`: micro-batches of a rank."""
    if spec.backend == "unsloth":
        return False, "backend=unsloth has kernels of its own"
    if "cpu" in world.gather(world.device.type):
        return False, "a rank trains on a CPU"
    before, error = _layers(spec, world, compiled=False)
    if error:
        return False, f"the model cannot be measured: {error}"
    whole = passes * min(seconds for seconds, _ in before)
    if whole < SHORTEST:
        return False, f"the run is short, about {whole:.0f} s in the layers of the model"
    after, error = _layers(spec, world, compiled=True)
    if error:
        return False, f"it fails here: {error}"
    pairs = [(slow, fast) for (slow, _), (fast, _) in zip(before, after, strict=True)]
    gain, saved = min(slow / fast for slow, fast in pairs), passes * min(slow - fast for slow, fast in pairs)
    takes = COMPILES * max(compiling for _, compiling in after)
    why = f"layers are {gain:.2f} times as fast, which saves {saved:.0f} s of this run; compiling takes about {takes:.0f} s"
    return gain >= COMPILE_GAIN and saved > takes, why


def _layers(spec: RunSpec, world: World, *, compiled: bool) -> tuple[list[tuple[float, float]], str]:
    """Return what `layers_seconds` measures on every rank, and the first error, or an empty text. Every rank calls it."""
    seconds, error = (0.0, 0.0), ""
    try:
        seconds = layers_seconds(spec, world.device, compiled=compiled)
    except Exception as failure:  # of torch.compile, Triton or the C compiler that it starts, and of any library
        error = first_line(failure)
    return world.gather(seconds), next(filter(None, world.gather(error)), "")


def _decided(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if len({values["strategy"] for values in found}) > 1:
        raise UserError(
            "strategy: auto chooses differently on different hosts: set a strategy, or start with train.yml"
        )
    open_fields = [name for name in found[0]["automatic"] if all(name in values["automatic"] for values in found)]
    return common(found) | {"automatic": open_fields}


def with_precision(spec: RunSpec, gain: float) -> tuple[RunSpec, str]:
    """Return the spec with the precision of ranks on CPUs, and a line. `gain`: how many times faster bfloat16 is on the slowest."""
    rest = tuple(name for name in spec.automatic if name != "precision")
    half = spec.model_copy(update={"precision": "bf16-mixed", "automatic": rest})
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
