"""The state of the queue host, as Slurm 22.05 of Debian 12 printed it on a lab host, and the reasons as text."""

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table

from trainyard.queue.queue_client import QueueState, SlurmJob, SlurmNode, parse_job, parse_node, parse_state
from trainyard.queue.queue_tables import list_history, list_queue, run_state
from trainyard.queue.reasons import refusal
from trainyard.queue.request import Request, slurm_options
from trainyard.wire.replies import checked_reply

NOW = 1795430140.0
# Each line of squeue, and what the program says of it: state, and why it waits.
WORDS = table("queue_words")["words"]
JOBS = ["10|low|PENDING|Priority|N/A|N/A|UNLIMITED||evil|name", "x", *(line for line, *_ in WORDS)]
NODES = """\
node1|planned|2|22848|(null)
node2|allocated|2|22848|gpu:standingpu:2,vram:24
node3|mixed|2|22848|gpu:standingpu:1,vram:8""".splitlines()
REQUESTS: dict[str, dict[str, Any]] = {
    **{line.rpartition("|")[2]: {} for line, *_ in WORDS},
    "after": {"after": ["busy", "small"]},
    "after-soon": {"after": ["busy"]},
    "never": {"after": ["lost"]},
    **{name: {} for name in ("ok", "bad", "stopped", "recorded", "unknown")},
}


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def answer(**changed: Any) -> dict[str, Any]:
    runs = {name: {"request": json.dumps({"run": name, **fields}), "state": None} for name, fields in REQUESTS.items()}
    told = {
        "jobs": JOBS,
        "nodes": NODES,
        "hosts": {"node2": ["node2"], "node3": ["node3"]},
        "runs": runs,
        "specs": {},
        "now": NOW,
    }
    return checked_reply("queue_info", told | changed)


def state(**changed: Any) -> QueueState:
    return parse_state(answer(**changed))


def test_the_output_of_slurm_is_read() -> None:
    queue = state()
    assert queue.nodes["node2"] == SlurmNode("node2", "allocated", 2, 22848, 2, 24)
    assert queue.nodes["node1"] == SlurmNode("node1", "planned", 2, 22848)
    assert queue.jobs["busy"] == SlurmJob(1, "busy", "normal", "RUNNING", "None", 1795430130, 1795431930, ("node2",))
    assert queue.jobs["two"].end == 0  # without a time limit, Slurm states a year
    listed = {run["run"]: run for run in list_queue(queue)["runs"]}
    for line, how, why in WORDS:
        run = line.rpartition("|")[2]
        assert (run_state(run, queue), listed[run]["state"], listed[run]["reason"]) == (how, how, why)
    assert run_state("none", queue) == "unknown"


def test_the_tables_show_order_and_end() -> None:
    listed = list_queue(state())
    assert [run["run"] for run in listed["runs"]][:3] == ["busy", "small", "two"]
    assert listed["runs"][0]["hosts"] == ["node2"] and "11:05" in listed["lines"][1]
    assert len(list_history(state())["runs"]) == len(REQUESTS)
    assert list_queue(state(jobs=[]))["lines"][0] == "no run waits or runs"


def test_the_record_of_the_driver_says_how_a_run_has_ended() -> None:
    attempt = {"hosts": {"node1": {}}, "begin": NOW - 90, "end": NOW - 30, "reason": "preempted\x1b[2J"}
    ended = {"code": 11, "reason": "it was cancelled", "time": NOW - 10}
    states: dict[str, Any] = {
        "ok": {"job": 14, "phase": "finished", "attempts": [attempt], "exit": {"code": 10, "reason": ""}},
        "bad": {"phase": ["x"], "attempts": [attempt, "x", {"hosts": 7}]},
        "stopped": {"phase": "cancelled", "attempts": [], "exit": ended},
        "recorded": {"phase": "failed", "attempts": [attempt], "exit": ended | {"reason": "given up"}},
        "unknown": {"phase": "running", "attempts": [attempt]},
    }
    runs = answer()["runs"]
    for name, content in states.items():
        runs[name]["state"] = json.dumps(content)
    runs["low"]["state"] = "{"
    told = list_history(state(runs=runs))
    found = {run["run"]: run for run in told["runs"]}
    assert (found["ok"]["state"], found["ok"]["start"], found["ok"]["end"]) == ("finished", NOW - 90, NOW - 30)
    assert found["ok"]["hosts"] == ["node1"] and found["ok"]["job"] == 14 and found["low"]["state"] == "waiting"
    assert (found["bad"]["state"], found["unknown"]["state"]) == ("unknown", "ending")
    assert (found["stopped"]["end"], found["stopped"]["reason"], found["stopped"]["start"]) == (NOW - 10, "", 0)
    assert (found["recorded"]["state"], found["recorded"]["reason"]) == ("failed", "given up")
    assert "\x1b" not in found["unknown"]["reason"] + "".join(told["lines"])
    row = next(line for line in told["lines"] if line.startswith("ok "))
    assert "finished" in row and "1:00" in row


@pytest.mark.parametrize(("fields", "said"), table("queue_words")["refusals"])
def test_what_no_host_satisfies_is_refused(fields: dict[str, Any], said: str) -> None:
    found = refusal(Request(run="r", **fields), state().nodes)
    assert said in found and bool(found) == bool(said)


def test_a_request_is_what_sbatch_gets() -> None:
    whole = slurm_options(Request(run="r", nodes=2, gpu_memory=16, time_limit=30), ["node9"])
    assert {"--exclusive", "--mem=0", "--gres=gpu:1,vram:16", "--nodes=2", "--time=30", "--exclude=node9"} <= set(whole)
    part = slurm_options(Request(run="r", gpus=2, memory=8, priority="low"))
    assert {"--cpus-per-task=2", "--mem=8G", "--gres=gpu:2", "--partition=low"} <= set(part)
    assert "--exclusive" not in part and not [word for word in part if word.startswith("--time")]


@settings(max_examples=30, deadline=None)
@given(st.one_of(st.text(max_size=80), st.lists(st.text(max_size=12), min_size=4, max_size=10).map("|".join)))
def test_hostile_lines_are_left_out_or_plain(line: str) -> None:
    for found in (parse_job(line, {}), parse_node(line)):
        assert not found or not re.search("[\x00-\x1f\x7f\u202e]", found.name)


def test_a_job_of_any_name_is_shown_as_plain_text() -> None:
    for name in ("a\x1b[31m", "../../etc", "a|b|c", "\u202eevil"):
        job = parse_job(f"10|low|PENDING|x\x1b|N/A|N/A|UNLIMITED||{name}", {})
        assert job and job.name.isprintable() and job.reason.isprintable()
    runs = {"../x": {"request": "{}", "state": None}, "wrong": {"request": json.dumps({"run": "other"}), "state": "[]"}}
    assert state(runs=runs).requests == {}
