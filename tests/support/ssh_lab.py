"""Hosts in network namespaces of this machine, each with an SSH server and a port of limited speed. Requires root."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from netlab import Lab, in_namespace

from trainyard.wire.connection import Host, HostConnection, Login
from trainyard.wire.openssh import OpenSSHTransport

CONTROLLER = "10.77.0.254"


class SSHLab:
    """Hosts named node1, node2, ... that share the file system of this machine, and a controller.

    Attributes:
        folder: has the data folder of each host.
        hosts: by name.
    """

    def __init__(self, lab: Lab, folder: Path, count: int, mbit: int) -> None:
        self.lab, self.folder, self.count, self.mbit = lab, folder, count, mbit
        self.servers: list[subprocess.Popen[bytes]] = []
        self.hosts: dict[str, Host] = {}

    def start(self) -> None:
        """Create the namespaces, shape their ports and start the servers."""
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        key = " ".join((self.folder / "host.pub").read_text().split()[:2])
        addresses = [f"10.77.0.{number + 1}" for number in range(self.count)]
        (self.folder / "known_hosts").write_text("".join(f"{address} {key}\n" for address in addresses))
        Path("/run/sshd").mkdir(exist_ok=True)
        self._shape(self.lab.controller(f"{CONTROLLER}/24"), 0)
        known = ("-o", f"UserKnownHostsFile={self.folder}/known_hosts", "-o", "GlobalKnownHostsFile=/dev/null")
        for number, address in enumerate(addresses):
            name = f"node{number + 1}"
            namespace = self.lab.node(name, f"{address}/24")
            self._shape(namespace, number + 1)
            self._serve(namespace)
            login = Login(address, "root", 22, str(self.folder / "user"), known)
            self.hosts[name] = Host(name, address, str(self.folder / name), sys.executable, login=login)
        self.lab.wait_for_links()
        for address in addresses:
            self._wait(address)

    def _shape(self, namespace: str, port: int) -> None:
        if not self.mbit:
            return
        rule = f"root tbf rate {self.mbit}mbit burst 128kb latency 50ms".split()
        for space, device in ((namespace, "eth0"), (self.lab.switch, f"p{port}")):
            subprocess.run(["tc", "-n", space, "qdisc", "add", "dev", device, *rule], check=True)

    def _serve(self, namespace: str) -> None:
        options = [
            "UsePAM=no",
            "StrictModes=no",
            "PidFile=none",
            "PermitRootLogin=yes",
            "MaxStartups=100",
            "MaxSessions=50",
        ]
        options += [f"HostKey={self.folder}/host", f"AuthorizedKeysFile={self.folder}/user.pub"]
        command = ["ip", "netns", "exec", namespace, "/usr/sbin/sshd", "-D", "-f", "/dev/null"]
        arguments = [*command, *(f"-o{option}" for option in options)]
        self.servers.append(subprocess.Popen(arguments, stderr=subprocess.DEVNULL))

    def _wait(self, address: str) -> None:
        probe = f"import socket; socket.create_connection(('{address}', 22), 1)"
        deadline = time.monotonic() + 30
        while self.lab.run(lambda: subprocess.run([sys.executable, "-c", probe], stderr=subprocess.DEVNULL)).returncode:
            assert time.monotonic() < deadline, f"no SSH server at {address}"
            time.sleep(0.1)

    def stop(self) -> None:
        """End the servers."""
        for server in self.servers:
            server.terminate()
        for server in self.servers:
            server.wait()

    def connect(self, name: str) -> HostConnection:
        """Make the connection to a host; call it and use it on the controller (see `run`)."""
        return HostConnection(self.hosts[name], OpenSSHTransport(self.hosts[name].login))

    def entries(self) -> list[dict[str, Any]]:
        """Return the fields of a plan's entries that transfers need."""
        return [{"host": h.name, "address": h.address, "data_dir": h.data_dir} for h in self.hosts.values()]

    def run(self, function: Any) -> Any:
        """Call `function` on the controller: its threads and processes use the controller's port."""
        return in_namespace(self.lab.control, function)

    def sent(self) -> int:
        """Return the bytes that have left the controller's port."""
        text = self.run(lambda: Path("/proc/thread-self/net/dev").read_text())
        return int(text.partition("eth0:")[2].split()[8])


@contextlib.contextmanager
def ssh_lab(folder: Path, count: int, mbit: int = 0) -> Iterator[SSHLab]:
    """Yield a lab of `count` hosts whose ports carry `mbit` Mbit/s in each direction (0: not limited)."""
    with Lab() as lab:
        hosts = SSHLab(lab, folder, count, mbit)
        try:
            hosts.start()
            yield hosts
        finally:
            hosts.stop()
