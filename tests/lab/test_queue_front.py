"""Adding, listing and changing queued runs, with playbooks/queue.yml and `trainyard queue`, on the Slurm of the role queue.

The service that drives the runs is stopped, so that a job keeps its hosts and nothing trains.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab_hosts import NEEDS_LAB, REPO, Lab, run_playbook
from test_queue import as_user, cluster
from testbed.root import DATA_DIR

from trainyard.cli import __main__ as program

__all__ = ["cluster"]

pytestmark = [*NEEDS_LAB, pytest.mark.slow]

SERVICE = "trainyard-queue.service"
ROLES = "ssh,firewall,storage,queue"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("ANSIBLE_CONFIG", str(REPO / "ansible.cfg"))


@pytest.fixture(scope="module")
def queue(cluster: tuple[Lab, Path]) -> Iterator[tuple[Lab, Path]]:
    """The cluster with its queue, on which no driver runs."""
    lab, inventory = cluster
    site = run_playbook("site.yml", inventory, {}, "--tags", ROLES, timeout=900)
    assert site.rc == 0, site.stdout
    lab.inside(lab.hosts[0], f"systemctl stop {SERVICE}")
    yield lab, inventory


def trainyard(inventory: Path, *words: str, code: int = 0, command: str = "queue") -> dict[str, Any]:
    """Call `trainyard COMMAND ... --json` in this process, which saves its imports, and return its answer."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        found = program.main([command, *words, "--json", "-i", str(inventory)])
    assert found == code, err.getvalue()
    answer: dict[str, Any] = json.loads(out.getvalue())
    return answer


def listed(inventory: Path) -> dict[str, dict[str, Any]]:
    return {run["run"]: run for run in trainyard(inventory, "list")["runs"]}


def test_a_sweep_is_added_listed_and_changed(queue: tuple[Lab, Path], tmp_path: Path) -> None:
    lab, inventory = queue
    sweep = {
        "model": "tiny",
        "max_steps": 5,
        "runs": [
            {"run": "busy", "gpus": 2, "gpu_memory": 16, "time_limit": 30},
            {"run": "wants", "gpus": 1, "gpu_memory": 16, "priority": "low"},
            {"run": "next", "after": "busy", "cores": 1},
            {"run": "last", "after": "grid", "cores": 1},
            {"run": "grid", "grid": {"lr": ["1e-4", "3e-4"]}, "gpus": 1, "gpu_memory": 16},
        ],
    }
    (tmp_path / "sweep.yml").write_text(yaml.safe_dump(sweep))
    added = run_playbook("playbooks/queue.yml", inventory, {"do": "add", "file": str(tmp_path / "sweep.yml")})
    assert added.rc == 0, added.stdout
    text = " ".join(added.stdout.split())
    assert "added run busy, priority normal, 1 host; time limit 30 minutes (job" in text
    assert (
        "added run next, priority normal, 1 host after busy; time limit 10 minutes: twice the plan's estimate" in text
    )

    lab.wait(lambda: listed(inventory)["busy"]["state"] == "running", "the run does not start", 60)
    runs = listed(inventory)
    assert set(runs) == {"busy", "wants", "next", "last", "grid-lr1e-4", "grid-lr3e-4"} and runs["busy"]["hosts"] == [
        "node2"
    ]
    waits = ("starts soon", "waits for free hosts", "waits for runs that come first")
    assert runs["grid-lr1e-4"]["reason"] in waits, runs
    assert runs["next"]["reason"] == "waits for the end of busy"
    assert runs["last"]["reason"] == "waits for the end of grid-lr1e-4, grid-lr3e-4"
    again = trainyard(inventory, "add", f"--file={tmp_path / 'sweep.yml'}")
    assert not again["changed"] and {run["state"] for run in again["runs"]} == {"running", "waiting"}

    # The files of the runs share the store, and what may hold secrets is private.
    folder = f"{DATA_DIR}/queue"
    assert lab.inside(lab.hosts[0], f"stat -c %a {folder}/busy/session.json").strip() == "600"
    inodes = lab.inside(lab.hosts[0], f"stat -c %i {folder}/*/files/store/models/*/model.safetensors").split()
    assert len(inodes) >= 5 and len(set(inodes)) == 1

    assert trainyard(inventory, "hold", "wants")["changed"]
    assert not trainyard(inventory, "hold", "wants")["changed"]
    assert listed(inventory)["wants"]["reason"] == "is held: release it with trainyard queue release wants"
    trainyard(inventory, "release", "wants")
    moved = run_playbook("playbooks/queue.yml", inventory, {"do": "priority", "run": "wants", "priority": "critical"})
    assert moved.rc == 0 and moved.count("changed") == 1, moved.stdout
    found = listed(inventory)["wants"]
    assert (found["priority"], found["state"]) == ("critical", "waiting")
    cancelled = trainyard(inventory, "cancel", "busy", "grid-lr3e-4")
    assert cancelled["changed"] and "run busy, which is running, cancelled" in cancelled["lines"]
    lab.wait(lambda: listed(inventory)["wants"]["state"] == "running", "the critical run does not start", 60)
    lab.wait(lambda: not {"next", "last"} & set(listed(inventory)), "the runs after a cancelled one do not end", 60)
    ended = "JobState=CANCELLED Reason=DependencyNeverSatisfied"
    assert ended in lab.inside(lab.hosts[0], f"scontrol --oneliner show job {runs['next']['job']}")


def test_slurm_that_does_not_answer_is_one_line(queue: tuple[Lab, Path]) -> None:
    lab, inventory = queue
    lab.inside(lab.hosts[0], "systemctl stop slurmctld")
    try:
        error = trainyard(inventory, "list", code=1)["error"]
    finally:
        lab.inside(lab.hosts[0], "systemctl start slurmctld")
    assert error.startswith("queue host node1: squeue: ") and "\n" not in error
    lab.wait(lambda: "UP" in as_user(lab, lab.hosts[0], "scontrol ping", check=False), "slurmctld does not start", 60)
    assert "wants" in listed(inventory)
