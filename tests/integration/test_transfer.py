"""Files that travel from host to host: real relay processes on loopback addresses, one per host."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from run_hosts import TOP, free_port, until

from trainer.common.files import sha256_file
from trainyard.remote.relay import ACCEPTED, relay
from trainyard.run.stage.transfer import copy_to_hosts
from trainyard.run.types import PlanEntry, StagedFile
from trainyard.wire import host_relay as chain
from trainyard.wire.connection import Host, HostConnection, RemoteError
from trainyard.wire.host_relay import Copy, Member, make_transfer_key, plan_relay
from trainyard.wire.openssh import LocalTransport

SIZE = 2_000_000


class Transport(LocalTransport):
    """Counts the bytes that the controller copies, and fails at the wanted verb of the wanted host."""

    def __init__(self, cluster: Cluster, host: Host) -> None:
        super().__init__()
        self.cluster, self.host = cluster, host

    def execute(self, command: str, stdin: bytes | None = None) -> tuple[int, bytes, bytes]:
        verb = shlex.split(command)[-1]
        if (self.host.name, verb) in self.cluster.failing:
            raise RemoteError("Connection reset by peer")
        return super().execute(command, stdin)

    def put(self, source: str, target: str) -> None:
        self.cluster.puts.append(self.host.name)
        super().put(source, target)


class Cluster:
    """Hosts with a loopback address each, on this machine."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.hosts = {
            f"node{n}": Host(f"node{n}", f"127.0.0.{n + 10}", str(folder / f"node{n}"), sys.executable)
            for n in range(1, count + 1)
        }
        self.puts: list[str] = []
        self.failing: set[tuple[str, str]] = set()
        self.lines: list[str] = []

    def connect(self, name: str) -> HostConnection:
        return HostConnection(self.hosts[name], Transport(self, self.hosts[name]))

    def entries(self) -> list[PlanEntry]:
        return [PlanEntry(h.name, address=h.address, data_dir=h.data_dir) for h in self.hosts.values()]

    def file(self, name: str, size: int = SIZE, mode: int = 0o644) -> StagedFile:
        """Create a file on the controller."""
        path = self.folder / name
        path.write_bytes(os.urandom(size))
        path.chmod(mode)
        digest = sha256_file(path)
        return StagedFile("dataset", str(path), f"store/datasets/{name}", {"": digest}, digest, size)

    def copy(self, files: list[StagedFile], **options: Any) -> dict[str, list[str]]:
        how = {"transfer": "auto", "report": self.lines.append} | options
        return copy_to_hosts(self.entries(), files, self.connect, "token", **how)

    def check(self, files: list[StagedFile]) -> None:
        """Check that every host has the files, and nothing that is incomplete."""
        for host in self.hosts.values():
            for file in files:
                assert sha256_file(Path(host.data_dir, file.dest)) == file.sha256[""]
            assert not list(Path(host.data_dir, "store/incoming").glob("*"))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(chain, "MINIMUM", 0)
    return Cluster(tmp_path, 4)


@pytest.mark.slow
def test_files_pass_from_host_to_host(cluster: Cluster) -> None:
    """The controller sends each file once. A host that has a file already passes it on."""
    files = [cluster.file("a"), cluster.file("empty", 0), cluster.file("private", 5000, 0o600)]
    changed = cluster.copy(files)
    cluster.check(files)
    assert cluster.puts == ["node1"] * 3 and not cluster.lines
    assert changed["node4"] == [f"{cluster.hosts['node4'].data_dir}/{file.dest}" for file in files]
    for host in cluster.hosts.values():
        assert Path(host.data_dir, "store/datasets/private").stat().st_mode & 0o777 == 0o600
    assert cluster.copy(files) == {name: [] for name in cluster.hosts}
    Path(cluster.hosts["node2"].data_dir, "store/datasets/a").unlink()
    Path(cluster.hosts["node4"].data_dir, "store/datasets/private").write_text("damaged")
    changed = cluster.copy(files)
    cluster.check(files)
    assert cluster.puts == ["node1"] * 3, "hosts that have everything are the source"
    assert [len(changed[f"node{n}"]) for n in (1, 2, 3, 4)] == [0, 1, 0, 1]


@pytest.mark.slow
def test_a_failed_relay_is_one_warning(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts behind the one that fails receive the files from the controller; those before it have them."""
    monkeypatch.setattr("trainyard.wire.host_relay.IDLE", 1.0)
    cluster.failing.add(("node3", "relay"))
    monkeypatch.setattr("trainyard.wire.host_relay.CONNECT", 1.0)
    files = [cluster.file("a")]
    cluster.copy(files)
    cluster.check(files)
    assert sorted(cluster.puts) == ["node1", "node3", "node4"]
    (line,) = cluster.lines
    assert line.startswith("warning: the relay failed at node3 and 1 more hosts (") and line.endswith("instead")


def test_transfer_from_the_controller_only(cluster: Cluster) -> None:
    files = [cluster.file("a", 1000)]
    cluster.copy(files, transfer="controller")
    cluster.check(files)
    assert sorted(cluster.puts) == ["node1", "node2", "node3", "node4"]


def test_only_machines_and_large_files_make_a_relay() -> None:
    copies = {"x": Copy("x", "/x", chain.MINIMUM, "0" * 64, 0o644), "y": Copy("y", "", chain.MINIMUM, "0" * 64, 0o644)}

    def member(number: int, lacks: str, speed: float = 0.0) -> Member:
        return Member(f"node{number}", f"10.0.0.{number}", "/d", frozenset(lacks), speed)

    two = [member(1, "x", 100.0), member(2, "x", 1000.0)]
    assert [m.host for m in plan_relay(two, copies)] == ["node2", "node1"], "the fast link first"
    assert not plan_relay(two[:1], copies) and not plan_relay([member(1, ""), member(2, "")], copies)
    assert not plan_relay([two[0], Member("node3", "10.0.0.1", "/e", frozenset("x"))], copies), "one machine"
    assert not plan_relay(two, copies | {"x": Copy("x", "/x", chain.MINIMUM - 1, "0" * 64, 0o644)})
    assert [m.host for m in plan_relay([member(1, "x"), member(2, "")], copies)] == ["node2", "node1"]
    assert not plan_relay([member(1, "y"), member(2, "y")], copies), "no host has it, and the controller neither"


class Receiver:
    """A relay verb that waits for 127.0.0.2, in a thread of this process."""

    def __init__(self, folder: Path, content: bytes, digest: str) -> None:
        self.port, (certificate, key) = free_port(), make_transfer_key()
        self.keys = {"certificate": certificate, "key": key}
        self.target = folder / "store/file"
        (folder / "in").mkdir(parents=True)
        file = {"target": str(self.target), "temporary": str(folder / "in/x"), "size": len(content), "sha256": digest}
        self.request = self.keys | {
            "files": [file | {"mode": 0o600, "source": "host", "wanted": False}], "address": "127.0.0.1",
            "port": self.port, "previous": "127.0.0.2", "next": "", "next_port": 0, "connect": 5.0, "idle": 5.0,
            "cache": str(folder / "digests.json"),
        }  # fmt: skip
        self.answer: dict[str, Any] = {}
        self.thread = threading.Thread(target=lambda: self.answer.update(relay(self.request)))
        self.thread.start()

    def dial(self, source: str) -> socket.socket:
        def attempt() -> socket.socket | None:
            try:
                return socket.create_connection(("127.0.0.1", self.port), 5, (source, 0))
            except ConnectionRefusedError:
                return None

        return until(attempt, 10)

    def end(self) -> dict[str, Any]:
        self.thread.join(10)
        return self.answer


def refused(connection: socket.socket) -> bool:
    """Return whether the receiver ends the connection without accepting anything; an alert of TLS is no answer."""
    connection.settimeout(5)
    received = b""
    try:
        while part := connection.recv(100):
            received += part
    except (ConnectionResetError, ssl.SSLError):
        pass
    return ACCEPTED not in received


def without_checks(plain: socket.socket, folder: Path, *keys: str) -> ssl.SSLSocket:
    """Return a TLS connection whose client accepts every server, with this certificate and key or without any."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if keys:
        (folder / "both.pem").write_text("".join(keys))
        context.load_cert_chain(folder / "both.pem")
    return context.wrap_socket(plain)


def test_only_the_host_before_it_is_accepted(tmp_path: Path) -> None:
    """Another address, an address without a key, and another transfer's key are rejected; the transfer continues."""
    (tmp_path / "sent").write_bytes(os.urandom(100_000))
    digest, content = sha256_file(tmp_path / "sent"), (tmp_path / "sent").read_bytes()
    receiver = Receiver(tmp_path, content, digest)
    assert refused(receiver.dial("127.0.0.3"))
    plain = receiver.dial("127.0.0.2")
    plain.sendall(content)
    assert refused(plain)
    certificate, key = make_transfer_key()
    for keys in ((), (certificate, key)):  # clients that do not check whom they connect to
        assert refused(without_checks(receiver.dial("127.0.0.2"), tmp_path, *keys))
    file = {"target": str(tmp_path / "sent"), "temporary": str(tmp_path / "in/none"), "size": 100_000, "sha256": digest}
    sender = {
        "files": [file | {"mode": 0o644, "source": "here", "wanted": True}], "address": "127.0.0.2", "port": 0,
        "previous": "", "next": "127.0.0.1", "next_port": receiver.port, "connect": 5.0, "idle": 5.0, "cache": str(tmp_path / "c"),
    }  # fmt: skip
    other = relay(sender | {"certificate": certificate, "key": key})
    assert other["send_error"].startswith("TLS: "), other
    assert relay(sender | receiver.keys) == {"installed": [], "receive_error": "", "send_error": ""}
    assert receiver.end() == {"installed": [str(receiver.target)], "receive_error": "", "send_error": ""}
    assert receiver.target.read_bytes() == content and receiver.target.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("sent", "why"), [(b"wrong", "arrived damaged"), (b"wr", "ended the transfer")])
def test_a_damaged_file_is_not_installed(tmp_path: Path, sent: bytes, why: str) -> None:
    receiver = Receiver(tmp_path, b"right", "0" * 64)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=receiver.keys["certificate"])
    both = tmp_path / "both.pem"
    both.write_text(receiver.keys["key"] + receiver.keys["certificate"])
    context.load_cert_chain(both)
    with context.wrap_socket(receiver.dial("127.0.0.2")) as connection:
        connection.sendall(sent)
    assert why in receiver.end()["receive_error"] and receiver.answer["installed"] == []
    assert not receiver.target.exists() and not list((tmp_path / "in").iterdir())


CONTROLLER = """
import sys, time
from pathlib import Path
sys.path.insert(0, "tests/integration")
import test_transfer as t
from trainyard.wire import host_relay as relay
relay.MINIMUM, relay.IDLE = 0, 1.0
class Slow(t.Transport):
    def put(self, source, target):
        Path(target).write_bytes(Path(source).read_bytes()[:1_000_000])
        print("half", flush=True)
        time.sleep(60)
t.Transport = Slow
cluster = t.Cluster(Path(sys.argv[1]), 3)
cluster.copy([cluster.file("a")])
"""


@pytest.mark.slow
def test_a_killed_controller_leaves_nothing_half_written(cluster: Cluster, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{TOP}:{TOP}/tests/support"}
    command = [sys.executable, "-c", CONTROLLER, str(tmp_path)]
    with subprocess.Popen(command, cwd=TOP, env=environment, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == b"half\n"
        others = [tmp_path / f"node{n}/store/incoming" for n in (2, 3)]
        until(lambda: all(list(folder.glob("*")) for folder in others), 20, "bytes on the last host")
        os.kill(process.pid, signal.SIGKILL)
    until(lambda: not any(list(folder.glob("*")) for folder in others), 20, "the relay to end")
    assert not list(tmp_path.glob("node*/store/datasets/*"))
    digest = sha256_file(tmp_path / "a")
    files = [StagedFile("dataset", str(tmp_path / "a"), "store/datasets/a", {"": digest}, digest, SIZE)]
    cluster.copy(files)
    cluster.check(files)
