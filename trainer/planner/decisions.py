"""Decide the fields that a spec leaves to its hosts: precision, micro-batch, gradient checkpointing, 4-bit weights. No torch.

The controller decides from the facts of the hosts, a rank without a controller from its own host. Only ranks can measure whether a CPU
is faster in bfloat16, and whether a GPU is faster with a compiled model: they decide these, see agreement.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import counted
from trainer.config import RunSpec
from trainer.config.automatic import VALUES
from trainer.costs.alternatives import shown
from trainer.costs.host_memory import have_gpus, own_memory_mib
from trainer.costs.packing_forecast import may_pack
from trainer.costs.teacher_cost import teacher_shape
from trainer.model_files.model_shape import Shape, shape_of
from trainer.planner.recommend import choose, fits
from trainer.spec import check_spec, has_begun, read_spec
from trainer.strategy import AUTO, plan_of
from trainer.supervise import nvidia_smi
from trainer.supervise.cpu import cpu_model

BF16, FP16 = 8.0, 7.0  # the first compute capability with bfloat16 (Ampere), and with fast float16 (Volta)
FULL = 16_384  # tokens of a micro-batch that keep a GPU busy
LEAST = 2048  # tokens of a micro-batch on a GPU, below which recomputing activations for larger ones is faster
CPU_ROWS = 4  # more rows do not make a CPU faster
MEASURED = ("precision", "torch_compile")  # fields that ranks may have to measure
GAIN = 1.5  # how many times faster bfloat16 must be on every host: its result is less exact

Hosts = Sequence[Mapping[str, Any]]


def decide(spec: RunSpec, hosts: Hosts, shape: Shape | None = None) -> tuple[RunSpec, list[str]]:
    """Decide the automatic fields of a spec, and its strategy if it is `auto`, for these hosts.

    Args:
        hosts: as for `choose`, also `capability`, the compute capability of its oldest GPU (0: unknown), `four_bits`,
            whether it has bitsandbytes, and `compiler`, whether it has one of C++ (missing: unknown).
        shape: the shape of the spec's model, if known.

    Returns:
        The spec; what ranks have to measure is still automatic. One line for each decision: the value, the reason, and its cost.

    Raises:
        UserError: the strategy is `auto`, and none fits in memory.
    """
    if spec.script:
        return spec.model_copy(update={"automatic": ()}), []
    spec, lines = _with_precision(spec, hosts)
    try:
        shape = shape or shape_of(spec)
        teacher_shape(spec)
    except UserError as error:
        return _without_shape(spec, hosts, lines, error)
    first: UserError | None = None
    variants = list(_variants(spec, hosts))
    for variant in variants:
        try:
            found, why = _placed(variant, hosts, shape)
        except UserError as error:
            first = first or error
            continue
        if why is not None:
            own = _own_sizes(found, hosts, shape)
            found, compiling = _with_compile(_measured(found, *MEASURED), hosts)
            if spec.ddp_larger_batches == "auto":
                found = found.model_copy(update={"ddp_larger_batches": bool(own)})
            return found, [*filter(None, [why]), *lines, *_lines(spec, found, own), *compiling]
    if first:
        raise first
    smallest = variants[-1]
    warning = f"warning: the plan does not fit in the memory of every host, even with {_settings(spec, smallest)}: add hosts, or set strategy=auto"
    return _measured(smallest, "precision"), [*lines, *_lines(spec, smallest), warning]


def decide_here(spec: RunSpec, run_dir: Path, hosts: Hosts | None = None) -> tuple[RunSpec, list[str], bool]:
    """Decide without a controller: keep the decisions of the run's first start, or decide for `hosts`.

    Args:
        hosts: as for `decide`; None: those of this torchrun, which are assumed to be like this one.

    Returns:
        Spec and lines as `decide` does, and whether an earlier start had decided everything.
    """
    if has_begun(run_dir):
        kept = run_dir / "spec.yml"
        spec, lines = as_before(spec, read_spec(kept, {}, str(kept)))
        return spec, lines, not spec.automatic
    if hosts is None:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        here = this_host() | {"processes": processes}
        hosts = [here] * (int(os.environ.get("WORLD_SIZE", "1")) // processes)
    return *decide(spec, hosts), False


def this_host(*, imports_torch: bool = True) -> dict[str, Any]:
    """Return what `decide` has to know of this machine.

    Args:
        imports_torch: whether torch is imported although no driver of a GPU is installed.
    """
    cpu = {
        "processes": 1,
        "device": cpu_model(),
        "threads": len(os.sched_getaffinity(0)),
        "gpu_mib": 0,
        "memory_mib": own_memory_mib("cpu"),
    }
    if not imports_torch and not nvidia_smi.program():
        return cpu
    try:
        import torch
    except ImportError:
        return cpu
    cards = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    capabilities = (major + minor / 10 for major, minor in map(torch.cuda.get_device_capability, cards))
    return cpu | {
        "device": torch.cuda.get_device_name(0) if cards else cpu["device"],
        "threads": torch.get_num_threads(),
        "gpu_mib": own_memory_mib("cuda") if cards else 0,
        "capability": min(capabilities, default=0.0),
        "four_bits": importlib.util.find_spec("bitsandbytes") is not None,
    }


def as_before(spec: RunSpec, before: RunSpec) -> tuple[RunSpec, list[str]]:
    """Return the spec with the strategy and the automatic fields of an earlier start of the run."""
    names = [*(["strategy"] if spec.strategy == AUTO else []), *spec.automatic]
    kept = {name: getattr(before, name) for name in names}
    line = f"auto: this run started with {', '.join(f'{name}={shown(value)}' for name, value in kept.items())}"
    undecided = tuple(name for name in spec.automatic if name in before.automatic)
    if spec.ddp_larger_batches == "auto":
        # True was decided for the earlier size and hosts, not for a size that the user sets now.
        replaced = before.ddp_larger_batches is True and "batch_size" not in kept
        kept["ddp_larger_batches"] = False if replaced else before.ddp_larger_batches
    return spec.model_copy(update=kept | {"automatic": undecided}), [line]


def common(specs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of automatic fields that suit all ranks, if they decided differently: those that need the least.

    Args:
        specs: for each rank its VALUES.
    """
    found = {name: [each[name] for each in specs] for name in VALUES}
    precisions = set(found["precision"])
    return {
        "precision": precisions.pop() if len(precisions) == 1 else "32-true",
        "batch_size": min(found["batch_size"]),
        "gradient_checkpointing": any(found["gradient_checkpointing"]),
        "quantize": "nf4" if "nf4" in found["quantize"] else "none",
        "torch_compile": all(found["torch_compile"]),
        "ddp_larger_batches": all(value is True for value in found["ddp_larger_batches"]),
        "strategy": found["strategy"][0],  # the same on all, which run_rank checks
    }


def _placed(spec: RunSpec, hosts: Hosts, shape: Shape) -> tuple[RunSpec, str | None]:
    """Return the spec with a strategy, and why that one; the reason is None if the spec does not fit. Raises UserError as `choose`."""
    if spec.strategy == AUTO:
        strategy, why = choose(spec, hosts, shape)
        return spec.model_copy(update={"strategy": strategy}), why
    return spec, None if fits(spec, hosts, shape) is False else ""


def _without_shape(spec: RunSpec, hosts: Hosts, lines: list[str], error: UserError) -> tuple[RunSpec, list[str]]:
    if spec.strategy == AUTO:
        strategy, why = choose(spec, hosts)
        spec, lines = spec.model_copy(update={"strategy": strategy}), [why, *lines]
    return _measured(spec, "precision"), [*lines, f"auto: {_settings(spec, spec)}: {error}"]


def _measured(spec: RunSpec, *names: str) -> RunSpec:
    """Return the spec with only these of its fields automatic: those that ranks have to measure."""
    return spec.model_copy(update={"automatic": tuple(name for name in spec.automatic if name in names)})


def _with_compile(spec: RunSpec, hosts: Hosts) -> tuple[RunSpec, list[str]]:
    """Return a spec, of which everything else is decided, with torch_compile automatic only if ranks have to measure it, and a line."""
    if "torch_compile" not in spec.automatic:
        return spec, []
    if not have_gpus(hosts):
        return _measured(spec, "precision"), []
    if why := _no_compile(spec, hosts):
        return _measured(spec, "precision"), [f"auto: torch_compile=false: {why}"]
    return spec, [
        "auto: torch_compile: true if the ranks measure that compiling saves more time than it takes; torch_compile=false skips this"
    ]


def _no_compile(spec: RunSpec, hosts: Hosts) -> str:
    """Return why a run is not compiled whatever ranks measure, or an empty text."""
    compiled = spec.model_copy(update={"torch_compile": True})
    try:
        check_spec(compiled)
    except ValueError as error:
        return str(error).removeprefix("torch_compile: ")
    reasons = {
        "replicas with a torchrun each do not compare their GPUs": plan_of(spec).separate_launchers(spec),
        "backend=unsloth has kernels of its own": spec.backend == "unsloth",
        "4-bit weights are unpacked outside of compiled code": spec.quantize != "none",
        "rows that are not packed would be padded to seq_length": not may_pack(spec),
        "a host has no C++ compiler: install g++": not all(host.get("compiler", True) for host in hosts),
    }
    return next((why for why, applies in reasons.items() if applies), "")


def _with_precision(spec: RunSpec, hosts: Hosts) -> tuple[RunSpec, list[str]]:
    if "precision" not in spec.automatic:
        return spec, []
    if not have_gpus(hosts) and plan_of(spec).separate_launchers(spec):
        rest = tuple(name for name in spec.automatic if name != "precision")
        return spec.model_copy(update={"precision": "32-true", "automatic": rest}), [
            "auto: precision=32-true: replicas with a torchrun each do not compare their CPUs"
        ]
    if not have_gpus(hosts):
        # Plans count on float32, which needs more memory.
        return spec.model_copy(update={"precision": "32-true"}), [
            "auto: precision: bf16-mixed if the ranks measure that their CPUs are faster in it, else 32-true"
        ]
    oldest = min(host.get("capability", 0.0) for host in hosts)
    precision = "bf16-mixed" if oldest >= BF16 else "fp16-mixed" if oldest >= FP16 else "32-true"
    why = {
        "bf16-mixed": "every GPU computes in bfloat16",
        "fp16-mixed": f"a GPU of compute capability {oldest:.1f} has no bfloat16",
        "32-true": f"a GPU of compute capability {oldest:.1f} is slow in 16 bits"
        if oldest
        else "the compute capability of a GPU is unknown",
    }[precision]
    rest = tuple(name for name in spec.automatic if name != "precision")
    chosen = spec.model_copy(update={"precision": precision, "automatic": rest})
    try:
        check_spec(chosen)
    except ValueError as error:
        chosen, why = chosen.model_copy(update={"precision": "32-true"}), str(error)
    return chosen, [f"auto: precision={chosen.precision}: {why}; weights that are trained stay in float32"]


def _variants(spec: RunSpec, hosts: Hosts) -> Iterator[RunSpec]:
    """Yield the spec with values of its automatic fields, the best ones first."""
    cuda = have_gpus(hosts)
    ranks = sum(host["processes"] for host in hosts)
    four_bits = "quantize" in spec.automatic and spec.lora_r > 0 and all(host.get("four_bits") for host in hosts)
    sizes = _sizes(spec, ranks, cuda=cuda) if "batch_size" in spec.automatic else [spec.batch_size]
    least = min(LEAST, sizes[0] * spec.seq_length)
    recomputes = "gradient_checkpointing" in spec.automatic
    strategies = (spec.strategy, AUTO) if "strategy" in spec.automatic and ranks > 1 else (spec.strategy,)
    values = product(
        (spec.quantize, "nf4") if four_bits else (spec.quantize,),
        strategies,
        (False, True) if recomputes else (spec.gradient_checkpointing,),
        sizes,
    )
    for quantize, strategy, checkpointing, rows in values:
        if cuda and recomputes and not checkpointing and rows * spec.seq_length < least:
            continue
        changed = {
            "quantize": quantize,
            "strategy": strategy,
            "gradient_checkpointing": checkpointing,
            "batch_size": rows,
        }
        variant = spec.model_copy(update=changed)
        try:
            check_spec(variant)
        except ValueError:
            continue  # the strategy, or another field, excludes it
        yield variant


def _sizes(spec: RunSpec, ranks: int, *, cuda: bool) -> list[int]:
    """Return the rows of a micro-batch that are possible, in descending order: powers of two."""
    most = max(1, FULL // spec.seq_length) if cuda else CPU_ROWS
    most = min(most, -(-spec.rows_per_step // ranks))
    largest = 1 << (most.bit_length() - 1)
    return [largest >> shift for shift in range(largest.bit_length())]


def _own_sizes(spec: RunSpec, hosts: Hosts, shape: Shape) -> list[int]:
    """Return the rows of a micro-batch that the ranks of each host choose; nothing if all ranks need the same."""
    if "batch_size" not in spec.automatic or spec.ddp_larger_batches is False or len(hosts) == 1:
        return []
    if not have_gpus(hosts) or not plan_of(spec).shares_rows_by_speed:
        return []
    return [own_size(spec, [host] * len(hosts), shape) for host in hosts]


def own_size(spec: RunSpec, hosts: Hosts, shape: Shape) -> int:
    """Return the rows of the largest micro-batch that fits hosts like the one of a rank, at least `batch_size`."""
    sizes = _sizes(spec, sum(host["processes"] for host in hosts), cuda=have_gpus(hosts))
    larger = (rows for rows in sizes if rows > spec.batch_size)
    return next((rows for rows in larger if fits(with_rows(spec, rows), hosts, shape)), spec.batch_size)


def with_rows(spec: RunSpec, rows: int) -> RunSpec:
    """Return the spec with micro-batches of `rows` rows."""
    return spec.model_copy(update={"batch_size": rows})


def _settings(spec: RunSpec, chosen: RunSpec) -> str:
    names = [name for name in spec.automatic if name not in (*MEASURED, "strategy")]
    return ", ".join(f"{name}={shown(getattr(chosen, name))}" for name in names)


def _lines(spec: RunSpec, chosen: RunSpec, own: Sequence[int] = ()) -> list[str]:
    """Return one line for each field that was decided. `own`: see `_own_sizes`."""
    lines = []
    if "batch_size" in spec.automatic:
        tokens = chosen.batch_size * chosen.seq_length
        most = max(own, default=0)
        more = f", up to {counted(most, 'row')} on hosts with more memory" if most > chosen.batch_size else ""
        lines.append(
            f"auto: batch_size={chosen.batch_size}: micro-batches of {counted(tokens, 'token')}{more}; the result of a step does not depend on it"
        )
    if "gradient_checkpointing" in spec.automatic and chosen.gradient_checkpointing:
        lines.append(
            "auto: gradient_checkpointing=true: activations do not fit in memory; they are computed twice, which costs about a third more time"
        )
    if "quantize" in spec.automatic and chosen.quantize != "none":
        lines.append(
            "auto: quantize=nf4: the weights do not fit in 16 or 32 bits; the frozen weights are rounded to 4 bits, and every pass unpacks them"
        )
    return lines
