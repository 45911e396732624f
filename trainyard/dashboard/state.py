"""What the hosts have sent: their samples, their runs, and events."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

from trainer.common.formats import counted
from trainyard.run.follow.monitor import ENDED, causes
from trainyard.run.follow.run_status import checked_status, newest_start
from trainyard.run.host_run import HostRun
from trainyard.wire.connection import Host
from trainyard.wire.replies import ReplyError
from trainyard.wire.reply_types.run_replies import HeartbeatReply

EVENTS = 1000  # that are kept
RUNS = 20_000  # of all hosts
LOST = 4.0  # s without an answer after which a host counts as lost
_versions = itertools.count(1)  # a run that disappears and reappears has a new version
ALIVE = ("starting", "running", "unknown")


@dataclass
class LiveHost:
    """A host and its newest sample.

    Attributes:
        clock_offset: seconds by which its clock is ahead of that of the dashboard; includes the time of the transfer.
    """

    host: Host
    connected: bool = False  # whether it answers
    since: float = field(default_factory=time.time)  # when `connected` changed last, in seconds since the epoch
    why: str = "connecting"  # why it does not answer
    sample: dict[str, Any] = field(default_factory=dict)  # see `reply_types.HostSample`; empty before the first one
    clock_offset: float = 0.0
    version: int = 0  # changes with every line about the host itself


@dataclass
class DashboardRun:
    """A run as its hosts describe it."""

    name: str
    parts: dict[str, HostRun] = field(default_factory=dict)  # {host: its part}, of any start
    checkpoints: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # {host: its checkpoints}
    results: dict[str, dict[str, Any] | None] = field(default_factory=dict)  # {host: the result, or None}
    status: str = ""  # status of the whole run; see `overall_status`
    cause: str = ""  # why it failed, or an empty string
    reported: tuple[int, str] = (0, "")  # attempt and status of the newest event
    version: int = 0  # changes with every line about the run

    @property
    def newest(self) -> list[HostRun]:
        """The parts of the newest start, by node rank."""
        return newest_start(self.parts.values())

    @property
    def attempt(self) -> int:
        """Number of the newest start."""
        return max((part.node.get("attempt", 0) for part in self.parts.values()), default=0)

    @property
    def started(self) -> float:
        """When the newest start began, in seconds since the epoch."""
        return max((part.node.get("started", 0.0) for part in self.newest), default=0.0)

    @property
    def ended(self) -> float | None:
        """When the last host ended; None while one is alive or did not say."""
        ends = [part.node.get("ended") for part in self.newest]
        return max(filter(None, ends), default=None) if self.status in ENDED else None

    @property
    def alive(self) -> bool:
        """Whether a host runs it, as far as is known."""
        return self.status in ALIVE

    @property
    def ranks(self) -> dict[int, tuple[str, HeartbeatReply]]:
        """{rank: (host, heartbeat)} of the newest start."""
        return {rank: (part.host, part.state(rank)) for part in self.newest for rank in part.ranks or part.states}

    @property
    def first(self) -> HeartbeatReply:
        """The heartbeat of the first rank that has one."""
        return next((state for _, (_, state) in sorted(self.ranks.items()) if state), HeartbeatReply())

    @property
    def comm_share(self) -> float | None:
        """Mean share of the time in which its ranks wait for communication, from 0 to 1; None if it is not measured."""
        return _mean(self.first.get("comm_share") or [])

    @property
    def mfu(self) -> float | None:
        """Mean share of the peak of their devices that its ranks use, from 0 to 1; None if it is unknown."""
        return _mean(self.first.get("mfu") or [])

    @property
    def result(self) -> dict[str, Any]:
        """The result of the first host that has one."""
        return next((result for result in self.results.values() if result), {})


@dataclass
class DashboardEvent:
    """Something that happened; `kind` is failed, lost, stopped, finished, started, restarted, preempted, requeued, back,
    warning or action.
    """

    time: float
    kind: str
    text: str
    run: str = ""
    host: str = ""


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def overall_status(parts: list[HostRun]) -> str:
    """Return the status of a run from its parts: the worst one, or alive while one is alive and none failed."""
    statuses = [part.status for part in parts]
    for status in ("failed", "lost", "running", "starting", "stopped", "finished", "none"):
        if status in statuses:
            return status
    return "unknown"


class ClusterView:
    """The state of all hosts and runs. Used in the event loop only."""

    def __init__(self, hosts: list[Host]) -> None:
        self.hosts = {host.name: LiveHost(host) for host in hosts}
        self.runs: dict[str, DashboardRun] = {}
        self.events: OrderedDict[tuple[str, ...], DashboardEvent] = OrderedDict()
        self.version = 0
        self.starts = 0  # changes with every start and end of a run
        self._changed = asyncio.Event()

    async def wait(self, version: int, limit: float) -> None:
        """Return when the state is newer than `version`, or after `limit` seconds."""
        deadline = time.monotonic() + limit
        while self.version == version and (left := deadline - time.monotonic()) > 0:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                return

    def change(self) -> None:
        """Tell all that wait that something has changed."""
        self.version += 1
        self._changed.set()

    def receive(self, host: str, kind: str, line: dict[str, Any]) -> None:
        """Take a line of a host's sampler."""
        state = self.hosts[host]
        if not state.connected:
            if state.why != "connecting":
                self.add_event("back", f"{host} answers again", host=host)
            state.connected, state.since, state.why, state.version = True, time.time(), "", next(_versions)
            for run in self.runs.values():
                if host in run.parts and run.alive:
                    self._judge(run)
            self.change()
        if kind == "beat":
            return
        if kind == "host":
            state.sample, state.version = {**state.sample, **line}, next(_versions)
            state.clock_offset = line["now"] - time.time()
        elif kind == "run":
            self._take_run(host, line)
        elif kind == "gone":
            self._forget(host, line["name"])
        else:
            why = f"cannot read the run folder {line['name']}" if kind == "unreadable" else line["error"]
            self.add_event("warning", f"{host}: {why}", host=host, key=("warning", host, why))
        self.change()

    def lost(self, host: str, why: str) -> None:
        """Record that a host does not answer."""
        state = self.hosts[host]
        if state.connected:
            self.add_event("lost", f"{host} does not answer: {why}", host=host)
            state.since = time.time()
        state.connected, state.why, state.version = False, why, next(_versions)
        for run in self.runs.values():
            if host in run.parts and run.alive:
                self._judge(run)
        self.change()

    def add_event(self, kind: str, text: str, *, at: float = 0.0, key: tuple[str, ...] = (), **about: str) -> None:
        """Add an event, or replace the one with the same key."""
        at = at or time.time()
        key = key or (kind, text, str(at))
        self.events[key] = DashboardEvent(at, kind, text, **about)
        if len(self.events) > EVENTS:
            self._drop_event()

    def _drop_event(self) -> None:
        """Drop the oldest event of the host that has most of them: it must not push out those of other hosts."""
        first = {name: next(iter(run.parts), "") for name, run in self.runs.items()}
        sources = {key: event.host or first.get(event.run, "") for key, event in self.events.items()}
        [(most, _)] = Counter(sources.values()).most_common(1)
        of_most = (key for key, one in sources.items() if one == most)
        del self.events[min(of_most, key=lambda key: self.events[key].time)]

    def _take_run(self, host: str, line: dict[str, Any]) -> None:
        name = line["name"]
        try:
            answer = checked_status(line["state"])
        except ReplyError as error:
            self.add_event("warning", f"{host}: run {name}: {error}", host=host, key=("warning", host, name))
            return
        if name not in self.runs and len(self.runs) >= RUNS:
            return
        new = name not in self.runs
        run = self.runs.setdefault(name, DashboardRun(name))
        # The folder comes from the inventory: a reply of a host never determines a path.
        folder = f"{self.hosts[host].host.data_dir}/runs/{name}"
        part = run.parts.setdefault(host, HostRun(host, folder))
        part.answer = answer
        part.ranks = part.node.get("ranks") or []
        run.checkpoints[host], run.results[host] = line["checkpoints"], line["result"]
        self._judge(run, new)

    def _forget(self, host: str, name: str) -> None:
        run = self.runs.get(name)
        if run and run.parts.pop(host, None) and not run.parts:
            del self.runs[name]
            self.starts += 1

    def _judge(self, run: DashboardRun, new: bool = False) -> None:
        """Set status and cause of a run, and add events about what changed."""
        for part in run.parts.values():
            state = self.hosts[part.host]
            part.silent = 0.0 if state.connected else max(LOST, time.time() - state.since)
            part.error = state.why
        run.version = next(_versions)
        newest = run.newest
        run.status = overall_status(newest)
        found = causes(newest, LOST - 0.1) if run.status not in ("finished", "stopped") else []
        run.cause = found[0].text if found else ""
        attempt = run.attempt
        before, run.reported = run.reported, (attempt, run.status)
        if before != run.reported or new:
            self.starts += 1
        about = {"run": run.name}
        if run.status in ("failed", "lost"):
            text = f"run {run.name} failed: {run.cause or 'no cause is known'}"
            self.add_event("failed", text, at=run.ended or _now(new, run), key=("end", run.name, str(attempt)), **about)
        elif before == run.reported:
            return
        elif run.status in ("finished", "stopped"):
            at, text = run.ended or _now(new, run), f"run {run.name} {run.status}"
            self.add_event(run.status, text, at=at, key=("end", run.name, str(attempt)), **about)
        elif attempt != before[0]:
            kind = "restarted" if attempt > 1 else "started"
            where = counted(len(newest[0].node.get("hosts", [])) if newest else 1, "host")
            text = f"run {run.name} {kind} on {where}" + (f" (start {attempt})" if attempt > 1 else "")
            self.add_event(kind, text, at=run.started, key=("start", run.name, str(attempt)), **about)


def _now(new: bool, run: DashboardRun) -> float:
    return (run.started if new else 0.0) or time.time()
