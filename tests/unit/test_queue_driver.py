"""The driver of a queued run: how an allocation ends, and what becomes of the run. Slurm and the hosts are scripted."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.spec import make_spec
from trainyard.queue import driver as module
from trainyard.queue.lease_step import AGAIN, FAILED, FINISHED
from trainyard.queue.run_folder import QueuedStart
from trainyard.queue.slurm_lease import TIME_LIMIT, LeaseJob
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.types import PreparedRun
from trainyard.wire.connection import Host, Login
from trainyard.wire.run_errors import HostUnreachableError, LaunchError, RunError

FOLLOW = module.Driver.follow  # which `world` replaces
NEVER = LeaseJob(5, "CANCELLED", reason="DependencyNeverSatisfied")


class World:
    """Slurm and the hosts of one run.

    Attributes:
        jobs: next answers of Slurm; the last one is repeated.
        lost: state of the leases after the session.
        outcome: result of the session: the status of the run, or an error.
        orders: exit codes with which leases were ended.
        commands: commands for Slurm.
    """

    def __init__(self) -> None:
        self.jobs: list[LeaseJob | None] = []
        self.lost: dict[str, str] = {}
        self.outcome: list[str | Exception] = []
        self.orders: list[int] = []
        self.commands: list[list[str]] = []

    def job(self, *_: object) -> LeaseJob | None:
        return self.jobs.pop(0) if len(self.jobs) > 1 else self.jobs[0]


def running(restart: int = 0) -> LeaseJob:
    return LeaseJob(5, "RUNNING", restart, ("node1",), {"node1": (0,)})


def ended(state: str, restart: int = 0) -> LeaseJob:
    return LeaseJob(5, state, restart, ("node1",))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world whose job has node1, and the folder of its run."""
    one = World()
    host = Host("node1", "10.0.0.1", "/srv/t", "/usr/bin/python3", login=Login("10.0.0.1"))
    prepared = PreparedRun(make_spec({"run": "r", "resume": "never"}, "the test"), [], {})
    (tmp_path / "session.json").write_bytes(QueuedStart([host], LaunchOptions(), prepared).as_json())
    write_state(tmp_path, phase="waiting")

    class Leases:
        def __init__(self, hosts: list[Host], *_: Any) -> None:
            self.hosts = hosts

        def grants(self) -> dict[str, list[str]]:
            return {"node1": []}

        def lost(self) -> dict[str, str]:
            return one.lost

        def end(self, code: int) -> None:
            one.orders.append(code)

    def follow(self: module.Driver, leases: Any, hosts: list[Host]) -> str:
        found = one.outcome.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(module, "Leases", Leases)
    monkeypatch.setattr(module, "read_job", one.job)
    monkeypatch.setattr(module, "command", lambda words: one.commands.append(words) or "")
    monkeypatch.setattr(module.Driver, "follow", follow)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    return one


def write_state(folder: Path, *attempts: dict[str, Any], phase: str = "running", **more: Any) -> None:
    """Write what a driver before this one has recorded, of these attempts."""
    state = {
        "job": 5,
        "phase": phase,
        "attempts": [{"begin": 1.0, "hosts": {}, **one} for one in attempts],
        "exit": None,
    }
    (folder / "state.json").write_text(json.dumps(state | more))


def drive(folder: Path) -> dict[str, Any]:
    """Drive the run of a folder; return its state."""
    module.Driver(folder).drive()
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return state


@pytest.mark.parametrize(
    ("outcome", "order", "phase"),
    [("finished", FINISHED, "finished"), ("stopped", FAILED, "stopped"), (RunError("no such model"), FAILED, "failed")],
)
def test_the_run_ends(world: World, tmp_path: Path, outcome: str | Exception, order: int, phase: str) -> None:
    world.jobs, world.outcome = [running(), ended("COMPLETED")], [outcome]
    state = drive(tmp_path)
    assert (state["phase"], world.orders, state["exit"]["code"]) == (phase, [order], order)
    assert state["attempts"][0]["order"] == order and len(state["attempts"]) == 1
    if phase == "failed":
        assert state["exit"]["reason"] == "no such model"


@pytest.mark.parametrize("reaches", [lambda place: 7, lambda place: place])
def test_a_run_that_loses_a_host_every_time_fails_unless_it_makes_progress(
    world: World, tmp_path: Path, reaches: Callable[[int], int]
) -> None:
    for place in range(module.LOSSES):
        waits = LeaseJob(5, "PENDING", place + 1)
        hosts = {"node1": {"ranks": {"0": {"step": reaches(place)}}}}
        world.outcome = [HostUnreachableError("node1 does not answer", hosts=hosts)]
        world.jobs = [running(place), waits, waits, waits]
        if place == module.LOSSES - 1 and reaches(0):
            world.jobs.append(ended("CANCELLED", module.LOSSES))
        state = drive(tmp_path)
        assert state["phase"] == "waiting" or place == module.LOSSES - 1
    if reaches(0):
        assert state["phase"] == "failed" and world.commands == [["scancel", "5"]]
        assert state["exit"]["reason"].startswith("10 attempts in a row lost a host and made no progress")
    else:
        assert state["phase"] == "waiting" and state["attempts"][-1]["reached"] == module.LOSSES - 1


@pytest.mark.parametrize("after", ["PENDING", "FAILED"])
def test_a_run_fails_at_its_time_limit_and_is_not_started_again(world: World, tmp_path: Path, after: str) -> None:
    world.jobs = [running(), LeaseJob(5, after, int(after == "PENDING"), ("node1",))]
    world.outcome, world.lost = ["stopped"], {"node1": TIME_LIMIT}
    state = drive(tmp_path)
    assert (state["phase"], state["exit"]["reason"], world.orders) == ("failed", TIME_LIMIT, [FAILED])
    assert world.commands == ([["scancel", "5"]] if after == "PENDING" else [])


def test_a_job_that_slurm_starts_again_after_the_end_of_its_run_ends_again(world: World, tmp_path: Path) -> None:
    """The job keeps its exit code, so that the runs after this one start."""
    world.jobs, world.outcome = [running(), LeaseJob(5, "PENDING", 1)], ["finished"]
    assert drive(tmp_path)["phase"] == "finished" and world.orders == [FINISHED]
    before = (tmp_path / "state.json").read_text()
    drive(tmp_path)
    assert world.orders == [FINISHED], "a job that waits has no leases"
    world.jobs = [running(1), running(1), ended("COMPLETED", 1)]
    drive(tmp_path)
    assert world.orders == [FINISHED, FINISHED] and world.commands == []
    assert (tmp_path / "state.json").read_text() == before


@pytest.mark.parametrize("outcome", ["stopped", RunError("rank 0 on node1 was killed by SIGKILL")])
def test_a_run_that_loses_its_lease_waits_again(world: World, tmp_path: Path, outcome: str | Exception) -> None:
    world.lost = {"node1": "the lease has ended"}
    world.jobs, world.outcome = [running(), LeaseJob(5, "PENDING", 1)], [outcome]
    state = drive(tmp_path)
    assert state["phase"] == "waiting" and world.orders == [] and world.commands == []
    assert state["attempts"][0]["reason"] == "node1: the lease has ended" and state["attempts"][0]["order"] == AGAIN

    world.lost = {}
    world.jobs, world.outcome = [running(1), ended("COMPLETED", 1)], ["finished"]
    state = drive(tmp_path)
    assert state["phase"] == "finished" and [a["order"] for a in state["attempts"]] == [AGAIN, FINISHED]


def test_slurm_that_does_not_see_a_loss_is_told(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world.lost = {"node1": "does not answer"}
    monkeypatch.setattr(module, "LOST_LIMIT", 0.0)
    left: list[LeaseJob | None] = [running(), running(), running(), LeaseJob(5, "PENDING", 1)]
    world.jobs, world.outcome = left, [RunError("node1 has not answered")]
    assert drive(tmp_path)["phase"] == "waiting"
    assert world.commands == [["scontrol", "requeue", "5"]]


@pytest.mark.parametrize("order", [FINISHED, FAILED])
def test_a_driver_killed_after_its_order_repeats_it_and_records_the_end(
    world: World, tmp_path: Path, order: int
) -> None:
    write_state(tmp_path, {"restart": 0, "order": order, "reason": ""})
    world.jobs = [running(), ended("COMPLETED" if order == FINISHED else "FAILED")]
    assert drive(tmp_path)["phase"] == {FINISHED: "finished", FAILED: "failed"}[order]
    assert world.orders == [order], "the first driver may have been killed before the hosts had its order"


def test_a_job_that_starts_again_with_an_old_number_returns_to_the_queue_once_more(
    world: World, tmp_path: Path
) -> None:
    """A crash of slurmctld may forget that it has returned the job to the queue."""
    write_state(tmp_path, {"restart": 0, "order": AGAIN, "reason": "preempted"}, phase="waiting")
    world.jobs = [running(), LeaseJob(5, "PENDING", 1)]
    assert drive(tmp_path)["phase"] == "waiting" and world.orders == [AGAIN]


@pytest.mark.parametrize(
    ("job", "phase", "reason"),
    [
        (ended("CANCELLED"), "cancelled", "it was cancelled"),
        (ended("TIMEOUT"), "failed", "its time limit"),
        (NEVER, "failed", "a run for which it waits did not finish"),
        (None, "failed", "Slurm has forgotten its job: add the run again"),
    ],
)
def test_slurm_ends_the_run(world: World, tmp_path: Path, job: LeaseJob | None, phase: str, reason: str) -> None:
    world.jobs = [job]
    state = drive(tmp_path)
    assert state["phase"] == phase and state["exit"]["reason"] == reason and world.commands == []


@pytest.mark.parametrize("state", ["FAILED", "NODE_FAIL"])
def test_a_job_that_ends_without_an_order_is_repeated(world: World, tmp_path: Path, state: str) -> None:
    world.jobs = [ended(state), LeaseJob(5, "PENDING", 1)]
    assert drive(tmp_path)["phase"] == "waiting"
    assert world.commands == [["scontrol", "requeue", "5"]]


def test_a_job_that_slurm_has_forgotten_is_submitted_again(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a crash of slurmctld in the first seconds; a job that was submitted long ago ended in another way."""

    now = module.time.time()
    submit_again(monkeypatch, submitted=now)
    first = {"restart": 0, "order": None}
    write_state(tmp_path, first, arguments=["--nodes=1"], submitted=now - 5)
    world.jobs = [None]
    state = drive(tmp_path)
    assert (state["job"], state["phase"], state["arguments"]) == (6, "waiting", ["--nodes=1"])
    world.jobs, world.outcome = [running(), ended("COMPLETED")], ["finished"]
    state = drive(tmp_path)
    assert state["phase"] == "finished" and [one["restart"] for one in state["attempts"]] == [-1, 0]

    for more in ({"submitted": now - 3600, "arguments": []}, {"submitted": now, "arguments": None}):
        write_state(tmp_path, first, **more)
        world.jobs = [None]
        assert drive(tmp_path)["exit"]["reason"] == "Slurm has forgotten its job: add the run again"
    write_state(tmp_path, first | {"order": FINISHED, "reason": ""})
    assert drive(tmp_path)["phase"] == "finished", "its end was recorded"


def submit_again(monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """Let Slurm take the job of a run again, as number 6."""

    def submit(folder: Path, arguments: list[str]) -> int:
        write_state(folder, phase="waiting", job=6, arguments=arguments, **more)
        return 6

    monkeypatch.setattr(module, "submit", submit)


def test_a_job_on_a_host_that_left_the_run_fails(world: World, tmp_path: Path) -> None:
    world.jobs = [LeaseJob(5, "RUNNING", 0, ("node1", "new")), ended("FAILED")]
    state = drive(tmp_path)
    assert state["phase"] == "failed" and state["exit"]["reason"].startswith("new is not a host of the run")


@pytest.mark.parametrize("before", [False, True], ids=["new", "again"])
@pytest.mark.parametrize("resume", ["auto", "never"])
def test_the_copy_of_an_earlier_run_is_used_only_where_it_continues(
    before: bool, resume: str, world: World, tmp_path: Path
) -> None:
    """`before`: hosts had a folder of the run when it was added."""
    content = json.loads((tmp_path / "session.json").read_text()) | {"continues": before}
    content["state"]["prepared"]["spec"]["resume"] = resume
    (tmp_path / "session.json").write_text(json.dumps(content))
    (tmp_path / "checkpoint/step-00000005").mkdir(parents=True)
    world.jobs, world.outcome = [running(), ended("COMPLETED")], ["finished"]
    assert drive(tmp_path)["phase"] == "finished"
    assert (tmp_path / "checkpoint").exists() == (before and resume == "auto")


def test_a_run_on_other_hosts_keeps_what_its_first_ones_decided(world: World, tmp_path: Path, monkeypatch: Any) -> None:
    begun = make_spec({"run": "r", "precision": "bf16-mixed", "batch_size": 2}, "the test").model_copy(
        update={"automatic": ()}
    )
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/spec.yml").write_text(begun.to_yaml())
    write_state(tmp_path, {"restart": 0}, {"restart": 1})
    started = []

    class Session:
        def __init__(self, *_: Any, state: Any, **more: Any) -> None:
            self.state = state

        def run(self) -> None:
            started.append(self.state.prepared.spec)

    monkeypatch.setattr(module, "RunSession", Session)
    monkeypatch.setattr(module.CheckpointCopy, "carry", lambda *_: None)
    driver = module.Driver(tmp_path)
    FOLLOW(driver, SimpleNamespace(lost=dict), driver.session.hosts)
    assert (started[0].precision, started[0].batch_size, started[0].automatic) == ("bf16-mixed", 2, ())


@pytest.mark.parametrize(
    ("outcome", "lost", "phase"),
    [
        ("finished", {}, "finished"),
        ("stopped", {"node1": "the lease has ended"}, "waiting"),
        (RunError("no"), {}, "failed"),
    ],
)
def test_a_job_whose_end_slurm_has_forgotten_is_not_cancelled(
    outcome: str | Exception,
    lost: dict[str, str],
    phase: str,
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """slurmctld was killed after the end of the steps, and shows the job as running, for ever."""
    monkeypatch.setattr(module, "END_LIMIT", 0.0)
    world.lost, world.outcome = lost, [outcome]

    def command(words: list[str]) -> str:
        world.commands.append(words)
        world.jobs = [LeaseJob(5, "PENDING", 1)]
        return ""

    monkeypatch.setattr(module, "command", command)
    requeued: list[LeaseJob | None] = [LeaseJob(5, "PENDING", 1)] * 2 if lost else []
    world.jobs = [running(), *requeued, running()]
    state = drive(tmp_path)
    assert world.commands == [["scontrol", "requeue", "5"]] and state["phase"] == phase
    if phase != "waiting":  # the job has hosts again, and ends as its run did
        order = world.orders[-1]
        world.jobs = [running(1), running(1), running(1), ended("COMPLETED", 1)]
        drive(tmp_path)
        assert world.orders == [order, order]


@pytest.mark.parametrize(
    ("error", "order"),
    [
        (RunError("node1 has not answered for 10 s", cause={"kind": "lost"}, lost=["node1"]), AGAIN),
        (HostUnreachableError("node1: unreachable"), AGAIN),
        (RunError("rank 0 was killed by SIGKILL", cause={"kind": "exit"}), FAILED),
        (LaunchError("node1: port 22 is in use", lost=["node1"]), FAILED),
    ],
)
def test_a_host_that_answers_again_has_not_failed_the_run(
    error: RunError, order: int, world: World, tmp_path: Path
) -> None:
    """The host kept its lease. Only what a new start would not change ends the run."""
    world.jobs, world.outcome = [running(), running(), running(), LeaseJob(5, "PENDING", 1)], [error]
    state = drive(tmp_path)
    assert world.orders == [order] and state["attempts"][0]["reason"] == str(error)
    assert state["phase"] == ("waiting" if order == AGAIN else "failed")


@pytest.mark.parametrize(("other", "more"), [("finished", ["queue empty"]), ("waiting", [])])
def test_the_end_of_a_run_and_of_the_queue_are_announced(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str, more: list[str]
) -> None:
    events: list[tuple[str, str, str]] = []
    monkeypatch.setattr(module.Announcer, "__call__", lambda self, *words: events.append(words))
    folder = tmp_path / "queue/r"
    folder.mkdir(parents=True)
    for name in ("session.json", "state.json"):
        (tmp_path / name).rename(folder / name)
    (tmp_path / "queue/other").mkdir()
    (tmp_path / "queue/other/state.json").write_text(json.dumps({"job": 6, "phase": other}))
    world.lost, world.outcome = {"node1": "it was preempted"}, [RunError("the lease was lost")]
    world.jobs = [running(), LeaseJob(5, "PENDING", 1), LeaseJob(5, "PENDING", 1)]
    drive(folder)
    world.lost, world.outcome, world.jobs = {}, [RunError("no such model")], [running(1), ended("COMPLETED", 1)]
    drive(folder)
    assert [event for event, *_ in events] == ["started", "restarting", "failed", *more]
    assert events[2][1:] == ("r", "no such model")
