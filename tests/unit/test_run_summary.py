"""The summary of a run that has ended."""

import shlex
from typing import Any

import pytest
from tables import table

from trainer.config.reward_source import NOTHING_LEARNED
from trainer.spec import make_spec
from trainyard.run.follow.artifacts import summary, tensorboard_command
from trainyard.run.types import PlanEntry
from trainyard.wire.connection import Host, Login
from trainyard.wire.replies import ReplyError, checked_reply

HEAD = PlanEntry("node1", run_dir="/d/runs/r")
RESULT = table("run_summary")["result"]


@pytest.mark.parametrize(("found", "line"), table("run_summary")["the_summary_says_which_share_of_its"], ids=str)
def test_the_summary_says_which_share_of_its_devices_the_run_used(found: dict[str, Any], line: list[str]) -> None:
    result = checked_reply("result.json", RESULT | {"adapter": "/a"} | found)
    lines = summary("r", result, HEAD, 2, None, None)  # type: ignore[arg-type]
    assert [each for each in lines if "MFU" in each] == line


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"learning_steps": 3, "reward_first": 0.25, "reward_last": 1}, ["  reward       0.2500 -> 1.0000"]),
        ({"learning_steps": 0, "reward_first": 0.0, "reward_last": 0.0}, ["  reward       0.0000 -> 0.0000", f"  warning      {NOTHING_LEARNED}"]),
        ({"learning_steps": 0}, ["  reward       none", f"  warning      {NOTHING_LEARNED}"]),
        ({}, []),
    ],
    ids=str,
)  # fmt: skip
def test_the_summary_has_the_reward_and_says_if_it_taught_nothing(found: dict[str, Any], expected: list[str]) -> None:
    result = checked_reply("result.json", RESULT | {"adapter": "/a"} | found)
    lines = summary("r", result, HEAD, 2, None, None)  # type: ignore[arg-type]
    assert [each for each in lines if "reward" in each] == expected


def test_the_summary_has_the_totals_of_the_dataset() -> None:
    data = {"samples": 9, "answers": 12, "tokens": 80, "truncated": 2, "dropped": {"too long": 1}, "notes": {}}
    lines = summary("r", RESULT | {"data": data}, HEAD, 2, None, None)  # type: ignore[arg-type]  # it is asked for TensorBoard only
    assert (
        lines[4] == "  data         9 samples: 12 answers and 80 tokens with loss, 2 truncated, 1 dropped (1 too long)"
    )
    assert lines[5].startswith("WARNING: 1 of 9 samples of the dataset are not trained (1 too long): correct them")


def test_the_summary_names_the_part_of_the_samples() -> None:
    known = make_spec({"data_part": "shard:2/4"}, "the test")
    lines = summary("r", RESULT | {"train_samples": 7}, HEAD, 2, None, known)  # type: ignore[arg-type]
    assert "  data part    shard:2/4: 7 different samples" in lines


@pytest.mark.parametrize(
    "wrong", [{"samples": -1}, {"tokens": "9"}, {"dropped": {"why": "x"}}, {"notes": []}, {"unread": "x"}]
)
def test_totals_of_another_type_are_refused(wrong: dict[str, Any]) -> None:
    data = {"samples": 9, "answers": 12, "tokens": 80, "truncated": 2, "dropped": {}, "notes": {}, "unread": 0}
    result = RESULT | {"adapter": "/a"}
    assert checked_reply("result.json", result | {"data": data})["data"] == data
    with pytest.raises(ReplyError, match=f"data.{next(iter(wrong))}"):
        checked_reply("result.json", result | {"data": data | wrong})


def test_the_command_of_tensorboard_passes_both_shells() -> None:
    folder = "/data of me/runs/r/tensorboard"
    program = ["/venv/bin/python", "-m", "tensorboard.main", "--logdir", folder]
    host = Host("node1", "10.0.0.1", "/data of me", "/venv/bin/python")
    assert shlex.split(tensorboard_command(folder, host)) == program
    host = Host("node1", "10.0.0.1", "/data of me", "/venv/bin/python", login=Login("box", "me", 2222, "/key"))
    *words, command = shlex.split(tensorboard_command(folder, host))
    assert words == ["ssh", "-t", "-i", "/key", "-p", "2222", "-L", "6006:127.0.0.1:6006", "me@box"]
    assert shlex.split(command) == program
