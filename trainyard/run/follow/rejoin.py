"""Hosts that return to a run which continues without them: whether a restart with them pays, and when.

A restart takes time, and a host with an intermittent connection would cause many restarts. Therefore a host has to
answer for some time, longer after each loss, and the rest of the run has to become shorter by more than the restart
takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from trainyard.run.follow.restart_policy import MOST_DOUBLINGS
from trainyard.run.host_run import HostRun
from trainyard.wire.connection import FanOut, HostConnection

ASK = 5.0  # s between two questions to an absent host
STEADY = 30.0  # s for which a host has to answer; doubles with each loss of it
UNFIT = 600.0  # s until a host that could not take part is considered again
SPAN = 10.0  # s over which a speed is measured, at least
STEPS = 5  # steps over which a speed is measured, at least
EFFICIENCY = 0.7  # share of a further host's part that speeds a run up, where that was not measured
RESTART = 20.0  # s that a restart takes, before one was measured
GAIN = 2.0  # multiple of the restart's time by which it must shorten the run
_CHECK = "check"  # the one thread of the check
SIGN_OF_LIFE = "date '+{\"now\": %s.%N}'"


@dataclass
class Speeds:
    """What was measured in the starts of a run.

    Attributes:
        rates: steps per second by the hosts that took part. Every step of a run is the same work, whatever hosts share it.
    """

    rates: dict[frozenset[str], float] = field(default_factory=dict)
    restart: float = RESTART  # seconds that the latest restart took, from the failure to the next step
    losses: dict[str, int] = field(default_factory=dict)  # how often each host was lost

    def rate(self, hosts: Collection[str], known: Collection[str]) -> float:
        """Return the rate with `hosts`: the measured one, or an estimate from that of the hosts `known`; 0 without that."""
        if (measured := self.rates.get(frozenset(hosts))) is not None:
            return measured
        more = len(hosts) / len(known) - 1
        return self.rates.get(frozenset(known), 0.0) * (1 + EFFICIENCY * more)

    def saved(self, steps: int, hosts: Collection[str], known: Collection[str]) -> float:
        """Return the seconds by which a restart with `hosts` shortens the run of `known` that has `steps` left."""
        now, then = self.rate(known, known), self.rate(hosts, known)
        return steps / now - steps / then - self.restart if now and then else 0.0


class Rejoin:
    """Watches the absent hosts of a run that continues without them, and decides when to restart with them.

    Args:
        present: names of the hosts of this start.
        absent: the other hosts of the run.
        connect: makes the connection to a host by its name; called in the thread of the caller.
        fits: prepares a check of absent hosts that answer, in the thread of the caller, and returns what then asks all of them and returns
            those that can take part. That runs in another thread, because hosts take seconds to answer and the run is watched meanwhile.
        speeds: measurements of earlier starts, to which this one adds.
        failed_at: when the start before this one failed, on the clock of `update`; None if this is the first.
    """

    def __init__(
        self,
        present: Collection[str],
        absent: Collection[str],
        connect: Callable[[str], HostConnection],
        fits: Callable[[list[str]], Callable[[], list[str]]],
        speeds: Speeds,
        failed_at: float | None = None,
    ) -> None:
        self.present, self.absent, self.speeds = frozenset(present), list(absent), speeds
        self.returning: list[str] = []  # with which the run starts again
        self._connect, self._fits = connect, fits
        self._asked: FanOut | None = None
        self._asked_at = float("-inf")
        self._check: tuple[list[str], FanOut] | None = None  # hosts, and the check of whether they can take part
        self._since: dict[str, float] = {}  # when a host began to answer
        self._unfit: dict[str, float] = {}  # when a host could not take part
        self._began: tuple[float, int] | None = None  # time and step at which the measurement of the rate began
        self._left, self._failed_at = 0, failed_at

    def update(self, parts: Iterable[HostRun], now: float) -> bool:
        """Record the run's progress; return whether the run should stop now, to restart with `returning`."""
        self._measure({rank: state for part in parts for rank, state in part.states.items()}, now)
        if not self.absent or self.returning:
            return False
        self._ask(now)
        if self._check is not None:
            found = self._fit(now)
            self.returning = found if self._pays(found) else []
            return bool(self.returning)
        steady = [name for name in self.absent if now - self._since.get(name, now) >= self._patience(name)]
        if self._pays([name for name in steady if now - self._unfit.get(name, float("-inf")) > UNFIT]):
            check = self._fits(steady)
            self._check = steady, FanOut({_CHECK: lambda: {"fit": check()}})
        return False

    def _fit(self, now: float) -> list[str]:
        """Return the hosts that can take part and still answer, once the check has ended; until then none."""
        assert self._check
        steady, check = self._check
        if check.threads[_CHECK].is_alive():
            return []
        self._check = None
        found = check.answers.get(_CHECK, {}).get("fit", [])  # nothing if the check itself failed
        self._unfit = {name: now for name in steady if name not in found}
        return [name for name in found if name in self._since]

    def _pays(self, names: list[str]) -> bool:
        saved = self.speeds.saved(self._left, self.present | set(names), self.present)
        return bool(names) and saved > (GAIN - 1) * self.speeds.restart

    def _patience(self, name: str) -> float:
        return float(STEADY * 2 ** min(max(0, self.speeds.losses.get(name, 0) - 1), MOST_DOUBLINGS))

    def _measure(self, states: Mapping[int, Mapping[str, object]], now: float) -> None:
        first = states[min(states)] if states else {}
        step, steps = int(str(first.get("step") or 0)), int(str(first.get("steps") or 0))
        if first.get("status") != "training" or not step:
            return
        self._left = steps - step
        if self._failed_at is not None:
            self.speeds.restart, self._failed_at = now - self._failed_at, None
        if self._began is None or step < self._began[1]:
            self._began = (now, step)
        seconds, done = now - self._began[0], step - self._began[1]
        if seconds >= SPAN and done >= STEPS:
            self.speeds.rates[self.present] = done / seconds

    def _ask(self, now: float) -> None:
        if self._asked is not None and any(thread.is_alive() for thread in self._asked.threads.values()):
            if now - self._asked_at > ASK:  # no answer in time
                self._since = {name: since for name, since in self._since.items() if name in self._asked.answers}
            return
        if self._asked is not None:
            answering = [name for name in self.absent if name in self._asked.answers]
            self._since = {name: self._since.get(name, now) for name in answering}
            self._asked = None
        if now - self._asked_at >= ASK:
            self._asked_at = now
            runs = {name: self._connect(name).run for name in self.absent}
            self._asked = FanOut({n: functools.partial(run, SIGN_OF_LIFE, verb="begin") for n, run in runs.items()})
