"""Let every host train alone for some steps, without a network between hosts, and compare the hosts in one table."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import printable, table
from trainer.config import TINY, TINY_RUN, RunSpec
from trainer.spec import make_spec
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.session import RunSession
from trainyard.run.types import PartEnd, Report, StepResult
from trainyard.wire.connection import Host, HostConnection, call_hosts
from trainyard.wire.replies import ReplyError, checked_reply, untrusted_json
from trainyard.wire.run_errors import RunError

STEPS = 20  # of each host
TOLERANCE = 0.02  # relative difference of a host's last loss from the median of all hosts that is reported
SLOW = 0.8  # share of the fastest host's tokens per second below which a host is named
READ_LIMIT = 30.0  # s for a host to return its metrics
EVIDENCE = 20  # lines about a failure, such as the end of a log
LABEL_LIMIT = 40  # characters of a device in the table
HEAD = ["host", "device", "ranks", "steps/s", "tokens/s", "loss", "memory peak", "speed"]
# The default run of the check.
DEFAULTS = {"model": TINY, "max_steps": STEPS, "seq_length": 128, "total_batch_size": 16, "eval_split": 0}
DEFAULTS |= {"checkpoint_interval": 0, "loggers": "none"}
_MEASURED = ("error", "device", "ranks", "steps_per_second", "tokens_per_second", "loss", "memory_gb")
_NO_LAUNCH = {"head": "", "min_nodes": 0, "elastic": False, "render_only": False, "collect_to": ""}


@dataclass
class HostCheck:
    """One host's training."""

    host: Host
    session: RunSession  # the session of the run on this host alone
    error: str = ""  # why it failed, in one line; empty if it did not
    device: str = "-"  # name of its GPUs, or its CPU threads
    ranks: int = 0
    steps_per_second: float = 0.0  # median of the second half of the steps
    tokens_per_second: float = 0.0  # as `steps_per_second`
    loss: float | None = None  # mean loss of the last step
    memory_gb: float | None = None  # largest peak memory of a rank in GB, on the GPU or of its process; None if unknown
    ended: PartEnd | None = None


def check_spec(spec: RunSpec, run: str) -> RunSpec:
    """Return the spec of the check: the user's values, and a small run where the user gave none. Raises UserError."""
    given = {name: getattr(spec, name) for name in spec.model_fields_set - {"automatic", *spec.automatic}}
    if all(given.get(name) == value for name, value in TINY_RUN.items()):
        given = {name: value for name, value in given.items() if name not in TINY_RUN}
    fake = {} if {"dataset", "fake_data"} & given.keys() else {"fake_data": True}
    return make_spec(DEFAULTS | fake | given | {"run": run}, "-e")


def check_training(
    hosts: Sequence[Host],
    connect: Callable[[Host], HostConnection],
    options: LaunchOptions,
    spec: RunSpec,
    *,
    home: Path,
    report: Report,
    check: bool = False,
) -> StepResult:
    """Train on every host alone, on all machines at once, and compare the hosts.

    Returns `run`; `lines`, the table and what is wrong; `hosts`, the measurements by host; `failed`, the hosts that did
    not train. Raises UserError: a mistake in the spec; no host was contacted.

    Args:
        hosts: hosts of one machine train after each other.
        connect: makes the connection to a host; called in this thread.
        spec: with the name of the run; see `check_spec`.
        home: folder on the controller for created models.
        report: receives a line for each host that starts or fails.
        check: start nothing.
    """
    alone = options.model_copy(update=_NO_LAUNCH)
    checks = [
        HostCheck(host, RunSession([host], connect, alone, spec=spec, home=home, report=lambda _: None, check=check))
        for host in hosts
    ]
    prepared = None
    for one in checks:
        if prepared is None:
            one.session.prepare()
            prepared = one.session.state.prepared
        one.session.state.prepared = prepared
    for turn in turns(checks):
        started = [one for one in turn if _step(one, report, one.session.plan, one.session.stage, one.session.launch)]
        for one in started:
            report(f"{one.host.name}: training {spec.max_steps} steps of {printable(spec.model)} alone")
        for one in [] if check else started:
            _step(one, report, functools.partial(_finish, one))
    if not check:
        _measure([one for one in checks if not one.error])
    failed = [one.host.name for one in checks if one.error]
    return {
        "run": spec.run,
        "changed": not check,
        "lines": [] if check else [*result_table(checks), *verdict(checks)],
        "hosts": {one.host.name: {name: getattr(one, name) for name in _MEASURED} for one in checks},
        "failed_hosts": failed,
    }


def turns(checks: Sequence[HostCheck]) -> list[list[HostCheck]]:
    """Return the hosts that train at the same time: hosts with one address are one machine, and take turns."""
    found: list[list[HostCheck]] = []
    for one in checks:
        turn = next((turn for turn in found if one.host.address not in {o.host.address for o in turn}), None)
        if turn is None:
            found.append(turn := [])
        turn.append(one)
    return found


def _step(one: HostCheck, report: Report, *steps: Callable[[], Any]) -> bool:
    """Do steps of a host's session; return whether they succeeded. A failure concerns this host alone."""
    try:
        for step in steps:
            step()
    except (RunError, UserError) as error:
        one.error = printable(str(error).removeprefix(f"{one.host.name}: "), 500)
        report(f"{one.host.name}: failed: {one.error}")
        for line in getattr(error, "details", {}).get("lines", [])[-EVIDENCE:]:
            report(f"{one.host.name}: {printable(line, 500)}")
    return not one.error


def _finish(one: HostCheck) -> None:
    """Follow a host's run to its end. Raises RunError if it did not finish."""
    ended = one.session.follow()
    if ended["status"] != "finished":
        raise RunError("the run was stopped")
    one.ended = ended["hosts"][one.host.name]


def _measure(checks: Sequence[HostCheck]) -> None:
    """Read the metrics of the hosts, and set their measurements, or `error`."""
    plans = {one.host.name: one.session.state.plan[0] for one in checks}
    connections = {one.host.name: one.session.connect(one.host.name) for one in checks}
    requests = {name: {"run_dir": plans[name].run_dir, "text": ["metrics.jsonl"]} for name in connections}
    asked = call_hosts(connections.__getitem__, "read_files", requests).wait(READ_LIMIT)
    for one in checks:
        name, entry = one.host.name, plans[one.host.name]
        one.error = asked.errors.get(name, "")
        one.ranks = len(entry.ranks)
        gpus = [printable(gpu, LABEL_LIMIT) for gpu in entry.gpus]
        one.device = f"{len(gpus)} x {gpus[0]}" if gpus else f"CPU, {entry.threads * one.ranks} threads"
        if not one.error:
            one.error = read_metrics(one, asked.answers[name]["text"].get("metrics.jsonl") or "")
        states = list(one.ended["ranks"].values()) if one.ended else []
        on_gpu = [gpu.get("memory_peak_gb") if (gpu := state.get("gpu")) else None for state in states]
        peaks = [peak or state.get("memory_peak_gb") for peak, state in zip(on_gpu, states, strict=True)]
        one.memory_gb = max((peak for peak in peaks if peak), default=None)


def read_metrics(one: HostCheck, text: str) -> str:
    """Set speed and loss from the text of a host's metrics.jsonl; return why that is not possible, or an empty string."""
    try:
        lines = [untrusted_json(line) for line in text.splitlines()]
        records = checked_reply("metrics.jsonl", {"records": lines})["records"]
    except ReplyError as error:
        return str(error)
    later = [
        (record.get("tokens_per_second"), max(1, record.get("tokens") or 0)) for record in records[len(records) // 2 :]
    ]
    later = [(speed, tokens) for speed, tokens in later if speed]
    if not later:
        return "has no metrics"
    one.tokens_per_second = statistics.median(speed for speed, _ in later)
    one.steps_per_second = statistics.median(speed / tokens for speed, tokens in later)
    one.loss = records[-1].get("loss")
    return ""


def result_table(checks: Sequence[HostCheck]) -> list[str]:
    """Return the table: one row for each host."""
    fastest = max((one.tokens_per_second for one in checks), default=0.0)
    rows = [HEAD]
    for one in checks:
        if one.error:
            rows.append([one.host.name, one.device, *["-"] * (len(HEAD) - 3), "failed"])
            continue
        speeds = [f"{one.steps_per_second:.2f}", f"{one.tokens_per_second:.0f}"]
        loss = "-" if one.loss is None else f"{one.loss:.4f}"
        memory = "-" if one.memory_gb is None else f"{one.memory_gb:.2f} GB"
        share = f"{one.tokens_per_second / fastest:.0%}"
        rows.append([one.host.name, one.device, str(one.ranks), *speeds, loss, memory, share])
    return table(rows)


def verdict(checks: Sequence[HostCheck]) -> list[str]:
    """Return what the table shows: the slowest host, losses that differ, and hosts that failed."""
    done = [one for one in checks if not one.error]
    lines = []
    if len(done) > 1:
        fast, slow = (chosen(done, key=lambda one: one.tokens_per_second) for chosen in (max, min))
        share = slow.tokens_per_second / fast.tokens_per_second
        level = "warning: " if share < SLOW else ""
        lines.append(f"{level}slowest: {slow.host.name}, {share:.0%} of the tokens/s of {fast.host.name}")
        losses = [one.loss for one in done if one.loss is not None]
        usual = statistics.median_low(losses) if losses else 0.0
        different = [one for one in done if one.loss is None or abs(one.loss - usual) > TOLERANCE * abs(usual)]
        for one in different:
            shown = "no loss" if one.loss is None else f"loss {one.loss:.4f}"
            what = f"{shown} after the same steps, the other hosts have {usual:.4f}"
            remedy = "compare its packages and precision, and test its memory and GPU"
            lines.append(f"warning: {one.host.name}: {what}: {remedy}")
        if not different:
            lines.append(f"the losses of {len(done)} hosts are equal within {TOLERANCE:.0%}")
    return lines + [f"failed: {one.host.name}: {one.error}" for one in checks if one.error]
