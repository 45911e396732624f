"""Students that are added to the queue: their options, requests that are refused before prompts are sent, and their
results.

The queue host is a stand-in; tests/lab/test_queue_front.py has a real one.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from fake_queue import HOSTS, FakeQueue

from trainer.common.errors import UserError
from trainer.config import RunSpec
from trainyard.inventory import Cluster
from trainyard.ollama.distill_options import make_distill_options
from trainyard.queue import requests
from trainyard.queue.queue_client import Job
from trainyard.queue.request import QueueOptions
from trainyard.run.launch_options import make_options
from trainyard.workflows.distill import distill, student_specs
from trainyard.workflows.queued_students import StudentQueue, student_queue

TOP = Path(__file__).resolve().parents[3]
GIVEN = {"teacher": "t", "prompts": "p.jsonl", "model": "tiny", "queue": "true"}
RESULT = {"status": "finished", "step": 5, "steps": 5, "world_size": 1, "tokens": 9, "samples": 9}
RESULT |= {
    "tokens_per_second": 1.0,
    "loss_first": 2.0,
    "loss_last": 1.0,
    "eval_loss_first": 2.0,
    "eval_loss": 0.5,
    "train_samples": 7,
}


def cluster() -> Cluster:
    def connect(name: str) -> Any:
        return type("Connection", (), {"host": next(host for host in HOSTS if host.name == name)})()

    groups = {"cluster": ["node1", "node2"]}
    return Cluster(HOSTS, groups, {host.name: {} for host in HOSTS}, connect, make_options)


def specs_of(given: dict[str, Any]) -> list[RunSpec]:
    return student_specs(make_distill_options(given), "", given, TOP, print)


def made(hybrid: bool = False, **values: Any) -> StudentQueue:
    return student_queue(values, hybrid, cluster(), make_options({}), TOP, print, False)


def test_options_of_the_queue_need_it() -> None:
    with pytest.raises(UserError, match="distill: priority is an option of the queue: set queue=true"):
        specs_of({**GIVEN, "queue": False, "priority": "low"})
    (spec,) = specs_of({**GIVEN, "priority": "low", "lr": 0.1})
    assert spec.lr == 0.1 and spec.eval_start


def test_hybrid_students_have_two_hosts() -> None:
    assert made(priority="low", cores="2").options == QueueOptions(priority="low", cores=2)
    assert made(hybrid=True).options.nodes == 2 and made(hybrid=True, nodes=3).options.nodes == 3
    with pytest.raises(UserError, match="hybrid=true trains each student on several hosts: set nodes to 2 or more"):
        made(hybrid=True, nodes=1)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"priority": "urgent"}, "distill: priority: expected one of low, normal, high, critical"),
        ({"quueue": True}, "-e quueue: unknown name"),
    ],
)
def test_mistakes_are_found_before_a_host_is_asked(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        distill(GIVEN | values, cluster(), TOP, print, False)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def queue_of(tmp_path: Path, **options: Any) -> StudentQueue:
    """Return a queue in which `one` has finished on node2, which has its result, `two` waits, and `three` has failed on node1."""
    queue = FakeQueue({"two": {"after": ("one",)}}, 2, one="finished", two="waiting", three="failed")
    queue.found.jobs["two"] = Job(7, "two", "low", "PENDING", "Dependency")
    attempt = {"begin": 1.0, "end": 2.0, "reason": ""}
    queue.found.states["one"]["attempts"] = [attempt | {"hosts": {"node2": {}}}]
    queue.found.states["three"]["attempts"] = [attempt | {"hosts": {"node1": {}}, "reason": "lr is too high"}]
    site = queue.site(tmp_path, {"node2": {"one/result.json": json.dumps(RESULT)}})
    return StudentQueue(site, QueueOptions(**options), make_options({}))


def test_students_of_the_queue_stay_and_show_their_loss(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    given = {**GIVEN, "lr": 0.1}
    (spec,) = specs_of(given)
    dataset = {"dataset": str(tmp_path / "d.jsonl")}
    specs = [spec.model_copy(update={"run": run, **dataset}) for run in ("one", "two")]
    added = queue_of(tmp_path).add(specs)
    assert not added["changed"] and added["students"] == {"one": RESULT}
    assert [run["run"] for run in added["runs"]] == ["two"]
    text = "\n".join(added["lines"])
    assert added["lines"][:2] == ["run one is finished: nothing to do", "run two is waiting already, as job 7"]
    assert "waits for the end of run one" in text and "playbooks/attach.yml -e run=two" in text
    (row,) = [line.split() for line in added["lines"] if line.split()[:2] == ["tiny", "one"]]
    assert row[2:10] == ["1", "all:", "7", "samples", "node2", "2.0000", "0.5000", "-75"]


def test_failed_students_are_shown_and_added_again_only_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    (spec,) = specs_of({**GIVEN, "lr": 0.1})
    spec = spec.model_copy(update={"run": "three", "dataset": str(tmp_path / "d.jsonl")})
    added = queue_of(tmp_path).add([spec])
    assert not added["changed"] and added["failed"] == {"three": "lr is too high"} and added["students"] == {}
    assert added["lines"][0] == "run three has failed: not added again"
    (row,) = [line for line in added["lines"] if line.split()[:2] == ["tiny", "three"]]
    assert row.split()[2:5] == ["1", "all", "node1"] and row.endswith("failed: lr is too high")
    assert added["lines"][-1].startswith("add failed students again with -e retry_failed=true")
    asked: list[str] = []

    def add(run: Any, *rest: Any, continues: bool) -> dict[str, Any]:
        asked.append(run.spec.run)
        return {"run": run.spec.run, "line": "added"}

    monkeypatch.setattr(requests, "_add", add)
    assert dataclasses.replace(queue_of(tmp_path), again=True).add([spec])["changed"] and asked == ["three"]


def test_students_that_no_host_can_train_are_refused(tmp_path: Path) -> None:
    specs = specs_of({**GIVEN, "run": "mine"})
    queue_of(tmp_path, after=("one",)).check(specs)
    with pytest.raises(UserError, match="run mine: no host has 9 cores: the closest is node1, which lacks 9 cores"):
        queue_of(tmp_path, cores=9).check(specs)
    with pytest.raises(UserError, match="after: the queue has no run and no grid four"):
        queue_of(tmp_path, after=("four",)).check(specs)
