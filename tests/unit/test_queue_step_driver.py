"""The steps of a queued run besides training, and runs whose teacher fails. Slurm, hosts, training and deployment are scripted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_queue_driver import World, drive, ended, running, submit_again, world, write_state

from trainyard.queue import driver as module
from trainyard.queue.queue_client import Job as ListedJob
from trainyard.queue.queue_client import QueueState
from trainyard.queue.queue_tables import describe
from trainyard.queue.request import Request
from trainyard.queue.slurm_lease import AGAIN, FAILED, Job
from trainyard.queue.step_work import LeaseLostError
from trainyard.wire.run_errors import RunError

__all__ = ["world"]

NEVER = Job(5, "PENDING", 0, reason="DependencyNeverSatisfied")
TEACHER_FAILED = "the run has finished, but its model is not deployed: node2: no server"


class KilledError(Exception):
    """The driver is killed at this point."""


class Steps:
    """Scripted steps.

    Attributes:
        done: calls in their order.
        fail: errors that a step raises, by step; each once.
        has_model: whether a host has the trained model already.
    """

    def __init__(self) -> None:
        self.done: list[str] = []
        self.fail: dict[str, list[BaseException]] = {}
        self.has_model = False

    def do(self, step: str) -> None:
        self.done.append(step)
        if errors := self.fail.get(step):
            raise errors.pop(0)


@pytest.fixture
def steps(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """A run that asks teachers, trains and deploys."""
    found = Steps()
    session = json.loads((tmp_path / "session.json").read_text())
    session["steps"] = {"student": {}, "deploy": {}}
    (tmp_path / "session.json").write_text(json.dumps(session))

    def ask(data: Any, prepared: Any, folder: Path, report: Any, lost: Callable[[], str]) -> Path:
        found.do("answers")
        return folder / "dataset/d.jsonl"

    def follow(self: module.Driver, leases: Any, hosts: Any) -> str:
        assert self.state["dataset"] == "dataset/d.jsonl"
        found.do("training")
        return "finished"

    monkeypatch.setattr(module, "ask_teachers", ask)
    monkeypatch.setattr(module.Driver, "follow", follow)
    monkeypatch.setattr(module, "has_model", lambda *_: found.has_model)
    monkeypatch.setattr(module, "deploy_model", lambda *_: found.do("deployment"))
    return found


def test_a_run_that_is_added_again_for_its_deployment_is_not_trained_again(
    world: World, steps: Steps, tmp_path: Path
) -> None:
    steps.has_model = True
    world.jobs = [running(), ended("COMPLETED")]
    assert drive(tmp_path)["phase"] == "finished" and steps.done == ["answers", "deployment"]


@pytest.mark.parametrize("step", ["answers", "training", "deployment"])
def test_a_killed_driver_repeats_only_the_step_that_was_in_progress(
    world: World, steps: Steps, tmp_path: Path, step: str
) -> None:
    steps.fail[step] = [KilledError()]
    world.jobs = [running()]
    with pytest.raises(KilledError):
        drive(tmp_path)
    recorded = json.loads((tmp_path / "state.json").read_text())
    assert (recorded["phase"], recorded["step"]) == ("running", step)
    world.jobs = [running(), ended("COMPLETED")]
    state = drive(tmp_path)
    assert state["phase"] == "finished" and len(state["attempts"]) == 1
    order = ["answers", "training", "deployment"]
    assert steps.done == sorted([*order, step], key=order.index)


@pytest.mark.parametrize("step", ["answers", "deployment"])
def test_a_step_that_fails_ends_the_run(world: World, steps: Steps, tmp_path: Path, step: str) -> None:
    steps.fail[step] = [RunError("node2: no server", lines=["node1: deployed"])]
    world.jobs = [running(), ended("FAILED")]
    state = drive(tmp_path)
    assert (state["phase"], world.orders, state["exit"]["reason"]) == ("failed", [FAILED], "node2: no server")
    assert "training" in steps.done or step == "answers"


def test_a_run_that_loses_its_hosts_while_teachers_answer_waits_again(
    world: World, steps: Steps, tmp_path: Path
) -> None:
    """Also if the lease is valid again: the answers so far are kept, and the next allocation requests the rest."""
    steps.fail["answers"] = [LeaseLostError("node1: Slurm has asked for the host")]
    world.jobs = [running(), Job(5, "PENDING", 1)]
    state = drive(tmp_path)
    assert state["phase"] == "waiting" and [each["order"] for each in state["attempts"]] == [AGAIN]
    world.jobs = [running(1), ended("COMPLETED", 1)]
    assert drive(tmp_path)["phase"] == "finished" and steps.done == ["answers", "answers", "training", "deployment"]


def test_a_job_that_slurm_forgot_keeps_its_finished_steps(
    world: World, steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit_again(monkeypatch)
    write_state(tmp_path, arguments=[], submitted=module.time.time(), dataset="dataset/d.jsonl", trained=True)
    world.jobs = [None]
    drive(tmp_path)
    world.jobs = [running(), ended("COMPLETED")]
    assert drive(tmp_path)["phase"] == "finished" and steps.done == ["deployment"]


# A teacher that fails ---------------------------------------------------------------------------------------------------


@pytest.fixture
def student(world: World, tmp_path: Path) -> Callable[..., Path]:
    """Make the folder of a student whose job can never start, after the job 4 of the run `teacher`."""

    def make(**teacher: Any) -> Path:
        folder = tmp_path / "student"
        folder.mkdir()
        (tmp_path / "session.json").rename(folder / "session.json")
        (folder / "request.json").write_text(json.dumps({"run": "student", "after": ["teacher"]}))
        write_state(folder, phase="waiting", arguments=["--dependency=afterok:3:4"])
        (tmp_path / "teacher").mkdir()
        write_state(tmp_path / "teacher", **{"job": 4, **teacher})
        return folder

    return make


FAILED_ATTEMPT = {"order": FAILED, "reason": TEACHER_FAILED}


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        (
            {"phase": "failed", "exit": {"code": FAILED, "reason": TEACHER_FAILED}},
            f"run teacher, for which it waits, has failed: {TEACHER_FAILED}",
        ),
        (
            {"phase": "running", "attempts": [FAILED_ATTEMPT]},
            f"run teacher, for which it waits, has failed: {TEACHER_FAILED}",
        ),
        (
            {"phase": "cancelled", "exit": {"code": FAILED, "reason": "it was cancelled"}},
            "run teacher, for which it waits, was cancelled",
        ),
        ({"phase": "waiting", "job": 9}, "the job of a run that it waits for did not complete: add this run again"),
        ({"phase": "finished"}, "the job of a run that it waits for did not complete: add this run again"),
    ],
)
def test_a_student_whose_teacher_fails_ends_and_says_why(
    world: World, student: Callable[..., Path], teacher: dict[str, Any], said: str
) -> None:
    folder = student(**teacher)
    world.jobs = [NEVER, ended("CANCELLED")]
    state = drive(folder)
    assert (state["phase"], state["exit"]["reason"]) == ("failed", said) and "\n" not in said
    assert world.commands == [["scancel", "5"]] and world.orders == []
    queue = QueueState({}, {}, {"student": Request(run="student", after=("teacher",))}, {"student": state})
    queue.ended["student"] = ListedJob(5, "student", "normal", "CANCELLED")
    assert (describe("student", queue)["state"], describe("student", queue)["reason"]) == ("failed", said[:200])


def test_a_driver_killed_after_it_cancelled_the_job_keeps_the_reason(
    world: World, student: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = student(phase="failed", exit={"code": FAILED, "reason": "lr is too high"})

    def killed(words: list[str]) -> str:
        raise KilledError

    world.jobs = [NEVER]
    monkeypatch.setattr(module, "command", killed)
    with pytest.raises(KilledError):
        drive(folder)
    world.jobs = [ended("CANCELLED")]
    assert drive(folder)["exit"]["reason"] == "run teacher, for which it waits, has failed: lr is too high"


def test_a_student_waits_while_the_end_of_its_teacher_is_not_recorded(
    world: World, student: Callable[..., Path]
) -> None:
    folder = student(phase="running", attempts=[{"order": None}])
    world.jobs = [NEVER]
    assert drive(folder)["phase"] == "waiting" and world.commands == []
    world.jobs = [Job(5, "PENDING", 0, reason="Dependency")]
    assert drive(folder)["phase"] == "waiting" and world.commands == []


def test_the_list_says_what_a_run_does_besides_training() -> None:
    job = ListedJob(5, "r", "normal", "RUNNING", hosts=("node1",))
    for step, said in (("answers", "its teachers answer its prompts"), ("deployment", "its model is deployed")):
        queue = QueueState({"r": job}, {}, {"r": Request(run="r")}, {"r": {"phase": "running", "step": step}})
        assert describe("r", queue)["reason"] == said
    queue = QueueState({"r": job}, {}, {"r": Request(run="r")}, {"r": {"phase": "running", "step": ["x"]}})
    assert describe("r", queue)["reason"] == ""
