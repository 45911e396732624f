"""Start and stop the ranks of a run on all hosts at once.

One thread per host sends the requests, so that neither Ansible's `forks` nor the order of the hosts matters.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterable
from typing import Any

from trainyard import front_end
from trainyard.run.host_run import HostRun, killed_ranks, last_step
from trainyard.run.plan.gather_facts import Connect
from trainyard.run.types import PlanEntry, Report, StepResult
from trainyard.wire.connection import FanOut, HostConnection, call_hosts
from trainyard.wire.run_errors import LaunchError

READY_LIMIT = 60.0  # s for a host to get ready
BEGIN_LIMIT = 20.0  # s for a host to receive the command to begin
# Code of a rank could make `state` a link, which `cd -P` shows, or `go` a link or a FIFO, which mkdir neither follows nor waits for.
BEGIN = (
    "cd -P RUN_DIR && run=$PWD && cd -P ./state || exit; "
    'if [ "$PWD" != "$run/state" ]; then echo "$run/state is a symbolic link: remove it" >&2; exit 1; fi; '
    """mkdir go && date '+{"now": %s.%N}'"""
)
STOP_LIMIT = 30.0  # s for a host to answer a stop request, besides the grace period


def start_ranks(
    entries: list[PlanEntry], connect: Connect, report: Report, properties: Iterable[str] = ()
) -> StepResult:
    """Start all ranks of a plan, or none of them.

    Every host gets ready first, which takes some hosts longer. Then a command of a few milliseconds starts all ranks.
    `properties`: properties of the systemd units. Raises LaunchError: a host refused or did not answer; no rank is left
    running. Returns `hosts`, the answer of each host, and `skew_seconds` between the first and the last start by the
    hosts' clocks.
    """
    stale = [HostRun(entry.host, entry.run_dir) for entry in entries if entry.stale]
    for host, error in stop_parts(stale, connect, {"now": True}).items():
        raise LaunchError(f"{host}: cannot stop the ranks of an earlier start: {error}")
    connections = {entry.host: connect(entry.host) for entry in entries}
    names = [entry.host for entry in entries]
    # From the archive of this controller, because code of a rank can write the staged trainer: only processes of the run, which its
    # unit restricts, import that one.
    requests = {entry.host: start_request(entry, names, properties) for entry in entries}
    ready = call_hosts(connections.__getitem__, "run_start", requests).wait(READY_LIMIT)
    begun = ready
    if not ready.errors:
        begun = FanOut({e.host: functools.partial(begin, connections[e.host], e.run_dir) for e in entries})
        begun.wait(BEGIN_LIMIT)
    if begun.errors:
        # A host that refused may run another run, or another start of this one. Leave that alone.
        parts = [HostRun(entry.host, entry.run_dir) for entry in entries if entry.host in ready.answers]
        stop_parts(parts, connect, {"now": True})
        host = next(name for name in names if name in begun.errors)
        raise LaunchError(f"{host}: {begun.errors[host]}", troubles=begun.errors, lost=list(begun.errors))
    for name in names:
        if ignored := ready.answers[name].get("ignored"):
            report(f"{name}: {', '.join(ignored)} has no effect, because no systemd runs there")
    times = [answer["now"] for answer in begun.answers.values()]
    return {"hosts": ready.answers, "skew_seconds": round(max(times) - min(times), 3)}


def start_request(entry: PlanEntry, hosts: list[str], properties: Iterable[str]) -> dict[str, Any]:
    """Return the request that makes one host ready (see trainer.supervise)."""
    return {
        "run_dir": entry.run_dir,
        "node_rank": entry.node_rank,
        "ranks": entry.ranks,
        "hosts": hosts,
        "backend": entry.backend,
        "attempt": entry.attempt,
        "claim": entry.claim,
        "stop_seen": entry.stop_wanted,
        "devices": entry.devices,
        "writable": entry.writable,
        "reads": entry.reads,
        "properties": [*properties, *entry.properties],
        "reachable": [*entry.peers, *entry.servers] if entry.isolated else [],
        "hold": True,
        "lease": entry.lease,
        "command": entry.command,
    }


def paths_in(value: Any) -> set[str]:
    """Return the absolute paths in a value of a spec."""
    if isinstance(value, str):
        return {value} if value.startswith("/") else set()
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return set().union(*map(paths_in, values))


def begin(connection: HostConnection, run_dir: str) -> dict[str, Any]:
    """Let the supervisor of a host start torchrun; return the time there, `now`. Raises RemoteError."""
    # A shell command, because Python would take longer to start and the ranks would start further apart.
    return connection.run(BEGIN.replace("RUN_DIR", shlex.quote(run_dir)), verb="begin")


def stop_parts(
    parts: list[HostRun], connect: Connect, request: dict[str, Any], limit: float = STOP_LIMIT
) -> dict[str, str]:
    """Stop a run's parts on all hosts at once. Returns why it failed, by host.

    `request`: how to stop: `grace` (seconds to save a checkpoint and exit), `now` (kill at once), `wanted` (a user
    stops the run, so that no session restarts it). `limit`: seconds for a host to answer.
    """
    # New connections: a request to a host may still be pending on the ones that monitor the run.
    requests = {part.host: request | {"run_dir": part.run_dir} for part in parts}
    return call_hosts(connect, "run_stop", requests).wait(limit).errors


def end_of(part: HostRun) -> str:
    """Return how a part that was asked to stop has ended. One whose record could not be read has no other status."""
    return "stopped" if part.status == "none" else part.status


def stop_lines(run: str, parts: list[HostRun], was_alive: bool, request: dict[str, Any]) -> list[str]:
    """Return what happened to a run that a user stopped. `parts`: their state after the stop."""
    ends = ", ".join(f"{part.host} {end_of(part)}" for part in parts)
    killed = ", ".join(str(rank) for rank in sorted(rank for part in parts for rank in killed_ranks(part)))
    step = 0 if killed else last_step(part for part in parts if part.status == "stopped")
    after = f" after step {step}" if step else ""
    lines = [f"run {run}: {ends}" + (after if was_alive else " (it was not running)")]
    leased = any(part.node.get("lease") and part.status != "finished" for part in parts)
    if not was_alive and leased:  # its job may wait
        cancel = front_end.command("queue cancel", run)
        lines.append(f"if it waits in the queue, it starts again: {cancel} prevents that")
    if was_alive and killed and not request.get("now"):
        lines.append(
            f"killed, because their checkpoint took longer than {request['grace']:g} s: ranks {killed}; the run "
            f"continues from the previous checkpoint ({front_end.option('grace', 'SECONDS')} allows more time)"
        )
    return lines
