"""Evaluates the status of a run's hosts: the cause of a failure, progress, slow and stalled ranks.

A status is the answer of the verb `run_status` (docs/internals/run-folder.md describes its files).
"""

from __future__ import annotations

import signal
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from trainer.common.formats import clock, printable, thousands
from trainer.supervise.status import HALTED
from trainyard.run.host_run import ENDED_WELL, HostRun
from trainyard.wire.reply_types.run_replies import GpuUse, HeartbeatReply

ENDED = (*ENDED_WELL, "failed", "lost", "none")
MESSAGE_LIMIT = 1000  # characters of a rank's error message
SLOW = 1.5  # ratio of a rank's step time to the median of the others' that is reported
GPU_INTERVAL = 10.0  # s between two lines about the GPUs
GPU_RANKS = 16  # ranks in such a line
SLOW_STEPS = 5  # steps over which step times are averaged
IMPORTING: HeartbeatReply = {"status": "starting", "note": "importing torch"}  # what no rank can report of itself
WAITING = "waiting for slower ranks"  # the trainer's note while a rank waits at a synchronization

# torchrun ends the other workers of a dead one with SIGTERM, and gloo aborts a process whose peer has exited. Neither
# is usually the cause.
CONSEQUENCES = ("SIGTERM", "SIGABRT")


Watch = Callable[[HeartbeatReply], None]


@dataclass(frozen=True, order=True)
class Cause:
    """Why a run failed. The lower the weight, the more likely it is the cause and not a consequence.

    Attributes:
        blocked_by: what must be fixed before a restart can succeed: `user` (a mistake in the run), `disk` (of the host),
            or empty.
    """

    weight: int
    rank: int  # global rank, or -1 if the cause is not one rank
    host: str
    text: str
    kind: str = ""  # rank, torchrun, supervisor, host, lost (no answer) or stall
    blocked_by: str = ""

    @property
    def sure(self) -> bool:
        """Whether it is certainly a cause."""
        return self.weight <= 1


def causes(parts: Iterable[HostRun], lost_limit: float) -> list[Cause]:
    """Return all signs of a failure, the most likely cause first. `lost_limit` in seconds."""
    parts = list(parts)
    found = [cause for part in parts for cause in part_causes(part, lost_limit)]
    if found:  # a stopped part is not a failure, but may have caused failures of others
        found += [Cause(2, -1, p.host, f"{p.host} was stopped", "host") for p in parts if p.status == "stopped"]
        full = [
            part for part in parts if part.answer and part.answer.get("disk_full")
        ]  # its ranks may have reported nothing
        found += [Cause(2, -2, p.host, f"{p.host}: the disk is full", "host", "disk") for p in full]
    return sorted(found)


def part_causes(part: HostRun, lost_limit: float) -> list[Cause]:
    """Return the evidence of a failure in one host's status."""
    if part.status not in ENDED and part.silent > lost_limit:
        why = f" ({part.error})" if part.error else ""
        return [Cause(1, -1, part.host, f"{part.host} has not answered for {part.silent:.0f} s{why}", "lost")]
    if part.status not in ENDED and part.halted > lost_limit:  # code of the run may do that to all that would end it
        why = f"the supervisor on {part.host} is halted (SIGSTOP or a debugger)"
        why = f"{part.host} cannot read the record of the run" if part.status == "unreadable" else why
        return [Cause(1, -1, part.host, why, "supervisor")]
    if part.status == "none":
        return [Cause(1, -1, part.host, f"there is no run in {part.run_dir} on {part.host}", "host")]
    if part.status == "lost":
        why = f" ({part.answer['why']})" if part.answer and part.answer.get("why") else ""
        # A rank may have reported the cause before its supervisor could no longer write (a full disk).
        told = [cause for rank in part.ranks if (cause := rank_cause(part, rank)) and cause.weight == 0]
        return told or [Cause(1, -1, part.host, f"the supervisor on {part.host} has exited{why}", "supervisor")]
    if part.node.get("restarts") and part.status == "running":
        return []  # torchrun restarts its ranks itself
    found = [cause for rank in part.ranks if (cause := rank_cause(part, rank))]
    if part.status == "failed" and not found:
        found = [torchrun_cause(part)]
    return found


def rank_cause(part: HostRun, rank: int) -> Cause | None:
    """Return the evidence of a failure in the heartbeat or the exit of a rank; None if there is none."""
    state = part.state(rank)
    if state.get("status") in ENDED_WELL:
        return None  # the rank's own report has precedence over that of torchrun
    place = part.name_of(rank)
    failed = next((entry for entry in part.node.get("failures", []) if entry["rank"] == rank), None)
    if error := state.get("error"):
        message = printable((str(error.get("message") or "").strip().splitlines() or [""])[0], MESSAGE_LIMIT)
        text = message if error.get("plain") or not error.get("type") else f"{error['type']}: {message}".rstrip(": ")
        blocked_by = "disk" if error.get("type") == "DiskError" else "user" if error.get("plain") else ""
        return Cause(4 if error.get("secondary") else 0, rank, part.host, f"{place}: {text}", "rank", blocked_by)
    if failed is None:
        return None
    if name := failed.get("signal"):
        memory = ", while its machine was out of memory" if part.node.get("oom") and name == "SIGKILL" else ""
        weight = 2 if name in CONSEQUENCES else 0
        return Cause(weight, rank, part.host, f"{place} was killed by {name}{memory}", "rank")
    code = failed.get("exit_code")
    how = "died" if code is None else f"ended with exit code {code}"
    return Cause(2, rank, part.host, f"{place} {how}", "rank")


def torchrun_cause(part: HostRun) -> Cause:
    """Return how torchrun ended on a host none of whose ranks names a cause."""
    if error := part.node.get("error"):
        return Cause(0, -1, part.host, f"{part.host}: {error}", "torchrun")
    code = part.node.get("exit_code") or 0
    if code < 0:
        return Cause(1, -1, part.host, f"torchrun on {part.host} was killed by {signal_name(-code)}", "torchrun")
    return Cause(3, -1, part.host, f"torchrun on {part.host} ended with exit code {code}", "torchrun")


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Progress:
    """Turns statuses into progress lines. Times are seconds of one monotonic clock.

    `interval`: minimum seconds between two progress lines. `stall_limit`: seconds without progress of any rank after
    which the run is stalled. `watch`: receives each heartbeat of the first rank.
    """

    def __init__(self, world_size: int, interval: float, stall_limit: float, watch: Watch = lambda state: None) -> None:
        self.watch = watch
        self.world_size, self.interval, self.stall_limit = world_size, interval, stall_limit
        self.shown_step, self.shown_at = -1, float("-inf")
        self.gpu_shown_at = float("-inf")
        self.phase = ""
        self.resumed = 0
        self.slow: set[int] = set()
        self.times: list[list[float]] = []
        self.timed_step: int | None = 0
        self.beats: dict[int, tuple[Any, ...]] = {}
        self.moved_at: float | None = None

    def lines(self, parts: Iterable[HostRun], now: float) -> list[str]:
        """Return what changed since the last call."""
        parts = list(parts)
        states = {rank: state for part in parts for rank, state in part.states.items()}
        if not states:
            # torchrun imports torch before it starts the ranks.
            imports = not self.phase and any(part.status == "running" for part in parts)
            self.phase = phase_line(IMPORTING) if imports else self.phase
            return [self.phase] if imports else []
        first = states[min(states)]  # rank 0 if it has a heartbeat
        self.watch(first)
        lines = []
        if (resumed := first.get("resumed") or 0) != self.resumed:
            self.resumed = resumed
            lines += [f"resuming from the checkpoint of step {resumed}"] if resumed else []
        status = first.get("status", "")
        done = status in ENDED_WELL or (first.get("steps") and first.get("step") == first.get("steps"))
        stepped = first.get("step") is not None and first["step"] != self.shown_step and first.get("loss") is not None
        if stepped and (done or now - self.shown_at >= self.interval):
            lines.append(progress_line(first, self.world_size))
            self.shown_step, self.shown_at = first["step"] or 0, now
            if now - self.gpu_shown_at >= GPU_INTERVAL and (line := gpu_line(states)):
                lines.append(line)
                self.gpu_shown_at = now
        if (phase := phase_line(first)) != self.phase:
            self.phase = phase
            lines += [phase] if phase else []
        where = {rank: part for part in parts for rank in part.states}
        return lines + self._slow_lines(where, first)

    def _slow_lines(self, where: dict[int, HostRun], first: HeartbeatReply) -> list[str]:
        """Report once a rank whose share of a step takes much longer than the other ranks' shares."""
        seconds = first.get("step_seconds") or []
        if first.get("status") != "training" or len(seconds) < 2 or first.get("step") == self.timed_step:
            return []
        self.timed_step = first.get("step")
        if self.times and len(seconds) != len(self.times[-1]):  # the number of ranks has changed
            self.times.clear()
        self.times.append(seconds)
        if len(self.times) < SLOW_STEPS:
            return []
        mean = [statistics.fmean(column) for column in zip(*self.times[-SLOW_STEPS:], strict=True)]
        rank = mean.index(max(mean))
        others = statistics.median(mean[:rank] + mean[rank + 1 :])
        if mean[rank] < SLOW * others or rank in self.slow:
            return []
        self.slow.add(rank)
        on = f" on {where[rank].host}" if rank in where else ""
        return [f"rank {rank}{on} takes {mean[rank]:.2g} s per step, the other ranks {others:.2g} s: they wait for it"]

    def stalled(self, parts: Iterable[HostRun], now: float) -> Cause | None:
        """Return a cause if no rank made progress for the stall limit.

        Ranks wait for each other at every step, so one that hangs blocks all. The cause names the rank that is halted,
        or else the one at the lowest step.
        """
        parts = list(parts)
        # A rank that waits for a peer updates its heartbeat without making progress.
        beats = {
            rank: (*map(state.get, ("pid", "status", "step")), state.get("note") != WAITING and state.get("time"))
            for part in parts
            for rank, state in part.states.items()
        }
        if self.moved_at is None or beats != self.beats:
            self.beats, self.moved_at = beats, now
        if now - self.moved_at < self.stall_limit:
            return None
        waiting = [
            (state.get("process") not in HALTED, state.get("step") or 0, rank, part.host, part.name_of(rank), state)
            for part in parts
            for rank in part.ranks
            if (state := part.state(rank)).get("status") not in ENDED_WELL
        ]
        since = f"no progress for {self.stall_limit:.0f} s"
        if not waiting:
            return Cause(2, -1, parts[0].host, f"{since}: all ranks have ended but torchrun has not", "stall")
        running, step, rank, host, name, state = min(waiting, key=lambda entry: entry[:3])
        if not state:
            how = "has not written a heartbeat yet"
        elif not running:
            how = f"is halted (SIGSTOP or a debugger) at step {step}"
        else:
            how = f"is the slowest rank, at step {step} ({state.get('status')})"
        return Cause(1, rank, host, f"{since}: {name} {how}", "stall")


def progress_line(state: HeartbeatReply, world_size: int) -> str:
    """Return a line such as ``step 12/80  loss 5.31  1.9k tok/s  ETA 0:42  (4 ranks)``."""
    words = [f"step {state['step']}/{state.get('steps') or '?'}", f"loss {state['loss']:.4g}"]
    if (reward := state.get("reward")) is not None:
        words.append(f"reward {reward:.4g}")
    if speed := state.get("tokens_per_second"):
        words.append(f"{thousands(speed)} tok/s")
    eta = state.get("eta")
    if eta is not None and state.get("status") not in ENDED_WELL and state["step"] != state.get("steps"):
        words.append(f"ETA {clock(eta)}")
    return "  ".join([*words, f"({world_size} rank{'s' if world_size > 1 else ''})"])


def gpu_cell(use: GpuUse | None) -> str:
    """Return the use of a rank's GPU, such as ``87% 11.2GB 65C 240W``; a dash without a GPU.

    The memory is what is in use on the GPU, or else the peak of the rank.
    """
    if not use:
        return "-"
    memory = use.get("memory_gb")
    shown = (
        (use.get("utilisation_percent"), "{:.0f}%"),
        (use.get("memory_peak_gb") if memory is None else memory, "{:.1f}GB"),
        (use.get("temperature_c"), "{:.0f}C"),
        (use.get("power_w"), "{:.0f}W"),
    )
    return " ".join(form.format(value) for value, form in shown if value is not None) or "-"


def gpu_line(states: dict[int, HeartbeatReply]) -> str:
    """Return the use of all ranks' GPUs in one line; empty if no rank has one."""
    cells = {rank: cell for rank, state in sorted(states.items()) if (cell := gpu_cell(state.get("gpu"))) != "-"}
    shown = [f"rank {rank} {cell}" for rank, cell in list(cells.items())[:GPU_RANKS]]
    more = [f"{len(cells) - GPU_RANKS} more ranks"] if len(cells) > GPU_RANKS else []
    return f"GPU  {', '.join([*shown, *more])}" if cells else ""


def phase_line(state: HeartbeatReply) -> str:
    """Return the activity of a rank outside of training steps; empty during those."""
    phases = {"starting": "starting", "evaluating": "evaluating", "saving": "saving a checkpoint"}
    words = (phases.get(state.get("status", ""), ""), state.get("note") or "")
    return ": ".join(word for word in words if word)
