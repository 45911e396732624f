"""Whether a run that broke is started again. Pure Python, no Ansible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class RestartPolicy:
    """Counts the starts of a run. A failure after progress is the first in a row again: a long run may outlive many."""

    retries: int
    nodes_min: int
    delay: float  # seconds before the first of a row; doubled with every further one
    delay_max: float = 60.0
    best: int = -1  # the furthest step that any start has come to
    in_a_row: int = 0

    def broke(self, failure: dict[str, Any], hosts: int) -> str:
        """Take note of a failure; return why it ends the run, or an empty string if it is to be started again.

        Args:
            failure: what `ranks` returned (`cause`, `lost`, `hosts`, `stop_wanted`), or any other action's failure.
            hosts: how many the run may have, away or not.
        """
        step = furthest(failure)
        self.in_a_row = 1 if step > self.best else self.in_a_row + 1
        self.best = max(step, self.best)
        cause = failure.get("cause") or {}
        if failure.get("stop_wanted"):
            return "it was stopped: train.yml with the same spec goes on from there"
        if cause.get("mend") == "user":
            return "it would fail again"
        if cause.get("mend") == "disk" and not 0 < self.nodes_min < hosts:
            return f"{cause['host']} has no room to go on, and nodes_min does not let the others go on without it"
        if self.in_a_row > self.retries:
            return f"{self.retries} starts in a row came no further"
        return ""

    def wait(self) -> float:
        """Return the seconds to wait before the next start."""
        return float(min(self.delay_max, self.delay * 2 ** (self.in_a_row - 1)))


def furthest(failure: dict[str, Any]) -> int:
    """Return the furthest step that any rank has told of."""
    states = [state for part in (failure.get("hosts") or {}).values() for state in (part.get("ranks") or {}).values()]
    return max((int(state.get("step") or 0) for state in states), default=0)
