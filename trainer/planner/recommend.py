"""Compare the strategies for a run, and recommend one. No torch: the controller resolves `strategy=auto` with it."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.config import RunSpec, read_spec
from trainer.errors import UserError
from trainer.planner.cost import Layout, Memory, Rows, row_flops
from trainer.planner.hosts import BASE, own_memory_mib, usable_bytes
from trainer.planner.model_shape import Shape, shape_of
from trainer.planner.teacher import teacher_flops, teacher_shape
from trainer.strategy import AUTO, DEFAULT_STRATEGY, STRATEGIES, plan_named, plan_of

ALONE = "alone"  # one process, for comparison with the strategies
LINK = 1000.0  # Mbit/s, if the link was not measured
# Operations per second, if speed was not measured: one core with AVX2, and an older GPU in 16-bit arithmetic.
NOMINAL = {"cpu": 40e9, "cuda": 30e12}
_QUIET = 0.05  # fraction of time in communication that is acceptable
_LOUD = 0.5  # fraction from which a strategy with less communication justifies a different result


@dataclass(frozen=True)
class Speed:
    """Seconds of a full micro-batch and of an optimizer step on one process; `measured`, or by nominal figures."""

    part: float
    step: float
    measured: bool

    @classmethod
    def nominal(cls, spec: RunSpec, shape: Shape, rows: Rows, device: str, threads: int = 1) -> "Speed":
        """Estimate the speed by figures of common hardware, within a factor of a few."""
        rate = NOMINAL[device] * (threads if device == "cpu" else 1)
        return cls(spec.batch_size * (row_flops(spec, shape, rows) + teacher_flops(spec, rows)) / rate, 0.0, False)


@dataclass(frozen=True)
class Option:
    """The cost of a run with one strategy: bytes, seconds per step, tokens per second.

    `fits`: whether `memory` is available, None if unknown. `comm_seconds`: communication that computation does not hide.
    """

    strategy: str
    processes: int
    memory: Memory
    fits: bool | None
    comm_bytes: float
    compute_seconds: float
    comm_seconds: float
    tokens_per_second: float

    @property
    def share(self) -> float:
        """The fraction of a step that is communication and not hidden behind computation."""
        total = self.compute_seconds + self.comm_seconds
        return self.comm_seconds / total if total else 0.0


@dataclass(frozen=True)
class Setting:
    """What the cost of a run depends on besides its spec.

    Attributes:
        link: Mbit/s between hosts; ignored for one host.
        room: bytes that a process has for tensors, or None if unknown.
        gloo: whether processes run on CPUs.
    """

    shape: Shape
    layout: Layout
    rows: Rows
    speed: Speed
    link: float
    room: float | None
    gloo: bool


def options(spec: RunSpec, setting: Setting) -> list[Option]:
    """Return the cost of one process alone, and of every registered strategy that the spec allows."""
    candidates = [(ALONE, DEFAULT_STRATEGY, replace(setting, layout=Layout((1,))))]
    if setting.layout.world > 1:
        candidates += [(name, name, setting) for name in STRATEGIES]
    found = []
    for label, strategy, place in candidates:
        try:
            candidate = RunSpec.model_validate(spec.model_dump() | {"strategy": strategy})
        except ValidationError:
            continue  # other fields of the spec exclude the strategy
        found.append(_option(label, candidate, place))
    return found


def _option(label: str, spec: RunSpec, setting: Setting) -> Option:
    """Return the cost of the spec's strategy under the name `label`."""
    shape, layout, rows, speed, gloo = setting.shape, setting.layout, setting.rows, setting.speed, setting.gloo
    bandwidth = setting.link * 1e6 / 8  # bytes per second
    plan = plan_of(spec)
    memory = plan.memory(spec, shape, layout, rows, cuda=not gloo)
    sent = plan.comm_bytes(spec, shape, layout, gloo=gloo)
    extra, slow = plan.overhead_seconds(spec, shape, layout, bandwidth) if gloo else (0.0, 0.0)
    communication = sent / bandwidth + slow if len(layout.processes) > 1 else 0.0
    compute, communication = plan.step_seconds(spec, shape, layout, rows, speed.part, speed.step, communication)
    compute += extra
    tokens = spec.rows_per_step * rows.tokens / (compute + communication)
    fits = None if setting.room is None else memory.total <= setting.room
    return Option(label, layout.world, memory, fits, sent, compute, communication, tokens)


@dataclass(frozen=True)
class Advice:
    """The recommended strategy, the reason in one line, and other fields to set."""

    strategy: str
    why: str
    fields: dict[str, Any]


def recommend(spec: RunSpec, found: Sequence[Option], setting: Setting) -> Advice:
    """Recommend a strategy that fits, keeps the result of a single process, and spends its time in computation.

    Raises:
        UserError: none fits in memory.
    """
    alone = next(option for option in found if option.strategy == ALONE)
    if setting.layout.world == 1:
        if alone.fits is False:
            raise UserError(f"plan: {_too_large(spec, alone)}")
        return Advice(DEFAULT_STRATEGY, "one process, so there is nothing to distribute", {})
    by_kind = {kind: [each for each in found if _kind(each) == kind] for kind in ("exact", "low_communication")}
    exact = [option for option in by_kind["exact"] if option.fits is not False]
    quiet = next((option for option in by_kind["low_communication"] if option.fits is not False), None)
    if not exact and not quiet:
        raise UserError(f"plan: {_too_large(spec, min(found, key=lambda option: option.memory.total))}")
    best = max(exact, key=lambda option: option.tokens_per_second, default=None)
    fit = "it fits" if alone.fits is not None else "memory is unknown (--hosts FILE states it); if it fits"
    if best and best.share <= _LOUD:
        return _advise_exact(spec, best, alone, fit, setting.link)
    if quiet:
        return _advise_low_communication(spec, quiet, by_kind["exact"][0], alone, setting.link)
    assert best is not None
    why = f"{fit}, but {best.share:.0%} of the time is communication at {round(setting.link, 1):g} Mbit/s"
    if _faster_alone(alone, best):
        why += ": one process alone is faster"
    return Advice(best.strategy, why, {})


def _kind(option: Option) -> str | None:
    return None if option.strategy == ALONE else plan_named(option.strategy).auto


def _faster_alone(alone: Option, option: Option) -> bool:
    return alone.fits is not False and alone.tokens_per_second >= option.tokens_per_second


def _advise_exact(spec: RunSpec, best: Option, alone: Option, fit: str, link: float) -> Advice:
    fields: dict[str, Any] = {}
    why = f"{fit}, and {best.share:.0%} of the time is communication at {round(link, 1):g} Mbit/s"
    if best.strategy != DEFAULT_STRATEGY:
        why = f"the full model does not fit in one process; sharded, {why}"
    elif best.share > 4 * _QUIET:
        # With rows multiplied by this factor, communication takes a fifth of the time.
        fields["total_batch_size"] = spec.rows_per_step * math.ceil(best.share * 4)
        why += f"; total_batch_size={fields['total_batch_size']} (or gradient_comm_dtype=bf16) would reduce it"
    if _faster_alone(alone, best):
        why += "; one process alone is faster"
    return Advice(best.strategy, why, fields)


def _advise_low_communication(spec: RunSpec, quiet: Option, exact: Option, alone: Option, link: float) -> Advice:
    steps = spec.local_steps * quiet.comm_seconds / max(1e-9, _QUIET * quiet.compute_seconds)
    fields = {"local_steps": max(10, math.ceil(steps / 10) * 10)}
    why = f"{exact.strategy} would spend {exact.share:.0%} of the time in communication at {round(link, 1):g} Mbit/s"
    if _faster_alone(alone, exact):
        why += ", where one process alone is faster"
    return Advice(quiet.strategy, f"{why}; local_steps={fields['local_steps']} keeps it below {_QUIET:.0%}", fields)


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
    return (
        f"{option.memory.total / 2**30:.1f} GiB per process do not fit, besides {BASE} MiB for Python on a CPU: "
        f"try {' or '.join(remedies) or 'a smaller model'}"
    )


def choose(spec: RunSpec, hosts: Sequence[dict[str, Any]], shape: Shape | None = None) -> tuple[str, str]:
    """Resolve `strategy=auto` for these hosts. The result depends only on the arguments.

    Args:
        hosts: for each its `processes`, `threads` per process, `gpu_mib` (memory of its smallest GPU; 0: no GPU),
            `memory_mib` of the host (0: unknown) and `link_mbit` (0: unknown).
        shape: the shape of the spec's model, if known.

    Returns:
        The strategy, and the reason in one line.

    Raises:
        UserError: no strategy fits in memory.
    """
    try:
        shape = shape or shape_of(spec)
        teacher_shape(spec)
    except UserError as error:
        return DEFAULT_STRATEGY, f"auto selected {DEFAULT_STRATEGY}: {error}"
    setting, linked = _nominal_setting(spec, hosts, shape)
    advice = recommend(spec, options(spec, setting), setting)
    assumed = "" if linked or len(hosts) == 1 else " (link assumed, not measured)"
    return advice.strategy, f"auto selected {advice.strategy}: {advice.why}{assumed}"


def _nominal_setting(spec: RunSpec, hosts: Sequence[dict[str, Any]], shape: Shape) -> tuple[Setting, bool]:
    """Return the setting of these hosts (see `choose`) with nominal speeds, and whether the speed of a link is known."""
    layout = Layout(tuple(host["processes"] for host in hosts))
    cuda = all(host["gpu_mib"] for host in hosts)
    if cuda:
        room = usable_bytes("cuda", [(host["gpu_mib"], 1) for host in hosts])
    else:
        room = usable_bytes("cpu", [(host["memory_mib"], host["processes"]) for host in hosts if host["memory_mib"]])
    links = [host["link_mbit"] for host in hosts if host.get("link_mbit")]
    link = min(links) if links else LINK
    rows = Rows.full(spec)
    speed = Speed.nominal(spec, shape, rows, "cuda" if cuda else "cpu", min(host["threads"] for host in hosts))
    return Setting(shape, layout, rows, speed, link, room, gloo=not cuda), bool(links)


def estimate_seconds(spec: RunSpec, hosts: Sequence[dict[str, Any]], samples: int) -> float:
    """Return the time that the steps of a run take, within a factor of a few: by nominal speeds, with full rows.

    Args:
        hosts: as for `choose`.
        samples: of the dataset. A row holds one sample at least.

    Raises:
        UserError: the planner does not know the model, or no strategy fits in memory.
    """
    setting, _ = _nominal_setting(spec, hosts, shape_of(spec))
    found = options(spec, setting)
    strategy = recommend(spec, found, setting).strategy if spec.strategy == AUTO else spec.strategy
    # With one process, the list has only this process alone.
    option = next((option for option in found if option.strategy == strategy), found[0])
    epoch = math.ceil(samples / spec.rows_per_step)
    steps = min(spec.max_steps or math.inf, max(1, epoch * spec.epochs)) if samples else spec.max_steps
    return steps * (option.compute_seconds + option.comm_seconds)


def choose_here(spec: RunSpec, run_dir: Path) -> tuple[RunSpec, str]:
    """Resolve `strategy=auto` without a controller: keep the choice of the run's first start, or assume that all hosts are like this one.

    Returns:
        The spec with a strategy, and the reason in one line.
    """
    kept = run_dir / "spec.yml"
    if kept.exists() and (run_dir / "checkpoints").is_dir():
        first = read_spec(kept, {}, str(kept)).strategy
        return spec.model_copy(update={"strategy": first}), f"auto: this run started with {first}"
    import torch

    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    host = {
        "processes": processes,
        "threads": torch.get_num_threads(),
        "gpu_mib": own_memory_mib("cuda") if torch.cuda.is_available() else 0,
        "memory_mib": own_memory_mib("cpu"),
    }
    strategy, why = choose(spec, [host] * (int(os.environ.get("WORLD_SIZE", "1")) // processes))
    return spec.model_copy(update={"strategy": strategy}), why
