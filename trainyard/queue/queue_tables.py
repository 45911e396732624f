"""The runs of the queue as tables: those that wait or run, and those that have ended."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from trainer.common.formats import clock, printable, table
from trainyard import front_end
from trainyard.queue.queue_client import MAX_TIME, QueueState, clock_time
from trainyard.queue.reasons import RUNNING, why_waiting
from trainyard.queue.request import Request
from trainyard.queue.slurm_conf import MAX_GPUS, PRIORITIES
from trainyard.remote.queue_phases import LIVE

ENDED = ("finished", "failed", "cancelled", "stopped")
_GPU = re.compile(r"[A-Za-z0-9-]{1,64}")
_LIST = ["run", "priority", "state", "hosts", "submitted", "ends about", "reason"]
_HISTORY = ["run", "priority", "state", "hosts", "submitted", "started", "ended", "took", "reason"]


def run_state(run: str, queue: QueueState) -> str:
    """Return the state of a run: waiting, held, running, ending, or how it ended; `unknown` without a trace."""
    if job := queue.jobs.get(run):
        if job.state in RUNNING:
            return "ending" if job.state == "COMPLETING" else "running"
        if job.state == "PENDING":
            return "held" if job.reason.startswith("JobHeld") else "waiting"
        return job.state.lower()
    phase = queue.states.get(run, {}).get("phase")
    # A job that has ended without the record of its driver, which follows in a moment.
    return str(phase) if phase in ENDED else "ending" if phase in LIVE else "unknown"


def state_words(state: str) -> str:
    """Return what follows the name of a run in this state in a sentence: `has failed`, `is waiting`."""
    return "has failed" if state == "failed" else f"is {state}"


def describe(run: str, queue: QueueState) -> dict[str, Any]:
    """Return one run as plain data: times are seconds since the epoch, and 0 if unknown."""
    request, job, state = queue.requests[run], queue.jobs.get(run), run_state(run, queue)
    recorded = queue.states.get(run, {})
    attempts, number = read_attempts(recorded), recorded.get("job")
    begun = [attempt["begin"] for attempt in attempts if attempt["begin"]]
    start = begun[0] if begun else job.start if job and job.state in RUNNING else 0.0
    end = job.end if job else _time(_exit(recorded).get("time")) or (attempts[-1]["end"] if attempts else 0.0)
    hosts = list(job.hosts) if job else []
    if attempts and not hosts:
        hosts = attempts[-1]["hosts"]
    return {
        "run": run,
        "job": job.number if job else number if isinstance(number, int) else None,
        # The priority may have been changed since the run was added.
        "priority": job.priority if job and job.priority in PRIORITIES else request.priority,
        "state": state,
        "hosts": hosts,
        "submitted": request.submitted,
        "user": request.user,
        "start": start,
        "end": end,
        "attempts": attempts,
        "reason": _reason(request, queue, state, attempts),
    }


def _reason(request: Request, queue: QueueState, state: str, attempts: list[dict[str, Any]]) -> str:
    job = queue.jobs.get(request.run)
    if job and job.state == "PENDING":
        return why_waiting(request, job, queue)
    # The last attempt of a run that was cancelled, or given up, ended for another reason than the run.
    if state in ENDED and (ending := _exit(queue.states.get(request.run, {}))):
        return "" if state == "cancelled" else printable(ending.get("reason") or "", 200)
    return str(attempts[-1]["reason"]) if attempts else ""


def _exit(recorded: dict[str, Any]) -> dict[str, Any]:
    """Return the end of a run that its driver recorded; empty without one."""
    ending = recorded.get("exit")
    return ending if isinstance(ending, dict) else {}


def read_attempts(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the starts of a run, as its driver recorded them in `state` on the queue host.

    Each has `hosts`, names; `gpus`, numbers or UUIDs by host; `begin` and `end` in seconds since the epoch, 0 if unknown;
    `reason`, why it ended, or an empty string; `order`, the code with which it ended, or None.
    """
    listed = state.get("attempts")
    found = []
    for attempt in listed[-100:] if isinstance(listed, list) else []:
        if isinstance(attempt, dict):
            hosts = attempt.get("hosts")
            names = [printable(name, 64) for name in list(hosts)[:64]] if isinstance(hosts, list | dict) else []
            gpus = {printable(name, 64): _gpus(has) for name, has in hosts.items()} if isinstance(hosts, dict) else {}
            times = {name: _time(attempt.get(name)) for name in ("begin", "end")}
            reason = printable(attempt.get("reason") or "", 200)
            order = attempt["order"] if isinstance(attempt.get("order"), int) else None
            found.append({"hosts": names, "gpus": gpus, **times, "reason": reason, "order": order})
    return found


def _gpus(has: Any) -> list[str]:
    """Return the GPUs that a start had on a host."""
    listed = has.get("gpus") if isinstance(has, dict) else None
    texts = listed[:MAX_GPUS] if isinstance(listed, list) else []
    return [text for text in texts if isinstance(text, str) and _GPU.fullmatch(text)]


def _time(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_TIME
    return float(value) if is_number else 0.0


def list_queue(queue: QueueState, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return the runs that wait or run: `runs` as data, `lines` as a table. The order is that in which they start.

    Args:
        names: names of the runs that are shown; empty for all.
    """
    runs = [describe(run, queue) for run in queue.requests if run in queue.jobs and (not names or run in names)]
    order = ("running", "ending", "waiting", "held")
    runs.sort(key=lambda run: (order.index(run["state"]) if run["state"] in order else 9, _place(run)))
    rows = []
    for run in runs:
        has_hosts = run["state"] in ("running", "ending")
        times = [_shown(run["submitted"], queue), _shown(run["end"] if run["state"] == "running" else 0.0, queue)]
        where = _hosts(run) if has_hosts else "-"
        rows.append([run["run"], run["priority"], run["state"], where, *times, run["reason"] or "-"])
    hint = [f"{front_end.queue_verb('history')} lists the runs that have ended"] if queue.requests else []
    return {"runs": runs, "lines": table([_LIST, *rows]) if rows else ["no run waits or runs", *hint]}


def _place(run: dict[str, Any]) -> tuple[int, int]:
    known = run["priority"] in PRIORITIES
    return -PRIORITIES.index(run["priority"]) if known else 1, run["job"] or 0


def list_history(queue: QueueState, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return every run of the queue, the newest first: `runs` as data, `lines` as a table. `names` as for `list_queue`."""
    wanted = [run for run in queue.requests if not names or run in names]
    runs = sorted((describe(run, queue) for run in wanted), key=lambda run: -run["submitted"])
    rows = []
    for run in runs:
        over = run["state"] in ENDED
        took = clock(run["end"] - run["start"]) if over and run["start"] and run["end"] >= run["start"] else "-"
        times = [
            _shown(run["submitted"], queue),
            _shown(run["start"], queue),
            _shown(run["end"] if over else 0.0, queue),
        ]
        rows.append([run["run"], run["priority"], run["state"], _hosts(run), *times, took, run["reason"] or "-"])
    return {"runs": runs, "lines": table([_HISTORY, *rows]) if rows else ["the queue had no run yet"]}


def _hosts(run: dict[str, Any]) -> str:
    return printable(",".join(run["hosts"]), 60) or "-"


def _shown(seconds: float, queue: QueueState) -> str:
    return clock_time(seconds, queue.now) if seconds else "-"
