"""Find a run on the hosts, and list all runs."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from trainer.common.formats import clock, counted, table, thousands
from trainyard import front_end
from trainyard.run.follow.monitor import gpu_cell
from trainyard.run.host_run import HostRun
from trainyard.run.plan.gather_facts import Connect
from trainyard.run.types import PlanEntry, StepResult
from trainyard.wire.connection import FanOut, Host, HostConnection, InvalidReplyError
from trainyard.wire.replies import ReplyError, checked_reply
from trainyard.wire.reply_types.run_replies import RunStatus
from trainyard.wire.run_errors import RunError

LATEST = 10  # ended runs in the table, unless all are wanted
ROWS_LIMIT = 2000  # ranks of one host in the table


class HostRunStatus(RunStatus):
    """The status of a run on a host."""

    host: str


STATUS_HEAD = ["run", "host", "rank", "state", "step", "loss", "tok/s", "GPU", "heartbeat"]


def planned_parts(entries: Iterable[PlanEntry]) -> list[HostRun]:
    """Return a plan's parts, by node rank."""
    return [HostRun(entry.host, entry.run_dir, entry.node_rank, list(entry.ranks)) for entry in entries]


def run_parts(hosts: Iterable[Host], run: str) -> list[HostRun]:
    """Return where a run's part is on each host, whether or not the host has one."""
    return [HostRun(host.name, f"{host.data_dir}/runs/{run}") for host in hosts]


def request_statuses(parts: list[HostRun], connect: Connect, limit: float) -> dict[str, str]:
    """Update the status of every part; return why a host did not answer within `limit` seconds, by name."""
    requests = {part.host: functools.partial(any_status, connect(part.host), part.run_dir) for part in parts}
    asked = FanOut(requests).wait(limit)
    for part in parts:
        part.answer = asked.answers.get(part.host, part.answer)
    return asked.errors


def read_status(connection: HostConnection, run_dir: str, **request: Any) -> RunStatus:
    """Return the status of a run on a host. `request`: see trainer/supervise/status.py. Raises RemoteError."""
    return cast("RunStatus", connection.call("run_status", {"run_dir": run_dir, **request}))


def any_status(connection: HostConnection, run_dir: str, **request: Any) -> RunStatus:
    """Return the status of a run on a host; without its records if those prevent it. As `read_status`."""
    try:
        return read_status(connection, run_dir, **request)
    except InvalidReplyError:  # whatever code of a rank has done, its processes can be found and stopped
        return read_status(connection, run_dir, plain=True)


def find_parts(
    run: str, hosts: Iterable[Host], connect: Connect, limit: float, *, every_start: bool = False
) -> tuple[list[HostRun], dict[str, str]]:
    """Find a run's parts on the hosts.

    Returns the parts by node rank, and why a host of the run did not answer, by name. Raises RunError: without
    `every_start`, a host has a part whose record cannot be read. `limit`: seconds for a host to answer. `every_start`:
    include parts that still run of earlier starts, on hosts without which the run continued.
    """
    parts = run_parts(hosts, run)
    errors = request_statuses(parts, connect, limit)
    unreadable = next((part for part in parts if part.status == "unreadable"), None)
    if unreadable and not every_start:
        raise RunError(
            f"{unreadable.host}: run {run} is alive, but its record state/node.json is unreadable: stop the run with "
            f"{front_end.command('stop', run)}"
        )
    found = newest_start(parts, every_start=every_start)
    members = {host for part in found for host in part.node.get("hosts", [])}
    missing = {host: error for host, error in errors.items() if host in members or not found}
    return found, missing


def newest_start(parts: Iterable[HostRun], *, every_start: bool = False) -> list[HostRun]:
    """Return the parts of a run's newest start by node rank, with their ranks; see `find_parts`."""
    parts = list(parts)
    known = [part for part in parts if part.node]
    # Two disconnected hosts may both have a start with the same number.
    newest = max((part.node for part in known), key=lambda node: (node["attempt"], node["started"]), default=None)
    found = [
        part
        for part in known
        if (newest and part.node["attempt"] == newest["attempt"] and part.host in newest["hosts"])
        or (every_start and is_left(part.answer or {}))
    ]
    # Their records cannot be read.
    found += [part for part in parts if every_start and not part.node and is_left(part.answer or {})]
    for part in found:
        if not part.node:
            continue
        part.node_rank, part.ranks = part.node["node_rank"], part.node["ranks"]
    return sorted(found, key=lambda part: part.node_rank)


def is_left(state: Mapping[str, Any]) -> bool:
    """Return whether a host has processes of a run: its ranks, or what is left of them."""
    return bool(state.get("alive") or state.get("left"))


def parts_to_monitor(run: str, hosts: Iterable[Host], connect: Connect, limit: float) -> list[HostRun]:
    """Find the parts of a run that was started before. Raises RunError if they cannot be monitored."""
    hosts = list(hosts)
    parts, missing = find_parts(run, hosts, connect, limit)
    if not parts and not missing:
        raise no_such_run(run)
    if missing:
        host, error = next(iter(missing.items()))
        raise RunError(f"{host} does not answer ({error}), so the run cannot be monitored")
    return parts


def no_such_run(run: str) -> RunError:
    """Return the error for a run that no host has."""
    return RunError(f"no host has a run {run}; {front_end.command('status')} lists the runs")


class RunList:
    """Lists the runs of the hosts, once or repeatedly. A host has one request at a time, regardless of its duration."""

    def __init__(
        self, hosts: Iterable[Host], connect: Connect, limit: float, run: str = "", latest: int | None = None
    ) -> None:
        """Prepare to list every run, or only `run`.

        `limit`: seconds for a host to answer. `latest`: the number of ended runs in the table; None: all.
        """
        self.hosts, self.limit, self.run, self.latest = list(hosts), limit, run, latest
        self._calls = {
            host.name: functools.partial(connect(host.name).call, "run_list", {"data_dir": host.data_dir})
            for host in self.hosts
        }
        self._pending: dict[str, FanOut] = {}

    def read(self) -> StepResult:
        """Return what `list_runs` does."""
        busy = {name for name, asked in self._pending.items() if asked.threads[name].is_alive()}
        asked = FanOut({name: call for name, call in self._calls.items() if name not in busy})
        self._pending |= dict.fromkeys(asked.threads, asked)
        asked.wait(self.limit)
        asked.errors |= dict.fromkeys(busy, "does not answer")
        return _run_table(self.hosts, asked, self.run, self.latest)


def watch_runs(listing: RunList, report: Callable[[str], None], interval: float) -> StepResult:
    """Report the table of runs every `interval` seconds until no run is alive; return the result of `list_runs`.

    A host that does not answer counts as it did last.
    """
    alive: dict[str, bool] = {}
    while True:
        started = time.monotonic()
        found = listing.read()
        alive |= {host.name: False for host in listing.hosts if host.name not in found["troubles"]}
        alive |= {state["host"]: True for state in found["runs"] if state["alive"]}
        if not any(alive.values()):
            return found
        for line in [time.strftime("%H:%M:%S"), *found["lines"], ""]:
            report(line)
        time.sleep(max(0.0, interval - (time.monotonic() - started)))


def list_runs(hosts: Iterable[Host], connect: Connect, limit: float, run: str = "") -> StepResult:
    """List every run of every host, or one run.

    Returns:
        `runs`, the statuses with their `host`; `troubles`, why a host did not answer, by name; `lines`, a table.
    """
    return RunList(hosts, connect, limit, run).read()


def _run_table(hosts: list[Host], asked: FanOut, run: str, latest: int | None) -> StepResult:
    """Return the answers to `run_list` as `list_runs` does. `latest`: see RunList; the table leaves out older runs."""
    runs: list[HostRunStatus] = []
    rows, warnings = [], []
    for host in hosts:
        answer = asked.answers.get(host.name, {})
        found, bad = valid_runs(answer.get("runs", []))
        found = [state for state in found if run in ("", run_name(state))]
        runs += [{**state, "host": host.name} for state in found]
        skipped = [f"cannot read {name} in {host.data_dir}/runs: skipped" for name in answer.get("skipped", [])]
        warnings += [f"warning: {host.name}: {text}" for text in [*skipped, *bad][:ROWS_LIMIT]]
    hidden = set() if latest is None or run else _older_runs(runs, latest)
    for host in hosts:
        shown = [state for state in runs if state["host"] == host.name and run_name(state) not in hidden]
        here = [row for state in shown for row in status_rows(host.name, state)]
        rows += here[:ROWS_LIMIT]
        if len(here) > ROWS_LIMIT:
            warnings.append(f"warning: {host.name}: {len(here) - ROWS_LIMIT} more ranks are not listed")
    rows.sort(key=lambda row: row[0])
    blank = ["-"] * (len(STATUS_HEAD) - 4)
    rows += [["-", host.name, "-", "unreachable", *blank] for host in hosts if host.name in asked.errors]
    lines = table([STATUS_HEAD, *rows])
    if hidden:
        how = f"{front_end.option('all')} lists all runs, {front_end.option('run', 'NAME')} one"
        lines.append(f"{counted(len(hidden), 'older run')} not listed: {how}")
    lines += warnings
    if not runs:
        where = hosts[0].name if len(hosts) == 1 else f"any of {len(hosts)} hosts"
        lines.append(f"no run {run} on {where}" if run else f"no run on {where} yet")
    return {"runs": runs, "troubles": asked.errors, "lines": lines}


def _older_runs(runs: Iterable[RunStatus], latest: int) -> set[str]:
    """Return the names of the runs that have ended everywhere, without the `latest` ones that were started last."""
    started: dict[str, float] = {}
    alive = set()
    for state in runs:
        name = run_name(state)
        started[name] = max(started.get(name, 0.0), node["started"] if (node := state.get("node")) else 0.0)
        alive |= {name} if state.get("alive") else set()
    ended = sorted(started.keys() - alive, key=lambda name: (started[name], name))
    return set(ended[: max(0, len(ended) - latest)])


def run_name(state: Mapping[str, Any]) -> str:
    """Return the name of a run, which is that of its folder: code of a rank can write another one in its record."""
    return str(state.get("run_dir", "")).rpartition("/")[2]


def checked_status(state: dict[str, Any]) -> RunStatus:
    """Return the status of a run that a host sent in another reply. Raises ReplyError."""
    return cast("RunStatus", checked_reply("run_status", state))


def valid_runs(states: Iterable[dict[str, Any]]) -> tuple[list[RunStatus], list[str]]:
    """Return the states of runs, and why each one that is not valid is not.

    An invalid state of a run with processes is returned without its records, so that the run can be stopped.
    """
    valid, bad = [], []
    for state in states:
        try:
            valid.append(checked_status(state))
        except ReplyError as error:
            bad.append(str(error))
            plain: dict[str, Any] = {"status": "unreadable", "node": None, "ranks": {}}
            plain |= {name: state[name] for name in ("run_dir", "now", "alive", "left") if name in state}
            with contextlib.suppress(ReplyError):
                valid += [known for known in [checked_status(plain)] if is_left(known)]
    return valid, bad


def status_rows(host: str, answer: RunStatus) -> list[list[str]]:
    """Return one row for each rank of a run on a host; see STATUS_HEAD."""
    node, run = answer.get("node"), run_name(answer)
    if not node:
        return [[run, host, "-", f"alive, {answer['status']}", *["-"] * (len(STATUS_HEAD) - 4)]]
    part = HostRun(host, answer.get("run_dir", ""), ranks=node.get("ranks") or [], answer=answer)
    rows = []
    for rank in part.ranks or sorted(part.states):
        state = part.state(rank)
        doing = part.status if part.status != "running" else state.get("status") or "starting"
        step, loss, speed = state.get("step"), state.get("loss"), state.get("tokens_per_second")
        seen, reward = state.get("time"), state.get("reward")
        shown = "-" if loss is None else f"{loss:.4g}"
        place = "-" if step is None else f"{step}/{state.get('steps') or '?'}"
        losses = shown if reward is None else f"{shown}, reward {reward:.3g}"
        use = [thousands(speed) if speed else "-", gpu_cell(state.get("gpu"))]
        age = f"{clock(answer['now'] - seen)} ago" if seen else "-"
        rows.append([run, host, str(rank), doing, place, losses, *use, age])
    return rows
