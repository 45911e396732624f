"""Monitor a run until it ends or fails, and collect the evidence of a failure."""

from __future__ import annotations

import functools
import re
import shlex
import time
from collections.abc import Callable, Iterable

from trainer.common.formats import counted, printable
from trainyard import front_end
from trainyard.run.answer_times import SHORTEST, AnswerTimes
from trainyard.run.follow.monitor import ENDED, Cause, Progress, Watch, causes
from trainyard.run.follow.rejoin import SIGN_OF_LIFE, Rejoin
from trainyard.run.follow.run_status import any_status, read_status
from trainyard.run.host_run import HostRun, last_step
from trainyard.run.launch.start_ranks import STOP_LIMIT
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.plan.gather_facts import Connect
from trainyard.run.types import PartEnd, Report, StepResult
from trainyard.wire.connection import AwakeClock, FanOut, call_hosts
from trainyard.wire.reply_types.run_replies import RunStatus
from trainyard.wire.run_errors import RunFailedError

TICK = 0.1  # s between two checks of the answers
POLL = 0.5  # s between two requests to a host, at least
LONG_POLL = 3.0  # s that a host delays its answer while nothing changes: fewer requests, and changes arrive at once
# s, where the limit of a lost host adapts: hosts that a switch takes at once are all silent for half the limit or more
SHORT_POLL = SHORTEST / 2
PROBE = 1.0  # s between two probes of a host that is late
_MISSING = re.compile(r"No such file or directory: '(/[^'\0]{1,4000})'")  # of a rank's error
REJOIN_GRACE = 600.0  # s for the ranks to write the checkpoint after which absent hosts rejoin
SETTLE = 1.5  # s to wait for the cause when only its consequences have been seen
ALIVE_LIMIT = (
    60.0  # s for a status of a host that answers probes meanwhile; one takes 0.6 s at a load of 11 on two cores
)
EVIDENCE_LIMIT = 3.0  # s for a host to return the end of its logs
TAIL = 20  # lines of a log shown with a failure
TRACEBACK = 200  # lines of a traceback shown with a failure
LINE_LIMIT = 1000  # characters of a line of a traceback


class Follower:
    """Keeps one status request pending at every host until the run ends or fails.

    A host answers when something changes, or else after some seconds, so monitoring costs little.
    """

    def __init__(
        self,
        parts: list[HostRun],
        connect: Connect,
        progress: Progress,
        options: LaunchOptions,
        report: Report,
        rejoin: Rejoin | None = None,
    ) -> None:
        self.rejoin = rejoin
        self.stopping: FanOut[StepResult] | None = None  # the request to stop for hosts that return
        self.parts, self.progress, self.report = parts, progress, report
        self.connections = {part.host: connect(part.host) for part in parts}
        self.connect, self.fixed_limit = connect, options.lost_limit
        self.clock = AwakeClock()
        longest = LONG_POLL if self.fixed_limit is None else min(LONG_POLL, self.fixed_limit / 3)
        self.wait = min(longest, options.progress_interval, options.stall_limit / 4)
        self.waits: dict[str, float] = {}  # of the pending requests
        self.times = AnswerTimes()
        self.probes: dict[str, FanOut[StepResult]] = {}
        self.probed_at: dict[str, float] = {}
        self.pending: dict[str, FanOut[RunStatus]] = {}
        self.requested_at: dict[str, float] = {}
        self.answered_at = dict.fromkeys(self.connections, self.clock.now())
        self.alive_at = dict(self.answered_at)  # when a host answered a request or a probe
        self.ran_at = dict(self.answered_at)  # when a supervisor was neither halted nor without a record

    @property
    def lost_limit(self) -> float:
        """Seconds of silence after which a host is lost: of the launch options, or by the recent answers of all hosts."""
        return self.times.limit(self.clock.now()) if self.fixed_limit is None else self.fixed_limit

    def follow(self) -> Cause | None:
        """Return the cause once the run has failed, or None once it has ended."""
        suspected_since: float | None = None
        while True:
            self.clock.turn()
            self.poll(at_once=suspected_since is not None)
            now = self.clock.now()
            for line in self.progress.lines(self.parts, now):
                self.report(line)
            found = causes(self.parts, self.lost_limit)
            if not found and (stall := self.progress.stalled(self.parts, now)):
                return stall
            if found:
                suspected_since = suspected_since or now
                # A host that does not answer may be the cause of the other hosts' errors. It answers, or its silence becomes
                # a cause of its own after `lost_limit`.
                running = [part for part in self.parts if part.status not in ENDED]
                settled = now - suspected_since > SETTLE and all(
                    self.answered_at[part.host] > suspected_since and part.silent <= SETTLE for part in running
                )
                if found[0].sure or settled:
                    return found[0]
            elif all(part.status in ENDED for part in self.parts):
                return None
            elif self.rejoin and not self.stopping and self.rejoin.update(self.parts, now):
                # All ranks write a checkpoint and stop, and the run starts again.
                returning = ", ".join(self.rejoin.returning)
                self.report(f"{returning} can take part again: the run stops at a checkpoint and starts again")
                requests = {part.host: {"grace": REJOIN_GRACE, "run_dir": part.run_dir} for part in self.parts}
                self.stopping = call_hosts(self.connect, "run_stop", requests)
            time.sleep(TICK)

    def poll(self, at_once: bool) -> None:
        """Read the answers, and send a new request to each host that answered. `at_once`: without a delayed answer."""
        now = self.clock.now()
        for part in self.parts:
            pending = self.pending.get(part.host)
            answered = pending is None or self.read_answer(part, pending)
            if answered and now - self.requested_at.get(part.host, 0) >= (TICK if at_once else POLL):
                self.requested_at[part.host] = now
                # Without what every host repeats: the bytes of all answers would grow with the square of the hosts.
                self.waits[part.host] = self.delay(part)
                wait = 0.0 if at_once else self.waits[part.host]
                ask = functools.partial(any_status, self.connections[part.host], part.run_dir, wait=wait, brief=True)
                self.pending[part.host] = FanOut({part.host: ask})
            # An answer that the host delays is not late.
            part.silent = now - self.answered_at[part.host] - self.waits.get(part.host, self.wait)
            if self.fixed_limit is None:
                self.probe(part, now)

    def delay(self, part: HostRun) -> float:
        """Return the seconds for which a host may delay its answer.

        Until its ranks train, they import modules with all cores, and each request would take CPU time from them.
        """
        trains = any(state.get("status") == "training" for state in part.states.values())
        return min(self.wait, SHORT_POLL) if self.fixed_limit is None and trains else self.wait

    def read_answer(self, part: HostRun, pending: FanOut[RunStatus]) -> bool:
        """Update the part if its host answered; return whether it did."""
        if pending.threads[part.host].is_alive():
            return False
        if part.host in pending.answers:
            part.answer, part.error = pending.answers.pop(part.host), ""
            self.answered_at[part.host] = self.alive_at[part.host] = now = self.clock.now()
            blind = part.answer.get("halted") or part.status == "unreadable"
            self.ran_at[part.host] = self.ran_at[part.host] if blind else now
            part.halted = now - self.ran_at[part.host]
            self.times.add(max(0.0, now - self.requested_at[part.host] - self.waits[part.host]), now)
            if part.node.get("restarts"):  # torchrun renumbers the ranks when it restarts them
                part.ranks = part.node["ranks"]
        part.error = pending.errors.get(part.host, part.error)
        return True

    def probe(self, part: HostRun, now: float) -> None:
        """Ask a host whose status is late for a sign of life, which needs no Python: a loaded host is slow, but not lost.

        A host that is alive but returns no status is silent once that has lasted for ALIVE_LIMIT.
        """
        if part.host in self.probes:
            probe = self.probes[part.host]
            if not probe.threads[part.host].is_alive():
                del self.probes[part.host]
                if part.host in probe.answers:
                    self.alive_at[part.host] = now
                    self.times.add(now - self.probed_at[part.host], now)
        elif part.silent > 0 and part.status not in ENDED and now - self.probed_at.get(part.host, 0.0) > PROBE:
            self.probed_at[part.host] = now
            call = functools.partial(self.connect(part.host).run, SIGN_OF_LIFE, verb="begin")
            self.probes[part.host] = FanOut({part.host: call})
        if part.silent < ALIVE_LIMIT:
            part.silent = min(part.silent, now - self.alive_at[part.host])


def follow_parts(
    run: str,
    parts: list[HostRun],
    connect: Connect,
    options: LaunchOptions,
    report: Report,
    *,
    rejoin: Rejoin | None = None,
    watch: Watch = lambda state: None,
    failed: Callable[[], None] = lambda: None,
) -> StepResult:
    """Monitor a run's parts to their end. On the first failure, call `failed`, and stop all of them.

    `rejoin`: says when the run stops for hosts that return. `watch`: see Progress. Returns `status` (finished or
    stopped), `hosts` (how each part ended), and `lines` for a stopped run. Raises RunFailedError: the run failed; its
    details hold `lines` (evidence), `cause`, `lost`, `stop_wanted`, `hosts`.
    """
    world_size = sum(len(part.ranks) for part in parts)
    where = ", ".join(part.host for part in parts)
    if any(part.status not in ENDED for part in parts):
        report(f"following {run}: {counted(world_size, 'rank')} on {where}")
        report(
            f"Ctrl-C leaves it running; to follow it again: {front_end.command('attach', run)}; "
            f"to stop it: {front_end.command('stop', run)}"
        )
    progress = Progress(world_size, options.progress_interval, options.stall_limit, watch)
    follower = Follower(parts, connect, progress, options, report, rejoin)
    cause = follower.follow()
    if follower.stopping:  # a stop must not reach the next start
        follower.stopping.wait(STOP_LIMIT)
    if cause is not None:
        failed()
        raise failed_run(parts, cause, connect, follower.lost_limit)
    ended: StepResult = {"hosts": part_ends(parts)}
    if all(part.status != "stopped" for part in parts):
        return ended | {"status": "finished"}
    line = f"run {run} was stopped after step {last_step(parts)}: {front_end.playbook('train')} with the same spec continues it"
    return ended | {"status": "stopped", "lines": [line]}


def failed_run(parts: list[HostRun], cause: Cause, connect: Connect, lost_limit: float) -> RunFailedError:
    """Stop the remaining processes of a failed run; return the error with its evidence."""
    # A host that has been silent for half the limit counts as lost: a switch takes several hosts at once.
    lost = [part.host for part in parts if part.silent > lost_limit / 2 and part.status not in ENDED]
    requests = {part.host: {"now": True, "run_dir": part.run_dir} for part in parts if part.host not in lost}
    stopping = call_hosts(connect, "run_stop", requests)
    lines = evidence(parts, cause, connect)
    unstopped = stopping.wait(STOP_LIMIT).errors
    rank = cause.rank if cause.rank >= 0 else None
    return RunFailedError(
        cause.text,
        lines=[*lines, *(f"cannot stop {host}: {error}" for host, error in unstopped.items())],
        cause={"host": cause.host, "rank": rank, "kind": cause.kind, "blocked_by": cause.blocked_by},
        lost=lost,
        stop_wanted=any(part.answer and part.answer.get("stop_wanted") for part in parts),
        hosts=part_ends(parts),
    )


def part_ends(parts: Iterable[HostRun]) -> dict[str, PartEnd]:
    """Return how each host's part ended."""
    return {part.host: {"status": part.status, "node": part.node, "ranks": part.states} for part in parts}


def evidence(parts: list[HostRun], cause: Cause, connect: Connect) -> list[str]:
    """Return the failed rank's traceback, the end of its log, and the paths of the logs; nothing of a lost host.

    A path that the rank did not find, but that its host has outside of the unit, comes first.
    """
    if cause.kind == "lost":
        return []
    part = next(part for part in parts if part.host == cause.host)
    error = part.state(cause.rank).get("error") or {}
    text = "" if error.get("plain") else str(error.get("traceback") or "").rstrip()
    traceback = [printable(line.expandtabs(), LINE_LIMIT) for line in text.splitlines()[-TRACEBACK:]]
    names = [*([f"rank{cause.rank}.log"] if cause.rank >= 0 else []), f"torchrun.{part.node_rank}.log"]
    tails = dict.fromkeys(names, -TAIL)
    missing = _MISSING.search(str(error.get("message") or "")) if part.node.get("unit") else None
    outside = missing[1] if missing else ""
    call = functools.partial(read_status, connect(part.host), part.run_dir, logs_from=tails, outside=outside)
    answer = FanOut({part.host: call}).wait(EVIDENCE_LIMIT).answers.get(part.host)
    logs = answer.get("logs", {}) if answer else {}
    places = {name: logs[name]["path"] if name in logs else f"{part.run_dir}/logs/{name}" for name in names}
    paths = [f"{name} on {part.host}: {place}" for name, place in places.items()]
    shown = next((name for name in names if name in logs and logs[name]["lines"]), None)
    # The log has the traceback, too.
    known = {line.strip() for line in traceback}
    ends = [line for line in logs[shown]["lines"][-TAIL:] if line.strip() not in known] if shown else []
    tail = [f"last lines of {shown}:", *(f"  {line}" for line in ends)] if ends else []
    hidden = f"{outside} is not shown to runs: {front_end.option('run_shows', shlex.quote(outside))}"
    first = [printable(hidden, LINE_LIMIT)] if answer and answer.get("outside") else []
    return [*first, *traceback, *([] if error.get("plain") else tail), *paths]
