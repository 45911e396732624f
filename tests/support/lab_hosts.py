"""What every test on real hosts uses: a lab of three, and the playbooks run against it as a person would run them.

A test file needs `pytestmark = NEEDS_LAB` and the fixture `lab` (tests/lab/conftest.py and this file offer it).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ansible_runner
import pytest
from testbed import machine
from testbed.lab import Host, Lab

from trainyard.python_env.resolve import requirements

REPO = Path(__file__).resolve().parents[2]
VENV = Path(sys.prefix)  # the hosts see the environment that the tests run in
REASON = machine.why_not()
NEEDS_LAB = [pytest.mark.lab, pytest.mark.skipif(REASON is not None, reason=REASON or "")]


@dataclass(frozen=True)
class Played:
    """How a playbook went: its exit code, what it printed, and per host how many tasks ok, changed, failed, unreachable."""

    rc: int
    stdout: str
    stats: dict[str, dict[str, int]]
    events: list[dict[str, Any]]

    def count(self, what: str) -> int:
        """Tasks of all hosts that were `what`: "ok", "changed", "failures", "dark" (unreachable), "skipped"."""
        return sum(self.stats.get(what, {}).values())


def run_playbook(
    playbook: str,
    inventory: Path,
    extra_vars: dict[str, Any] | None = None,
    *arguments: str,
    timeout: float = 600,
    environment: dict[str, str] | None = None,
) -> Played:
    """Run `playbook` (a path inside the repository) with ansible-runner; `arguments` go to ansible-playbook as they are.

    `timeout` is in seconds. Nothing is raised when the playbook fails: the caller looks at `rc`.
    """
    with tempfile.TemporaryDirectory(prefix="trainyard-runner-") as folder:
        done = ansible_runner.run(
            private_data_dir=folder,
            project_dir=str(REPO),
            playbook=str(REPO / playbook),
            inventory=str(inventory),
            extravars=extra_vars or {},
            cmdline=" ".join(arguments),
            envvars={
                "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"),
                # The runner wraps the callback, and does not read ansible.cfg to find it.
                "ANSIBLE_STDOUT_CALLBACK": "trainyard",
                "ANSIBLE_CALLBACK_PLUGINS": str(REPO / "plugins/callback"),
                "ANSIBLE_NOCOLOR": "1",
                "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}",
                **(environment or {}),
            },
            timeout=int(timeout),
            quiet=True,
        )
        events = list(done.events)
        return Played(done.rc, done.stdout.read(), done.stats or {}, events)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Three light hosts with the tests' own Python environment. They die with the test run, however it ends."""
    one = Lab(f"test-{os.getpid()}")
    one.up(hosts=3, venv=VENV, persistent=False)
    yield one
    one.down()


@pytest.fixture(scope="module")
def bare() -> Iterator[Lab]:
    """Three light hosts that no other test module has touched."""
    one = Lab(f"bare-{os.getpid()}")
    one.up(hosts=3, venv=VENV, persistent=False)
    yield one
    one.down()


@pytest.fixture(scope="module")
def metal() -> Iterator[Lab]:
    """Two whole machines that no other test module has touched."""
    one = Lab(f"metal-{os.getpid()}")
    one.up(hosts=2, kind="metal", persistent=False)
    yield one
    one.down()


@pytest.fixture
def hosts(lab: Lab) -> Iterator[list[Host]]:
    """The hosts of the lab, and afterwards every fault that a test left undone."""
    from testbed import faults

    yield lab.hosts
    for host in lab.hosts:
        faults.undo(lab, host)


def inventory_with(lab: Lab, folder: Path, **variables: Any) -> Path:
    """A copy of the lab's inventory in `folder`, with these variables for the group `cluster` on top."""
    import yaml

    document = yaml.safe_load(lab.inventory.read_text())
    document["all"]["children"]["cluster"]["vars"].update(variables)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "inventory.yml").write_text(yaml.safe_dump(document, sort_keys=False))
    return folder / "inventory.yml"


def small_wheels(folder: Path) -> Path:
    """Fetch into `folder` the wheels of an environment without torch, for the hosts' Python; return it."""
    # The hosts' Python is that of this machine's distribution, not the one that the tests run in.
    asked = ["/usr/bin/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    download = [sys.executable, "-m", "pip", "download", "-q", "-d", folder, "-c", REPO / "constraints.txt"]
    download += ["--only-binary=:all:", f"--python-version={version}"]
    subprocess.run([*download, *requirements(REPO / "pyproject.toml", [], torch=False)], check=True)
    return folder


__all__ = [
    "NEEDS_LAB",
    "REPO",
    "VENV",
    "Host",
    "Lab",
    "Played",
    "bare",
    "hosts",
    "inventory_with",
    "lab",
    "metal",
    "run_playbook",
    "small_wheels",
]
