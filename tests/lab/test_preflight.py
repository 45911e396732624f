"""Preflight reports every fault of the lab, and further ones, with check, host and level."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_hosts import NEEDS_LAB, REPO, VENV, Host, Lab, inventory_with
from testbed import faults, machine

pytestmark = [*NEEDS_LAB, pytest.mark.slow]

TORCHRUN = f"exec -a python {VENV}/bin/python -c 'import time; time.sleep(600)' -m torch.distributed.run train.py"


def inside(command: str) -> Callable[[Lab, Host], Any]:
    return lambda lab, host: lab.inside(host, command)


def fault(name: str, *arguments: str) -> Callable[[Lab, Host], Any]:
    return lambda lab, host: faults.inject(lab, host, name, *arguments)


def unit(name: str, command: str) -> Callable[[Lab, Host], Any]:
    return inside(f'systemd-run --quiet --collect --unit={name} --uid=tester /bin/bash -c "{command}"')


SHARED = "shared.img"  # in the folder of the lab
DATA = "/home/tester/trainyard"
MARKERS = "find /home/tester -maxdepth 3 -name '.trainyard-preflight-*'"


def share(lab: Lab, host: Host) -> None:
    """Let two hosts share their data directory, as with homes on NFS. It holds the marker of a preflight that was killed."""
    image = lab.folder / SHARED
    machine.run("truncate", "--size=16M", image)
    machine.run("mke2fs", "-q", "-t", "ext4", "-E", "root_owner=1000:1000", image)
    device = machine.run("losetup", "--find", "--show", image).strip()
    for each in (lab.hosts[host.index - 2], host):
        lab.inside(
            each,
            f"""mknod /dev/shared b 7 {device.removeprefix("/dev/loop")}
            [ -d {DATA} ] || runuser -u tester mkdir {DATA}
            mount /dev/shared {DATA}""",
        )
    lab.inside(host, f"touch -d '1 day ago' {DATA}/.trainyard-preflight-killed")


def unshare(lab: Lab) -> None:
    """Undo `share`."""
    for host in lab.hosts:
        lab.inside(host, f"! mountpoint -q {DATA} || umount {DATA}; rm -rf /dev/shared")
    for line in machine.run("losetup", "--associated", lab.folder / SHARED).splitlines():
        machine.run("losetup", "--detach", line.partition(":")[0])
    (lab.folder / SHARED).unlink(missing_ok=True)


# Faults that do not hide one another are injected together, and one run of preflight reports them all.
# (fault, its host, the check that reports it, a part of the text)
TOGETHER: list[list[tuple[str, Callable[[Lab, Host], Any], int, str, str]]] = [
    [
        ("clone", fault("clone", "node1"), 2, "twice", "machine-id of node1"),
        ("mtu", fault("mtu", "1280"), 3, "mtu", "1280"),
        ("nic", fault("nic"), 2, "nic", "second NIC"),
        ("hosts", fault("hosts"), 3, "names", "resolves node1 to"),
        ("skew", fault("skew", "PyYAML", "0.0.7"), 1, "", ""),
        ("port", fault("port", "29500"), 1, "port", "29500"),
        ("block", fault("block", "32768-60999"), 2, "firewall", "high TCP ports"),
        ("memory", fault("memory", "300"), 3, "memory", "512 MiB"),
        ("second host with the data directory", share, 2, "", ""),
        ("shared data directory", lambda lab, host: None, 1, "shared", f"data directory {DATA} with node2"),
    ],
    [
        ("fill", fault("fill"), 3, "disk", "MB free"),
        ("cpu", fault("cpu", "20"), 3, "cpu", "quota"),
        ("shape", fault("shape", "100mbit"), 2, "link", "Mbit/s"),
        ("one port", fault("block", "29500"), 3, "firewall", "29500"),
        ("no sudo", inside("mv /etc/sudoers.d/90-cloud-init-users /var/lib/sudoers.aside"), 2, "sudo", "sudo"),
        ("load of another program", unit("lab-load", "while :; do :; done"), 1, "load", "cores"),
        ("run of another launcher", unit("lab-run", TORCHRUN), 1, "busy", "torch.distributed.run"),
    ],
    [("crash", fault("crash"), 2, "ssh", "does not answer"), ("pause", fault("pause"), 3, "ssh", "does not answer")],
]
UNDO = """systemctl stop lab-load lab-run 2>/dev/null || :
[ ! -e /var/lib/sudoers.aside ] || mv /var/lib/sudoers.aside /etc/sudoers.d/90-cloud-init-users"""


def preflight(inventory: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Return exit code and report of playbooks/preflight --json."""
    command = [sys.executable, REPO / "playbooks/preflight", "--json", "-i", inventory, *words]
    environment = os.environ | {"PATH": f"{VENV / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def named(lab: Lab) -> Iterator[Callable[[int], dict[str, Any]]]:
    """Return the report with the faults of one group; preflight runs once per group."""
    reports: dict[int, dict[str, Any]] = {}

    def run(group: int) -> dict[str, Any]:
        if group not in reports:
            try:
                for _, inject, host, _, _ in TOGETHER[group]:
                    inject(lab, lab.hosts[host - 1])
                code, reports[group] = preflight(lab.inventory)
                assert code == reports[group]["exit"] == 2
                for name, answer in reports[group]["hosts"].items():
                    if "mesh" in answer:
                        assert not lab.inside(lab.host(name), MARKERS), f"{name} keeps a marker"
            finally:
                for host in lab.hosts:
                    faults.undo(lab, host)
                    lab.inside(host, UNDO)
                unshare(lab)
        return reports[group]

    yield run


@pytest.mark.parametrize(
    ("group", "host", "check", "text"),
    [
        pytest.param(group, host, check, text, id=name)
        for group, together in enumerate(TOGETHER)
        for name, _, host, check, text in together
        if check
    ],
)
def test_fault_is_reported(
    named: Callable[[int], dict[str, Any]], group: int, host: int, check: str, text: str
) -> None:
    found = named(group)["findings"]
    matching = [row for row in found if row["host"] == f"node{host}" and row["check"] == check]
    assert any(text in row["text"] for row in matching), json.dumps(found, indent=1)
    assert all(row["remedy"] for row in matching)


def test_healthy_cluster_has_no_failure(lab: Lab, hosts: list[Host]) -> None:
    code, report = preflight(lab.inventory)
    # Other programs on the machine cause warnings about load and slow links.
    assert code in (0, 1) and code == report["exit"], report["findings"]
    assert {row["check"] for row in report["findings"]} <= {"load", "cpu", "names", "link"}, report["findings"]
    for name, answer in report["hosts"].items():
        reached = answer["mesh"]["reached"]
        assert set(reached) == {host.name for host in hosts} - {name}
        for peer, ports in reached.items():
            # A random port may be in use on that host; then it is not checked.
            taken = report["hosts"][peer]["mesh"]["taken"]
            assert len(taken) < len(ports) and not any(wrong for port, wrong in ports.items() if int(port) not in taken)


def test_a_closed_port_of_ollama_is_reported(lab: Lab, hosts: list[Host], tmp_path: Path) -> None:
    """No Ollama runs: the hosts listen on its port for the time of the check."""
    faults.inject(lab, hosts[1], "block", "11434")
    with_ollama = inventory_with(lab, tmp_path, ollama_state="present")
    _, report = preflight(with_ollama)
    (found,) = [row for row in report["findings"] if row["check"] == "ollama"]
    assert (found["host"], found["level"]) == ("node2", "warning") and "firewall_allow" in found["remedy"]
    assert found["text"].startswith("node1, node3, the controller cannot reach TCP port 11434 of its Ollama (")
    assert all(answer["health"]["hardware"]["models"] is None for answer in report["hosts"].values())
    _, report = preflight(lab.inventory)
    assert not [row for row in report["findings"] if row["check"] == "ollama"], "Ollama is not part of the cluster"
