"""Decide the fields that a spec leaves to its hosts: precision, micro-batch, gradient checkpointing, 4-bit weights. No torch.

The controller decides from the facts of the hosts, a rank without a controller from its own host. Only ranks know how many steps the
dataset gives, and so whether a model on GPUs is compiled: see agreement.
"""

import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import counted
from trainer.config import RunSpec
from trainer.config.automatic import AUTOMATIC
from trainer.costs.host_memory import have_gpus, own_memory_mib
from trainer.costs.packing_forecast import may_pack
from trainer.costs.teacher_cost import teacher_shape
from trainer.model_files.model_shape import Shape, shape_of
from trainer.planner.recommend import choose, fits
from trainer.spec import check_spec, has_begun, read_spec
from trainer.strategy import AUTO
from trainer.supervise import nvidia_smi
from trainer.supervise.cpu import multiplies_bfloat16

BF16, FP16 = 8.0, 7.0  # the first compute capability with bfloat16 (Ampere), and with fast float16 (Volta)
FULL = 16_384  # tokens of a micro-batch that keep a GPU busy
LEAST = 2048  # tokens of a micro-batch on a GPU, below which recomputing activations for larger ones is faster
CPU_ROWS = 4  # more rows do not make a CPU faster
SMALL_LAYER = 512  # hidden size below which conversions to bfloat16 take the time that its products save on a CPU
COMPILE_STEPS = 2000  # steps of a run from which compiling saves more time than it takes
COMPILERS = ("g++", "clang++", "c++")

Hosts = Sequence[Mapping[str, Any]]


def decide(spec: RunSpec, hosts: Hosts, shape: Shape | None = None) -> tuple[RunSpec, list[str]]:
    """Decide the automatic fields of a spec, and its strategy if it is `auto`, for these hosts.

    Returns the spec; torch_compile is still automatic if ranks decide it. One line for each decision: the value, the
    reason, and its cost. Raises UserError: the strategy is `auto`, and none fits in memory.

    Args:
        hosts: as for `choose`, also `capability`, the compute capability of its oldest GPU (0: unknown), `four_bits`,
            whether it has bitsandbytes, `bfloat16`, whether its CPU multiplies in bfloat16, and `compiler`, whether it has one of C++
            (missing: unknown).
        shape: the shape of the spec's model, if known.
    """
    if spec.script:
        return spec.model_copy(update={"automatic": ()}), []
    try:
        shape = shape or shape_of(spec)
        teacher_shape(spec)
    except UserError as error:
        spec, lines = _with_precision(spec, hosts, None)
        if spec.strategy == AUTO:
            strategy, why = choose(spec, hosts)
            spec, lines = spec.model_copy(update={"strategy": strategy}), [why, *lines]
        return _decided(spec), [*lines, f"auto: {_settings(spec, spec)}: {error}"]
    spec, lines = _with_precision(spec, hosts, shape)
    first: UserError | None = None
    variants = list(_variants(spec, hosts))
    for variant in variants:
        try:
            if variant.strategy == AUTO:
                strategy, why = choose(variant, hosts, shape)
                variant, said = variant.model_copy(update={"strategy": strategy}), [why]
            elif fits(variant, hosts, shape) is False:
                continue
            else:
                said = []
        except UserError as error:
            first = first or error
            continue
        found, compiling = _with_compile(variant, hosts)
        return found, [*said, *lines, *_lines(spec, found), *compiling]
    if first:
        raise first
    smallest = variants[-1]
    warning = f"warning: the plan does not fit in the memory of every host, even with {_settings(spec, smallest)}: add hosts, or set strategy=auto"
    return _decided(smallest), [*lines, *_lines(spec, smallest), warning]


def decide_here(spec: RunSpec, run_dir: Path, hosts: Hosts | None = None) -> tuple[RunSpec, list[str], bool]:
    """Decide without a controller: keep the decisions of the run's first start, or decide for `hosts`.

    `hosts`: as for `decide`; None: those of this torchrun, which are assumed to be like this one. Returns Spec and
    lines as `decide` does, and whether an earlier start had decided everything.
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

    `imports_torch`: whether torch is imported although no driver of a GPU is installed.
    """
    cpu = {
        "processes": 1,
        "threads": len(os.sched_getaffinity(0)),
        "gpu_mib": 0,
        "memory_mib": own_memory_mib("cpu"),
        "bfloat16": multiplies_bfloat16(),
        "compiler": any(map(shutil.which, COMPILERS)),
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
    return spec.model_copy(update=kept | {"automatic": undecided}), [line]


def common(specs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of automatic fields that suit all ranks, if they decided differently: those that need the least.

    `specs`: for each rank its AUTOMATIC fields.
    """
    found = {name: [each[name] for each in specs] for name in AUTOMATIC}
    precisions = set(found["precision"])
    return {
        "precision": precisions.pop() if len(precisions) == 1 else "32-true",
        "batch_size": min(found["batch_size"]),
        "gradient_checkpointing": any(found["gradient_checkpointing"]),
        "quantize": "nf4" if "nf4" in found["quantize"] else "none",
        "torch_compile": all(found["torch_compile"]),
        "strategy": found["strategy"][0],  # the same on all, which run_rank checks
    }


def _decided(spec: RunSpec) -> RunSpec:
    return spec.model_copy(update={"automatic": ()})


def _with_compile(spec: RunSpec, hosts: Hosts) -> tuple[RunSpec, list[str]]:
    """Return a spec, of which everything else is decided, with torch_compile automatic only if ranks have to decide it, and a line."""
    if "torch_compile" not in spec.automatic or not have_gpus(hosts):
        return _decided(spec), []
    if why := _no_compile(spec, hosts):
        return _decided(spec), [f"auto: torch_compile=false: {why}"]
    return spec.model_copy(update={"automatic": ("torch_compile",)}), [
        f"auto: torch_compile: true on GPUs if the run has {COMPILE_STEPS:,} steps or more"
    ]


def _no_compile(spec: RunSpec, hosts: Hosts) -> str:
    """Return why a run is not compiled whatever ranks measure, or an empty text."""
    compiled = spec.model_copy(update={"torch_compile": True})
    try:
        check_spec(compiled)
    except ValueError as error:
        return str(error).removeprefix("torch_compile: ")
    reasons = {
        f"the run has fewer than {COMPILE_STEPS:,} steps": 0 < spec.max_steps < COMPILE_STEPS,
        "backend=unsloth has kernels of its own": spec.backend == "unsloth",
        "4-bit weights are unpacked outside of compiled code": spec.quantize != "none",
        "rows that are not packed would be padded to seq_length": not may_pack(spec),
        "a host has no C++ compiler: install g++": not all(host.get("compiler", True) for host in hosts),
    }
    return next((why for why, applies in reasons.items() if applies), "")


def _with_precision(spec: RunSpec, hosts: Hosts, shape: Shape | None) -> tuple[RunSpec, list[str]]:
    if "precision" not in spec.automatic:
        return spec, []
    precision, why = _gpu_precision(hosts) if have_gpus(hosts) else _cpu_precision(hosts, shape)
    rest = tuple(name for name in spec.automatic if name != "precision")
    chosen = spec.model_copy(update={"precision": precision, "automatic": rest})
    try:
        check_spec(chosen)
    except ValueError as error:
        chosen, why = chosen.model_copy(update={"precision": "32-true"}), str(error)
    cost = "" if chosen.precision == "32-true" else "; weights that are trained stay in float32"
    return chosen, [f"auto: precision={chosen.precision}: {why}{cost}"]


def _gpu_precision(hosts: Hosts) -> tuple[str, str]:
    oldest = min(host.get("capability", 0.0) for host in hosts)
    if oldest >= BF16:
        return "bf16-mixed", "every GPU computes in bfloat16"
    if oldest >= FP16:
        return "fp16-mixed", f"a GPU of compute capability {oldest:.1f} has no bfloat16"
    slow = f"a GPU of compute capability {oldest:.1f} is slow in 16 bits"
    return "32-true", slow if oldest else "the compute capability of a GPU is unknown"


def _cpu_precision(hosts: Hosts, shape: Shape | None) -> tuple[str, str]:
    if shape and shape.hidden < SMALL_LAYER:
        return "32-true", "layers of this size are hardly faster in bfloat16 on a CPU"
    if not all(host.get("bfloat16") for host in hosts):
        return "32-true", "a CPU has no matrix unit for bfloat16 (amx_bf16)"
    return "bf16-mixed", "every CPU has a matrix unit for bfloat16 (amx_bf16)"


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
        changed = {"quantize": quantize, "strategy": strategy, "batch_size": rows}
        variant = spec.model_copy(update=changed | {"gradient_checkpointing": checkpointing})
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


def _settings(spec: RunSpec, chosen: RunSpec) -> str:
    names = [name for name in spec.automatic if name not in ("precision", "torch_compile", "strategy")]
    return ", ".join(f"{name}={shown(getattr(chosen, name))}" for name in names)


def shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _lines(spec: RunSpec, chosen: RunSpec) -> list[str]:
    lines = []
    if "batch_size" in spec.automatic:
        tokens = chosen.batch_size * chosen.seq_length
        lines.append(
            f"auto: batch_size={chosen.batch_size}: micro-batches of {counted(tokens, 'token')}; the result of a step does not depend on it"
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
