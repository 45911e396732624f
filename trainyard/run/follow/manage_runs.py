"""Runs that were started before: list them, stop one, or follow one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from trainer.common.formats import counted
from trainyard import front_end
from trainyard.preflight.hardware_table import gather_hardware, hardware_table
from trainyard.run.follow.follower import follow_parts
from trainyard.run.follow.monitor import ENDED, Watch
from trainyard.run.follow.run_status import (
    LATEST,
    RunList,
    find_parts,
    is_left,
    list_runs,
    no_such_run,
    parts_to_monitor,
    request_statuses,
    run_name,
    watch_runs,
)
from trainyard.run.launch.start_ranks import STOP_LIMIT, end_of, stop_lines, stop_parts
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.plan.gather_facts import Connect
from trainyard.run.types import Report, StepResult
from trainyard.wire.connection import Host, HostConnection
from trainyard.wire.run_errors import RunError, first_of

WATCH = 5.0  # s between two tables of a watched status
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
) -> StepResult:
    """Stop a run on all its hosts; return when none of its processes is left.

    Returns `changed`; `hosts`, the status of each host's part; `lines`, readable text. Raises RunError: no host has the
    run, or a host did not stop it. `grace`: seconds that the ranks have to save a checkpoint and exit, before they are
    killed. `now`: kill the ranks at once, without a checkpoint. `check`: stop nothing; list the runs that would stop.
    """
    parts, missing = find_parts(run, hosts, connect, options.answer_limit, every_start=True)
    if not parts and not missing:
        raise no_such_run(run)
    if check:
        return {"changed": True, "msg": f"would stop {run} on {', '.join(part.host for part in parts)}"}
    alive = any(is_left(part.answer or {}) for part in parts)
    request = {"grace": grace, "now": now, "wanted": True}
    missing |= stop_parts(parts, connect, request, STOP_LIMIT + (0 if now else grace))
    if missing:
        host, error = next(iter(missing.items()))
        raise RunError(f"{host} did not stop the run: {error}", troubles=missing)
    request_statuses(parts, connect, options.answer_limit)
    lines = stop_lines(run, parts, alive, request)
    return {"changed": alive, "hosts": {part.host: end_of(part) for part in parts}, "lines": lines}


def stop_all_runs(
    hosts: list[Host],
    connect: Connect,
    options: LaunchOptions,
    report: Report,
    *,
    grace: float = GRACE,
    now: bool = False,
    check: bool = False,
) -> StepResult:
    """Stop every run of every host, one after another; arguments as for `stop_run`.

    `report`: receives the lines of each run when it has stopped. Returns `changed`; `runs`, for each run the status of
    each host's part; `lines`, readable text. Raises RunError: a host does not answer, or did not stop a run; the other
    runs are stopped.
    """
    found = list_runs(hosts, connect, options.answer_limit)
    names = sorted({run_name(state) for state in found["runs"] if is_left(state)} - {""})
    if check:
        return {"changed": bool(names), "msg": f"would stop {', '.join(names) or 'no run'}"}
    stopped, troubles = {}, dict(found["troubles"])
    here = [host for host in hosts if host.name not in troubles]
    for name in names:
        try:
            done = stop_run(name, here, connect, options, grace=grace, now=now)
        except RunError as error:
            troubles[f"run {name}"] = str(error)
            continue
        stopped[name] = done["hosts"]
        for line in done["lines"]:
            report(line)
    where = f"on {counted(len(here), 'host')}"
    line = f"stopped {counted(len(stopped), 'run')} {where}" if names else f"no run is alive {where}"
    if troubles:
        message, others = first_of(troubles)
        raise RunError(message, troubles=troubles, lines=[*others, line], runs=stopped)
    return {"changed": bool(stopped), "runs": stopped, "lines": [line]}


def follow_run(
    run: str,
    hosts: Iterable[Host],
    connect: Connect,
    options: LaunchOptions,
    report: Report,
    watch: Watch = lambda state: None,
) -> StepResult:
    """Monitor a run that was started before, to its end. Nothing restarts it.

    Returns and raises what `follow_parts` does. Raises RunError if the run cannot be found.
    """
    parts = parts_to_monitor(run, hosts, connect, options.answer_limit)
    runs = any(part.status not in ENDED for part in parts)
    ended = follow_parts(run, parts, connect, options, report, watch=watch)
    lines = [f"run {run} is finished"] if ended["status"] == "finished" else []
    return {"changed": runs, "lines": lines} | ended


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
    every: bool = False,
    watch: float = 0.0,
    hardware: bool = False,
) -> StepResult:
    """List the runs of the hosts, or stop or follow one run.

    Args:
        state: `listed`, `stopped` or `followed`.
        run: the run's name; for `listed` it may be empty.
        every: for `stopped`: all runs. For `listed`: all runs in the table, not only those that run or ended last.
        watch: for `listed`: seconds after which the list is reported again, until no run is alive; 0 lists once.
        hardware: for `listed`: whether to list the hardware of the hosts before the runs.

    Raises RunError: the name is missing, no host has the run, or see `stop_run` and `follow_run`.
    """
    by_name = {host.name: host for host in hosts}

    def connect_name(name: str) -> HostConnection:
        return connect(by_name[name])

    if state == "listed":
        listing = RunList(hosts, connect_name, options.answer_limit, run, latest=None if every else LATEST)
        known = gather_hardware(hosts, connect_name, options.answer_limit) if hardware else {}
        table = [*hardware_table([host.name for host in hosts], known), ""] if hardware else []
        if watch and not check:
            for line in table:
                report(line)
            table = []
        found = watch_runs(listing, report, watch) if watch and not check else listing.read()
        if run and not found["runs"] and not found["troubles"]:
            raise no_such_run(run)
        more = {"hardware": known, "lines": [*table, *found["lines"]]} if hardware else {}
        return {"changed": False} | found | more
    if state == "stopped" and every:
        if run:
            raise RunError("name a run or all=true, not both")
        return stop_all_runs(hosts, connect_name, options, report, grace=grace, now=now, check=check)
    if not run:
        hint = f", or {front_end.option('all')} for every run" if state == "stopped" else ""
        raise RunError(f"name the run: {front_end.option('run', 'NAME')}{hint}")
    if state == "stopped":
        return stop_run(run, hosts, connect_name, options, grace=grace, now=now, check=check)
    return {"skipped": True} if check else follow_run(run, hosts, connect_name, options, report)
