"""Compare the strategies for a run, and choose one. No torch: the controller resolves `strategy=auto` with it.

The fastest strategy that fits wins; of those that differ by no more than the error of predicted speeds, the one with fewer concessions,
such as a result that is not exact.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer.common.errors import UserError
from trainer.config import FIELDS, RunSpec
from trainer.costs.cost import Layout, Memory, RowStats, row_flops, unpacking_factor
from trainer.costs.host_memory import BASE, have_gpus, layout_of
from trainer.costs.teacher_cost import teacher_flops, teacher_shape
from trainer.method import method_of
from trainer.model_files.model_shape import Shape, shape_of
from trainer.spec import check_spec, missing_for
from trainer.strategy import AUTO, DEFAULT_STRATEGY, STRATEGIES, plan_named, plan_of

ALONE = "alone"  # one process, for comparison with the strategies
LINK = 1000.0  # Mbit/s, if the link was not measured
# Operations per second, if speed was not measured: one core with AVX2, and an older GPU in 16-bit arithmetic.
NOMINAL = {"cpu": 40e9, "cuda": 30e12}
TIGHT = 0.05  # a strategy that leaves less than this fraction of a rank's memory makes a concession
ERROR = 1.15  # of predicted speeds: a strategy must be that many times faster for every concession
_LOUD = 0.5  # fraction of time in communication that is worth a word


@dataclass(frozen=True)
class Speed:
    """Seconds of a full micro-batch and of an optimizer step on one process.

    `measured`: here, not by nominal figures.
    """

    part: float
    step: float
    measured: bool

    @classmethod
    def nominal(cls, spec: RunSpec, shape: Shape, rows: RowStats, device: str, threads: int = 1) -> "Speed":
        """Estimate the speed by figures of common hardware, within a factor of a few."""
        rate, method = NOMINAL[device] * (threads if device == "cpu" else 1), method_of(spec)
        # Of a row; those of unpacking weights count as well.
        flops = row_flops(spec, shape, rows) * unpacking_factor(spec, cuda=device == "cuda") + teacher_flops(spec, rows)
        return cls(method.as_rows(spec).batch_size * flops * method.time_factor(spec) / rate, 0.0, False)


@dataclass(frozen=True)
class Option:
    """The cost of a run with one strategy: bytes, seconds per step, tokens per second.

    Attributes:
        host_memory: bytes of host memory that a rank on a GPU needs for offloaded state, and while it loads the model.
    """

    strategy: str
    processes: int
    memory: Memory
    fits: bool | None  # whether `memory` is available, None if unknown
    comm_bytes: float
    compute_seconds: float
    comm_seconds: float  # communication that computation does not hide
    tokens_per_second: float
    host_memory: int = 0
    free: float | None = None  # the smallest fraction of its memory that the strategy leaves to a rank, None if unknown
    concessions: int = 0  # number of things that the strategy gives up, such as exactness

    @property
    def score(self) -> float:
        """What the planner compares: tokens per second, less the error of predictions for every concession.

        It is rounded so that the order of operations does not matter.
        """
        tight = self.free is not None and 0 <= self.free < TIGHT  # an error of the prediction may exceed it
        return float(f"{self.tokens_per_second / ERROR ** (self.concessions + tight):.9g}")

    @property
    def share(self) -> float:
        """The fraction of a step that is communication and not hidden behind computation."""
        total = self.compute_seconds + self.comm_seconds
        return self.comm_seconds / total if total else 0.0


@dataclass(frozen=True)
class Setting:
    """The inputs of a run's cost besides its spec.

    `link`: Mbit/s between hosts; ignored for one host. `gloo`: whether processes run on CPUs.
    """

    shape: Shape
    layout: Layout
    rows: RowStats
    speed: Speed
    link: float
    gloo: bool


def options(spec: RunSpec, setting: Setting) -> list[Option]:
    """Return the cost of one process alone, and of every registered strategy that the spec allows."""
    found, layout = [], setting.layout
    # One process alone, with the least memory and the highest speed.
    fastest = (max(layout.speeds),) if layout.speeds else ()
    smallest = Layout((1,), _smallest(layout.rooms), _smallest(layout.host_rooms), fastest)
    candidates = [(ALONE, DEFAULT_STRATEGY, replace(setting, layout=smallest))]
    candidates += [(name, name, setting) for name in STRATEGIES if layout.world > 1]
    for label, strategy, place in candidates:
        candidate = spec.model_copy(update={"strategy": strategy})
        try:
            check_spec(candidate)
        except ValueError:
            continue  # other fields of the spec exclude the strategy
        found.append(_option(label, candidate, place, setting.speed))
    return found


def _smallest(rooms: Iterable[float | None]) -> tuple[float | None, ...]:
    return (min((room for room in rooms if room is not None), default=None),)


def _option(label: str, spec: RunSpec, setting: Setting, speed: Speed) -> Option:
    shape, layout, rows, gloo = setting.shape, setting.layout, setting.rows, setting.gloo
    bandwidth = setting.link * 1e6 / 8  # bytes per second
    plan, spec = plan_of(spec), method_of(spec).as_rows(spec)
    memories = plan.memories(spec, shape, layout, rows, cuda=not gloo)
    sent = plan.comm_bytes(spec, shape, layout, gloo=gloo)
    extra, slow = plan.overhead_seconds(spec, shape, layout, bandwidth) if gloo else (0.0, 0.0)
    communication = sent / bandwidth + slow if len(layout.processes) > 1 else 0.0
    compute, communication = plan.step_seconds(spec, shape, layout, rows, speed.part, speed.step, communication)
    compute += extra if gloo else plan.offload_seconds(spec, shape, layout)
    left = plan.free(spec, shape, layout, memories, cuda=not gloo)
    known = [part for part in left if part is not None]
    return Option(
        label,
        layout.world,
        max(memories, key=lambda memory: memory.total),
        _fits(left),
        sent,
        compute,
        communication,
        tokens_per_second=spec.rows_per_step * rows.tokens / (compute + communication),
        host_memory=0 if gloo else plan.host_memory(spec, shape, layout),
        free=min(known, default=None),
        concessions=plan.concessions,
    )


def _fits(free: Sequence[float | None]) -> bool | None:
    """Return whether every rank has enough memory; None if that is unknown. `free`: the fraction that is left to each."""
    known = [part for part in free if part is not None]
    if any(part < 0 for part in known):
        return False
    return True if known and len(known) == len(free) else None


def _best(found: Sequence[Option]) -> Option | None:
    """Return the option with the highest score that fits, or else of which it is unknown."""
    known = [option for option in found if option.fits] or [option for option in found if option.fits is None]
    return max(known, key=lambda option: option.score, default=None)


def recommend(spec: RunSpec, found: Sequence[Option], setting: Setting) -> tuple[str, str]:
    """Return the fastest strategy that fits and that is worth its concessions, and the reason in one line.

    `found`: result of `options`. Raises UserError: none fits in memory.
    """
    alone, *others = found
    if setting.layout.world == 1:
        if alone.fits is False:
            raise UserError(f"plan: {_too_large(spec, alone)}")
        return DEFAULT_STRATEGY, "one process, so there is nothing to distribute"
    plans = [(option, plan_named(option.strategy)) for option in others]
    possible = [each for each, plan in plans if plan.auto and plan.runs_on(spec, setting.shape, setting.layout)]
    best = _best(possible)
    if not best:
        raise UserError(f"plan: {_too_large(spec, min([alone, *possible], key=lambda option: option.memory.total))}")
    if plan_named(best.strategy).auto == "low_communication":
        exact = _best([option for option in possible if option.concessions == 0])
        return best.strategy, _why_low_communication(best, exact or others[0], alone, setting.link)
    return best.strategy, _why_exact(best, others, alone, setting.link)


def _faster_alone(alone: Option, option: Option) -> bool:
    return alone.fits is not False and alone.tokens_per_second >= option.tokens_per_second


def _why_exact(best: Option, found: Sequence[Option], alone: Option, link: float) -> str:
    fit = f"it fits, {'but' if best.share > _LOUD else 'and'}"
    if best.fits is None:
        fit = "if it fits (--hosts FILE states the memory),"
    why = f"{fit} {best.share:.0%} of the time is communication at {round(link, 1):g} Mbit/s"
    default = next((option for option in found if option.strategy == DEFAULT_STRATEGY), None)
    if best.strategy != DEFAULT_STRATEGY and (default is None or default.fits is False):
        why = f"the full model does not fit in one process; divided, {why}"
    elif best.strategy != DEFAULT_STRATEGY and default:
        times = best.tokens_per_second / default.tokens_per_second
        why = f"{times:.1f} times as fast as {DEFAULT_STRATEGY}; {why}"
    return f"{why}: one process alone is faster" if _faster_alone(alone, best) else why


def _why_low_communication(quiet: Option, exact: Option, alone: Option, link: float) -> str:
    why = f"{exact.strategy} would spend {exact.share:.0%} of the time in communication at {round(link, 1):g} Mbit/s"
    if exact.fits is False:
        why = f"{exact.strategy} does not fit"
    if _faster_alone(alone, exact):
        why += ", where one process alone is faster"
    return f"{why}; {quiet.strategy} spends {quiet.share:.0%}"


def _too_large(spec: RunSpec, option: Option) -> str:
    remedies = [
        remedy
        for remedy, applies in (
            ("gradient_checkpointing=true", not spec.gradient_checkpointing),
            ("a smaller batch_size", spec.batch_size > 1),
            ("precision=bf16-mixed", spec.precision == "32-true"),
            ("quantize=nf4", spec.quantize == "none" and spec.lora_r > 0),
            ("LoRA (lora_r=16)", not spec.lora_r),
        )
        if applies
    ]
    strategy = DEFAULT_STRATEGY if option.strategy == ALONE else option.strategy
    return (
        f"{option.memory.total / 2**30:.1f} GiB per process do not fit, besides {BASE} MiB for Python on a CPU "
        f"(strategy={strategy}): try {' or '.join(remedies) or 'a smaller model'}, or more hosts"
    )


def choose(spec: RunSpec, hosts: Sequence[Mapping[str, Any]], shape: Shape | None = None) -> tuple[str, str]:
    """Resolve `strategy=auto` for these hosts. The result depends only on the arguments.

    Returns the strategy, and the reason in one line. Raises UserError: no strategy fits in memory. `hosts`: for each
    its `processes`, `threads` per process, `gpu_mib` (memory of its smallest GPU; 0: no GPU), `memory_mib` of the host
    (0: unknown) and `link_mbit` (0: unknown). `shape`: the shape of the spec's model, if known.
    """
    try:
        shape = shape or shape_of(spec)
        teacher_shape(spec)
    except UserError as error:
        return DEFAULT_STRATEGY, f"auto selected {DEFAULT_STRATEGY}: {error}"
    setting, linked = _setting_of(spec, hosts, shape)
    strategy, why = recommend(spec, options(spec, setting), setting)
    said = " (link assumed, not measured)" if not linked and len(hosts) > 1 else ""
    chosen = spec.model_copy(update={"strategy": strategy})
    if idle := [name for name in FIELDS if missing_for(chosen, name) and not missing_for(spec, name)]:
        said += f"; without effect then: {', '.join(idle)}"
    return strategy, f"auto selected {strategy}: {why}{said}"


def _setting_of(spec: RunSpec, hosts: Sequence[Mapping[str, Any]], shape: Shape) -> tuple[Setting, bool]:
    """Return the setting of these hosts (see `choose`) with nominal speeds, and whether the speed of a link is known."""
    device = "cuda" if have_gpus(hosts) else "cpu"
    links = [host["link_mbit"] for host in hosts if host.get("link_mbit")]
    link = min(links) if links else LINK
    rows = RowStats.full(spec)
    speed = Speed.nominal(spec, shape, rows, device, min(host["threads"] for host in hosts))
    return Setting(shape, layout_of(hosts, device), rows, speed, link, gloo=device == "cpu"), bool(links)


def fits(spec: RunSpec, hosts: Sequence[Mapping[str, Any]], shape: Shape) -> bool | None:
    """Return whether every rank of these hosts (see `choose`) has enough memory for a spec; None if that is unknown."""
    spec = method_of(spec).as_rows(spec)
    setting, _ = _setting_of(spec, hosts, shape)
    plan, cuda = plan_of(spec), not setting.gloo
    if not plan.runs_on(spec, shape, setting.layout):
        return None  # a pipeline of one rank, for example, whose memory the plan does not know
    memories = plan.memories(spec, shape, setting.layout, setting.rows, cuda=cuda)
    return _fits(plan.free(spec, shape, setting.layout, memories, cuda=cuda))


def estimate_seconds(spec: RunSpec, hosts: Sequence[dict[str, Any]], samples: int) -> float:
    """Return the time that the steps of a run take, within a factor of a few: by nominal speeds, with full rows.

    `hosts`: as for `choose`. `samples`: samples of the dataset. A row holds one sample at least. Raises UserError: the
    planner does not know the model, or no strategy fits in memory.
    """
    setting, _ = _setting_of(spec, hosts, shape_of(spec))
    found = options(spec, setting)
    strategy = choose(spec, hosts)[0] if spec.strategy == AUTO else spec.strategy
    # With one process, the list has only this process alone.
    option = next((option for option in found if option.strategy == strategy), found[0])
    epoch = math.ceil(samples / spec.samples_per_step)
    steps = spec.max_steps or (max(1, epoch * spec.epochs) if samples else 0)
    return steps * (option.compute_seconds + option.comm_seconds)
