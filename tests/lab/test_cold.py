"""The commands of the documentation, on hosts that are built from nothing: no cached root file system, no package lists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from lab_hosts import NEEDS_LAB, REPO, VENV
from testbed.machine import os_release

pytestmark = [*NEEDS_LAB, pytest.mark.slow]
PARTS = [
    "ansible.cfg", "site.yml", "train.yml", "Makefile", "pyproject.toml", "setup.py", "constraints.txt", "benchmarks", "docs", "group_vars",
    "inventory", "molecule", "playbooks", "plugins", "roles", "tools", "trainer", "trainyard",
]  # fmt: skip
MIXED = ["bookworm", "trixie"]


@dataclass
class NewClone:
    """A copy of the repository with the environment of the tests, and an empty cache of the lab."""

    top: Path
    environment: dict[str, str]

    def run(self, command: str) -> str:
        """Run a shell command as root in the copy, without sudo; return its output. It must succeed."""
        shell = ["bash", "-c", f"exec 2>&1 </dev/null; {re.sub('^sudo ', '', command)}"]
        done = subprocess.run(shell, cwd=self.top, env=self.environment, stdout=subprocess.PIPE, text=True, timeout=900)
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}"
        return done.stdout


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[NewClone]:
    top, name = tmp_path / "trainyard", f"cold-{os.getpid()}"
    # The sockets of SSH lie in the cache, and the path of a socket has at most 108 characters.
    cache = Path(tempfile.mkdtemp(prefix="cold-", dir="/tmp"))
    for part in PARTS:
        source = REPO / part
        if source.is_dir():
            shutil.copytree(source, top / part, ignore=shutil.ignore_patterns("__pycache__", "lab.yml", "hosts.yml"))
        else:
            top.mkdir(exist_ok=True)
            shutil.copy2(source, top / part)
    (top / ".venv").symlink_to(VENV)
    # The environment of the tests is complete: make does not set it up again.
    for part in ("pyproject.toml", "constraints.txt"):
        os.utime(top / part, (0, 0))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("ANSIBLE_", "PYTHONPATH"))}
    new = NewClone(
        top, environment | {"TRAINYARD_CACHE": str(cache), "LAB_NAME": name, "LAB_FILE": "inventory/lab.yml"}
    )
    yield new
    # The roots of the cache contain mounts until the lab is down.
    new.run("make lab-down")
    shutil.rmtree(cache)


def documented_commands() -> list[str]:
    """Return the commands of the section "Try it without machines" of docs/getting-started.md."""
    section = (
        (REPO / "docs/getting-started.md").read_text().split("\n## Try it without machines\n")[1].split("\n## ")[0]
    )
    return [line for block in re.findall(r"```console\n(.*?)```", section, re.S) for line in block.splitlines()]


def changes(output: str) -> int:
    """Return the number of changed tasks in the recap of a playbook."""
    return sum(int(count) for count in re.findall(r"changed=(\d+)", output))


@pytest.mark.long
def test_the_documented_commands_work_on_new_hosts(clone: NewClone) -> None:
    commands = documented_commands()
    programs = [command.removeprefix("sudo ").split()[0] for command in commands]
    assert programs == ["make", ".venv/bin/ansible-playbook", ".venv/bin/ansible-playbook", "make"], commands
    for command in commands:
        output = clone.run(command)
        if "train.yml" in command:
            assert "40 of 40 steps" in output, output[-4000:]


@pytest.mark.skipif(
    os_release().get("VERSION_CODENAME") not in MIXED, reason="hosts of Debian 12 and 13 need apt sources of Debian"
)
@pytest.mark.long
def test_hosts_of_debian_12_and_13_train_together(clone: NewClone) -> None:
    play = ".venv/bin/ansible-playbook -i inventory/lab.yml"
    clone.run("make lab N=2 RELEASE=bookworm,trixie")
    assert "13." in clone.run("make lab-ssh HOST='node2 cat /etc/debian_version'")
    assert changes(clone.run(f"{play} site.yml")) > 0
    assert changes(clone.run(f"{play} site.yml")) == 0
    assert "4 of 4 steps on 2 ranks, 2 hosts" in clone.run(f"{play} train.yml -e model=tiny -e max_steps=4")
    assert changes(clone.run(f"{play} playbooks/reset.yml")) > 0
    assert changes(clone.run(f"{play} playbooks/reset.yml")) == 0
