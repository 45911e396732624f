"""Runs that were started before: list them, stop one, or follow one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from trainyard.connection import Host, HostConnection
from trainyard.run.errors import RunError
from trainyard.run.follower import follow_parts
from trainyard.run.gather import Connect
from trainyard.run.launch import STOP_LIMIT, stop_lines, stop_parts
from trainyard.run.options import LaunchOptions
from trainyard.run.spec_files import Report
from trainyard.run.status import find_parts, list_runs, no_such_run, parts_to_monitor, request_statuses

GRACE = 60.0  # s that ranks have to save a checkpoint and exit


def stop_run(
    run: str,
    hosts: Iterable[Host],
    connect: Connect,
    options: LaunchOptions,
    *,
    grace: float = GRACE,
    now: bool = False,
    check: bool = False,
) -> dict[str, Any]:
    """Stop a run on all its hosts; return when none of its processes is left.

    Args:
        grace: seconds that the ranks have to save a checkpoint and exit, before they are killed.
        now: kill the ranks at once, without a checkpoint.
        check: stop nothing; say what would stop.

    Returns:
        `changed`; `hosts`, the status of each host's part; `lines` for a person.

    Raises:
        RunError: no host has the run, or a host did not stop it.
    """
    parts, missing = find_parts(run, hosts, connect, options.lost_limit, every_start=True)
    if not parts and not missing:
        raise no_such_run(run)
    if check:
        return {"changed": True, "msg": f"would stop {run} on {', '.join(part.host for part in parts)}"}
    alive = any((part.answer or {}).get("alive") for part in parts)
    request = {"grace": grace, "now": now, "wanted": True}
    missing |= stop_parts(parts, connect, request, STOP_LIMIT + (0 if now else grace))
    if missing:
        host, error = next(iter(missing.items()))
        raise RunError(f"{host} did not stop the run: {error}", troubles=missing)
    request_statuses(parts, connect, options.lost_limit)
    lines = stop_lines(run, parts, alive, request)
    return {"changed": alive, "hosts": {part.host: part.status for part in parts}, "lines": lines}


def follow_run(
    run: str, hosts: Iterable[Host], connect: Connect, options: LaunchOptions, report: Report
) -> dict[str, Any]:
    """Monitor a run that was started before, to its end. Nothing restarts it.

    Returns and raises what `follow_parts` does. Raises RunError if the run cannot be found.
    """
    parts = parts_to_monitor(run, hosts, connect, options.lost_limit)
    return {"changed": True} | follow_parts(run, parts, connect, options, report)


def manage_runs(
    state: str,
    run: str,
    hosts: list[Host],
    connect: Callable[[Host], HostConnection],
    options: LaunchOptions,
    report: Report,
    *,
    grace: float = GRACE,
    now: bool = False,
    check: bool = False,
) -> dict[str, Any]:
    """List the runs of the hosts, or stop or follow one run.

    Args:
        state: `listed`, `stopped` or `followed`.
        run: the run's name; for `listed` it may be empty.

    Raises:
        RunError: the name is missing, or see `stop_run` and `follow_run`.
    """
    by_name = {host.name: host for host in hosts}

    def connect_name(name: str) -> HostConnection:
        return connect(by_name[name])

    if state == "listed":
        return {"changed": False} | list_runs(hosts, connect_name, options.lost_limit, run)
    if not run:
        raise RunError("name the run: -e run=NAME")
    if state == "stopped":
        return stop_run(run, hosts, connect_name, options, grace=grace, now=now, check=check)
    return {"skipped": True} if check else follow_run(run, hosts, connect_name, options, report)
