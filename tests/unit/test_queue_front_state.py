"""The state of the queue host, as Slurm 22.05 of Debian 12 printed it on a lab host, and the reasons as text."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.queue.queue_client import Job, Node, QueueState, parse_completed, parse_job, parse_node, parse_state
from trainyard.queue.queue_tables import list_history, list_queue, run_state
from trainyard.queue.reasons import refusal, why_waiting
from trainyard.queue.request import Request, slurm_options
from trainyard.wire.replies import checked_reply

NOW = 1795430140.0
JOBS = """\
8|high|PENDING|Resources|1795431930|N/A|UNLIMITED||two
7|low|PENDING|BeginTime|1795433732|N/A|UNLIMITED||later
9|low|PENDING|Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions|N/A|N/A|1:40:00||low
10|low|PENDING|Priority|N/A|N/A|UNLIMITED||evil|name
x
6|low|PENDING|JobHeldUser|N/A|N/A|UNLIMITED||held
3|normal|PENDING|Resources|N/A|N/A|30:00||wantvram
4|normal|PENDING|Dependency|N/A|N/A|3:00||after
5|normal|PENDING|DependencyNeverSatisfied|N/A|N/A|3:00||never
1|normal|RUNNING|None|1795430130|1795431930|30:00|node2|busy
2|normal|RUNNING|None|1795430130|1795431330|20:00|node3|small""".splitlines()
NODES = """\
node1|planned|2|22848|(null)
node2|allocated|2|22848|gpu:standingpu:2,vram:24
node3|mixed|2|22848|gpu:standingpu:1,vram:8""".splitlines()
COMPLETED = """\
JobId=15 UserId=tester(1000) GroupId=tester(1000) Name=bad JobState=FAILED Partition=normal TimeLimit=UNLIMITED StartTime=2026-11-23T10:36:42 EndTime=2026-11-23T10:36:43 NodeList=node2 NodeCnt=1 ProcCnt=1 WorkDir=/tmp ReservationName= Tres=cpu=1,mem=11424M,node=1,billing=1 Account= QOS= WcKey= Cluster=unknown SubmitTime=2026-11-23T10:36:41 EligibleTime=2026-11-23T10:36:41 DerivedExitCode=0:0 ExitCode=3:0 
JobId=14 UserId=tester(1000) GroupId=tester(1000) Name=ok JobState=COMPLETED Partition=normal TimeLimit=UNLIMITED StartTime=2026-11-23T10:36:42 EndTime=2026-11-23T10:38:42 NodeList=node[1-2] NodeCnt=2 ProcCnt=2 WorkDir=/tmp ReservationName= Tres=cpu=1,mem=11424M,node=1,billing=1 Account= QOS= WcKey= Cluster=unknown SubmitTime=2026-11-23T10:36:41 EligibleTime=2026-11-23T10:36:41 DerivedExitCode=0:0 ExitCode=0:0 
JobId=8 UserId=tester(1000) GroupId=tester(1000) Name=gone JobState=CANCELLED Partition=high TimeLimit=UNLIMITED StartTime=2026-11-23T10:36:32 EndTime=2026-11-23T10:36:32 NodeList=(null) NodeCnt=0 ProcCnt=6 WorkDir=/tmp ReservationName= Tres=cpu=3,mem=68544M,node=3,billing=3 Account= QOS= WcKey= Cluster=unknown SubmitTime=2026-11-23T10:35:32 EligibleTime=2026-11-23T10:35:32 DerivedExitCode=0:0 ExitCode=0:0 """.splitlines()  # noqa: W291
REQUESTS = {
    "two": {"nodes": 3, "priority": "high"},
    "later": {},
    "low": {"priority": "low"},
    "held": {},
    "wantvram": {"gpu_memory": 16},
    "after": {"after": ["busy", "small"]},
    "never": {"after": ["lost"]},
    "busy": {"gpu_memory": 16},
    "small": {"gpus": 1},
    "ok": {},
    "bad": {},
    "gone": {},
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
        "completed": COMPLETED,
        "offset": 0,
        "now": NOW,
    }
    return checked_reply("queue_info", told | changed)


def state(**changed: Any) -> QueueState:
    return parse_state(answer(**changed))


def reason(run: str, queue: QueueState | None = None) -> str:
    queue = queue or state()
    return why_waiting(queue.requests[run], queue.jobs[run], queue)


def test_the_output_of_slurm_is_read() -> None:
    queue = state()
    assert queue.nodes["node2"] == Node("node2", "allocated", 2, 22848, 2, 24)
    assert queue.nodes["node1"] == Node("node1", "planned", 2, 22848) and queue.nodes["node1"].is_up
    assert queue.jobs["busy"] == Job(1, "busy", "normal", "RUNNING", "None", 1795430130, 1795431930, ("node2",))
    assert queue.jobs["two"].end == 0  # without a time limit, Slurm states a year
    assert queue.ended["ok"].end - queue.ended["ok"].start == 120
    runs = {"ok": "finished", "bad": "failed", "gone": "cancelled", "held": "held", "busy": "running", "two": "waiting"}
    assert {run: run_state(run, queue) for run in [*runs, "none"]} == {**runs, "none": "unknown"}
    assert parse_completed(COMPLETED[1], 3600).end == queue.ended["ok"].end - 3600  # type: ignore[union-attr]


def test_reasons_are_in_words() -> None:
    assert (
        reason("wantvram")
        == "waits for 16 GB of GPU memory and 1 GPU: node2 has it, busy with run busy until about 11:05"
    )
    assert reason("two").startswith("waits for 3 hosts: node3 is busy with run small until about 10:55; node2 is busy")
    assert reason("low") == "waits for a whole host: run two comes first"
    assert reason("held") == "is held: release it with do=release run=held"
    assert reason("after") == "waits for the end of runs busy and small"
    queue = state()
    queue.jobs["after"] = replace(queue.jobs["after"], reason="None")  # Slurm has not examined it yet
    assert reason("after", queue) == "waits for the end of runs busy and small"
    assert reason("never").startswith("never starts, because run lost did not finish")
    assert reason("later") == "starts again at about 11:35"
    down = state(nodes=[NODES[0], NODES[1].replace("allocated", "down*"), NODES[2]])
    assert reason("wantvram", down) == "waits for 16 GB of GPU memory and 1 GPU: node2 is down"


def test_the_tables_show_order_reason_and_end() -> None:
    listed = list_queue(state())
    assert [run["run"] for run in listed["runs"]][:3] == ["busy", "small", "two"]
    assert listed["runs"][0]["hosts"] == ["node2"] and "11:05" in listed["lines"][1]
    past = list_history(state())
    rows = {line.split()[0]: line for line in past["lines"][1:]}
    assert "finished" in rows["ok"] and "2:00" in rows["ok"] and "node[1-2]" in rows["ok"]
    assert len(past["runs"]) == len(REQUESTS)
    gone = next(run for run in past["runs"] if run["run"] == "gone")  # cancelled while it waited, with another priority
    assert gone["start"] == 0 and gone["priority"] == "high" and rows["gone"].split()[-2] == "-"
    assert list_queue(state(jobs=[]))["lines"][0] == "no run waits or runs"


def test_the_record_of_the_driver_takes_precedence_over_slurms() -> None:
    runs = answer()["runs"]
    attempts = [
        {"hosts": {"node1": {}}, "begin": NOW - 90, "end": NOW - 30, "reason": "preempted\x1b[2J"},
        "x",
        {"hosts": 7},
    ]
    runs["ok"]["state"] = json.dumps({"job": 14, "phase": "failed", "attempts": attempts[:1]})
    runs["bad"]["state"] = json.dumps({"phase": ["x"], "attempts": attempts})
    runs["gone"]["state"] = "{"
    runs["after"]["state"] = json.dumps(
        {"phase": "cancelled", "attempts": attempts[:1], "exit": {"code": 11, "reason": "it was cancelled"}}
    )
    runs["never"]["state"] = json.dumps({"phase": "failed", "attempts": attempts[:1], "exit": {"reason": "given up"}})
    found = {run["run"]: run for run in list_history(state(runs=runs))["runs"]}
    without = [line for line in JOBS if not line.endswith(("|after", "|never"))]
    others = {run["run"]: run for run in list_history(state(runs=runs, jobs=without))["runs"]}
    assert (others["after"]["reason"], others["never"]["reason"]) == ("", "given up")
    assert found["ok"]["hosts"] == ["node1"]  # Slurm's log has node[1-2]
    assert found["ok"]["state"] == "failed" and found["ok"]["start"] == NOW - 90
    assert found["ok"]["reason"] == "preempted\\x1b[2J" or "\x1b" not in found["ok"]["reason"]
    assert found["bad"]["state"] == "failed" and found["gone"]["state"] == "cancelled"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"gpu_memory": 32}, "no host has 32 GB of GPU memory, 1 GPU, 1 core: the closest is node2, which lacks 32 GB of GPU memory (it has 24)"),
        ({"gpus": 3}, "the closest is node2, which lacks 3 GPUs (it has 2) and 3 cores (it has 2)"),
        ({"memory": 64}, "which lacks 64 GB of memory (it has 22)"),
        ({"nodes": 2, "gpu_memory": 16}, "only node2 can be one: the next is node3, which lacks 16 GB of GPU memory (it has 8)"),
        ({"nodes": 4}, "it needs 4 hosts, and the queue has 3"),
        ({"gpus": 1, "hosts": ("node1",)}, "the closest is node1, which lacks 1 GPU (it has 0) (of the hosts node1)"),
        ({"nodes": 3}, ""),
        ({"gpus": 2, "gpu_memory": 24}, ""),
        ({"memory": 22, "cores": 2}, ""),
    ],
)  # fmt: skip
def test_what_no_host_satisfies_names_the_closest(fields: dict[str, Any], said: str) -> None:
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
    for found in (parse_job(line, {}), parse_node(line), parse_completed(line, 0)):
        assert not found or not re.search("[\x00-\x1f\x7f\u202e]", found.name)


def test_a_job_of_any_name_is_shown_as_plain_text() -> None:
    for name in ("a\x1b[31m", "../../etc", "a|b|c", "\u202eevil"):
        job = parse_job(f"10|low|PENDING|x\x1b|N/A|N/A|UNLIMITED||{name}", {})
        assert job and job.name.isprintable() and job.reason.isprintable()
    runs = {"../x": {"request": "{}", "state": None}, "wrong": {"request": json.dumps({"run": "other"}), "state": "[]"}}
    assert state(runs=runs).requests == {}


def test_a_run_that_was_just_added_starts_soon() -> None:
    job = Job(1, "new", "normal", "PENDING", "None")
    queue = QueueState({"new": job}, {"node1": Node("node1", "idle", 2, 8192)}, {"new": Request(run="new", cores=1)})
    assert why_waiting(queue.requests["new"], job, queue) == "starts soon"
    limit = Job(1, "new", "normal", "PENDING", "JobArrayTaskLimit")
    assert why_waiting(queue.requests["new"], limit, queue) == "waits for 1 core: Slurm says JobArrayTaskLimit"
