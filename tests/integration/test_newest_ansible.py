"""A controller with the newest ansible-core and the newest Python of this machine; the hosts have the Python of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreters import interpreter
from run_hosts import TOP, questions

from tools.lock import read_pins
from trainyard.python_env.uv_settings import environment_of_uv

pytestmark = pytest.mark.slow
UV = Path(sys.executable).with_name("uv")
# Tests of plugins that need neither torch nor another process.
TESTS = ("test_dependencies", "test_argument_spec", "test_ufw", "test_lock", "test_new_project")
UNREACHABLE = ("error sending request", "dns error", "Failed to fetch", "no index")


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the programs of an environment with the newest ansible-core; all else as pinned."""
    folder = tmp_path_factory.mktemp("newest")
    python = next(filter(None, map(interpreter, ("3.14", "3.13", "3.12"))), sys.executable)
    pins = [f"{name}=={version}" for name, version in read_pins("constraints.txt").items() if name != "ansible-core"]
    (folder / "pins.txt").write_text("\n".join(pins))
    environment = environment_of_uv()
    subprocess.run([UV, "venv", "--quiet", "--no-config", "--python", python, folder / "env"], check=True)
    command = [UV, "pip", "install", "--quiet", "--no-config", "--python", folder / "env/bin/python"]
    command += ["--constraint", folder / "pins.txt", "--requirements", TOP / "pyproject.toml"]
    command += ["pytest", "pytest-xdist", "hypothesis", "packaging"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode and any(text in done.stderr for text in UNREACHABLE):
        pytest.skip("the package index does not answer: the newest ansible-core is not tested")
    assert done.returncode == 0, done.stderr
    return folder / "env/bin"


def run(newest: Path, folder: Path, *words: str) -> str:
    """Run a program of the environment; return its output. It must succeed."""
    environment = {name: value for name, value in os.environ.items() if name != "ANSIBLE_CONFIG"}
    environment |= {"PATH": f"{newest}:/usr/bin:/bin", "PYTHONPATH": str(TOP)}
    environment |= {"ANSIBLE_NOCOLOR": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout + done.stderr


@pytest.mark.long
def test_a_run_and_the_plugins_work_without_deprecations(newest: Path, tmp_path: Path) -> None:
    """The fixture `deprecations` reads what Ansible reports."""
    print(run(newest, tmp_path, "ansible", "--version"))
    run(newest, tmp_path, "python", "-m", "trainyard.cli", "init", ".")
    options = ["-e", "model=tiny", "-e", f"dataset={questions(tmp_path)}", "-e", "max_steps=2", "-e", "epochs=20"]
    options += ["-e", f"cluster_python={sys.executable}", "-e", "run=first"]
    trained = run(newest, tmp_path, "ansible-playbook", "train.yml", *options)
    assert "run first finished: 2 of 2 steps on 2 ranks" in trained
    run(newest, tmp_path, "ansible-playbook", "site.yml", "--syntax-check")
    (tmp_path / "ollama.yml").write_text("{plugin: ollama, networks: [127.0.0.2/32], this_machine: false}\n")
    assert "|--@discovered:" in run(newest, tmp_path, "ansible-inventory", "-i", "ollama.yml", "--graph")
    assert "networks" in run(newest, tmp_path, "ansible-doc", "-t", "inventory", "ollama")
    files = [f"tests/unit/{name}.py" for name in TESTS]
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow and not lab"]
    assert " passed" in run(newest, TOP, "python", "-m", "pytest", *options, *files)
