"""The checks: each compares outcomes of runs, and returns figures with bounds. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.gpu.bench import Bench, Outcome


@dataclass(frozen=True)
class Figure:
    """One measured value and its bound, `low` <= value <= `high`. `binding`: a value outside of it fails the check."""

    name: str
    value: float
    unit: str = ""
    low: float = -math.inf
    high: float = math.inf
    binding: bool = True

    @property
    def holds(self) -> bool:
        """Whether the value is within its bound. A value that is not a number is not."""
        return self.low <= self.value <= self.high

    @property
    def bound(self) -> str:
        """The bound as text."""
        low = f">= {self.low:g}" if math.isfinite(self.low) else ""
        high = f"<= {self.high:g}" if math.isfinite(self.high) else ""
        return " and ".join(filter(None, [low, high]))


@dataclass
class Result:
    """What a check found. `status`: passed, failed, or skipped for `reason`; `notes`: parts that did not run."""

    name: str
    title: str
    status: str = "passed"
    reason: str = ""
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON data."""
        found = asdict(self)
        found["figures"] = [asdict(figure) | {"holds": figure.holds, "bound": figure.bound} for figure in self.figures]
        for figure in found["figures"]:
            for name in ("value", "low", "high"):
                figure[name] = figure[name] if math.isfinite(figure[name]) else None
        return found


class Unavailable(Exception):
    """A run that a check needs has no figures. `status`: failed or skipped."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Evidence:
    """The outcomes of a bench, as the checks read them."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.cuda = not bench.scale.cpu

    def values(self, name: str) -> dict[str, Any]:
        """Return the figures of a run. Raises Unavailable if it has none."""
        outcome = self.bench.outcomes.get(name, Outcome("skipped", reason="it did not run"))
        if outcome.status != "ok":
            raise Unavailable(outcome.status, f"{name}: {outcome.reason}")
        return outcome.values

    def memory(self, name: str) -> Figure:
        """Return the measured peak of CUDA tensors, relative to the plan; on a CPU of the process, with no bound."""
        plan = self.bench.planned.get(name, {})
        if "memory_mib" not in plan:
            raise Unavailable("failed", f"the plan of {name}: {plan.get('error', 'it did not run')}")
        peak = self.values(name)["cuda_mib"] or self.values(name)["resident_mib"]
        return Figure(f"{name}: memory, measured / planned", peak / plan["memory_mib"], "x", 0.8, 1.25)

    def peak(self, name: str) -> Figure:
        """Return the measured peak in MiB."""
        return Figure(f"{name}: peak", self.values(name)["cuda_mib"] or self.values(name)["resident_mib"], "MiB")

    def planned_speed(self, name: str) -> list[Figure]:
        """Return the speed of a run, and relative to its plan if the plan predicts it."""
        tokens = self.values(name)["tokens_per_second"]
        found = [Figure(f"{name}: speed", tokens, "tokens/s")]
        if predicted := self.bench.planned[name].get("tokens_per_second"):
            found.append(Figure(f"{name}: speed, measured / planned", tokens / predicted, "x", 0.7, 1.4, self.cuda))
        return found

    def speed(self, name: str, reference: str, low: float = 0.0) -> Figure:
        """Return the speed of a run relative to another."""
        ratio = self.values(name)["tokens_per_second"] / self.values(reference)["tokens_per_second"]
        return Figure(f"{name}: speed relative to {reference}", ratio, "x", low, math.inf, self.cuda)

    def loss(self, name: str, reference: str, limit: float) -> Figure:
        """Return the largest relative difference between the losses of two runs, step by step."""
        pairs = list(zip(self.values(name)["losses"], self.values(reference)["losses"], strict=True))
        # A loss that is not finite is recorded as null.
        if any(one is None or other is None for one, other in pairs):
            return Figure(f"{name}: loss against {reference}", math.inf, "", 0, limit)
        worst = max(abs(one - other) / abs(other) for one, other in pairs)
        return Figure(f"{name}: loss against {reference}", worst, "", 0, limit)

    def learned(self, name: str) -> Figure:
        """Return the mean loss of the last three steps relative to that of the first three."""
        losses = self.values(name)["losses"]
        finite = all(loss is not None for loss in losses)
        return Figure(
            f"{name}: last losses / first losses",
            sum(losses[-3:]) / sum(losses[:3]) if finite else math.inf,
            "",
            0,
            0.999,
        )


def plan(evidence: Evidence) -> list[Figure]:
    found = []
    for name in ("lora", "full", "large", "checkpointing"):
        found += [evidence.memory(name), evidence.peak(name)]
        found += evidence.planned_speed(name)
    return found


def precision(evidence: Evidence) -> list[Figure]:
    found = [evidence.learned("fp32")]
    for name in ("lora", "fp16"):
        found += [evidence.loss(name, "fp32", 0.02), evidence.speed(name, "fp32", 1.0)]
    return found


def packing(evidence: Evidence) -> list[Figure]:
    found = []
    for name, values in evidence.values("packing")["packing"].items():
        limit = 1e-4 if "float32" in name else 3e-2
        found += [
            Figure(f"{name}: gradient of packed rows, relative difference", values["gradient"], "", 0, limit),
            Figure(f"{name}: loss of packed rows, relative difference", values["loss"], "", 0, limit),
            Figure(f"{name}: samples of a row are isolated", float(values["isolated"]), "", 1),
        ]
    return found


def quantized(evidence: Evidence) -> list[Figure]:
    found = [evidence.learned("nf4"), evidence.loss("nf4", "lora", 0.2)]
    for name in ("nf4", "fsdp-nf4", "fsdp-nf4-offload"):
        found += [evidence.memory(name), evidence.peak(name), evidence.speed(name, "lora")]
        found += [evidence.loss(name, "nf4", 0.01)] if name != "nf4" else []
    return found


def adamw8bit(evidence: Evidence) -> list[Figure]:
    saved = evidence.peak("full").value - evidence.peak("adamw8bit").value
    return [
        evidence.loss("adamw8bit", "full", 0.05),
        evidence.memory("adamw8bit"),
        Figure("adamw8bit: memory below adamw", saved, "MiB", 0, math.inf, evidence.cuda),
        evidence.speed("adamw8bit", "full"),
    ]


def fsdp(evidence: Evidence) -> list[Figure]:
    found = []
    for name in ("fsdp", "fsdp-offload", "fsdp-fp16", "fsdp-compiled"):
        found += [evidence.loss(name, "full", 0.02), evidence.memory(name), evidence.peak(name)]
        found.append(evidence.speed(name, "full"))
    return found


def deepspeed(evidence: Evidence) -> list[Figure]:
    found = []
    for name in ("zero2", "zero3"):
        found += [evidence.loss(name, "full", 0.02), evidence.memory(name), evidence.peak(name)]
        found.append(evidence.speed(name, "full"))
    return found


def nccl(evidence: Evidence) -> list[Figure]:
    values = evidence.values("collectives")
    backend = "nccl" if evidence.cuda else "gloo"
    return [
        Figure(f"backend is {backend}", float(values["backend"] == backend), "", 1),
        Figure("collectives give the right result", float(values["right"]), "", 1),
        Figure("all-reduce of one rank", values["gb_per_second"], "GB/s"),
        evidence.learned("one-rank"),
    ]


def two_ranks(evidence: Evidence) -> list[Figure]:
    return [
        evidence.loss("two-ranks", "one-rank", 1e-4),
        evidence.speed("two-ranks", "one-rank"),
        evidence.learned("diloco"),
    ]


def pipeline(evidence: Evidence) -> list[Figure]:
    return [
        evidence.loss("pipeline", "one-rank", 1e-4),
        evidence.loss("pipeline-full", "full-one", 1e-4),
        evidence.loss("pipeline-nf4", "nf4", 0.02),
        evidence.learned("pipeline-large"),
        *(evidence.memory(name) for name in ("pipeline", "pipeline-nf4", "pipeline-large")),
    ]


def compiled(evidence: Evidence) -> list[Figure]:
    return [evidence.loss("compiled", "eager", 0.02), evidence.speed("compiled", "eager")]


def trl(evidence: Evidence) -> list[Figure]:
    best = max(evidence.values(name)["tokens_per_second"] for name in ("large", "kernels"))
    sides = {name: side for name, side in evidence.values("trl").items() if "error" not in side}
    speeds = {name: side["tokens_per_second"] for name, side in sides.items()}
    found = [Figure(f"{name}: speed", speed, "tokens/s") for name, speed in speeds.items()]
    found += [Figure(f"{name}: peak", side["cuda_mib"] or side["peak_mib"], "MiB") for name, side in sides.items()]
    found.append(Figure("trainyard, kernels=auto: speed", evidence.values("kernels")["tokens_per_second"], "tokens/s"))
    found.append(
        Figure("trainyard relative to TRL's fastest", best / max(speeds.values()), "x", 1.0, math.inf, evidence.cuda)
    )
    return found


def kernels(evidence: Evidence) -> list[Figure]:
    found = [evidence.loss("kernels", "large", 0.02), evidence.speed("kernels", "large"), evidence.peak("kernels")]
    return found + evidence.planned_speed("kernels")


def resume(evidence: Evidence) -> list[Figure]:
    values = evidence.values("resume")
    return [
        Figure("steps after the resume / expected", values["resumed_steps"] / values["expected_steps"], "", 1, 1),
        Figure("two equal runs give equal adapters", float(values["repeated_equal"]), "", 1),
        Figure("the resumed run gives an equal adapter", float(values["resumed_equal"]), "", 1),
        Figure("largest difference of losses after the resume", values["loss_difference"], "", 0, 0),
    ]


def unsloth(evidence: Evidence) -> list[Figure]:
    return [evidence.learned("unsloth"), evidence.speed("unsloth", "lora"), evidence.peak("unsloth")]


Check = tuple[str, tuple[str, ...], Callable[[Evidence], list[Figure]]]
# name -> (title, the runs that it needs, function)
CHECKS: dict[str, Check] = {
    "plan": ("plan compared with measurement", ("lora", "full", "large", "checkpointing"), plan),
    "trl": ("speed compared with TRL", ("large", "kernels", "trl"), trl),
    "precision": ("bf16-mixed and fp16-mixed", ("lora", "fp32", "fp16"), precision),
    "packing": ("packed rows compared with separate rows", ("packing",), packing),
    "kernels": ("Liger kernels (kernels=auto)", ("large", "kernels"), kernels),
    "compile": ("torch.compile", ("eager", "compiled"), compiled),
    "nf4": (
        "NF4 base weights: whole, and fsdp on one rank, also with offload",
        ("lora", "nf4", "fsdp-nf4", "fsdp-nf4-offload"),
        quantized,
    ),
    "adamw8bit": ("AdamW with 8-bit moments", ("full", "adamw8bit"), adamw8bit),
    "fsdp": (
        "fsdp on one rank: offload, fp16-mixed, torch.compile",
        ("full", "fsdp", "fsdp-offload", "fsdp-fp16", "fsdp-compiled"),
        fsdp,
    ),
    "deepspeed": ("DeepSpeed stages 2 and 3 with offload", ("full", "zero2", "zero3"), deepspeed),
    "nccl": ("NCCL with one rank", ("one-rank", "collectives"), nccl),
    "two-ranks": ("two ranks on one GPU over gloo", ("one-rank", "two-ranks", "diloco"), two_ranks),
    "pipeline": (
        "pipeline of two ranks on one GPU",
        ("one-rank", "full-one", "nf4", "pipeline", "pipeline-full", "pipeline-nf4", "pipeline-large"),
        pipeline,
    ),
    "resume": ("resume, bit by bit", ("resume",), resume),
    "unsloth": ("unsloth", ("lora", "unsloth"), unsloth),
}

# The checks of each leg, those that never ran on CUDA first, and the seconds that each may take. With those for its inputs, a leg
# ends within LEG_SECONDS.
LEGS: tuple[dict[str, int], ...] = (
    {"fsdp": 230, "resume": 100, "packing": 60, "unsloth": 70},
    {"nf4": 170, "adamw8bit": 120, "deepspeed": 170},
    {"plan": 200, "kernels": 60, "trl": 200},
    {"precision": 130, "compile": 150, "nccl": 70, "two-ranks": 110},
    {"pipeline": 290},
)
LEG_SECONDS = 530  # the processes that are ended then have 10 more
INPUT_SECONDS = 70
LIMITS = {name: seconds for leg in LEGS for name, seconds in leg.items()}


def evaluate(bench: Bench, names: Sequence[str]) -> list[Result]:
    """Return the results of these checks from the outcomes so far."""
    evidence, results = Evidence(bench), []
    for name in names:
        title, _, function = CHECKS[name]
        result = Result(name, title)
        try:
            if name in ONLY_CUDA and not evidence.cuda:
                result.notes.append(ONLY_CUDA[name])
            result.figures = function(evidence)
            result.status = "failed" if any(f.binding and not f.holds for f in result.figures) else "passed"
        except Unavailable as missing:
            result.status, result.reason = missing.status, str(missing)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            result.status, result.reason = "failed", f"unexpected values: {type(error).__name__}: {error}"
        result.notes += _notes(bench, name)
        results.append(result)
    return results


# The parts of a check that a stand-in without CUDA omits.
ONLY_CUDA = {
    "kernels": "Liger kernels need CUDA: both runs use the kernels of torch",
    "nccl": "NCCL needs CUDA: gloo replaces it",
    "two-ranks": "without CUDA, the ranks share no GPU",
    "pipeline": "without CUDA, the ranks share no GPU",
}


def _notes(bench: Bench, name: str) -> list[str]:
    if name == "packing" and (missing := bench.outcomes.get("packing", Outcome("")).values.get("missing")):
        return [missing]
    if name == "trl" and (outcome := bench.outcomes.get("trl")):
        return [f"{side}: {value['error']}" for side, value in outcome.values.items() if "error" in value]
    if name == "kernels" and bench.machine and not bench.scale.cpu and not bench.machine.get("liger"):
        return ["liger_kernel is not installed: both runs use the kernels of torch"]
    return []
