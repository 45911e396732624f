"""Ansible and the playbooks on a host with Python 3.10, the version of Ubuntu 22.04: this machine with that
interpreter."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import Any

import pytest
import yaml
from interpreters import interpreter
from lab_hosts import run_playbook
from run_hosts import write_inventory

PYTHON = interpreter("3.10")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="this machine has no Python 3.10")]


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    python = {"ansible_python_interpreter": PYTHON, "cluster_python": PYTHON, "cluster_managed": True}
    return write_inventory(tmp_path, {"jammy": {"cluster_data_dir": str(tmp_path / "data")}}, **python)


def play(folder: Path, inventory: Path, tasks: list[dict[str, Any]], **more: Any) -> Any:
    path = folder / "play.yml"
    path.write_text(yaml.safe_dump([{"hosts": "cluster", "gather_facts": False, "tasks": tasks, **more}]))
    return run_playbook(str(path), inventory)


def test_modules_run_and_a_second_run_changes_nothing(tmp_path: Path, inventory: Path) -> None:
    tasks = [
        {"user_folder": {"paths": [str(tmp_path / "made")], "owner": getpass.getuser()}},
        {"nvidia_info": {"branch": 580, "sysfs": str(tmp_path)}},
        {"machine_identity_info": {}},
        {"ansible.builtin.command": "{{ ansible_python_interpreter }} -V", "register": "v", "changed_when": False},
        {"ansible.builtin.assert": {"that": "v.stdout is match('Python 3.10')"}},
    ]
    first, second = play(tmp_path, inventory, tasks), play(tmp_path, inventory, tasks)
    assert (first.rc, first.count("changed")) == (0, 1), first.stdout
    assert (second.rc, second.count("changed")) == (0, 0), second.stdout
    assert (tmp_path / "made").is_dir()


def test_an_environment_on_python_310_is_refused_with_its_remedy(tmp_path: Path, inventory: Path) -> None:
    variables = {"cluster_python": str(tmp_path / "data/venv/bin/python"), "python_base": PYTHON}
    played = play(tmp_path, inventory, [], roles=["cluster", "python"], vars=variables)
    assert played.rc != 0
    assert f"error: jammy: {PYTHON} is Python 3.10." in played.stdout, played.stdout
    assert (
        "3.11 to 3.14 is required: set python_base to an installed one, or set python_env: conda, which installs its own"
    ) in played.stdout
    assert not (tmp_path / "data").exists()


def test_a_run_on_python_310_is_refused_by_preflight(inventory: Path) -> None:
    played = run_playbook("playbooks/preflight.yml", inventory)
    assert played.rc != 0
    assert f"jammy: {PYTHON} is Python 3.10." in played.stdout, played.stdout
    assert "set python_base to a supported one, or python_env: conda, and run site.yml" in played.stdout
