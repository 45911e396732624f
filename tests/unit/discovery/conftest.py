"""Fixtures of the discovery tests: fake servers, network namespaces, the inventory command."""

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from netlab import Lab, why_no_lab

ROOT = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A home folder without known_hosts, and no OLLAMA_HOST from the environment."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_HOST", raising=False)
    (tmp_path / ".ssh").mkdir(mode=0o700)


def _lab() -> Iterator[Lab]:
    if reason := why_no_lab():
        pytest.skip(reason)
    with Lab() as lab:
        yield lab


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Network namespaces behind one switch; skipped if they cannot be created."""
    yield from _lab()


@pytest.fixture(scope="session")
def lab24() -> Iterator[Lab]:
    """10.9.0.0/24 with the controller at .1 and 40 nodes, n11 at .11 to n50 at .50."""
    for lab in _lab():
        lab.controller("10.9.0.1/24")
        for i in range(11, 51):
            lab.node(f"n{i}", f"10.9.0.{i}/24")
        lab.wait_for_links()
        yield lab


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """The environment of ansible commands: this repository's configuration, plain output."""
    # The path of a Unix socket has at most 107 bytes: ssh's control sockets need a shorter folder than HOME.
    with tempfile.TemporaryDirectory(prefix="cp", dir="/tmp") as sockets:
        yield {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_DEPRECATION_WARNINGS": "0",
            "ANSIBLE_SSH_CONTROL_PATH_DIR": sockets,
        }
