"""Does every host reach every other as ranks will? Runs on all hosts at once, piped to their Pythons: standard library only.

    python - '{"name": "node1", "address": "10.0.0.1", "device": "eth0", "peers": {"node2": "10.0.0.2"}, "ports": [29500], ...}'

Every host listens on the same few ports at its cluster address and connects to them on all others. Both ends prove that
they know the token, so that a stranger's server on the port does not pass for a peer.
Prints one JSON object on one line (see `Pairs.result`).
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

HELLO = 64  # bytes: the token, and who speaks
STREAM = 2 << 20  # bytes that a worker sends to the head at most, and gets back, to see how fast the line is
LARGE = 128 << 10  # bytes in one go: more than a path takes that drops large packets silently
PINGS = 20


class Pairs:
    """One host's part. `limit` is in seconds, from the start: hosts start within a second or two of each other."""

    def __init__(self, a: dict[str, Any]) -> None:
        self.a = a
        self.deadline = time.monotonic() + a["limit"]
        self.mtu = mtu_of(a["device"])
        self.token = a["token"].encode().ljust(HELLO)[:HELLO]
        self.taken: list[int] = []
        self.reached: dict[str, dict[str, str]] = {name: {} for name in a["peers"]}  # peer: {port: "" or what is wrong}
        self.lines: dict[str, dict[str, Any]] = {name: {} for name in a["peers"]}
        self.done: set[str] = set()  # peers that said that they need us no more
        self.one_at_a_time = threading.Lock()

    # What others ask of us

    def listen(self) -> None:
        family = socket.AF_INET6 if ":" in self.a["address"] else socket.AF_INET
        for port in self.a["ports"]:
            server = socket.socket(family, socket.SOCK_STREAM)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                server.bind((self.a["address"], port))
                server.listen(256)
            except OSError:
                self.taken.append(port)
                continue
            threading.Thread(target=self.accept, args=(server,), daemon=True).start()

    def accept(self, server: socket.socket) -> None:
        while True:
            peer, _ = server.accept()
            threading.Thread(target=self.answer, args=(peer,), daemon=True).start()

    def answer(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), peer:
            peer.settimeout(max(1.0, self.deadline - time.monotonic()))
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if take(peer, HELLO) != self.token:
                return
            peer.sendall(self.token)
            while True:
                word = take(peer, 16).strip().decode()
                if word == "ping":
                    peer.sendall(b"x")
                elif word.startswith("bye "):
                    self.done.add(self.a["names"][int(word[4:])])
                elif word.startswith("send "):
                    # Lines are measured one after another, or they would share the head's.
                    with self.one_at_a_time:
                        peer.sendall(b"g")
                        size = int(word[5:])
                        take(peer, size)
                        peer.sendall(bytes(size))
                        take(peer, 1)

    # What we ask of others

    def reach(self, name: str, address: str) -> None:
        good = None
        for port in self.a["ports"]:
            link, wrong = self.connect(address, port)
            self.reached[name][str(port)] = wrong
            if link and not good:
                good = link
            elif link:
                link.close()
        if good:
            with good:
                try:
                    self.measure(name, good)
                except (OSError, EOFError) as error:
                    self.lines[name]["stalled"] = str(error) or "the connection was closed"
                with contextlib.suppress(OSError):
                    good.sendall(f"bye {self.a['names'].index(self.a['name'])}".encode().ljust(16))

    def connect(self, address: str, port: int) -> tuple[socket.socket | None, str]:
        """Try until it works or the time is up: the peer may not have started yet."""
        wrong = "no answer"
        # Half of the time is for this, the rest for what follows.
        until = self.deadline - self.a["limit"] / 2
        while True:
            try:
                link = socket.create_connection((address, port), timeout=max(0.3, until - time.monotonic()))
            except TimeoutError:
                return None, "no answer"
            except OSError as error:
                wrong = (error.strerror or str(error)).lower()
            else:
                try:
                    link.settimeout(max(1.0, min(3.0, self.deadline - time.monotonic())))
                    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    link.sendall(self.token)
                    if take(link, HELLO) == self.token:
                        return link, ""
                    link.close()
                    return None, "somebody else answers"
                except (OSError, EOFError):
                    link.close()
                    return None, "somebody else answers"
            if time.monotonic() > until:
                return None, wrong
            time.sleep(0.05)

    def measure(self, name: str, link: socket.socket) -> None:
        times = []
        for _ in range(PINGS):
            begun = time.perf_counter()
            link.sendall(b"ping".ljust(16))
            take(link, 1)
            times.append(time.perf_counter() - begun)
        self.lines[name]["latency_ms"] = round(sorted(times)[PINGS // 2] * 1e3, 3)
        # Small packets pass where large ones vanish: then this never ends.
        link.settimeout(max(1.0, self.deadline - time.monotonic()))
        seconds, size = self.there_and_back(link, LARGE), LARGE
        if name == self.a["head"]:
            # More, as long as it takes no second, nor more than this line's share of the time: the head's lines take turns.
            while size < STREAM and 4 * seconds < min(1.0, self.a["limit"] / 3 / len(self.a["peers"])):
                size = min(STREAM, 4 * size)
                seconds = self.there_and_back(link, size)
            self.lines[name]["mbit"] = round(2 * size * 8e-6 / seconds, 1)

    def there_and_back(self, link: socket.socket, size: int) -> float:
        """Return the seconds that `size` bytes take to the peer, and as many back."""
        link.sendall(f"send {size}".encode().ljust(16))
        take(link, 1)
        begun = time.perf_counter()
        link.sendall(bytes(size))
        take(link, size)
        seconds = time.perf_counter() - begun
        link.sendall(b"e")
        return seconds

    def large_packets(self, name: str, address: str) -> None:
        """Send one packet of the full size of our device, not to be fragmented, to the peer; note whether it comes back."""
        header = 48 if ":" in address else 28
        for key, size in (("small", 56), ("large", self.mtu - header)):
            argv = ["ping", "-n", "-c", "2", "-i", "0.2", "-W", "1", "-M", "do", "-s", str(size), address]
            try:
                done = subprocess.run(argv, capture_output=True, timeout=10, check=False)
            except (OSError, subprocess.TimeoutExpired):
                return
            self.lines[name][f"ping_{key}"] = done.returncode == 0

    def result(self) -> dict[str, Any]:
        """Return the device's `mtu`; ports `taken` here; `reached`: {peer: {port: "" or what is wrong}}; `lines`: {peer:
        {latency_ms, mbit, ping_small, ping_large, stalled}}."""
        self.listen()
        threads = []
        for name, address in self.a["peers"].items():
            for work in (self.reach, self.large_packets):
                threads.append(threading.Thread(target=work, args=(name, address), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self.deadline - time.monotonic()))
        # Who could reach us may still be at it.
        while time.monotonic() < self.deadline and not set(self.a["peers"]) <= self.done:
            time.sleep(0.05)
        return {"mtu": self.mtu, "taken": self.taken, "reached": self.reached, "lines": self.lines}


def mtu_of(device: str) -> int:
    """Return a device's MTU in bytes; Ethernet's, where there is no such device."""
    try:
        return int(Path("/sys/class/net", device or "none", "mtu").read_text())
    except (OSError, ValueError):
        return 1500


def take(link: socket.socket, size: int) -> bytes:
    """Return exactly `size` bytes. Raises EOFError when the other side closes before."""
    parts = []
    while size:
        part = link.recv(min(size, 1 << 18))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def measure(request: dict[str, Any]) -> dict[str, Any]:
    return Pairs(request).result()
