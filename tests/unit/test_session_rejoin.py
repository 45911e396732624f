"""A session whose run stops for a host that returns: a host with which it does not start must not end it, or stop it for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from tables import table

from trainer.spec import make_spec
from trainyard.preflight.host_state import HostState
from trainyard.run import session as module
from trainyard.run.follow import absent_hosts
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


def test_a_host_with_which_the_run_does_not_start_is_left_out_of_the_next_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts = Starts(monkeypatch, without_c, returns=4)
    assert starts.session.follow()["status"] == "finished", "progress in between counts, with max_restarts=1"
    assert starts.plans == [["a", "b", "c"], ["a", "b"]] * 4
    assert starts.session._speeds.losses == {"c": 4}, "it has to answer longer each time"


def test_what_is_left_on_a_host_that_was_left_out_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts(monkeypatch, lambda names: None, returns=0)
    assert starts.session.follow()["status"] == "finished" and starts.ended == [("c", "/d/runs/r")]


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
    assert fit_hosts([HostState(host) for host in HOSTS], connect, PREPARED, make_options({}), "ddp") == [
        "b",
        "c",
    ]


def facts(name: str) -> dict[str, Any]:
    return {
        "boot_id": name,
        "machine_id": name,
        "addresses": [f"10.0.0.{'abc'.index(name) + 1}"],
        "versions": {"torch": "2.8"},
        "gpus": [],
        "cpus": 4,
        "running": name == "a",
        "compiler": "",
        "python_exists": True,
        "may_write": True,
        "free_bytes": 1 << 40,
    }


@pytest.mark.parametrize(("size", "fits"), [(1, ["c"]), (2, []), (3, ["c"])])
def test_a_host_that_completes_no_pipeline_does_not_stop_the_run(
    monkeypatch: pytest.MonkeyPatch, size: int, fits: list[str]
) -> None:
    session = Starts(monkeypatch, lambda names: None, returns=0).session
    session.state.spec = SPEC.model_copy(
        update={"strategy": "diloco", "replica_strategy": "pipeline", "replica_hosts": size}
    )
    monkeypatch.setattr(absent_hosts, "fit_hosts", lambda *args: ["c"])
    rejoin = session._rejoin()
    assert rejoin and rejoin._fits(["c"])() == fits
