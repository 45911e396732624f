"""A lab starts, changes its size, and leaves nothing behind, also after failures. Nightly: these tests test the lab."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_hosts import NEEDS_LAB, REPO, Lab
from tables import table
from testbed import machine
from testbed.machine import LabError

pytestmark = [*NEEDS_LAB, pytest.mark.long]

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO / "molecule/resources")}


@pytest.fixture
def one() -> Iterator[Lab]:
    lab = Lab(f"life-{os.getpid()}")
    yield lab
    lab.down()


def traces(lab: Lab) -> dict[str, str]:
    """Return this machine's traces of a lab, and the settings that a lab may change; the veth devices of other labs are
    omitted."""

    def output(*argv: str) -> str:
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    links = [line for line in output("ip", "-o", "link").splitlines() if not re.search(r": (trainyard\d|veth)", line)]
    return {
        "mount": "\n".join(line for line in output("mount").splitlines() if " /run/netns" not in line),
        "ip netns": "\n".join(name for name in output("ip", "netns").splitlines() if "trainyard" in name),
        "ip link": "\n".join(line.split(":", 2)[1] for line in links),
        "nft list ruleset": output("nft", "list", "ruleset"),
        "ip_forward": Path("/proc/sys/net/ipv4/ip_forward").read_text(),
        "cgroups": "\n".join(str(top) for top in lab.cgroup_tops if top.exists()),
        "disks": "\n".join(line for line in output("losetup", "--all").splitlines() if f"/{lab.name}/" in line),
        "folder": str(lab.folder) if lab.folder.exists() else "",
        "processes": "\n".join(processes_of(lab)),
    }


def processes_of(lab: Lab) -> list[str]:
    """Return the command lines of running processes that name the lab."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            environment = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if int(folder.name) != os.getpid() and (str(lab.folder) in words or f"LAB={lab.folder}" in environment):
            found.append(" ".join(words))
    return found


def ends_as(lab: Lab, before: dict[str, str], seconds: float = 20) -> None:
    """Wait until the traces equal `before`; fail with the difference."""
    deadline = time.monotonic() + seconds
    while (now := traces(lab)) != before and time.monotonic() < deadline:
        time.sleep(0.2)
    assert now == before


def cable_of(lab: Lab) -> str:
    return f"trainyard{lab.running.net}"


def gone(cable: str) -> bool:
    return not Path(f"/sys/class/net/{cable}").exists()


def test_ten_labs_leave_the_machine_unchanged(one: Lab) -> None:
    before = traces(one)
    for _ in range(10):
        one.up(hosts=2)
        cable = cable_of(one)
        one.down()
        assert gone(cable)
    assert traces(one) == before


def test_second_up_converges(one: Lab) -> None:
    one.up(hosts=2)
    first = one.running
    one.inside(one.host("node1"), "touch /run/same-boot")
    one.power_off(one.host("node2"))
    one.up(hosts=3)
    assert one.running.holder == first.holder
    assert [host.name for host in one.hosts if one.init_pid(host)] == ["node1", "node2", "node3"]
    one.inside(one.host("node1"), "test -e /run/same-boot")
    one.up(hosts=1)
    assert [host.name for host in one.hosts] == ["node1"]
    assert "node2" not in one.inventory.read_text() + one.in_lab("ip", "link")
    one.inside(one.host("node1"), "test -e /run/same-boot")
    with pytest.raises(LabError, match="is running with light hosts"):
        one.up(kind="metal")


def start(lab: Lab, *arguments: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "testbed", "--name", lab.name, "up", "--hosts", "2", *arguments]
    return subprocess.Popen(
        argv, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGTERM, "state.json"), (signal.SIGKILL, "node1/console.log"), (signal.SIGINT, "node1/console.log")],
)
def test_interrupted_up_leaves_nothing(one: Lab, number: signal.Signals, moment: str) -> None:
    before = traces(one)
    with start(one) as begun:
        one.wait((one.folder / moment).exists, "the lab does not start")
        begun.send_signal(number)
        assert begun.wait(30) != 0
    # After kill -9 only the holder of the lab cleans up: its pipe to the owner closes.
    ends_as(one, before)


def test_lab_outlives_the_command_but_not_its_holder(one: Lab) -> None:
    before = traces(one)
    with start(one) as begun:
        assert begun.wait(60) == 0, begun.stdout and begun.stdout.read()
    assert one.running.hosts == 2
    cable = cable_of(one)
    os.kill(one.running.holder, signal.SIGKILL)
    # The kernel removes everything except cgroups and files.
    one.wait(lambda: not processes_of(one) and gone(cable), "the lab outlives its holder", 10)
    assert one.state is None
    one.down()
    assert traces(one) == before
    one.down()


def test_lab_of_a_test_ends_with_the_test(one: Lab) -> None:
    before = traces(one)
    code = f"from testbed.lab import Lab; import time; Lab({one.name!r}).up(hosts=1, persistent=False); print('up', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert any(line == "up\n" for line in owner.stdout)
        owner.kill()
    ends_as(one, before)


def test_labs_are_isolated_and_reach_only_package_registries(one: Lab) -> None:
    """slirp4netns sends all traffic of a lab, and only its rules forward packets to it; no lab uses a network that has a route."""
    other = Lab(f"{one.name}-b")
    free = next(net for net in range(1, 255) if not any(r.startswith(f"10.231.{net}.") for r in machine.routes()))
    subprocess.run(["ip", "route", "add", "blackhole", f"10.231.{free}.128/25"], check=True)
    try:
        one.up(hosts=1)
        other.up(hosts=1)
        assert free != one.running.net != other.running.net
        here, there = one.host("node1"), other.host("node1")
        assert "0 received" in one.inside(here, f"ping -c 1 -W 1 {there.address}", check=False)
        assert one.inside(here, "cat /etc/machine-id") != other.inside(there, "cat /etc/machine-id")
    finally:
        subprocess.run(["ip", "route", "del", "blackhole", f"10.231.{free}.128/25"], check=True)
        other.down()
    assert one.inside(one.host("node1"), "hostname") == "node1\n"
    rules = one.in_lab("nft", "list", "table", "inet", "lab")
    accepted = [line.strip() for line in rules.splitlines() if "accept" in line and "policy" not in line]
    assert accepted[:2] == ['iifname "br0" oifname "br0" accept', "ct state established,related accept"]
    assert len(accepted) == 4
    assert all(
        "th dport 53" in line or re.search(r"tcp dport \{? ?80, 443|tcp dport \{", line) for line in accepted[2:]
    )
    assert one.in_lab("ip", "-o", "route", "show", "default").count("tap0") == 1


@pytest.mark.parametrize(("arguments", "message"), table("life")["invalid_command_is_one_line"])
def test_invalid_command_is_one_line(one: Lab, arguments: list[str], message: str) -> None:
    argv = [sys.executable, "-m", "testbed", "--name", one.name, *arguments]
    done = subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
