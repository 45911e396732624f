"""The runs of the queue as tables: those that wait or run, and those that have ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.common.formats import clock, printable, table
from trainyard import front_end
from trainyard.queue.queue_client import QueueState, clock_time
from trainyard.queue.reasons import RUNNING, why_waiting
from trainyard.queue.slurm_conf import PRIORITIES
from trainyard.remote.queue_phases import LIVE
from trainyard.wire.reply_types.queue_replies import RunRecord

ENDED = ("finished", "failed", "cancelled", "stopped")
_ORDER = ("running", "ending", "waiting", "held")
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
    phase = queue.states.get(run, RunRecord()).get("phase", "")
    # A job that has ended without the record of its driver, which follows in a moment.
    return phase if phase in ENDED else "ending" if phase in LIVE else "unknown"


def state_words(state: str) -> str:
    """Return what follows the name of a run in this state in a sentence: `has failed`, `is waiting`."""
    return "has failed" if state == "failed" else f"is {state}"


def describe(run: str, queue: QueueState) -> dict[str, Any]:
    """Return one run as plain data: times are seconds since the epoch, and 0 if unknown."""
    request, job, state = queue.requests[run], queue.jobs.get(run), run_state(run, queue)
    attempts, recorded = queue.attempts(run), queue.states.get(run, RunRecord())
    last, over = attempts[-1] if attempts else None, recorded.get("exit")
    # The last attempt of a run that was cancelled, or given up, ended for another reason than the run.
    reason = over["reason"] if over and state in ENDED else last.get("reason", "") if last else ""
    if job and job.state == "PENDING":
        reason = why_waiting(request, job, queue)
    elif state == "cancelled":
        reason = ""
    return {
        "run": run,
        "job": job.number if job else recorded.get("job"),
        # The priority may have been changed since the run was added.
        "priority": job.priority if job and job.priority in PRIORITIES else request.priority,
        "state": state,
        "hosts": list(job.hosts if job and job.hosts else last["hosts"] if last else ()),
        "submitted": request.submitted,
        "user": request.user,
        "start": attempts[0]["begin"] if attempts else job.start if job and job.state in RUNNING else 0.0,
        "end": job.end if job else (over and over.get("time")) or (last and last.get("end")) or 0.0,
        "attempts": attempts,
        "reason": printable(reason, 200),
    }


def list_queue(queue: QueueState, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return the runs (only `names`, if any) that wait or run, as they start: `runs` as data, `lines` as a table."""

    def place(run: dict[str, Any]) -> tuple[int, int, int]:
        known = run["priority"] in PRIORITIES
        order = _ORDER.index(run["state"]) if run["state"] in _ORDER else 9
        return order, -PRIORITIES.index(run["priority"]) if known else 1, run["job"] or 0

    runs = [describe(run, queue) for run in queue.requests if run in queue.jobs and (not names or run in names)]
    runs.sort(key=place)
    rows = []
    for run in runs:
        times = [_shown(run["submitted"], queue), _shown(run["end"] if run["state"] == "running" else 0.0, queue)]
        where = _hosts(run) if run["state"] in ("running", "ending") else "-"
        rows.append([run["run"], run["priority"], run["state"], where, *times, run["reason"] or "-"])
    hint = [f"{front_end.queue_verb('history')} lists the runs that have ended"] if queue.requests else []
    return {"runs": runs, "lines": table([_LIST, *rows]) if rows else ["no run waits or runs", *hint]}


def list_history(queue: QueueState, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return every run of the queue, the newest first: `runs` as data, `lines` as a table. `names` as for `list_queue`."""
    wanted = [run for run in queue.requests if not names or run in names]
    runs = sorted((describe(run, queue) for run in wanted), key=lambda run: -run["submitted"])
    rows = []
    for run in runs:
        start, end = run["start"], run["end"] if run["state"] in ENDED else 0.0
        times = [_shown(moment, queue) for moment in (run["submitted"], start, end)]
        times.append(clock(end - start) if start and end >= start else "-")
        rows.append([run["run"], run["priority"], run["state"], _hosts(run), *times, run["reason"] or "-"])
    return {"runs": runs, "lines": table([_HISTORY, *rows]) if rows else ["the queue had no run yet"]}


def _hosts(run: dict[str, Any]) -> str:
    return printable(",".join(run["hosts"]), 60) or "-"


def _shown(seconds: float, queue: QueueState) -> str:
    return clock_time(seconds, queue.now) if seconds else "-"
