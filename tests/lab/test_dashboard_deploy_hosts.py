"""The dashboard's service deploys a run of two hosts to a real Ollama on each of them, from its sandboxed unit."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from fault_trial import questions
from lab_hosts import NEEDS_LAB, VENV, Lab, inventory_with, run_playbook
from queued_runs import tiny_spec
from test_dashboard_service_hosts import PASSWORD, PORT, press, shown
from test_services import archive, tags

__all__ = ["archive"]

pytestmark = [*NEEDS_LAB, pytest.mark.long]


def test_the_service_deploys_a_run(tmp_path: Path, archive: Path) -> None:
    lab = Lab(f"deploys-{os.getpid()}")
    wanted = {"ollama_state": "present", "ollama_version": "0.5.4", "ollama_archive": str(archive)}
    wanted |= {"ollama_sha256": hashlib.sha256(archive.read_bytes()).hexdigest()}
    wanted |= {"dashboard_state": "present", "dashboard_port": PORT, "dashboard_password": PASSWORD}
    try:
        lab.up(hosts=2, venv=VENV, persistent=False)
        inventory = inventory_with(lab, tmp_path, dashboard_allow=[f"10.231.{lab.hosts[0].net}.254"], **wanted)
        played = run_playbook("site.yml", inventory, {}, timeout=900)
        assert played.rc == 0, played.stdout
        trained = run_playbook("train.yml", inventory, tiny_spec("small", questions(tmp_path), 60) | {"lr": 2e-3})
        assert trained.rc == 0, trained.stdout
        lab.wait(lambda: "Deploy this run" in shown(lab, "/runs/small"), "the run is not shown as finished", 30)
        press(lab, "/runs/small/deploy", "&name=mine")
        lab.wait(lambda: "Deploy as mine" in shown(lab, "/runs/small"), "the deployment is not shown", 30)
        ended = lambda: "progress running" not in shown(lab, "/runs/small")  # noqa: E731
        lab.wait(ended, "the deployment does not end", 180)
        assert all("mine:latest" in tags(host) for host in lab.hosts), shown(lab, "/runs/small")
        lab.wait(lambda: "mine:latest" in shown(lab, "/models"), "the page does not show the model", 60)
    finally:
        lab.down()
