"""Decide whether a run that failed is restarted, and when; say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainyard import front_end
from trainyard.run.types import RunFailure, StepResult
from trainyard.wire.run_errors import RunError

MANY = 1000  # restarts above which the limit is not shown
MOST_DOUBLINGS = 64  # of a wait, which a limit ends long before; more would exceed the largest float


@dataclass
class RestartPolicy:
    """Counts consecutive failures without progress. After progress, the next failure counts as the first."""

    max_restarts: int  # maximum consecutive restarts without progress
    min_nodes: int  # minimum number of hosts; 0 requires all
    delay: float  # seconds before a restart without progress; it doubles with each consecutive one, up to `delay_max`
    delay_max: float = 60.0
    best: int = -1  # highest step that any start reached
    failures: int = 0  # consecutive failures without progress
    progressed: bool = False  # whether the start that failed last had got further than those before it

    def note_progress(self, ended: StepResult) -> None:
        """Take note of a start that ended without a failure, to be followed by another one; `ended` has `hosts`."""
        if (step := furthest_step(ended)) > self.best:
            self.best, self.failures = step, 0

    def record(self, failure: RunFailure, hosts: int) -> str:
        """Record a failure; return why it ends the run, or an empty string if the run is restarted.

        Args:
            failure: `cause`, `hosts`, `stop_wanted` of a run that failed; none of these if it did not start.
            hosts: number of the run's hosts, reachable or not.
        """
        step = furthest_step(failure)
        self.progressed = step > max(self.best, 0)
        self.failures = 1 if step > self.best else self.failures + 1
        self.best = max(step, self.best)
        cause = failure.get("cause")
        blocked_by = cause["blocked_by"] if cause else ""
        if failure.get("stop_wanted"):
            return f"it was stopped: {front_end.playbook('train')} with the same spec continues it"
        if blocked_by == "user":
            return "it would fail again"
        if cause and blocked_by == "disk" and not 0 < self.min_nodes < hosts:
            return f"the disk of {cause['host']} is full, and min_nodes does not allow fewer hosts"
        if self.failures > self.max_restarts:
            return f"{self.max_restarts} consecutive restarts made no progress"
        return ""

    def wait(self) -> float:
        """Return the seconds to wait before the next start: none after progress."""
        doubled = self.delay * 2 ** min(self.failures - 1, MOST_DOUBLINGS)
        return 0.0 if self.progressed else min(self.delay_max, doubled)

    def lines(self, failure: RunFailure) -> list[str]:
        """Return what a user is told about a failure, and about the restart that follows it."""
        limit = f" of {self.max_restarts}" if self.max_restarts < MANY else ""
        again = f"restarting in {self.wait():.0f} s (restart {self.failures}{limit} without progress in between)"
        return [f"failed: {failure['msg']}", *failure.get("lines", []), again]

    def error(self, failure: RunFailure, why: str) -> RunError:
        """Return the error of a run that is not restarted."""
        details: dict[str, Any] = {name: value for name, value in failure.items() if name != "msg"}
        more = [f"not restarted: {why}"] if self.max_restarts else []
        return RunError(failure["msg"], **details | {"lines": [*failure.get("lines", []), *more]})


def furthest_step(failure: RunFailure | StepResult) -> int:
    """Return the highest step that any rank reported."""
    states = [state for part in (failure.get("hosts") or {}).values() for state in (part.get("ranks") or {}).values()]
    return max((int(state.get("step") or 0) for state in states), default=0)
