"""The collection trainyard.cluster, installed from its file: playbooks, and its roles and plugins in a playbook of a user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from installed_collection import installed_collection
from run_hosts import TOP, questions

from tools.collection import filter_names

pytestmark = pytest.mark.slow
OWN = """\
- hosts: cluster
  gather_facts: false
  roles:
    - trainyard.cluster.cluster
  tasks:
    - name: Ask for the hardware
      trainyard.cluster.machine_identity_info:
      register: machine
    - name: Show it
      ansible.builtin.debug:
        msg: "{{ hostvars | trainyard.cluster.cluster_addresses(cluster_members) }}"
    - name: Show the runs
      trainyard.cluster.trainyard:
        command: status
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return a folder of a user with an inventory of this machine, and the environment for Ansible."""
    folder = tmp_path_factory.mktemp("collection")
    environment = installed_collection(folder) | {"PYTHONPATH": str(TOP), "ANSIBLE_NOCOLOR": "1", "HF_HUB_OFFLINE": "1"}
    (folder / "inventory").mkdir()
    (folder / "inventory/local.yml").write_text((TOP / "inventory/local.yml").read_text())
    return folder, environment


def run(project: tuple[Path, dict[str, str]], program: str, *words: str) -> subprocess.CompletedProcess[str]:
    folder, environment = project
    command = [Path(sys.executable).with_name(program), "-i", "inventory/local.yml", *words]
    return subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False
    )


@pytest.mark.long
def test_a_run_of_the_collection(project: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    values = {"model": "tiny", "dataset": str(questions(tmp_path)), "max_steps": 2, "epochs": 20, "run": "first"}
    done = run(project, "ansible-playbook", "trainyard.cluster.train", "-e", json.dumps(values))
    assert done.returncode == 0 and "run first finished: 2 of 2 steps on 2 ranks" in done.stdout, (
        done.stdout[-3000:] + done.stderr
    )
    assert (project[0] / "runs/first/adapter/adapter_config.json").is_file()
    assert "to follow it again: ansible-playbook trainyard.cluster.attach -e run=first" in done.stdout, done.stdout[
        -3000:
    ]
    assert "playbooks/" not in done.stdout
    wrong = run(project, "ansible-playbook", "trainyard.cluster.train", "-e", "model=tiny", "-e", "lr=fast")
    assert wrong.returncode and [line for line in wrong.stdout.splitlines() if line.startswith("error: ")] == [
        "error: run spec: lr: expected a number > 0 and <= 1e+38, got 'fast' (-e)"
    ], wrong.stdout


def test_roles_and_plugins_in_a_playbook_of_a_user(project: tuple[Path, dict[str, str]]) -> None:
    (project[0] / "own.yml").write_text(OWN)
    done = run(project, "ansible-playbook", "own.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"node2": "127.0.0.1"' in done.stdout and "\nhost   GPUs" in done.stdout, done.stdout


def test_the_inventory_plugin(project: tuple[Path, dict[str, str]]) -> None:
    text = (TOP / "inventory/ollama.yml").read_text().replace("plugin: ollama", "plugin: trainyard.cluster.ollama")
    (project[0] / "discovered.yml").write_text(text.replace("networks: [auto]", "networks: [127.0.0.2/32]"))
    done = run(project, "ansible-inventory", "-i", "discovered.yml", "--graph")
    assert done.returncode == 0 and "|--@discovered:" in done.stdout, done.stdout + done.stderr


def test_every_plugin_has_its_full_name(project: tuple[Path, dict[str, str]]) -> None:
    """A name that the checkout's configuration would find is an error in the collection."""
    top = project[0] / "collections/ansible_collections/trainyard/cluster"
    names = {path.stem for path in (top / "plugins/modules").glob("*.py")}
    playbooks = [f"trainyard.cluster.{path.stem}" for path in (top / "playbooks").glob("*.yml")]
    done = run(project, "ansible-playbook", *playbooks, "--syntax-check")
    assert done.returncode == 0, done.stdout + done.stderr
    for path in [*(top / "roles").rglob("*.yml"), *(top / "playbooks").glob("*.yml")]:
        for document in yaml.safe_load_all(path.read_text()):
            stack = [document]
            while stack:
                item = stack.pop()
                if isinstance(item, dict):
                    assert path.parent.name in ("meta", "defaults") or names.isdisjoint(item), f"{path}: {item}"
                stack += item.values() if isinstance(item, dict) else item if isinstance(item, list) else []
    filters = filter_names(top / "plugins/filter")
    assert "config_word" in filters and len(filters) >= 15


def test_another_version_of_the_package_is_one_line(project: tuple[Path, dict[str, str]]) -> None:
    manifest = project[0] / "collections/ansible_collections/trainyard/cluster/MANIFEST.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"version": "0.2.0"', '"version": "0.1.0"'))
    done = run(project, "ansible-playbook", "trainyard.cluster.status")
    manifest.write_text(text)
    errors = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert errors and "the collection trainyard.cluster 0.1.0 needs the package of the same version" in errors[0], (
        done.stdout
    )


@pytest.mark.long
def test_ansible_test_finds_nothing(project: tuple[Path, dict[str, str]]) -> None:
    """The checks of Ansible for collections, with packages from PyPI. Two import the plugins without the package trainyard, which they need."""
    folder, environment = project
    home = folder / "home"
    pip = home / ".ansible/test/cache/get_pip_24_2.py"  # instead of a download
    pip.parent.mkdir(parents=True)
    pip.write_text("import ensurepip\nensurepip.bootstrap()\n")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    skipped = [word for name in ("ansible-doc", "import", "pslint", "shellcheck") for word in ("--skip-test", name)]
    program = Path(sys.executable).with_name("ansible-test")
    command = [program, "sanity", "--color", "no", "--python", python, *skipped]
    top = folder / "collections/ansible_collections/trainyard/cluster"
    known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run(
        command, cwd=top, env=known | {"HOME": str(home)}, capture_output=True, text=True, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0 and 'Running sanity test "validate-modules"' in output, output[-4000:]
