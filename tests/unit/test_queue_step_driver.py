"""Runs that wait for one that fails. Slurm, hosts and training are scripted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_queue_driver import World, drive, ended, world, write_state

from trainyard.queue import driver as module
from trainyard.queue.queue_client import Job as ListedJob
from trainyard.queue.queue_client import QueueState
from trainyard.queue.queue_tables import describe
from trainyard.queue.request import Request
from trainyard.queue.slurm_lease import FAILED, Job

__all__ = ["world"]

NEVER = Job(5, "PENDING", 0, reason="DependencyNeverSatisfied")
TEACHER_FAILED = "lr is too high"


class KilledError(Exception):
    """The driver is killed at this point."""


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
