"""A session whose run stops for a host that returns: a host with which it does not start must not end it, or stop it for ever."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tables import table

from trainer.spec import make_spec
from trainyard.preflight.host_state import HostState
from trainyard.run import session as module
from trainyard.run.follow import absent_hosts
from trainyard.run.follow.rejoin import ASK, GAIN, RESTART, SPAN, STEADY, UNFIT, Rejoin, Speeds
from trainyard.run.host_run import HostRun
from trainyard.run.launch_options import make_options
from trainyard.run.plan import gather_facts as gather
from trainyard.run.plan.gather_facts import fit_hosts
from trainyard.run.session import RunSession
from trainyard.run.types import PlanEntry, PreparedRun, PreviousStart, RunPlan, SessionState
from trainyard.wire.connection import Host
from trainyard.wire.run_errors import LaunchError, PlanError, RunError, RunFailedError

SPEC = make_spec({"run": "r", "model": "tiny", "fake_data": True, "strategy": "ddp"}, "the test")
PREPARED = PreparedRun(SPEC, [], {})
HOSTS = [Host(name, f"10.0.0.{place}", "/d", "/p") for place, name in enumerate("abc", 1)]


def entries(names: str) -> list[PlanEntry]:
    return [PlanEntry(name, rank, [rank], run_dir="/d/runs/r") for rank, name in enumerate(names)]


class Starts:
    """The starts of a run of a and b, which stops for c whenever this is permitted; each start trains one more step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[list[str]], None], returns: int) -> None:
        self.refuse, self.returns, self.step = refuse, returns, 0
        self.plans: list[list[str]] = []
        for name in ("stage_files", "keep_start"):
            monkeypatch.setattr(module, name, lambda *args, **more: {})
        self.ended: list[tuple[str, str]] = []  # host and run folder
        monkeypatch.setattr(module, "stop_parts", self.stop)
        monkeypatch.setattr(module, "release_claims", lambda *args, **more: None)
        monkeypatch.setattr(module, "plan_run", self.plan)
        monkeypatch.setattr(module, "start_ranks", self.start)
        monkeypatch.setattr(module, "follow_parts", self.follow)
        options = make_options({"max_restarts": 1, "min_nodes": 1, "restart_delay": 0})
        state = SessionState(PREPARED, entries("ab"), SPEC, "running")
        self.session = RunSession(HOSTS, lambda host: None, options, state=state, report=lambda line: None)  # type: ignore[arg-type, return-value]

    def plan(self, hosts: list[HostState], *rest: Any) -> RunPlan:
        previous: PreviousStart = rest[3]
        names = [host.name for host in hosts if host.name not in previous.barred]
        self.plans.append(names)
        return RunPlan(entries("".join(names)), "new", 1, [], SPEC)

    def start(self, plan: list[PlanEntry], *rest: Any) -> dict[str, Any]:
        self.refuse([entry.host for entry in plan])
        return {}

    def stop(self, parts: list[Any], connect: Any, request: dict[str, Any], limit: float) -> dict[str, str]:
        self.ended += [(part.host, part.run_dir) for part in parts if request == {"now": True}]
        return {}

    def follow(self, run: str, parts: list[Any], *rest: Any, rejoin: Any, **more: Any) -> dict[str, Any]:
        names = [part.host for part in parts]
        if "c" in names:  # lost before its first step
            raise RunFailedError("c does not answer", lost=["c"], cause={"kind": "lost"}, hosts={})
        self.step += 1
        ended = {name: {"ranks": {"0": {"step": self.step}}} for name in names}
        if self.step > self.returns:
            return {"status": "finished", "hosts": ended}
        rejoin.returning = ["c"]
        return {"status": "stopped", "hosts": ended}


def without_c(names: list[str]) -> None:
    if "c" in names:
        raise LaunchError("c: cannot start a systemd unit", lost=["c"])


def test_a_host_with_which_the_run_does_not_start_is_left_out_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts(monkeypatch, without_c, returns=4)
    assert starts.session.follow()["status"] == "finished", "progress in between counts, with max_restarts=1"
    assert starts.plans == [["a", "b", "c"], ["a", "b"]] * 4
    assert starts.session._speeds.losses == {"c": 4}, "it has to answer longer each time"


def test_what_is_left_on_a_host_that_was_left_out_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts(monkeypatch, lambda names: None, returns=0)
    assert starts.session.follow()["status"] == "finished" and starts.ended == [("c", "/d/runs/r")]


@pytest.mark.parametrize("push", [None, lambda run: [f"pushed {run}"]])
def test_a_run_that_was_followed_is_collected_and_pushed(push: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "collect_artifacts", lambda *args: {"lines": ["collected"]})
    session = Starts(monkeypatch, without_c, returns=0).session
    session.state.status, session.push = "finished", push
    assert session.collect()["lines"] == ["collected"] + (["pushed r"] if push else [])


def test_a_plan_that_fails_with_the_returning_host_leaves_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts(monkeypatch, lambda names: None, returns=3)
    plan = starts.plan

    def other_versions(hosts: list[HostState], *rest: Any) -> RunPlan:
        found = plan(hosts, *rest)
        if "c" in starts.plans[-1]:
            raise PlanError("a and c have different environments")
        return found

    monkeypatch.setattr(module, "plan_run", other_versions)
    assert starts.session.follow()["status"] == "finished"
    assert starts.plans == [["a", "b", "c"], ["a", "b"]] * 3 and starts.session._speeds.losses == {"c": 3}


def test_a_start_that_leaves_the_returning_host_out_counts_as_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts(monkeypatch, lambda names: None, returns=2)
    monkeypatch.setattr(module, "plan_run", lambda *args: RunPlan(entries("ab"), "new", 1, [], SPEC))
    assert starts.session.follow()["status"] == "finished" and starts.session._speeds.losses == {"c": 2}


def test_failures_without_progress_still_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(names: list[str]) -> None:
        raise LaunchError("a: cannot start")

    with pytest.raises(RunError, match="a: cannot start") as raised:
        Starts(monkeypatch, refuse, returns=9).session.follow()
    assert raised.value.details["lines"] == ["not restarted: 1 consecutive restarts made no progress"]


@pytest.mark.parametrize(("changed", "fits"), table("session_rejoin")["only_hosts_that_the_next_plan_accepts_are_fit"])
def test_only_hosts_that_the_next_plan_accepts_are_fit(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any] | None, fits: list[str]
) -> None:
    states = [HostState(host) for host in HOSTS]

    def gather_facts(hosts: list[HostState], *rest: Any) -> dict[str, str]:
        for host in hosts:
            host.facts = facts(host.name) | ((changed or {}) if host.name == "c" else {})
        return {"c": "does not answer"} if changed is None else {}

    monkeypatch.setattr(gather, "gather_facts", gather_facts)
    assert fit_hosts(states, lambda name: None, PREPARED, make_options({}), "ddp") == fits  # type: ignore[arg-type, return-value]


def test_a_host_that_answers_slowly_is_fit() -> None:
    class Answering:
        def __init__(self, name: str) -> None:
            self.name = name

        def call(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
            if self.name == "c":
                time.sleep(gather.GRACE + 0.5)
            return facts(self.name)

    connect: Any = Answering
    assert fit_hosts([HostState(host) for host in HOSTS], connect, PREPARED, make_options({}), "ddp") == ["b", "c"]


def facts(name: str) -> dict[str, Any]:
    return table("session_rejoin")["facts"] | {
        "boot_id": name,
        "machine_id": name,
        "addresses": [f"10.0.0.{'abc'.index(name) + 1}"],
        "running": name == "a",
    }


@pytest.mark.parametrize(("size", "fits"), [(1, ["c"]), (2, []), (3, ["c"])])
def test_half_a_pipeline_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch, size: int, fits: list[str]) -> None:
    session = Starts(monkeypatch, lambda names: None, returns=0).session
    fields = {"strategy": "diloco", "replica_strategy": "pipeline", "replica_hosts": size}
    session.state.spec = SPEC.model_copy(update=fields)
    monkeypatch.setattr(absent_hosts, "fit_hosts", lambda *args: ["c"])
    rejoin = session._rejoin()
    assert rejoin and rejoin._fits(["c"])() == fits


# The time of a restart -----------------------------------------------------------------------------------------------


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
