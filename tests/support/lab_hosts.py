"""Fixtures and helpers of the tests on lab hosts: labs of three hosts, and playbooks run against them.

A test file sets `pytestmark = NEEDS_LAB` and uses one of these fixtures. Every test process has separate labs:

    lab          one lab for the session; a test restores what it changes on the hosts
    provisioned  the same lab after one site.yml
    hosts        the hosts of that lab; undoes every fault after the test
    bare         a new lab for the module, for tests that change the hosts for good
    metal        two hosts under qemu for the module
"""

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ansible_runner
import pytest
import yaml
from testbed import machine
from testbed.lab import Lab
from testbed.lab import LabHost as Host

from tools.lock import read_lines
from trainyard.python_env.resolve import requirements

REPO = Path(__file__).resolve().parents[2]
VENV = Path(sys.prefix)  # the hosts mount the environment of the tests
REASON = machine.why_not()
NEEDS_LAB = [pytest.mark.lab, pytest.mark.skipif(REASON is not None, reason=REASON or "")]


@dataclass(frozen=True)
class Played:
    """Result of a playbook: exit code, output, events, and the number of tasks per result and host."""

    rc: int
    stdout: str
    stats: dict[str, dict[str, int]]
    events: list[dict[str, Any]]

    def count(self, result: str) -> int:
        """Return the number of tasks with a result: "ok", "changed", "failures", "dark" (unreachable), "skipped"."""
        return sum(self.stats.get(result, {}).values())


def run_playbook(
    playbook: str,
    inventory: Path,
    extra_vars: dict[str, Any] | None = None,
    *arguments: str,
    timeout: float = 600,
    environment: dict[str, str] | None = None,
) -> Played:
    """Run `playbook` (a path in the repository, or a name in a collection) with ansible-runner; `arguments` are passed to ansible-playbook.

    `timeout` is in seconds. A failed playbook raises nothing: check `rc`.
    """
    # ansible-runner wraps the callback and does not read its name from ansible.cfg.
    known = {"ANSIBLE_STDOUT_CALLBACK": "trainyard", "ANSIBLE_CALLBACK_PLUGINS": str(REPO / "plugins/callback")}
    known |= {"ANSIBLE_CONFIG": str(REPO / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
    known |= {"PATH": f"{VENV / 'bin'}:{os.environ['PATH']}"} | (environment or {})
    program = str(REPO / playbook) if playbook.endswith(".yml") else playbook
    with tempfile.TemporaryDirectory(prefix="trainyard-runner-") as folder:
        done = ansible_runner.run(
            private_data_dir=folder, project_dir=str(REPO), playbook=program, inventory=str(inventory), envvars=known,
            extravars=extra_vars or {}, cmdline=" ".join(arguments), timeout=int(timeout), quiet=True,
        )  # fmt: skip
        events = list(done.events)
        return Played(done.rc, done.stdout.read(), done.stats or {}, events)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Three light hosts with the Python environment of the tests. They end with the test process."""
    new = Lab(f"test-{os.getpid()}")
    new.up(hosts=3, venv=VENV, persistent=False)
    yield new
    new.down()


@pytest.fixture(scope="session")
def provisioned(lab: Lab) -> Lab:
    """The lab of the session after site.yml, which runs once."""
    site = run_playbook("site.yml", lab.inventory)
    assert site.rc == 0, site.stdout
    return lab


@pytest.fixture(scope="module")
def bare() -> Iterator[Lab]:
    """Three stock light hosts for this module."""
    new = Lab(f"bare-{os.getpid()}")
    new.up(hosts=3, venv=VENV, persistent=False)
    yield new
    new.down()


@pytest.fixture(scope="module")
def metal() -> Iterator[Lab]:
    """Two stock hosts under qemu for this module."""
    new = Lab(f"metal-{os.getpid()}")
    new.up(hosts=2, kind="metal", persistent=False)
    yield new
    new.down()


@pytest.fixture
def hosts(lab: Lab) -> Iterator[list[Host]]:
    """The hosts of the lab; after the test, every fault is undone."""
    from testbed import faults

    yield lab.hosts
    for host in lab.hosts:
        faults.undo(lab, host)


def inventory_with(lab: Lab, folder: Path, hosts: dict[str, dict[str, Any]] | None = None, **variables: Any) -> Path:
    """Write a copy of the inventory of the lab to `folder`, with these variables added to the group `cluster`; return its path.

    `hosts`: the hosts to keep with further variables of each, of which None removes one.
    """
    document = yaml.safe_load(lab.inventory.read_text())
    groups = document["all"]["children"]
    groups["cluster"]["vars"].update(variables)
    for group in groups.values() if hosts is not None else ():
        group["hosts"] = {name: of for name, of in group["hosts"].items() if name in hosts}
    for name, more in (hosts or {}).items():
        merged = groups["cluster"]["hosts"][name] | more
        groups["cluster"]["hosts"][name] = {key: value for key, value in merged.items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "inventory.yml").write_text(yaml.safe_dump(document, sort_keys=False))
    return folder / "inventory.yml"


def remove_role(role: str, inventory: Path, folder: Path) -> Played:
    """Undo one role on all hosts."""
    tasks = [{"ansible.builtin.include_role": {"name": role, "tasks_from": "remove"}}]
    playbook = [{"hosts": "cluster", "gather_facts": False, "roles": ["cluster"], "tasks": tasks}]
    (folder / "remove.yml").write_text(yaml.safe_dump(playbook))
    return run_playbook(str(folder / "remove.yml"), inventory)


# Answers as Ollama that has no models.
OLLAMA = r"""#!/usr/bin/python3
import http.server, os
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"version": "0.12.3", "models": []}')
host, _, port = os.environ["OLLAMA_HOST"].rpartition(":")
http.server.ThreadingHTTPServer((host, int(port)), Answer).serve_forever()
"""


def with_ollama(folder: Path, program: str) -> dict[str, str]:
    """Write an archive of Ollama that has a stand-in as its program to `folder`; return the variables of the role that install it."""
    file, archive = folder / "ollama", folder / "ollama.tgz"
    file.write_text(program)
    file.chmod(0o755)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(file, "./bin/ollama")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    where = {"ollama_archive": str(archive), "ollama_sha256": digest}
    return {"ollama_state": "present", "ollama_version": "0.0.1"} | where


def small_wheels(folder: Path) -> Path:
    """Download the wheels of an environment without torch, for the Python of the hosts, into `folder`; return it."""
    # The hosts run the distribution's Python, not the Python of the tests.
    query = ["/usr/bin/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    version = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    folder.mkdir(parents=True)
    pins = folder.parent / "pins.txt"  # with digests, pip would need those of all packages
    pins.write_text("\n".join(line for lines in read_lines("constraints.txt").values() for line in lines))
    download = [sys.executable, "-m", "pip", "download", "-q", "-d", folder, "-c", pins]
    download += ["--only-binary=:all:", f"--python-version={version}"]
    subprocess.run([*download, *requirements(REPO / "pyproject.toml", [], torch=False)], check=True)
    return folder
