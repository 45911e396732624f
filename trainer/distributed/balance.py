"""Distribute the rows of a step over ranks by their measured speed, so that fast ranks do not wait.

The distribution does not change the result of a step: the loss is weighted by tokens, so the gradient is the same for any
distribution, up to rounding. Every rank passes the same numbers and gets the same counts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

# Weight of a new measurement in the moving average: noise averages out, and a slowdown shows within ten steps.
_NEWEST = 0.25
# Fraction of a step's time that a new distribution must save.
_MIN_GAIN = 0.04


class Balance:
    """The number of rows of a step for every rank, from the measured seconds per row of each."""

    def __init__(self, ranks: int, earlier: Mapping[str, Any] | None = None) -> None:
        """Args:
        earlier: `state()` of an earlier start, so that a resumed run distributes rows as if it had not been interrupted;
            ignored for another number of ranks.
        """
        earlier = earlier or {}
        self._resumed = len(earlier.get("costs", ())) == ranks
        self.costs: list[float] = list(earlier["costs"]) if self._resumed else [0.0] * ranks
        # Checkpoints of older versions have costs only.
        self._used: dict[int, list[int]] = dict(earlier.get("used", {})) if self._resumed else {}

    def state(self) -> dict[str, Any]:
        return {"costs": self.costs, "used": self._used}

    def shares(self, rows: int) -> list[int]:
        """Distribute `rows` rows over the ranks, at least one to each if there are enough.

        The previous distribution of the same number of rows stays in use until a new one saves enough time.
        """
        best = divide(rows, self.costs)
        used = self._used.get(rows, best)
        if self._time(used) > self._time(best) * (1 + _MIN_GAIN):
            used = best
        self._used[rows] = used
        return used

    def _time(self, counts: Sequence[int]) -> float:
        """Return the seconds of a step with these counts, which are those of the slowest rank."""
        return max(count * cost for count, cost in zip(counts, self.costs, strict=True))

    def update(self, seconds: Sequence[float], counts: Sequence[int]) -> None:
        """Update the seconds per row of every rank after a step.

        `seconds`: seconds of computation of every rank, without waiting. `counts`: rows of every rank. The value of a
        rank without rows does not change.
        """
        if self._resumed:  # the first step of a process is slower than those before the interruption
            self._resumed = False
            return
        for rank, (spent, count) in enumerate(zip(seconds, counts, strict=True)):
            if count and spent > 0:
                cost, now = self.costs[rank], spent / count
                self.costs[rank] = cost + _NEWEST * (now - cost) if cost else now


def divide(rows: int, costs: Sequence[float]) -> list[int]:
    """Return counts of sum `rows` that minimize the time of the slowest rank; equal counts if a cost is unknown.

    Each row goes to the rank that would finish it first, which is optimal for rows of one size.
    """
    ranks = len(costs)
    if not all(costs):
        return [rows * (rank + 1) // ranks - rows * rank // ranks for rank in range(ranks)]
    # A rank without rows would not be measured again.
    counts = [1 if rows >= ranks else 0] * ranks
    for _ in range(rows - sum(counts)):
        first = min(range(ranks), key=lambda rank: ((counts[rank] + 1) * costs[rank], rank))
        counts[first] += 1
    return counts
