"""What a run will need and how fast it will be, strategy by strategy, and which one to take. No torch: the controller asks too.

    python -m trainer plan SPEC.yml [--hosts 2 | --hosts hosts.json] [--link-mbit 1000] [--json] [--no-measure]

hosts.json is a list with one object a host: `host` (a name), `processes` (1), `memory_mib` (of one GPU, or of the host without one).
A run folder's plan.json will do.
"""

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from trainer.config.run_spec import FIELDS, RunSpec, read_spec
from trainer.errors import UserError
from trainer.planner.cost import Layout, Memory, Rows, memory, not_hidden, row_flops, wire_bytes, zero_seconds
from trainer.planner.model_shape import Shape, shape_of

LINK = 1000.0  # Mbit/s, where nobody has measured it
# Operations a second, where nobody has measured them: one core with AVX2, and a GPU of some years ago in its 16-bit arithmetic.
NOMINAL = {"cpu": 40e9, "cuda": 30e12}
_ROOM = 0.92  # share of memory that processes can have
BASE = 475  # MiB that Python and its libraries take of a host's memory, a process
_BUSY = 0.1  # share of this machine's cores that other work has, from which a measurement says so
_QUIET = 0.05  # share of time in communication that nobody minds
_LOUD = 0.5  # and the one from which a strategy that talks less is worth other mathematics


@dataclass(frozen=True)
class Speed:
    """Seconds of a full micro-batch and of an optimiser step on one process; `measured` here, or by nominal figures."""

    part: float
    step: float
    measured: bool

    @classmethod
    def nominal(cls, spec: RunSpec, shape: Shape, rows: Rows, device: str, threads: int = 1) -> "Speed":
        """Return what figures of common hardware say: right within a factor of a few."""
        rate = NOMINAL[device] * (threads if device == "cpu" else 1)
        return cls(spec.batch_size * row_flops(spec, shape, rows) / rate, 0.0, False)


@dataclass(frozen=True)
class Option:
    """One way to run it. Bytes, seconds and tokens a second; `wire_seconds` and `share`: of time spent in communication alone."""

    strategy: str
    processes: int
    memory: Memory
    fits: bool | None
    wire_bytes: float
    compute_seconds: float
    wire_seconds: float
    tokens_per_second: float

    @property
    def share(self) -> float:
        """Return the share of a step that is communication and not hidden behind arithmetic."""
        total = self.compute_seconds + self.wire_seconds
        return self.wire_seconds / total if total else 0.0


def options(
    spec: RunSpec,
    shape: Shape,
    layout: Layout,
    rows: Rows,
    speed: Speed,
    link: float,
    room: float | None,
    gloo: bool,
) -> list[Option]:
    """Return every strategy's cost: one process alone, then those that this trainer has.

    Args:
        link: Mbit/s between hosts (ignored on one host).
        room: bytes for a process's tensors, or None if unknown.
    """
    known = [name for name in get_args(FIELDS["strategy"].annotation) if name != "auto"]
    ways = [("alone", Layout((1,)))] + ([(name, layout) for name in known] if layout.world > 1 else [])
    found = []
    for name, place in ways:
        try:
            one = RunSpec.model_validate(spec.model_dump() | {"strategy": "ddp" if name == "alone" else name})
        except ValidationError:
            continue  # another field of the spec does not go with it
        need = memory(one, shape, place, rows, cuda=not gloo)
        # The rank with the most rows is waited for.
        mine = math.ceil(one.rows_per_step / place.world)
        compute = mine / one.batch_size * speed.part + speed.step
        sent = wire_bytes(one, shape, place, gloo=gloo)
        hooks, slow = zero_seconds(one, shape, place, link * 1e6 / 8) if gloo else (0.0, 0.0)
        compute += hooks
        wire = sent * 8 / (link * 1e6) + slow if len(place.processes) > 1 else 0.0
        last = mine % one.batch_size or one.batch_size
        wire = not_hidden(one, shape, wire, last / one.batch_size * speed.part)
        tokens = one.rows_per_step * rows.tokens / (compute + wire)
        fits = None if room is None else need.total <= room
        found.append(Option(name, place.world, need, fits, sent, compute, wire, tokens))
    return found


@dataclass(frozen=True)
class Advice:
    """What to run, and why in one line."""

    strategy: str
    why: str
    fields: dict[str, Any]


def recommend(spec: RunSpec, found: Sequence[Option], layout: Layout, shape: Shape, link: float, gloo: bool) -> Advice:
    """Return the strategy to take: the one that fits, changes no mathematics, and spends its time in arithmetic.

    Raises:
        UserError: none fits in memory.
    """
    by = {option.strategy: option for option in found}
    alone = by["alone"]
    if layout.world == 1:
        if alone.fits is False:
            raise UserError(f"plan: {_tight(spec, alone)}")
        return Advice("ddp", "one process: nothing to share", {})
    exact = [by[name] for name in ("ddp", "fsdp") if name in by and by[name].fits is not False]
    quiet = by.get("diloco")
    if quiet and quiet.fits is False:
        quiet = None
    if not exact and not quiet:
        raise UserError(f"plan: {_tight(spec, min(found, key=lambda option: option.memory.total))}")
    best = max(exact, key=lambda option: option.tokens_per_second, default=None)
    fit = "it fits" if alone.fits is not None else "nobody said how much memory there is (--hosts FILE); if it fits"
    if best and best.share <= _LOUD:
        fields: dict[str, Any] = {}
        why = f"{fit}, and {best.share:.0%} of the time is communication at {round(link, 1):g} Mbit/s"
        if best.strategy != "ddp":
            why = f"the model does not fit in one process whole; shared, {why}"
        elif best.share > 4 * _QUIET:
            # As many rows more as make the same bytes a fifth of the time.
            factor = math.ceil(best.share * 4)
            fields["total_batch_size"] = spec.rows_per_step * factor
            why += f"; total_batch_size={fields['total_batch_size']} (or gradient_wire=bf16) would bring it down"
        if alone.fits is not False and alone.tokens_per_second >= best.tokens_per_second:
            why += "; one process alone is faster"
        return Advice(best.strategy, why, fields)
    if quiet:
        steps = spec.local_steps * quiet.wire_seconds / max(1e-9, _QUIET * quiet.compute_seconds)
        fields = {"local_steps": max(10, math.ceil(steps / 10) * 10)}
        loud = f"ddp would spend {by['ddp'].share:.0%} of the time in communication at {round(link, 1):g} Mbit/s"
        if alone.fits is not False and alone.tokens_per_second >= by["ddp"].tokens_per_second:
            loud += ", where one process alone is faster"
        return Advice("diloco", f"{loud}; local_steps={fields['local_steps']} keeps it below {_QUIET:.0%}", fields)
    assert best is not None
    why = f"{fit}, but {best.share:.0%} of the time is communication at {round(link, 1):g} Mbit/s"
    if alone.fits is not False and alone.tokens_per_second >= best.tokens_per_second:
        why += ": one process alone is faster"
    return Advice(best.strategy, why, {})


def _tight(spec: RunSpec, option: Option) -> str:
    ways = [
        word
        for word, open_ in (
            ("gradient_checkpointing=true", not spec.gradient_checkpointing),
            ("a smaller batch_size", spec.batch_size > 1),
            ("precision=bf16-mixed", spec.precision == "32-true"),
            ("quantize=nf4", spec.quantize == "none" and spec.lora_r > 0),
            ("LoRA (lora_r=16)", not spec.lora_r),
        )
        if open_
    ]
    return f"{option.memory.total / 2**30:.1f} GiB a process do not fit: try {' or '.join(ways) or 'a smaller model'}; on a CPU Python takes {BASE} MiB of each, too"


def choose(spec: RunSpec, hosts: Sequence[dict[str, Any]], shape: Shape | None = None) -> tuple[str, str]:
    """Return the strategy that `strategy=auto` means on these hosts, and why. The same hosts give the same answer.

    Args:
        hosts: for each its `processes`, `threads` of one process, `gpu_mib` (least memory of its GPUs; 0 without one),
            `memory_mib` of the host (0: unknown) and `link_mbit` (0: unknown).

    Raises:
        UserError: nothing fits.
    """
    try:
        shape = shape or shape_of(spec)
    except UserError as error:
        return "ddp", f"auto took ddp: {error}"
    layout = Layout(tuple(host["processes"] for host in hosts))
    cuda = all(host["gpu_mib"] for host in hosts)
    if cuda:
        room = _room("cuda", [(host["gpu_mib"], 1) for host in hosts])
    else:
        room = _room("cpu", [(host["memory_mib"], host["processes"]) for host in hosts if host["memory_mib"]])
    links = [host["link_mbit"] for host in hosts if host.get("link_mbit")]
    link = min(links) if links else LINK
    rows = Rows.full(spec)
    speed = Speed.nominal(spec, shape, rows, "cuda" if cuda else "cpu", min(host["threads"] for host in hosts))
    found = options(spec, shape, layout, rows, speed, link, room, not cuda)
    advice = recommend(spec, found, layout, shape, link, not cuda)
    assumed = "" if links or len(hosts) == 1 else " (link assumed, nobody measured it)"
    return advice.strategy, f"auto took {advice.strategy}: {advice.why}{assumed}"


def _room(device: str, given: Sequence[tuple[float, int]]) -> float | None:
    """Return the bytes that a process has for tensors. `given`: of hosts, the MiB of one GPU or of the host, and its processes."""
    if not given:
        return None
    if device == "cpu":
        return min(size * _ROOM / processes - BASE for size, processes in given) * 2**20
    return min(size for size, _ in given) * _ROOM * 2**20


def choose_here(spec: RunSpec, run_dir: Path) -> tuple[RunSpec, str]:
    """Settle strategy=auto without a controller: what the run began with, else by this host, taken for like all the others."""
    kept = run_dir / "spec.yml"
    if kept.exists() and (run_dir / "checkpoints").is_dir():
        began = read_spec(kept, {}, str(kept)).strategy
        return spec.model_copy(update={"strategy": began}), f"auto: this run began with {began}"
    import torch

    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    host = {
        "processes": here,
        "threads": torch.get_num_threads(),
        "gpu_mib": _own_mib("cuda") if torch.cuda.is_available() else 0,
        "memory_mib": _own_mib("cpu"),
    }
    strategy, why = choose(spec, [host] * (int(os.environ.get("WORLD_SIZE", "1")) // here))
    return spec.model_copy(update={"strategy": strategy}), why


def _own_mib(device: str) -> float:
    """Return the memory of this machine in MiB: of its smallest GPU, or of the host."""
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**20
    import torch

    sizes = [torch.cuda.get_device_properties(place).total_memory for place in range(torch.cuda.device_count())]
    return min(sizes) / 2**20


def read_hosts(said: str) -> list[dict[str, Any]]:
    """Read --hosts: a number of hosts, or a JSON file. Raises UserError."""
    if said.isdigit() and 1 <= int(said) <= 10_000:
        return [{"host": f"host{place + 1}", "processes": 1} for place in range(int(said))]
    try:
        hosts = json.loads(Path(said).read_text())
        return [
            {
                "host": str(host.get("host", f"host{place + 1}")),
                "processes": int(host.get("processes") or len(host.get("ranks", [0]))),
                "memory_mib": float(host.get("memory_mib") or 0),
            }
            for place, host in enumerate(hosts)
        ]
    except OSError as error:
        raise UserError(f"--hosts: {said} is neither a number of hosts nor a file here: {error.strerror}") from None
    except (ValueError, TypeError, AttributeError):
        raise UserError(
            f"--hosts: {said} takes a JSON list with one object a host: host, processes, memory_mib"
        ) from None


def rows_of(spec: RunSpec, data_dir: Path) -> tuple[Rows, str]:
    """Return what the rows of the spec's data are like, if it is a file here and the tokenizer can be had; else full ones."""
    if spec.fake_data or not Path(spec.dataset).expanduser().is_file():
        return Rows.full(spec), "full rows, every token with loss"
    import tempfile

    from trainer.data.encode import encoded_dataset
    from trainer.data.order import Order
    from trainer.data.tiny import with_tiny_model
    from trainer.model import load_tokenizer

    with tempfile.TemporaryDirectory() as work:
        there = with_tiny_model(spec, Path(work))
        store = (data_dir if data_dir.is_dir() else Path(work)) / "store"
        corpus = encoded_dataset(there, load_tokenizer(there.model), store)
    order = Order(
        corpus.lengths,
        seed=spec.seed,
        capacity=spec.seq_length,
        packing=spec.packing,
        epochs=1,
        rows=spec.rows_per_step,
    )
    epoch, lengths = order.epoch(0), corpus.lengths
    filled = [int(sum(lengths[sample] for sample in row)) for row in epoch]
    # A micro-batch is as wide as its longest row.
    wide = [max(filled[first : first + spec.batch_size]) for first in range(0, len(filled), spec.batch_size)]
    places = sum(wide) / len(wide)
    return (
        Rows(places, sum(filled) / len(filled), float(corpus.trained.sum()) / (places * len(epoch))),
        f"{spec.dataset}: {sum(filled) / len(filled):.0f} tokens in rows of {places:.0f}",
    )


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f}"


def lines(spec: RunSpec, shape: Shape, found: Sequence[Option], advice: Advice, about: Sequence[str]) -> list[str]:
    """Return the plan as a person reads it."""
    head = ["strategy", "processes", "memory MiB", "wire MB/step", "s/step", "tokens/s", "communication", "fits"]
    table = [head] + [
        [
            option.strategy,
            str(option.processes),
            _mib(option.memory.total),
            f"{option.wire_bytes / 1e6:.2f}",
            f"{option.compute_seconds + option.wire_seconds:.3g}",
            f"{option.tokens_per_second:,.0f}",
            f"{option.share:.1%}",
            {True: "yes", False: "no", None: "?"}[option.fits],
        ]
        for option in found
    ]
    widths = [max(len(row[place]) for row in table) for place in range(len(head))]
    chosen = next(option for option in found if option.strategy in (advice.strategy, "alone")[: 1 + (len(found) == 1)])
    parts = ", ".join(f"{name} {_mib(size)}" for name, size in chosen.memory.step.items() if size)
    if chosen.memory.total > sum(chosen.memory.step.values()):
        parts += f"; and {_mib(chosen.memory.between)} while it reads the model, writes it, or meets other replicas"
    return [
        f"{spec.model}: {shape.parameters / 1e6:.1f} M parameters, {shape.trained(spec) / 1e6:.2f} M of them trained; "
        f"{spec.rows_per_step} rows of {spec.seq_length} a step in micro-batches of {spec.batch_size}",
        *about,
        "",
        *("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table),
        "",
        f"memory of {chosen.strategy} in MiB, above what Python and its libraries take (on a CPU about {BASE}): {parts}",
        f"take strategy={advice.strategy}: {advice.why}",
        *([healing(spec, shape)] if spec.diloco_members == "torchft" else []),
    ]


def healing(spec: RunSpec, shape: Shape) -> str:
    """Return what membership by torchft takes, as a line: a checkpoint (weights, AdamW's two moments, momentum) in memory."""
    return (
        f"diloco_members=torchft: while a replica that was away is healed, it and another one hold "
        f"{_mib(16 * shape.trained(spec))} MiB more each in their hosts' memory, and send it once"
    )


def _others() -> float:
    """Return the seconds that cores of this machine have had for other processes than this one.

    https://man7.org/linux/man-pages/man5/proc_stat.5.html
    """
    words = Path("/proc/stat").read_text().splitlines()[0].split()
    user, nice, system, steal = (int(words[place]) for place in (1, 2, 3, 8))
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK") - time.process_time()


def plan(
    spec: RunSpec, hosts: Sequence[dict[str, Any]], link: float | None, *, fast: bool, data_dir: Path
) -> dict[str, Any]:
    """Return the whole plan, for JSON; `lines` in it are the table. `fast`: nominal speed, nothing is run."""
    shape = shape_of(spec)
    layout = Layout(tuple(host["processes"] for host in hosts))
    levers: list[str] = []
    device = "cpu"
    if fast:
        rows, data = Rows.full(spec), "full rows, every token with loss"
        speed = Speed.nominal(spec, shape, rows, device)
        measured = f"nominal speed: {NOMINAL['cpu'] / 1e9:.0f} GFLOP/s a process"
    else:
        import torch

        from trainer import model
        from trainer.planner.measure import measure

        rows, data = rows_of(spec, data_dir)
        where = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        device, levers = where.type, model.fast_kernels(spec, where)
        others, began = _others(), time.monotonic()
        speed = Speed(*measure(spec, rows, where), True)
        busy = (_others() - others) / (time.monotonic() - began)
        threads = f"{torch.get_num_threads()} threads" if device == "cpu" else torch.cuda.get_device_name(0)
        measured = f"measured here ({threads}): {speed.part:.3g} s a micro-batch, {speed.step:.2g} s an optimiser step"
        if device == "cpu" and busy > _BUSY * (os.cpu_count() or 1):
            measured += f", while other work had {busy:.1f} of {os.cpu_count()} cores: it is faster on a quiet machine"
    given = [(host["memory_mib"], host["processes"]) for host in hosts if host.get("memory_mib")]
    if not given and not fast:  # as its speed, this machine's memory is taken for that of all
        given = [(_own_mib(device), max(layout.processes))]
    room = _room(device, given)
    found = options(spec, shape, layout, rows, speed, link or LINK, room, device == "cpu")
    advice = recommend(spec, found, layout, shape, link or LINK, device == "cpu")
    words = [*levers, *(["packing"] if spec.packing else []), *(["gradient bucket views"] if layout.world > 1 else [])]
    words += [f"{name}={getattr(spec, name)}" for name in ("gradient_wire", "optimizer", "quantize", "precision")]
    words += [name for name in ("gradient_checkpointing", "torch_compile") if getattr(spec, name)]
    if device == "cpu":
        words.append(
            "tcmalloc"
            if "tcmalloc" in os.environ.get("LD_PRELOAD", "")
            else "tcmalloc (where site.yml brought it; not loaded here)"
        )
    about = [
        f"{len(hosts)} hosts, {layout.world} processes, link {round(link or LINK, 1):g} Mbit/s{'' if link else ' (assumed)'}; {measured}",
        f"data: {data}; levers: {', '.join(words)}",
    ]
    return {
        "model": spec.model,
        "parameters": shape.parameters,
        "trained_parameters": shape.trained(spec),
        "hosts": list(hosts),
        "link_mbit": link or LINK,
        "rows": asdict(rows),
        "speed": asdict(speed),
        "levers": words,
        "options": [
            asdict(option) | {"memory_bytes": option.memory.total, "communication_share": option.share}
            for option in found
        ],
        "recommended": asdict(advice),
        "lines": lines(spec, shape, found, advice, about),
    }
