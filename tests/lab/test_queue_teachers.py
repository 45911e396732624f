"""A teacher, its deployment to a real Ollama on three lab hosts, and a student in the queue; a student whose teacher fails."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fault_trial import questions
from lab_hosts import NEEDS_LAB, VENV, Lab, inventory_with, run_playbook
from queued_runs import LEFT, QueuedRun, tiny_spec
from test_queue_front import SERVICE, offline, trainyard
from test_services import archive, tags
from testbed.root import DATA_DIR

from trainer.data.samples import read_samples
from trainer.data.tiny import make_tiny

__all__ = ["archive", "offline"]

pytestmark = [*NEEDS_LAB, pytest.mark.long]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, archive: Path) -> Iterator[tuple[Lab, Path]]:
    """Three hosts with the queue and Ollama, and their inventory."""
    lab, folder = Lab(f"teachers-{os.getpid()}"), tmp_path_factory.mktemp("teachers")
    wanted = {"ollama_state": "present", "ollama_version": "0.5.4", "ollama_archive": str(archive)}
    wanted |= {"ollama_sha256": hashlib.sha256(archive.read_bytes()).hexdigest(), "queue_state": "present"}
    try:
        lab.up(hosts=3, venv=VENV, persistent=False)
        inventory = inventory_with(lab, folder, **wanted)
        played = run_playbook("site.yml", inventory, {}, timeout=900)
        assert played.rc == 0, played.stdout
        yield lab, inventory
    finally:
        lab.down()


def add(cluster: tuple[Lab, Path], folder: Path, runs: list[dict[str, Any]]) -> dict[str, QueuedRun]:
    """Add the runs of a queue file; return them by name."""
    lab, inventory = cluster
    common = {"run_env": {"OMP_NUM_THREADS": "1"}, "cores": 1, "time_limit": 60}
    (folder / "runs.yml").write_text(yaml.safe_dump(common | {"runs": runs}))
    values = {"do": "add", "file": str(folder / "runs.yml")}
    played = run_playbook("playbooks/queue.yml", inventory, values)
    assert played.rc == 0 and played.count("changed") == 1, played.stdout
    jobs = {run["run"]: run["job"] for run in trainyard(inventory, "history")["runs"]}
    return {run["run"]: QueuedRun(lab, lab.hosts[0], run["run"], jobs[run["run"]]) for run in runs}


def student(folder: Path, **more: Any) -> dict[str, Any]:
    """Return a student of the run `teacher`."""
    if not (folder / "model").exists():
        make_tiny(read_samples(questions(folder)), folder / "model", 0)
        (folder / "p.jsonl").write_text("".join(f'{{"prompt": "What follows {n}?"}}\n' for n in range(12)))
    spec = tiny_spec("student", questions(folder), 5) | {"model": str(folder / "model"), "after": "teacher"}
    del spec["dataset"]
    asked = {"prompts": str(folder / "p.jsonl"), "near_duplicates": 0, "keep_cut": True, "max_tokens": 12}
    return spec | asked | more


def test_a_student_trains_after_the_deployment_of_its_teacher(cluster: tuple[Lab, Path], tmp_path: Path) -> None:
    """The service and its drivers are killed during the deployment and while the teacher answers."""
    lab, inventory = cluster
    head = lab.hosts[0]
    teacher = tiny_spec("teacher", questions(tmp_path), 60) | {"deploy_name": "mine", "lr": 2e-3}
    runs = add(cluster, tmp_path, [teacher, student(tmp_path)])
    again = trainyard(inventory, "add", f"--file={tmp_path / 'runs.yml'}")
    assert not again["changed"], again
    listed = {run["run"]: run for run in trainyard(inventory, "list")["runs"]}
    assert listed["student"]["reason"] == "waits for the end of run teacher"
    for name, step in (("teacher", "deployment"), ("student", "answers")):
        runs[name].wait(lambda state, step=step: state.get("step") == step, f"at its {step}", 400)
        lab.inside(head, f"systemctl kill --signal=KILL {SERVICE}")
    runs["student"].wait_phase("finished", 400)
    assert runs["teacher"].state()["phase"] == "finished"
    for run in runs.values():
        state = run.state()
        assert len(state["attempts"]) == 1 and "the driver monitors the run again" in run.log(), run.log()
    said = runs["teacher"].log()
    for host in lab.hosts:
        assert "mine:latest" in tags(host) and f"{host.name}: " in said
    asked = runs["student"].log()
    assert "mine teaches on node1, node2, node3: 12 answers" in asked
    result = runs["student"].result(runs["student"].on()[0])
    assert (result["status"], result["step"]) == ("finished", 5)
    answers = lab.inside(head, f"cat {DATA_DIR}/queue/.students/answers/mine-*.jsonl").splitlines()
    keys = [json.loads(line)["key"] for line in answers]
    assert len(keys) == len(set(keys)) == 12
    modes = lab.inside(head, f"stat -c %a {DATA_DIR}/queue/*/session.json {DATA_DIR}/queue/.students/answers/*.jsonl")
    assert set(modes.split()) == {"600"}
    assert lab.inside(head, LEFT) == ""


def test_students_of_a_teacher_that_fails_end_with_the_reason(cluster: tuple[Lab, Path], tmp_path: Path) -> None:
    lab, inventory = cluster
    wrong = tiny_spec("wrong", questions(tmp_path), 5) | {"deploy_name": "wrong", "master_port": 22}
    runs = add(
        cluster,
        tmp_path,
        [
            wrong,
            student(tmp_path, run="one", after="wrong"),
            student(tmp_path, run="two", after="one", ollama_teacher="mine"),
        ],
    )
    for name in ("one", "two"):
        lab.wait(lambda name=name: runs[name].state()["phase"] == "failed", f"{name} does not end", 300)
    found = {run["run"]: run for run in trainyard(inventory, "history")["runs"]}
    assert found["one"]["state"] == found["two"]["state"] == "failed"
    assert (
        found["one"]["reason"].startswith("run wrong, for which it waits, has failed: ")
        and "22" in found["one"]["reason"]
    )
    assert found["two"]["reason"].startswith("run one, for which it waits, has failed: run wrong")
    assert trainyard(inventory, "list")["runs"] == []

    lab.inside(lab.hosts[2], "systemctl stop ollama")
    undeployed = tiny_spec("undeployed", questions(tmp_path), 60) | {"deploy_name": "other", "lr": 2e-3}
    again = [undeployed, student(tmp_path, run="three", after="undeployed")]
    runs = add(cluster, tmp_path, again)
    lab.wait(lambda: runs["three"].state()["phase"] == "failed", "the student does not end", 300)
    reason = runs["three"].state()["exit"]["reason"]
    assert "the run has finished, but its model is not deployed: node3: " in reason, reason
    lab.inside(lab.hosts[2], "systemctl start ollama")
    runs = add(cluster, tmp_path, again)
    runs["undeployed"].wait_phase("finished", 300)
    runs["three"].wait_phase("finished", 300)
    assert "other:latest" in tags(lab.hosts[2])
