"""Why a queued run is not started (again), from what its driver and those of other runs have recorded. Runs on the queue host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trainer.common.formats import printable
from trainer.supervise.run_files import read_json
from trainyard.queue.slurm_lease import AGAIN, ASKED_FOR, FAILED, Job
from trainyard.remote.queue_phases import LIVE, UNSATISFIED

_DEPENDENCY = re.compile(r"--dependency=afterok:([\d:]+)")
LOST_LIMIT = 10  # attempts in a row that lose a host and reach no further step
_WORDS = {"failed": "has failed", "cancelled": "was cancelled", "stopped": "was stopped"}


def never_starts(job: Job, folder: Path, state: dict[str, Any]) -> str:
    """Return why the job of a run can never start; empty if it can, or if that is not known yet.

    Args:
        folder: folder of the run.
        state: its `state.json`.
    """
    if not job.reason.startswith(UNSATISFIED):
        return ""
    request = read_json(folder / "request.json") or {}
    awaited = _awaited(state)
    for name in map(str, request.get("after") or []):
        before = read_json(folder.parent / name / "state.json") or {}
        phase = str(before.get("phase"))
        if before.get("job") not in awaited:  # it had finished when this run was added, or was added again since
            continue
        if phase in _WORDS:
            return _line(name, _WORDS[phase], str((before.get("exit") or {}).get("reason") or ""))
        if phase in LIVE:
            reason = _failed(before)  # else its driver records the end in a moment
            return _line(name, "has failed", reason) if reason else ""
    return "the job of a run that it waits for did not complete: add this run again"


def loses_hosts(attempts: list[dict[str, Any]]) -> str:
    """Return why a run that lost a host in each of its last attempts does not start again; empty if it may.

    Attempts that reached a further step, or that Slurm ended, for example for a preemption, begin the count anew.
    """
    last = attempts[-LOST_LIMIT:]
    lost = [attempt for attempt in last if attempt.get("order") == AGAIN and ASKED_FOR not in attempt.get("reason", "")]
    if len(lost) < LOST_LIMIT or len({attempt.get("reached", 0) for attempt in lost}) > 1:
        return ""
    return f"{LOST_LIMIT} attempts in a row lost a host and made no progress, the last one: {lost[-1]['reason']}"


def _awaited(state: dict[str, Any]) -> set[int]:
    """Return the jobs that the job of a run waits for."""
    found: set[int] = set()
    for word in state.get("arguments") or []:
        if match := _DEPENDENCY.fullmatch(str(word)):
            found |= {int(number) for number in match[1].split(":") if number}
    return found


def _failed(state: dict[str, Any]) -> str:
    """Return why the last attempt of a run has ended it; empty if it has not."""
    attempts = state.get("attempts") or [{}]
    return str(attempts[-1].get("reason") or "no reason") if attempts[-1].get("order") == FAILED else ""


def _line(name: str, what: str, reason: str) -> str:
    same = reason in ("", "it was cancelled", "it was stopped")
    return printable(f"run {name}, for which it waits, {what}{'' if same else f': {reason}'}", 500)
