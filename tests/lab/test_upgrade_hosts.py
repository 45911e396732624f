"""A cluster that the version before has installed and used: site.yml of this version converts it, and nothing is lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_trial import questions
from lab_hosts import NEEDS_LAB, REPO, VENV, Lab, inventory_with, run_playbook
from queued_runs import tiny_spec
from testbed.root import DATA_DIR

pytestmark = [*NEEDS_LAB, pytest.mark.long]

BEFORE = "7ae20fae1c"  # the last commit that kept programs of services where ranks can write
ROLES = "ssh,firewall,storage,queue,dashboard"
WEEK = "7 days ago"


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the version before."""
    folder = tmp_path_factory.mktemp("before")
    archive = subprocess.run(["git", "archive", BEFORE], cwd=REPO, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"this clone has no commit {BEFORE}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, Path]]:
    lab, folder = Lab(f"upgrade-{os.getpid()}"), tmp_path_factory.mktemp("upgrade")
    lab.up(hosts=2, venv=VENV, persistent=False)
    settings = {"dashboard_state": "present", "dashboard_password": "correct horse battery", "queue_state": "present"}
    yield lab, inventory_with(lab, folder, **settings)
    lab.down()


def of_before(folder: Path, inventory: Path) -> Callable[..., str]:
    """Return a function that runs a playbook of the version before, and returns its output."""

    def play(playbook: str, spec: dict[str, Any], *arguments: str) -> str:
        command = [
            str(VENV / "bin/ansible-playbook"),
            "-i",
            str(inventory),
            playbook,
            "-e",
            json.dumps(spec),
            *arguments,
        ]
        path = f"{VENV / 'bin'}:{os.environ['PATH']}"
        environment = os.environ | {
            "ANSIBLE_CONFIG": str(folder / "ansible.cfg"),
            "PYTHONPATH": str(folder),
            "PATH": path,
        }
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return play


def test_site_converts_a_cluster_of_the_version_before(before: Path, cluster: tuple[Lab, Path], tmp_path: Path) -> None:
    lab, inventory = cluster
    head = lab.hosts[0]
    data = questions(tmp_path)
    play = of_before(before, inventory)
    play("site.yml", {}, "--tags", ROLES)
    assert lab.inside(head, f"ls {DATA_DIR}/dashboard/packages* -d")
    play("train.yml", tiny_spec("done", data, 6) | {"lora_r": 4})
    play("train.yml", tiny_spec("half", data, 600) | {"lora_r": 4, "follow": "false"})
    saved = f"ls {DATA_DIR}/runs/half/checkpoints/step-*/manifest.json 2>/dev/null || :"
    lab.wait(lambda: lab.inside(head, saved) != "", "the run does not train", 300)
    play("playbooks/stop.yml", {"run": "half"})
    for host in lab.hosts:
        lab.inside(host, f"find {DATA_DIR}/runs/done {DATA_DIR}/runs/half -exec touch -h -d '{WEEK}' {{}} +")
    play("playbooks/queue.yml", tiny_spec("queued", data, 100_000) | {"do": "add", "time_limit": 120})
    queued = f"cat {DATA_DIR}/runs/queued/logs/rank0.log 2>/dev/null || :"
    logs = lambda: "".join(lab.inside(host, queued) for host in lab.hosts)  # noqa: E731
    lab.wait(lambda: "step " in logs(), "the queued run does not train", 300)
    kept = f"cd {DATA_DIR} && find runs/done runs/half -type f | sort | xargs sha256sum"
    files = {host.name: lab.inside(host, kept) for host in lab.hosts}

    site = run_playbook("site.yml", inventory, {}, "--tags", ROLES, timeout=1800)
    assert site.rc == 0, site.stdout
    assert "the service of the dashboard and its password are removed from" in " ".join(site.stdout.split())
    assert (
        lab.inside(head, f"ls {DATA_DIR}/dashboard /etc/systemd/system/trainyard-dashboard.service 2>/dev/null || :")
        == ""
    )
    again = run_playbook("site.yml", inventory, {}, "--tags", ROLES, timeout=1800)
    assert again.rc == 0 and again.count("changed") == 0, again.stdout

    assert {host.name: lab.inside(host, kept) for host in lab.hosts} == files
    status = run_playbook("playbooks/status.yml", inventory)
    assert status.rc == 0, status.stdout
    for run, states in (("done", "finished"), ("half", "stopped"), ("queued", "training|saving")):
        assert re.search(rf"^{run} .* ({states}) ", status.stdout, re.MULTILINE), status.stdout
    steps = logs().count("\n")
    lab.wait(lambda: logs().count("\n") > steps, "the queued run does not go on", 300)
    cancelled = run_playbook("playbooks/queue.yml", inventory, {"do": "cancel", "run": "queued"})
    assert cancelled.rc == 0, cancelled.stdout
    resumed = run_playbook("train.yml", inventory, tiny_spec("half", data, 600) | {"lora_r": 4}, timeout=1800)
    assert resumed.rc == 0, resumed.stdout
    assert "resuming from step" in lab.inside(head, f"cat {DATA_DIR}/runs/half/logs/rank0.log")
    merged = run_playbook("playbooks/merge.yml", inventory, {"runs": "done,half", "run": "both"})
    assert merged.rc == 0, merged.stdout
    trained = run_playbook("train.yml", inventory, tiny_spec("fresh", data, 4) | {"lora_r": 4})
    assert trained.rc == 0, trained.stdout
