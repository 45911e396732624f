"""How long hosts need to answer, and from that how long a host may be silent before it counts as lost."""

from __future__ import annotations

SHORTEST = 2.5  # s of silence after which a host is lost, where all hosts answer at once
LONGEST = 10.0  # s
MARGIN = 4.0  # multiple of the slowest recent answer that is added to SHORTEST
HALF_LIFE = 60.0  # s in which the memory of a slow answer halves


class AnswerTimes:
    """The slowest recent answer of all hosts. A slow answer raises the estimate at once, and its effect decays slowly.

    Before the first answers, hosts have LONGEST: a start loads them.
    """

    def __init__(self) -> None:
        self._slowest, self._at, self._known = 0.0, 0.0, False

    def add(self, seconds: float, now: float) -> None:
        """Record how late an answer was: its time after the request, less the delay that the request asked for."""
        self._slowest, self._at, self._known = max(seconds, self._recent(now)), now, True

    def limit(self, now: float) -> float:
        """Return the seconds of silence after which a host is lost."""
        return min(LONGEST, SHORTEST + MARGIN * self._recent(now)) if self._known else LONGEST

    def _recent(self, now: float) -> float:
        return float(self._slowest * 0.5 ** (max(0.0, now - self._at) / HALF_LIFE))
