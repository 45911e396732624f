"""The time at which a run that continues without some hosts restarts with them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tables import table

from trainyard.run.follow.rejoin import ASK, GAIN, RESTART, SPAN, STEADY, UNFIT, Rejoin, Speeds
from trainyard.run.host_run import HostRun


class AbsentHost:
    """Answers a sign of life while it is `up`."""

    def __init__(self, up: bool = True) -> None:
        self.up, self.asked = up, 0

    def run(self, command: str, verb: str) -> dict[str, Any]:
        self.asked += 1
        if not self.up:
            raise OSError("unreachable")
        return {"now": 1.0}


class Watch:
    """A run of hosts a and b, without c, on a clock of its own; it trains one step per second."""

    def __init__(self, speeds: Speeds, steps: int = 1000, fits: bool = True, failed_at: float | None = None) -> None:
        self.host, self.now, self.step, self.steps = AbsentHost(), 0.0, 1, steps
        self.fits, self.checks = fits, 0
        self.rejoin = Rejoin(["a", "b"], ["c"], lambda name: self.host, self.check, speeds, failed_at)

    def check(self, names: list[str]) -> Callable[[], list[str]]:
        self.checks += 1
        return lambda: names if self.fits else []

    def advance(self, seconds: float) -> float | None:
        """Let time pass; return when the run should stop, if it should."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            self.step += 1
            state = {"status": "training", "step": self.step, "steps": self.steps}
            part = HostRun("a", "/r", answer={"status": "running", "ranks": {"0": state}})
            if self.rejoin.update([part], self.now):
                return self.now
            _, check = self.rejoin._check or ([], None)
            for asked in (self.rejoin._asked, check):
                for thread in asked.threads.values() if asked else ():
                    thread.join(10)
        return None


BOTH, ALL = frozenset("ab"), frozenset("abc")


def test_a_host_that_answers_steadily_rejoins_when_that_pays() -> None:
    watch = Watch(Speeds({ALL: 1.5}))
    at = watch.advance(200)
    assert at is not None and STEADY <= at <= STEADY + 3 * ASK
    assert watch.rejoin.returning == ["c"]
    assert watch.rejoin.speeds.rates[BOTH] == pytest.approx(1.0)
    assert not watch.rejoin.update([], 1e6), "once is enough"


def test_a_host_that_was_lost_often_has_to_answer_longer() -> None:
    at = Watch(Speeds({ALL: 1.5}, losses={"c": 3})).advance(900)
    assert at is not None and 4 * STEADY <= at < 4 * STEADY + 3 * ASK


def test_a_host_that_comes_and_goes_does_not_rejoin() -> None:
    watch = Watch(Speeds({ALL: 1.5}), steps=10_000)
    for _ in range(20):
        watch.host.up = True
        assert watch.advance(STEADY - 2 * ASK) is None
        watch.host.up = False
        assert watch.advance(2 * ASK) is None


@pytest.mark.parametrize(("rate", "steps", "pays"), table("rejoin")["a_restart_has_to_pay"])
def test_a_restart_has_to_pay(rate: float | None, steps: int, pays: bool) -> None:
    watch = Watch(Speeds({ALL: rate} if rate else {}), steps=steps)
    assert (watch.advance(min(300, steps - 2)) is not None) == pays


def test_what_a_restart_took_is_measured_and_counts() -> None:
    watch = Watch(Speeds({ALL: 1.5}), failed_at=-7.0)
    watch.advance(SPAN)
    assert watch.rejoin.speeds.restart == pytest.approx(8.0)
    slow = Watch(Speeds({ALL: 1.5}), failed_at=-1000.0)
    assert slow.advance(300) is None, "restarts take longer than the rest of the run gains"


def test_a_host_that_cannot_take_part_is_not_waited_for() -> None:
    watch = Watch(Speeds({ALL: 1.5}), fits=False)
    assert watch.advance(300) is None and watch.rejoin.returning == [] and watch.checks == 1


@pytest.mark.parametrize(("lost", "returning"), [(False, ["c"]), (True, [])], ids=["answers", "lost again"])
def test_a_run_is_watched_while_hosts_are_checked(lost: bool, returning: list[str]) -> None:
    """The answers of a host to the check take seconds, or a minute if it hangs."""
    watch, may_end = Watch(Speeds({ALL: 1.5})), threading.Event()

    def check(names: list[str]) -> Callable[[], list[str]]:
        assert threading.current_thread() is threading.main_thread(), "which alone may make connections"
        return lambda: names if may_end.wait(10) else []

    watch.rejoin._fits = check
    watch.rejoin.speeds.rates[BOTH] = 1.0
    watch.rejoin._left, watch.rejoin._since = 1000, {"c": -STEADY}
    began = time.monotonic()
    assert not watch.rejoin.update([], 1.0) and not watch.rejoin.update([], 2.0)
    assert time.monotonic() - began < 5, "the check, which does not end, does not block"
    if lost:
        watch.rejoin._since.clear()
    may_end.set()
    assert watch.rejoin._check
    watch.rejoin._check[1].wait(10)
    assert watch.rejoin.update([], 3.0) == bool(returning) and watch.rejoin.returning == returning


def test_a_check_that_fails_is_repeated_later() -> None:
    watch = Watch(Speeds({ALL: 1.5}), steps=10_000)

    def fail(names: list[str]) -> Callable[[], list[str]]:
        watch.checks += 1
        return lambda: [name for name in names if 1 // 0]

    watch.rejoin._fits = fail
    assert watch.advance(UNFIT) is None and watch.checks == 1
    watch.rejoin._fits = watch.check
    assert watch.advance(2 * STEADY) is not None and watch.rejoin.returning == ["c"]


def test_the_gain_is_the_time_that_is_left_less_the_restart() -> None:
    speeds = Speeds({BOTH: 1.0, ALL: 2.0})
    assert speeds.saved(100, ALL, BOTH) == pytest.approx(100 - 50 - RESTART)
    assert GAIN > 1 and speeds.saved(100, BOTH, BOTH) == -RESTART
    assert Speeds().saved(100, ALL, BOTH) == 0.0
