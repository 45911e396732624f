"""Code of a rank, in a system unit, that lays traps for the programs outside: for a restart, and for readers."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard_site import Dashboard, end, serve
from lab_hosts import NEEDS_LAB, VENV, Lab, Played, inventory_with, run_playbook
from ranks_site import export
from run_hosts import questions, until
from tables import table
from testbed.root import DATA_DIR

pytestmark = [*NEEDS_LAB, pytest.mark.slow]

SECRET = "kept from every rank"
KEPT = "/home/tester/.ssh/kept"  # the unit hides its folder; the login user, and so programs outside, can read it
KEYS = "cd /home/tester/.ssh && stat -c '%n %U %a' . * && sha256sum *"

LINK_STATE = table("hostile_rank_hosts")["link_state"]
LINK_FILES = table("hostile_rank_hosts")["link_files"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, Path]]:
    lab, folder = Lab(f"hostile-{os.getpid()}"), tmp_path_factory.mktemp("hostile")
    lab.up(hosts=1, venv=VENV, persistent=False)
    inventory = inventory_with(lab, folder)
    played = run_playbook("site.yml", inventory, {}, "--tags", "storage", timeout=900)
    assert played.rc == 0, played.stdout
    lab.inside(lab.hosts[0], f"echo '{SECRET}' >{KEPT}; chown tester: {KEPT}; chmod 600 {KEPT}")
    yield lab, inventory
    lab.down()


def train(cluster: tuple[Lab, Path], folder: Path, run: str, script: str, **more: Any) -> Played:
    """Let a rank run this code; `more` are launch options."""
    (folder / "hostile.py").write_text(script)
    spec = {"script": str(folder / "hostile.py"), "run": run, "dataset": str(questions(folder, 600))}
    return run_playbook("train.yml", cluster[1], spec | more)


@pytest.mark.long
def test_a_restart_removes_nothing_behind_a_link_in_place_of_state(cluster: tuple[Lab, Path], tmp_path: Path) -> None:
    lab, _ = cluster
    head = lab.hosts[0]
    before = lab.inside(head, KEYS)
    played = train(cluster, tmp_path, "state", LINK_STATE, max_restarts=1)
    assert played.rc != 0 and "restart 1 of 1" in played.stdout, played.stdout
    assert f"it is a symbolic link: remove it: '{DATA_DIR}/runs/state/state'" in played.stdout, played.stdout
    assert "authorized_keys" in before and lab.inside(head, KEYS) == before


def test_links_in_place_of_logs_and_checkpoints_show_nothing(cluster: tuple[Lab, Path], tmp_path: Path) -> None:
    """Neither in the progress and the error of a run, nor in status, its pages, copies of its files, and an export."""
    lab, inventory = cluster
    head = lab.hosts[0]
    digest = hashlib.sha256(f"{SECRET}\n".encode()).hexdigest()
    said = []
    for run, code in (("failed", 1), ("ended", 0)):
        values = {"SIZE": str(len(SECRET) + 1), "DIGEST": digest, "CODE": str(code)}
        played = train(
            cluster, tmp_path, run, LINK_FILES, run_env=values, collect_to=str(tmp_path / "copy"), progress_interval=0.5
        )
        said += [played.stdout, json.dumps(played.events)]
        assert (played.rc != 0) == bool(code), played.stdout
        logs = run_playbook("playbooks/logs.yml", inventory, {"run": run, "logs_to": str(tmp_path / "logs" / run)})
        said += [logs.stdout, json.dumps(logs.events)]
    said += pages(inventory, "/runs/failed", "/runs/ended")
    status = run_playbook("playbooks/status.yml", inventory, {})
    assert "ended" in status.stdout and "failed" in status.stdout, status.stdout
    exported = export(lab, head, f"{DATA_DIR}/runs/ended", digest, "")
    assert b"error" in exported.stdout, exported
    said += [status.stdout, json.dumps(status.events), (exported.stdout + exported.stderr).decode()]
    assert (tmp_path / "copy/ended/output/plain.txt").read_text() == "copied"
    said += [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert [text for text in said if SECRET in text] == []
    assert lab.inside(head, f"readlink {DATA_DIR}/runs/ended/logs/rank0.log").strip() == KEPT


def pages(inventory: Path, *paths: str) -> list[str]:
    """Return pages of the dashboard, once it shows the runs."""
    process, port, token = serve(inventory)
    try:
        board = Dashboard(process, port, token)
        session = board.session()
        return [until(lambda path=path: shown(board, path, session), 60, path) for path in paths]
    finally:
        end(process)


def shown(board: Dashboard, path: str, session: str) -> str:
    status, _, text = board.ask("GET", path, Cookie=session)
    return text if status == 200 else ""
