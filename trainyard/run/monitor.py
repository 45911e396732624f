"""What is to be read from the answers of a run's hosts: how far it is, who lags, what broke it. Pure Python, no Ansible.

An answer is what `trainer/supervise.py status` printed on a host (docs/run-folder.md tells what is in it).
"""

from __future__ import annotations

import signal
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

DONE = ("finished", "stopped")
ENDED = (*DONE, "failed", "lost", "none")
LAG = 5  # steps behind the first rank that are worth a word
SLOW = 1.5  # times the others' time for its share of a step: worth a word, too
WAITING = "waiting for slower ranks"  # the trainer's word, where ranks meet every few steps
SLOW_STEPS = 5  # over so many of the steps that were heard of

# torchrun ends the workers beside a dead one by SIGTERM, and gloo aborts a process whose peer is gone: hardly ever a cause.
CONSEQUENCES = ("SIGTERM", "SIGABRT")


@dataclass
class Part:
    """One host's part of a run, and what was last heard of it."""

    host: str
    run_dir: str
    node_rank: int = 0
    ranks: list[int] = field(default_factory=list)
    answer: dict[str, Any] | None = None
    silent: float = 0.0  # seconds since its last answer
    trouble: str = ""  # why the last question failed
    replica: int | None = None  # the one that it belongs to, if each has a torchrun of its own and may be away

    @property
    def status(self) -> str:
        return self.answer["status"] if self.answer else "unknown"

    @property
    def node(self) -> dict[str, Any]:
        return (self.answer or {}).get("node") or {}

    @property
    def states(self) -> dict[int, dict[str, Any]]:
        """The ranks of this host that have written a heartbeat."""
        return {int(rank): state for rank, state in ((self.answer or {}).get("ranks") or {}).items()}


@dataclass(frozen=True, order=True)
class Cause:
    """Why a run broke. The lower the weight, the surer that this is the cause and not only its consequence."""

    weight: int
    rank: int
    host: str
    text: str
    kind: str = ""  # rank, torchrun, supervisor, host, lost (it does not answer), stall
    mend: str = ""  # what has to be mended before it can go on: "user" (a mistake in the run), "disk" (of that host)

    @property
    def sure(self) -> bool:
        return self.weight <= 1


def causes(parts: Iterable[Part], lost_limit: float) -> list[Cause]:
    """All that speaks for the run being broken, the surest first; empty while all is well. `lost_limit` in seconds."""
    parts = list(parts)
    found = [cause for part in parts for cause in part_causes(part, lost_limit)]
    if found:  # a part that was stopped by somebody is no failure, but it may be why the others failed
        found += [Cause(2, -1, p.host, f"{p.host} was stopped", "host") for p in parts if p.status == "stopped"]
    return sorted(found)


def others_go_on(parts: list[Part], found: list[Cause]) -> set[int]:
    """Return the replicas that are away by these causes, if the run goes on without them; else none.

    It needs the head, which keeps the lighthouse, and one replica; and a mistake is not mended by starting again.
    """
    away = {p.replica for cause in found for p in parts if p.host == cause.host and p.replica is not None}
    there = [part for part in parts if part.replica not in away and part.status not in ("failed", "lost", "none")]
    if not there or any(cause.host == parts[0].host or cause.mend == "user" for cause in found):
        return set()
    return {replica for replica in away if replica is not None}


def left_behind(part: Part) -> bool:
    """Tell whether a part that runs is not at the run's last step, or beyond."""
    return part.status == "running" and not any(
        state.get("steps") and state.get("step") == state["steps"] for state in part.states.values()
    )


def killed_ranks(part: Part) -> list[int]:
    """Return the ranks of a stopped part that did not leave by themselves, with a checkpoint: their last word is of work."""
    if part.status != "stopped":
        return []
    return [rank for rank, state in sorted(part.states.items()) if state.get("status") not in (*DONE, "failed")]


def part_causes(part: Part, lost_limit: float) -> list[Cause]:
    if part.status not in ENDED and part.silent > lost_limit:
        why = f" ({part.trouble})" if part.trouble else ""
        return [Cause(1, -1, part.host, f"{part.host} has not answered for {part.silent:.0f} s{why}", "lost")]
    if part.status == "none":
        return [Cause(1, -1, part.host, f"there is no run in {part.run_dir} on {part.host}", "host")]
    if part.status == "lost":
        why = f" ({part.answer['why']})" if part.answer and part.answer.get("why") else ""
        # A rank may have said why before its supervisor could not say anything any more (a full disk).
        said = [cause for rank in part.ranks if (cause := rank_cause(part, rank)) and cause.weight == 0]
        return said or [Cause(1, -1, part.host, f"the supervisor on {part.host} is gone{why}", "supervisor")]
    if part.node.get("restarts") and part.status == "running":
        return []  # torchrun restarts its ranks itself
    found = [cause for rank in part.ranks if (cause := rank_cause(part, rank))]
    if part.status == "failed" and not found:
        found = [torchrun_cause(part)]
    return found


def rank_cause(part: Part, rank: int) -> Cause | None:
    state = part.states.get(rank, {})
    if state.get("status") in DONE:
        return None  # a rank is judged by its own word
    place = f"rank {rank} on {part.host}"
    failed = next((entry for entry in part.node.get("failures", []) if entry["rank"] == rank), None)
    if error := state.get("error"):
        message = (str(error.get("message") or "").strip().splitlines() or [""])[0]
        text = message if error.get("plain") or not error.get("type") else f"{error['type']}: {message}".rstrip(": ")
        mend = "disk" if error.get("type") == "DiskError" else "user" if error.get("plain") else ""
        return Cause(4 if error.get("secondary") else 0, rank, part.host, f"{place}: {text}", "rank", mend)
    if failed is None:
        return None
    if failed["signal"]:
        memory = (
            ", while its machine was out of memory" if part.node.get("oom") and failed["signal"] == "SIGKILL" else ""
        )
        weight = 2 if failed["signal"] in CONSEQUENCES else 0
        return Cause(weight, rank, part.host, f"{place} was killed by {failed['signal']}{memory}", "rank")
    how = "died" if failed["exit_code"] is None else f"ended with exit code {failed['exit_code']}"
    return Cause(2, rank, part.host, f"{place} {how}", "rank")


def torchrun_cause(part: Part) -> Cause:
    if error := part.node.get("error"):
        return Cause(0, -1, part.host, f"{part.host}: {error}", "torchrun")
    code = part.node.get("exit_code") or 0
    if code < 0:
        return Cause(1, -1, part.host, f"torchrun on {part.host} was killed by {signal_name(-code)}", "torchrun")
    return Cause(3, -1, part.host, f"torchrun on {part.host} ended with exit code {code}", "torchrun")


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Progress:
    """Turns answers into the few lines that a person wants to read. Times are seconds on one monotonic clock."""

    def __init__(self, world_size: int, interval: float, stall_limit: float) -> None:
        self.world_size, self.interval, self.stall_limit = world_size, interval, stall_limit
        self.shown_step, self.shown_at = -1, float("-inf")
        self.phase = ""
        self.lagging: set[int] = set()
        self.slow: set[int] = set()
        self.times: list[list[float]] = []
        self.timed_step = 0
        self.beats: dict[int, tuple[Any, ...]] = {}
        self.moved_at: float | None = None

    def lines(self, parts: Iterable[Part], now: float) -> list[str]:
        """What is new since the last call."""
        states = {rank: state for part in parts for rank, state in part.states.items()}
        if not states:
            return []
        first = states[min(states)]  # rank 0 where it is heard
        lines = []
        phase = first.get("status", "")
        done = phase in DONE or (first.get("steps") and first.get("step") == first.get("steps"))
        stepped = first.get("step") is not None and first["step"] != self.shown_step and first.get("loss") is not None
        if stepped and (done or now - self.shown_at >= self.interval):
            lines.append(progress_line(first, self.world_size))
            self.shown_step, self.shown_at = first["step"], now
        if (word := phase_line(first)) != self.phase:
            self.phase = word
            lines += [word] if word else []
        where = {rank: part for part in parts for rank in part.states}
        return lines + self.lag_lines(where, states) + self.slow_lines(where, first)

    def lag_lines(self, where: dict[int, Part], states: dict[int, dict[str, Any]]) -> list[str]:
        steps = {rank: state.get("step") or 0 for rank, state in states.items() if state.get("status") == "training"}
        behind = {}
        for rank, step in steps.items():
            # Hosts are not heard at one moment: only what was known of the others before counts against a rank.
            earlier = [steps[other] for other in steps if where[other].silent >= where[rank].silent]
            if max(earlier) - step >= LAG:
                behind[rank] = max(earlier) - step
        new = {rank: gap for rank, gap in behind.items() if rank not in self.lagging}
        self.lagging = set(behind)
        return [
            f"rank {rank} on {where[rank].host} is {gap} steps behind the first" for rank, gap in sorted(new.items())
        ]

    def slow_lines(self, where: dict[int, Part], first: dict[str, Any]) -> list[str]:
        """A word, once, for a rank whose share of a step takes it much longer than the others theirs."""
        seconds = first.get("step_seconds") or []
        if first.get("status") != "training" or len(seconds) < 2 or first["step"] == self.timed_step:
            return []
        self.timed_step = first["step"]
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
        return [f"rank {rank}{on} takes {mean[rank]:.2g} s a step, the others {others:.2g} s: they wait for it"]

    def stalled(self, parts: Iterable[Part], now: float) -> Cause | None:
        """A cause if no rank gave a sign of progress for the stall limit. Ranks wait for each other at every step, so
        one that hangs holds all; the one that is hindmost, or halted, is named."""
        parts = list(parts)
        # One that waits for another says so again and again, and is no further for it.
        beats = {
            rank: (state.get("pid"), state.get("status"), state.get("step"), not waits(state) and state.get("time"))
            for part in parts
            for rank, state in part.states.items()
        }
        if self.moved_at is None or beats != self.beats:
            self.beats, self.moved_at = beats, now
        if now - self.moved_at < self.stall_limit:
            return None
        waiting = [
            (not halted(state), state.get("step") or 0, rank, part.host, state)
            for part in parts
            for rank in part.ranks
            if (state := part.states.get(rank, {})).get("status") not in DONE
        ]
        since = f"no progress for {self.stall_limit:.0f} s"
        if not waiting:
            return Cause(2, -1, parts[0].host, f"{since}: the ranks are done but torchrun does not end", "stall")
        running, step, rank, host, state = min(waiting, key=lambda w: w[:3])
        if not state:
            how = "has not written a heartbeat yet"
        elif not running:
            how = f"is halted (SIGSTOP or a debugger) at step {step}"
        else:
            how = f"is the hindmost, at step {step} ({state.get('status')})"
        return Cause(1, rank, host, f"{since}: rank {rank} on {host} {how}", "stall")


def waits(state: dict[str, Any]) -> bool:
    return state.get("note") == WAITING


def halted(state: dict[str, Any]) -> bool:
    return state.get("process") in ("T", "t")


def progress_line(state: dict[str, Any], world_size: int) -> str:
    """`step 12/80  loss 5.31  1.9k tok/s  ETA 0:42  (4 ranks)`"""
    words = [f"step {state['step']}/{state.get('steps') or '?'}", f"loss {state['loss']:.4g}"]
    if state.get("tokens_per_second"):
        words.append(f"{thousands(state['tokens_per_second'])} tok/s")
    if state.get("eta") is not None and state.get("status") not in DONE and state["step"] != state.get("steps"):
        words.append(f"ETA {clock(state['eta'])}")
    return "  ".join([*words, f"({world_size} rank{'s' if world_size > 1 else ''})"])


def phase_line(state: dict[str, Any]) -> str:
    """A word for what is not plain training; empty for that."""
    words = {"starting": "starting", "evaluating": "evaluating", "saving": "saving a checkpoint"}
    note = state.get("note") or ""
    word = words.get(state.get("status", ""), "")
    return ": ".join(part for part in (word, note) if part)


def thousands(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"


def clock(seconds: float) -> str:
    minutes, rest = divmod(int(max(0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def table(rows: list[list[str]]) -> list[str]:
    """Columns as wide as their widest word; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def status_rows(host: str, answer: dict[str, Any]) -> list[list[str]]:
    """One row for each rank of one run on one host: run, host, rank, state, step, loss, tok/s, GPU, last heartbeat."""
    node = answer.get("node") or {}
    part = Part(host, answer.get("run_dir", ""), ranks=node.get("ranks") or [], answer=answer)
    rows = []
    for rank in part.ranks or sorted(part.states):
        state = part.states.get(rank, {})
        doing = part.status if part.status != "running" else state.get("status") or "starting"
        step, loss, speed = state.get("step"), state.get("loss"), state.get("tokens_per_second")
        rows.append(
            [
                node.get("run", ""),
                host,
                str(rank),
                doing,
                "-" if step is None else f"{step}/{state.get('steps') or '?'}",
                "-" if loss is None else f"{loss:.4g}",
                thousands(speed) if speed else "-",
                gpu_word(state.get("gpu") or {}),
                f"{clock(answer['now'] - state['time'])} ago" if state.get("time") else "-",
            ]
        )
    return rows


def gpu_word(use: dict[str, float]) -> str:
    """`87% 11.2GB`: what a rank tells of its GPU, the most memory that it has held; a dash without one."""
    share, memory = use.get("utilisation_percent"), use.get("memory_peak_gb")
    words = [] if share is None else [f"{share:.0f}%"]
    return " ".join([*words, *([] if memory is None else [f"{memory:.1f}GB"])]) or "-"


STATUS_HEAD = ["run", "host", "rank", "state", "step", "loss", "tok/s", "GPU", "heartbeat"]
