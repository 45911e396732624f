"""Every fault of the lab has its effect, and its undo removes it. Nightly: these tests test the lab."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from typing import Any

import pytest
from lab_hosts import NEEDS_LAB, VENV, Host, Lab
from tables import table
from testbed import faults
from testbed.machine import LabError

pytestmark = [*NEEDS_LAB, pytest.mark.long]


def reaches(lab: Lab, source: Host, target: Host) -> bool:
    return "1 received" in lab.inside(source, f"ping -c 1 -W 1 {target.address}", check=False)


def connects(host: Host, port: int, timeout: float = 0.5) -> bool:
    """Return whether this machine can connect to a TCP port of a host."""
    try:
        with socket.create_connection((host.address, port), timeout=timeout):
            return True
    except OSError:
        return False


def eventually(lab: Lab, condition, what: str) -> None:
    lab.wait(condition, what, 20)


FAULTS = table("lab_faults")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: " ".join(fault["fault"]))
def test_fault(lab: Lab, hosts: list[Host], fault: dict[str, Any]) -> None:
    """The output of a command on a host changes as the fault says, and its undo restores it."""
    net, values = hosts[0].net, {host.name: host.address for host in hosts} | {"nic": hosts[1].nic}
    values["id"] = lab.inside(hosts[0], "cat /etc/machine-id").strip()
    host = hosts[fault["at"] - 1]

    def shown() -> str:
        return lab.inside(host, fault["command"].format(net=net, **values), check=False)

    target, (name, *arguments) = hosts[fault["to"] - 1], fault["fault"]
    for first in fault.get("first", []):
        faults.inject(lab, target, *first)
    before = shown()
    for _ in range(fault.get("times", 1)):
        faults.inject(lab, target, name, *arguments)
    assert re.search(fault["during"].format(net=net, **values), shown()), shown()
    faults.undo(lab, target, name)
    eventually(lab, lambda: shown() == before, f"{name} is not undone: {before}")


@pytest.mark.parametrize(("rate", "low", "high"), [("100mbit", 80, 101), ("1gbit", 700, 1010)])
def test_shape(lab: Lab, hosts: list[Host], rate: str, low: float, high: float) -> None:
    """Both directions have the rate. Half a second of data empties the bucket, the next half second is measured."""
    size = 6_000_000 if rate == "100mbit" else 60_000_000
    faults.inject(lab, hosts[1], "shape", rate)
    for sender, receiver in ((hosts[0], hosts[1]), (hosts[1], hosts[0])):
        assert low < throughput(lab, sender, receiver, size) < high
    faults.undo(lab, hosts[1], "shape")
    assert "tbf" not in lab.in_lab("tc", "qdisc") + lab.inside(hosts[1], "tc qdisc")
    assert throughput(lab, hosts[0], hosts[1], 60_000_000) > 1010


def throughput(lab: Lab, sender: Host, receiver: Host, size: int) -> float:
    """Return the Mbit/s of one TCP stream at the receiver, over the second half of `size` bytes."""
    pid = lab.init_pid(receiver)
    code = f"""
import socket, time
server = socket.create_server(("{receiver.address}", 5999))
print("ready", flush=True)
peer, _ = server.accept()
got, half = 0, None
while data := peer.recv(1 << 20):
    got += len(data)
    if half is None and got > {size // 2}:
        half = (got, time.monotonic())
print((got - half[0]) * 8e-6 / (time.monotonic() - half[1]))
"""
    argv = ["nsenter", f"--net=/proc/{pid}/ns/net", "python3", "-c", code]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        send = f"import socket; socket.create_connection(('{receiver.address}', 5999)).sendall(bytes({size}))"
        lab.inside(sender, f'python3 -c "{send}"')
        return float(server.stdout.readline())


def test_pause(lab: Lab, hosts: list[Host]) -> None:
    assert connects(hosts[2], 22)
    faults.inject(lab, hosts[2], "pause")
    # The kernel accepts the connection, but the frozen sshd sends nothing.
    with socket.create_connection((hosts[2].address, 22), timeout=1) as link:
        link.settimeout(1)
        with pytest.raises(TimeoutError):
            link.recv(1)
        faults.undo(lab, hosts[2], "pause")
        link.settimeout(10)
        assert link.recv(4) == b"SSH-"


def test_crash(lab: Lab, hosts: list[Host]) -> None:
    lab.inside(hosts[2], "echo kept > /var/lib/kept; sync; systemd-run --quiet --collect sleep 1000")
    begun = time.monotonic()
    faults.inject(lab, hosts[2], "crash")
    assert time.monotonic() - begun < 2
    assert lab.init_pid(hosts[2]) is None
    assert not connects(hosts[2], 22)
    with pytest.raises(LabError, match="node3 is off"):
        lab.inside(hosts[2], "true")
    faults.undo(lab, hosts[2], "crash")
    assert lab.inside(hosts[2], "cat /var/lib/kept") == "kept\n"
    assert lab.inside(hosts[2], "systemctl list-units --no-legend 'run-*.service'") == ""


def test_cpu(lab: Lab, hosts: list[Host]) -> None:
    faults.inject(lab, hosts[1], "cpu", "30")
    assert share(lab, hosts[1]) == pytest.approx(0.30, abs=0.06)
    faults.undo(lab, hosts[1], "cpu")
    assert share(lab, hosts[1]) > 0.36


def share(lab: Lab, host: Host) -> float:
    """Return the share of one core that a busy loop gets on a host within a second."""
    code = (
        "import time; wall = time.monotonic(); used = time.process_time()\n"
        "while time.monotonic() - wall < 1.0: pass\n"
        "print((time.process_time() - used) / (time.monotonic() - wall))"
    )
    argv = [*(str(word) for word in lab.ssh(host)), f'python3 -c "{code}"']
    return float(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)


def test_skew(lab: Lab, hosts: list[Host]) -> None:
    ask = f"{VENV}/bin/python -c 'import importlib.metadata as m, yaml; print(m.version(\"PyYAML\"), yaml.__version__)'"
    real = lab.inside(hosts[0], ask).split()
    faults.inject(lab, hosts[1], "skew", "PyYAML", "0.0.7")
    assert lab.inside(hosts[1], ask).split() == ["0.0.7", "0.0.7"]
    assert lab.inside(hosts[0], ask).split() == real
    # Login sessions are affected, too: the fault changes the host, not one process.
    argv = [*(str(word) for word in lab.ssh(hosts[1])), ask]
    assert subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split() == ["0.0.7", "0.0.7"]
    faults.undo(lab, hosts[1], "skew")
    assert lab.inside(hosts[1], ask).split() == real


def test_undo_without_names_removes_every_fault(lab: Lab, hosts: list[Host]) -> None:
    faults.undo(lab, hosts[2])
    for name, *arguments in (["hosts"], ["shape", "10mbit"], ["cpu", "50"], ["cut"]):
        faults.inject(lab, hosts[2], name, *arguments)
    faults.inject(lab, hosts[2], "pause")
    faults.undo(lab, hosts[2])
    eventually(lab, lambda: reaches(lab, hosts[0], hosts[2]), "node3 does not answer")
    assert "node1" not in lab.inside(hosts[2], "cat /etc/hosts")


@pytest.mark.parametrize(("arguments", "message"), table("faults")["invalid_fault_is_one_line"])
def test_invalid_fault_is_one_line(lab: Lab, arguments: list[str], message: str) -> None:
    with pytest.raises(LabError, match=re.escape(message)):
        faults.inject(lab, lab.hosts[0], *arguments)


def test_all_faults_are_tested() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    tested |= {fault["fault"][0] for fault in FAULTS}
    assert set(faults.FAULTS) <= tested
