"""The plan of a run as a table and as JSON: memory, communication and speed of every strategy, and which one `auto` takes.

    python -m trainer plan SPEC.yml [--hosts 2 | --hosts hosts.json] [--link-mbit 1000] [--json] [--no-measure]

hosts.json is a list with one object per host: `host` (a name), `processes` (1), `memory_mib` (of the host), `gpu_mib` (of one GPU),
`threads` (of a process, for nominal speeds), `speed` (of a process in relation to other hosts, 1). The plan.json of a run folder also has this form.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError, model_errors
from trainer.common.formats import counted, mib, table
from trainer.common.inputs import path_kind, user_path
from trainer.config import RunSpec
from trainer.costs.cost import Layout, RowStats, row_flops, unpacking_factor
from trainer.costs.host_memory import BASE, have_gpus, layout_of, own_memory_mib, speeds
from trainer.costs.packing_forecast import packing_text, steps_about
from trainer.costs.teacher_cost import teacher_flops, teacher_shape
from trainer.data.data_report import DataReport
from trainer.method import METHODS, method_of
from trainer.model_files.model_shape import Shape, fit_to_model, shape_of
from trainer.planner.decisions import decide_here, this_host
from trainer.planner.recommend import (
    LINK,
    NOMINAL,
    Option,
    Setting,
    Speed,
    options,
    recommend,
)
from trainer.strategy import AUTO
from trainer.supervise.cpu import multiplies_bfloat16

_BUSY = 0.1  # minimum fraction of cores in use by other processes that the report mentions
_FULL_ROWS = "full rows, every token with loss"
_HEAD = ["strategy", "processes", "memory MiB", "sent MB/step", "s/step", "tokens/s", "communication", "fits"]


def rows_of(spec: RunSpec, data_dir: Path) -> tuple[RowStats, str, DataReport | None]:
    """Return the properties of the rows of the spec's dataset, a description, and the totals of the dataset.

    Without a local file of the dataset, with `fake_data`, and of prompts whose completions are not written yet, every row counts as
    full, and there are no totals.
    """
    paths = [user_path(source.path, "dataset") for source in spec.sources]
    if spec.fake_data or spec.learns_from_prompts or not all(path_kind(path) in ("file", "folder") for path in paths):
        return RowStats.full(spec), _FULL_ROWS, None
    spec = spec.with_dataset_paths([str(path) for path in paths])
    import tempfile

    from trainer.data.encode import encoded_dataset
    from trainer.data.order import Order
    from trainer.data.tiny import with_tiny_model
    from trainer.model_files.base_weights import embedding_rows
    from trainer.models.model import load_tokenizer

    with tempfile.TemporaryDirectory() as work:
        local = with_tiny_model(spec, Path(work))
        store = (data_dir if path_kind(data_dir) == "folder" else Path(work)) / "store"
        tokenizer = load_tokenizer(local.model)
        rows = embedding_rows(local.model)
        corpus = encoded_dataset(local, tokenizer, store, rows=rows)
    one_epoch = spec.model_copy(update={"epochs": 1})
    epoch = Order.of(one_epoch, corpus.lengths, corpus.sources).epoch(0)
    # The tokens of the rows of a micro-batch that the samples of a row become: one, or two for a pair.
    parts = [each for row in epoch for each in zip(*map(corpus.sequences, row), strict=True)]
    filled = [sum(span.stop - span.start for span in each) for each in parts]
    counts = corpus.trained_counts()
    trained = float(sum(counts[sample] for row in epoch for sample in row))
    # A micro-batch is padded to its longest row.
    size = method_of(spec).as_rows(spec).batch_size
    padded = [max(filled[first : first + size]) for first in range(0, len(filled), size)]
    places = sum(padded) / len(padded)
    return (
        RowStats(places, sum(filled) / len(filled), trained / (places * len(filled))),
        f"{spec.dataset_name}: {sum(filled) / len(filled):.0f} tokens in rows of {places:.0f}",
        corpus.report,
    )


def _with_packing(spec: RunSpec) -> RunSpec:
    """Replace `packing: auto` by the value that a run would choose."""
    if spec.packing != "auto":
        return spec
    if not METHODS[spec.method].packs:
        return spec.model_copy(update={"packing": False})
    from trainer.planner.measure import keeps_samples_apart

    with model_errors(spec.model):
        return spec.model_copy(update={"packing": keeps_samples_apart(spec)})


def _other_cpu_seconds() -> float:
    """Return the CPU seconds of all other processes of this machine since it started.

    https://man7.org/linux/man-pages/man5/proc_stat.5.html
    """
    columns = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()
    user, nice, system, steal = (int(columns[place]) for place in (1, 2, 3, 8))
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK") - time.process_time()


def _measured(spec: RunSpec, shape: Shape, rows: RowStats) -> tuple[Speed, str, list[str], str]:
    """Measure the speed of this device. Returns speed, device type, fast kernels in use, and a description."""
    import torch

    from trainer.models import model
    from trainer.planner.measure import measure

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    others, began = _other_cpu_seconds(), time.monotonic()
    part, step = measure(method_of(spec).as_rows(spec), rows, device)
    part *= method_of(spec).time_factor(spec)
    # The teacher computes at the speed of the student. The measured model is not quantized.
    student = unpacking_factor(spec, cuda=device.type == "cuda")
    speed = Speed(part * (student + teacher_flops(spec, rows) / row_flops(spec, shape, rows)), step, True)
    busy = (_other_cpu_seconds() - others) / (time.monotonic() - began)
    where = f"{torch.get_num_threads()} threads" if device.type == "cpu" else torch.cuda.get_device_name(0)
    about = f"measured here ({where}): {speed.part:.3g} s per micro-batch, {speed.step:.2g} s per optimizer step"
    if device.type == "cpu" and busy > _BUSY * (os.cpu_count() or 1):
        about += f", while other processes used {busy:.1f} of {os.cpu_count()} cores: it is faster on an idle machine"
    return speed, device.type, model.fast_kernels(spec, device), about


def _expected(spec: RunSpec, shape: Shape, rows: RowStats, hosts: Sequence[dict[str, Any]]) -> tuple[Speed, str]:
    """Return the speed of the slowest process without a measurement here, and a description."""
    device, threads = "cuda" if have_gpus(hosts) else "cpu", min(host.get("threads", 1) for host in hosts)
    nominal = NOMINAL[device] * (threads if device == "cpu" else 1) / 1e9
    return Speed.nominal(spec, shape, rows, device, threads), f"nominal speed of {nominal:,.0f} GFLOP/s per process"


def _settings(spec: RunSpec, layout: Layout, kernels: list[str], device: str) -> list[str]:
    """Return the settings that affect speed or memory, as ``name=value`` or a name."""
    packing = [f"rows {packing_text(spec)}"] if spec.packing else []
    found = [*kernels, *packing, *(["gradient bucket views"] if layout.world > 1 else [])]
    names = ("comm_dtype", "optimizer", "quantize", "precision")
    found += [f"{name}={getattr(spec, name)}" for name in names]
    found += [name for name in ("gradient_checkpointing", "torch_compile") if getattr(spec, name)]
    if device == "cpu":
        loaded = "tcmalloc" in os.environ.get("LD_PRELOAD", "")
        found.append("tcmalloc" if loaded else "tcmalloc (if installed by site.yml; not loaded here)")
    return found


def plan(
    spec: RunSpec, hosts: Sequence[dict[str, Any]], link: float | None, *, fast: bool, data_dir: Path
) -> dict[str, Any]:
    """Return the plan for JSON; `lines` in it are the plan as text. Raises UserError: the model is unknown.

    Args:
        hosts: as `trainer.costs.host_memory.read_hosts` returns them.
        link: Mbit/s between hosts, or None if unknown.
        fast: use nominal speed instead of a measurement.
        data_dir: where encoded datasets are cached, and the run may have started before.
    """
    shape, spec = shape_of(spec), fit_to_model(spec)
    facts = _facts(hosts, link, fast)
    spec, decisions = _decided(spec, facts, fast, data_dir)
    kernels: list[str] = []
    totals: DataReport | None = None
    gpus = have_gpus(hosts)
    device = "cuda" if gpus else "cpu"
    if fast or (gpus and not _has_gpu()):
        rows, data = RowStats.full(spec), _FULL_ROWS
        speed, about_speed = _expected(spec, shape, rows, hosts)
    else:
        packing, spec = spec.packing and METHODS[spec.method].packs, _with_packing(spec)
        rows, data, totals = rows_of(spec, data_dir)
        if packing and not spec.packing:
            data += "; packing: off, because the model mixes the samples of a packed row"
        with model_errors(spec.model):
            speed, device, kernels, about_speed = _measured(spec, shape, rows)
    if not fast and not any(host.get("memory_mib") or host.get("gpu_mib") for host in hosts):
        # Assume that all hosts have the memory of this machine, as for its speed.
        most = max(host["processes"] for host in hosts)
        own = {"memory_mib": own_memory_mib(device), "processes": most}
        room, processes = layout_of([own], device).rooms[0], tuple(host["processes"] for host in hosts)
        layout = Layout(processes, (room,) * sum(processes), speeds=speeds(hosts))
    else:
        layout = layout_of(hosts, device)
    setting = Setting(shape, layout, rows, speed, link or LINK, gloo=device == "cpu")
    found = options(spec, setting)
    try:
        strategy, why = recommend(spec, found, setting)
    except UserError as error:  # none fits
        strategy, why = "", str(error)
    settings = _settings(spec, layout, kernels, device)
    about = [
        f"{counted(len(hosts), 'host')}, {counted(layout.world, 'process', 'es')}, link {round(link or LINK, 1):g} Mbit/s"
        f"{'' if link else ' (assumed)'}; {about_speed}",
        f"data: {data}; settings: {', '.join(settings)}",
        *([*totals.lines(), *steps_about(spec, totals)] if totals else []),
        *decisions,
    ]
    return {
        "model": spec.model,
        "parameters": shape.parameters,
        "trained_parameters": shape.trained(spec),
        "hosts": list(hosts),
        "link_mbit": link or LINK,
        "data": totals.as_dict() if totals else {},
        "rows": asdict(rows),
        "speed": asdict(speed),
        "settings": settings,
        "decisions": decisions,
        "options": [
            asdict(option) | {"memory_bytes": option.memory.total, "communication_share": option.share}
            for option in found
        ],
        "recommended": {"strategy": strategy, "why": why},
        "lines": lines(spec, shape, found, strategy, why, about),
    }


def _facts(hosts: Sequence[dict[str, Any]], link: float | None, fast: bool) -> list[dict[str, Any]]:
    """Return what a start would know of the hosts. Unknown hosts are like this machine."""
    known = {"link_mbit": link or 0.0}
    if any(host.get("memory_mib") or host.get("gpu_mib") for host in hosts):
        return [{"bfloat16": multiplies_bfloat16()} | host | known for host in hosts]
    here = this_host(imports_torch=not fast)
    return [host | known | here | {"processes": host["processes"]} for host in hosts]


def _decided(spec: RunSpec, hosts: Sequence[dict[str, Any]], fast: bool, data_dir: Path) -> tuple[RunSpec, list[str]]:
    """Return the spec as a start on these hosts would decide it, and a line for each decision."""
    if spec.strategy != AUTO and not spec.automatic:
        return spec, []
    try:
        found, lines, _ = decide_here(spec, data_dir / "runs" / spec.named().run, hosts)
    except UserError as error:  # no strategy fits
        return spec, [f"auto: {error}"]
    return found, lines


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _row(option: Option) -> list[str]:
    """Return an option as a row of a table, below `_HEAD`."""
    return [
        option.strategy,
        str(option.processes),
        mib(option.memory.total),
        f"{option.comm_bytes / 1e6:.2f}",
        f"{option.compute_seconds + option.comm_seconds:.3g}",
        f"{option.tokens_per_second:,.0f}",
        f"{option.share:.1%}",
        {True: "yes", False: "no", None: "?"}[option.fits],
    ]


def lines(
    spec: RunSpec,
    shape: Shape,
    found: Sequence[Option],
    strategy: str,
    why: str,
    about: Sequence[str],
) -> list[str]:
    """Return the plan as text: the run, `about` hosts and data, the strategies, and the one that `auto` takes."""
    chosen = next((each for each in found if each.strategy == strategy), found[0])
    size = teacher.parameters if (teacher := teacher_shape(spec)) else 0
    uncounted = "the time in which the model writes completions and rewards are computed is not counted"
    host_memory = f"host memory of a process, besides Python: {mib(chosen.host_memory)} MiB"
    parts = ", ".join(f"{name} {mib(size)}" for name, size in chosen.memory.step.items() if size)
    if chosen.memory.total > sum(chosen.memory.step.values()):
        parts += f"; {mib(chosen.memory.outside_step)} while the model is loaded, a checkpoint is written, or replicas synchronize"
    return [
        f"{spec.model}: {shape.parameters / 1e6:.1f} M parameters, {shape.trained(spec) / 1e6:.2f} M of them trained; "
        f"{spec.rows_per_step} rows of {spec.seq_length} per step in micro-batches of {spec.batch_size}",
        *([f"teacher {spec.teacher}: {size / 1e6:.1f} M parameters, in full on every process"] if size else []),
        *([uncounted] if spec.learns_from_prompts else []),
        *about,
        "",
        *table([_HEAD, *map(_row, found)], right=True),
        "",
        f"memory of {chosen.strategy} in MiB, besides Python and its libraries (about {BASE} on a CPU): {parts}",
        *([host_memory] if chosen.host_memory else []),
        f"recommended: strategy={strategy}: {why}" if strategy else why,
    ]
