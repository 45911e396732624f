"""Unlike ranks share a step's rows by their speed, so that the fast one does not wait.

Who computes a row does not change the step: the loss is weighted by tokens, so the gradient is the same for any division
(but for the order of a sum of floats). Every rank calls this with the same numbers and comes to the same counts.
"""

from collections.abc import Sequence

# Share of the newest measurement in the mean: a few steps of noise pass, a machine that slows down is seen within ten.
_NEWEST = 0.25
# A new division has to save so much of a step's time: below that it is noise.
_WORTH = 0.04


class Balance:
    """How many rows of a step every rank takes, from the seconds that a row has cost it so far."""

    def __init__(self, ranks: int, costs: Sequence[float] = ()) -> None:
        """Args:
        costs: seconds a row of every rank, as `costs` of an earlier start told; equal if there are none, or of another world.
        """
        self.costs: list[float] = list(costs) if len(costs) == ranks else [0.0] * ranks
        self._used: dict[int, list[int]] = {}

    def shares(self, rows: int) -> list[int]:
        """Return how many of `rows` rows every rank takes: all of them together, at least one each where there are enough.

        What was used for as many rows before stays, until another division is worth it.
        """
        best = divide(rows, self.costs)
        used = self._used.get(rows, best)
        if self._time(used) > self._time(best) * (1 + _WORTH):
            used = best
        self._used[rows] = used
        return used

    def _time(self, counts: Sequence[int]) -> float:
        """Return the seconds that a step takes with these counts: those of the rank that is ready last."""
        return max(count * cost for count, cost in zip(counts, self.costs, strict=True))

    def learn(self, seconds: Sequence[float], counts: Sequence[int]) -> None:
        """Take up what the rows of a step have cost every rank.

        Args:
            seconds: seconds of computing, without waiting for others, of every rank.
            counts: the rows that it took; a rank without rows is what it was.
        """
        for rank, (spent, count) in enumerate(zip(seconds, counts, strict=True)):
            if count and spent > 0:
                cost, now = self.costs[rank], spent / count
                self.costs[rank] = cost + _NEWEST * (now - cost) if cost else now


def divide(rows: int, costs: Sequence[float]) -> list[int]:
    """Return the counts, of sum `rows`, with which the last rank is ready soonest; equal ones where a cost is unknown.

    A row at a time to the rank that would have it ready first: best possible for rows of one size.
    """
    ranks = len(costs)
    if not all(costs):
        return [rows * (rank + 1) // ranks - rows * rank // ranks for rank in range(ranks)]
    # A rank without rows would never be measured again.
    counts = [1 if rows >= ranks else 0] * ranks
    for _ in range(rows - sum(counts)):
        first = min(range(ranks), key=lambda rank: ((counts[rank] + 1) * costs[rank], rank))
        counts[first] += 1
    return counts
