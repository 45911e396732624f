"""The connectivity mesh: checks that pairs of hosts can connect as ranks do. Standard library only.

The program runs on all hosts at once. Every host listens on the same ports at its cluster address and connects to them
on all its peers. Both ends prove that they know a token, so that another server on the port does not pass for a peer.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from trainyard.remote.folder_marker import FolderMarkers
from trainyard.remote.network import interface_mtu

TOKEN_SIZE = 64  # bytes that both ends of a connection send first
COMMAND_SIZE = 16  # bytes of a command on a connection
STREAM = 2 << 20  # maximum bytes that a worker sends to the head, and receives, to measure the bandwidth
LARGE = 128 << 10  # bytes; too many for a path that silently drops large packets
PINGS = 20
SERVICE_LIMIT = 3.0  # s for a connection to the port of a peer's Ollama
CONNECT_LIMIT = 3.0  # s for a peer that accepted a connection to send its token


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Measure the connections of this host to its peers.

    `request`: `name` and `address` of this host; `device`, its network interface; `names` of all hosts; `head`, one of
    them; `peers`, {name: address} of the hosts that this one measures, and that measure it; `ports` to listen on;
    `token`, known to all hosts; `limit`, the seconds for everything: hosts start within a second or two of each other;
    `data_dir`, the data directory, or an empty string to write nothing; `services`, {name: port} of hosts with an
    Ollama. Returns `mtu` of the interface in bytes; `taken`, the ports on which this host could not listen; `reached`,
    {peer: {port: "" or an error}}; `lines`, {peer: {`latency_ms`, `mbit` (to the head), `ping_small` and `ping_large`,
    `stalled`: an error}}; `services`, {peer: "" or why its Ollama's port is not reached}; `shares_with`, {peer:
    "data_dir", or "runs" if this folder alone is shared}; `write_error`, why this host cannot write to one, or an empty
    string.
    """
    return Mesh(request).run()


class Mesh:
    """One host's part of the measurement."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.name: str = request["name"]
        self.names: list[str] = request["names"]
        self.address: str = request["address"]
        self.head: str = request["head"]
        self.peers: dict[str, str] = request["peers"]
        self.ports: list[int] = request["ports"]
        self.limit: float = request["limit"]
        self.deadline = time.monotonic() + self.limit
        self.mtu = interface_mtu(request["device"])
        self.token = request["token"].encode().ljust(TOKEN_SIZE)[:TOKEN_SIZE]
        self.taken: list[int] = []
        self.reached: dict[str, dict[str, str]] = {name: {} for name in self.peers}
        self.lines: dict[str, dict[str, Any]] = {name: {} for name in self.peers}
        self.service_ports: dict[str, int] = request.get("services", {})
        self.services: dict[str, str] = {}
        self.done: set[str] = set()  # peers that no longer need this host
        self.one_stream = threading.Lock()
        self.markers = FolderMarkers(data_dir, request["token"]) if (data_dir := request["data_dir"]) else None
        self.shares_with: dict[str, str] = {}

    def run(self) -> dict[str, Any]:
        """Measure, serve the peers until they are done or the time is up, and return the result; see `measure`."""
        if not self.markers:
            return self.measure_network() | {"shares_with": {}, "write_error": ""}
        try:
            error = self.markers.create(self.name)
            return self.measure_network() | {"shares_with": self.shares_with, "write_error": error}
        finally:
            self.markers.remove()

    def measure_network(self) -> dict[str, Any]:
        """Return the measurements of the network. The marker exists while the peers search for it."""
        self.listen()
        threads = [
            threading.Thread(target=work, args=(name, address), daemon=True)
            for name, address in self.peers.items()
            for work in self.measurements()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.time_left())
        while self.time_left() and not set(self.peers) <= self.done:
            time.sleep(0.05)
        # A host that is not a peer has its markers at this point, unless it has ended and checked for ours.
        self.find_shared(name for name in self.names if name not in self.peers and name != self.name)
        answer = {"mtu": self.mtu, "taken": self.taken, "reached": self.reached, "lines": self.lines}
        return answer | {"services": self.services}

    def measurements(self) -> tuple[Callable[[str, str], None], ...]:
        """Return what this host measures for each peer, at once; each takes the peer's name and address."""
        return self.measure_peer, self.ping_packets

    def find_shared(self, names: Iterable[str]) -> None:
        """Note which of these hosts have marked a folder of this host."""
        if self.markers:
            self.shares_with |= {name: folder for name in names if (folder := self.markers.shared_with(name))}

    def time_left(self) -> float:
        """Return the seconds until the deadline, 0 after it."""
        return max(0.0, self.deadline - time.monotonic())

    # Serving the peers

    def listen(self) -> None:
        """Listen on all ports, and note those that are taken."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        for port in self.ports:
            server = socket.socket(family, socket.SOCK_STREAM)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind((self.address, port))
                server.listen(256)
            except OSError:
                self.taken.append(port)
                continue
            threading.Thread(target=self.accept, args=(server, self.serve), daemon=True).start()
        if service := self.service_ports.get(self.name):  # in place of an Ollama that does not listen on this address
            with contextlib.suppress(OSError):
                server = socket.create_server((self.address, service), family=family)
                threading.Thread(target=self.accept, args=(server, socket.socket.close), daemon=True).start()

    def accept(self, server: socket.socket, handle: Callable[[socket.socket], None]) -> None:
        """Handle every connection in a separate thread."""
        while True:
            peer, _ = server.accept()
            threading.Thread(target=handle, args=(peer,), daemon=True).start()

    def serve(self, peer: socket.socket) -> None:
        """Answer the commands of a peer that knows the token: `ping`, `send BYTES` and `bye NUMBER`."""
        with contextlib.suppress(OSError, EOFError), peer:
            peer.settimeout(max(1.0, self.time_left()))
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if receive(peer, TOKEN_SIZE) != self.token:
                return
            peer.sendall(self.token)
            while True:
                command = receive(peer, COMMAND_SIZE).strip().decode()
                if command == "ping":
                    peer.sendall(b"x")
                elif command.startswith("bye "):
                    self.done.add(self.names[int(command[4:])])
                elif command.startswith("send "):
                    # One stream at a time: simultaneous ones would share the head's bandwidth.
                    with self.one_stream:
                        peer.sendall(b"g")
                        size = int(command[5:])
                        receive(peer, size)
                        peer.sendall(bytes(size))
                        receive(peer, 1)

    # Measuring the peers

    def measure_peer(self, name: str, address: str) -> None:
        """Try every port of a peer, and measure the first connection."""
        if service := self.service_ports.get(name):
            self.services[name] = self.connect_service(address, service)
        connection = None
        for port in self.ports:
            opened, error = self.connect(address, port)
            self.reached[name][str(port)] = error
            if opened and not connection:
                connection = opened
            elif opened:
                opened.close()
        # After a connection or the time limit of all: the peer has created its markers, and keeps them until the "bye".
        self.find_shared([name])
        if connection:
            with connection:
                try:
                    self.measure_connection(name, connection)
                except (OSError, EOFError) as error:
                    self.lines[name]["stalled"] = str(error) or "the peer closed the connection"
                with contextlib.suppress(OSError):
                    send_command(connection, f"bye {self.names.index(self.name)}")

    def connect_service(self, address: str, port: int) -> str:
        """Return why no connection to a port is possible, or an empty string. A peer that starts later refuses at first."""
        deadline = time.monotonic() + min(SERVICE_LIMIT, self.time_left())
        while True:
            try:
                socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic())).close()
                return ""
            except OSError as error:
                if time.monotonic() > deadline or not isinstance(error, ConnectionRefusedError):
                    return error.strerror or str(error) or "no answer"
            time.sleep(0.1)

    def connect(self, address: str, port: int) -> tuple[socket.socket | None, str]:
        """Retry until the time is up, because the peer may not have started yet; return a connection or an error."""
        error = "no answer"
        deadline = self.deadline - self.limit / 2  # the other half is for the measurements
        while True:
            try:
                connection = socket.create_connection((address, port), max(0.3, deadline - time.monotonic()))
            except TimeoutError:
                return None, "no answer"
            except OSError as refusal:
                error = (refusal.strerror or str(refusal)).lower()
            else:
                return self.authenticate(connection)
            if time.monotonic() > deadline:
                return None, error
            time.sleep(0.05)

    def authenticate(self, connection: socket.socket) -> tuple[socket.socket | None, str]:
        """Exchange the token on a new connection; return the connection, or an error and close it."""
        with contextlib.suppress(OSError, EOFError):
            connection.settimeout(max(1.0, min(CONNECT_LIMIT, self.time_left())))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(self.token)
            if receive(connection, TOKEN_SIZE) == self.token:
                return connection, ""
        connection.close()
        return None, "another program answers"

    def measure_connection(self, name: str, connection: socket.socket) -> None:
        """Measure latency, a large transfer, and the bandwidth to the head. Raises OSError or EOFError."""
        times = []
        for _ in range(PINGS):
            start = time.perf_counter()
            send_command(connection, "ping")
            receive(connection, 1)
            times.append(time.perf_counter() - start)
        self.lines[name]["latency_ms"] = round(sorted(times)[PINGS // 2] * 1e3, 3)
        # Where small packets pass and large ones are dropped, the next transfer times out.
        connection.settimeout(max(1.0, self.time_left()))
        seconds, size = self.transfer(connection, LARGE), LARGE
        if name == self.head:
            # Grow while a transfer takes less than a second, and less than this host's share of the head's time.
            share = min(1.0, self.limit / 3 / (len(self.names) - 1))
            while size < STREAM and 4 * seconds < share:
                size = min(STREAM, 4 * size)
                seconds = self.transfer(connection, size)
            self.lines[name]["mbit"] = round(2 * size * 8e-6 / seconds, 1)

    def transfer(self, connection: socket.socket, size: int) -> float:
        """Return the seconds to send `size` bytes to the peer and to receive as many."""
        send_command(connection, f"send {size}")
        receive(connection, 1)
        start = time.perf_counter()
        connection.sendall(bytes(size))
        receive(connection, size)
        seconds = time.perf_counter() - start
        connection.sendall(b"e")
        return seconds

    def ping_packets(self, name: str, address: str) -> None:
        """Send a small packet and one of the interface's full size, without fragmentation; note whether replies arrive."""
        header = 48 if ":" in address else 28
        for key, size in (("small", 56), ("large", self.mtu - header)):
            command = ["ping", "-n", "-c", "2", "-i", "0.2", "-W", "1", "-M", "do", "-s", str(size), address]
            try:
                done = subprocess.run(command, capture_output=True, timeout=10, check=False)
            except (OSError, subprocess.TimeoutExpired):
                return
            self.lines[name][f"ping_{key}"] = done.returncode == 0


def send_command(connection: socket.socket, text: str) -> None:
    """Send one command to a peer."""
    connection.sendall(text.encode().ljust(COMMAND_SIZE))


def receive(connection: socket.socket, size: int) -> bytes:
    """Return exactly `size` bytes. Raises EOFError if the peer closes the connection early."""
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 18))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
