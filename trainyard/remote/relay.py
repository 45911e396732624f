"""One host of a relay: receives files from the host before it, and passes them on to the next one while they arrive.

The first host reads files that it has, or that the controller is still copying to it. Every other host listens on its
cluster address. It accepts only the host before it, over TLS 1.3 with a key that the controller made for this transfer and
sent over SSH. A file is moved to its target after its SHA-256 was verified. A slow or lost successor delays no other host,
because each host sends from its disk. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.supervise.link_free import LinkFreePath
from trainyard.remote.digests import Digests
from trainyard.remote.receive import install, restrict
from trainyard.remote.trees import path_below

BLOCK = 128 << 10  # bytes that a host receives before it passes them on
POLL = 0.02  # s between two checks of a file that the controller is copying
HANDSHAKE_LIMIT = 10.0  # s for TLS
ACCEPTED = b"1"  # the receiver's answer to the last byte


@dataclass
class _File:
    """A file of the relay on this host."""

    target: LinkFreePath  # its final path
    temporary: LinkFreePath  # where it arrives; the same as `target` if this host has the file
    size: int
    sha256: str
    mode: int
    source: str  # "here", "controller" or "host"
    wanted: bool  # whether the next host lacks it
    have: int = 0  # bytes that can be sent on
    installed: bool = field(default=False)

    @property
    def readable(self) -> LinkFreePath:
        """Where the bytes are."""
        return self.target if self.source == "here" else self.temporary


def relay(request: dict[str, Any]) -> dict[str, Any]:
    """Take part in a relay until all files have arrived here and at the next host.

    `request`: `files`, each with `target`, `temporary`, `size`, `sha256`, `mode`, `source` (here, controller, host) and
    `wanted` by the next host; `address` of this host; `port` to listen on; `previous` and `next`, addresses, or empty;
    `next_port`; `certificate` and `key` of the transfer; `cache`, the file of known digests; `connect`, the seconds for
    the next host to listen; `idle`, those without a byte after which the transfer fails. Returns `installed`, the paths
    of the files that have arrived; `receive_error` and `send_error`, empty if there is none.
    """
    store = Path(request["cache"]).parent
    places = ("target", "temporary")
    files = [_File(**entry | {name: path_below(store, entry[name]) for name in places}) for entry in request["files"]]
    return _Relay(request, files).run()


class _Relay:
    def __init__(self, request: dict[str, Any], files: list[_File]) -> None:
        self.request, self.files = request, files
        self.idle, self.connect = float(request["idle"]), float(request["connect"])
        self.arrived = threading.Condition()
        self.failed = ""  # why no more bytes arrive
        self.send_error = ""

    def run(self) -> dict[str, Any]:
        """Receive in this thread, and send in another one."""
        digests = Digests(Path(self.request["cache"]))
        sender = threading.Thread(target=self._send)
        if self.request["next"]:
            sender.start()
        try:
            try:
                self._receive(digests)
            except (OSError, ValueError) as error:
                self._fail(_reason(error))
            if self.request["next"]:
                sender.join()
        finally:  # also when the controller is gone
            for file in self.files:
                if file.source != "here" and not file.installed:
                    file.temporary.remove(missing_ok=True)
        digests.keep()
        installed = [str(file.target) for file in self.files if file.installed]
        return {"installed": installed, "receive_error": self.failed, "send_error": self.send_error}

    def _fail(self, why: str) -> None:
        with self.arrived:
            self.failed = why
            self.arrived.notify_all()

    # Receive ----------------------------------------------------------------------------------------------------------

    def _receive(self, digests: Digests) -> None:
        """Receive the files that this host lacks. Raises OSError or ValueError."""
        for file in self.files:
            if file.source == "here":
                self._progress(file, file.size)
        for file in self.files:
            if file.source == "controller":
                self._finish(file, self._follow(file), digests)
        coming = [file for file in self.files if file.source == "host"]
        if not coming:
            return
        with self._accept() as connection:
            for file in coming:
                self._finish(file, self._read(connection, file), digests)
            connection.sendall(ACCEPTED)

    def _progress(self, file: _File, have: int) -> None:
        with self.arrived:
            file.have = have
            self.arrived.notify_all()

    def _finish(self, file: _File, found: str, digests: Digests) -> None:
        """Move a file to its target. The sender keeps it open, so the next host receives it all the same."""
        restrict(file.temporary, file.mode)
        with self.arrived:  # the sender opens the file at one path or the other
            install(file.temporary, file.target, file.sha256, digests, found)
            file.installed, file.source = True, "here"

    def _follow(self, file: _File) -> str:
        """Read a file that the controller is copying to this host; return its SHA-256. Raises OSError."""
        digest, deadline = hashlib.sha256(), time.monotonic() + self.idle
        while not file.temporary.exists():
            self._wait(deadline, file)
        with file.temporary.open_read() as source:
            while file.have < file.size:
                if block := source.read(BLOCK):
                    digest.update(block)
                    self._progress(file, file.have + len(block))
                    deadline = time.monotonic() + self.idle
                else:
                    self._wait(deadline, file)
        return digest.hexdigest()

    def _wait(self, deadline: float, file: _File) -> None:
        if time.monotonic() > deadline:
            raise OSError(f"{file.temporary.name} did not arrive from the controller for {self.idle:.0f} s")
        time.sleep(POLL)

    def _read(self, connection: ssl.SSLSocket, file: _File) -> str:
        """Receive a file; return its SHA-256. Raises OSError."""
        digest, buffer = hashlib.sha256(), memoryview(bytearray(BLOCK))
        with file.temporary.create(0o600) as target:
            # Under the umask, as a copy by the controller would be; `restrict` removes what the source does not have.
            os.fchmod(target.fileno(), file.mode & 0o666 & ~_umask() | 0o600)
            while file.have < file.size:
                end, limit = 0, min(BLOCK, file.size - file.have)
                while end < limit:
                    count = connection.recv_into(buffer[end:limit])
                    if not count:
                        raise OSError(f"the host before it ({self.request['previous']}) ended the transfer")
                    end += count
                target.write(buffer[:end])
                target.flush()  # the sender reads the file
                digest.update(buffer[:end])
                self._progress(file, file.have + end)
        return digest.hexdigest()

    def _accept(self) -> ssl.SSLSocket:
        """Return the connection of the host before this one; every other one is closed. Raises OSError."""
        deadline = time.monotonic() + self.connect + self.idle
        with _listen(self.request["address"], self.request["port"]) as listener:
            while True:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    plain, (address, *_) = listener.accept()
                except TimeoutError:
                    raise OSError(f"the host before it ({self.request['previous']}) did not connect") from None
                if address == self.request["previous"]:
                    plain.settimeout(HANDSHAKE_LIMIT)
                    with contextlib.suppress(OSError):
                        connection = _context(self.request, server=True).wrap_socket(plain, server_side=True)
                        connection.settimeout(self.idle)
                        return connection
                plain.close()

    # Send -------------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        wanted = [file for file in self.files if file.wanted]
        try:
            with self._connect() as connection:
                for file in wanted:
                    self._write(connection, file)
                if connection.recv(1) != ACCEPTED:
                    raise OSError("the next host ended the transfer")
        except (OSError, ValueError) as error:
            self.send_error = _reason(error)

    def _connect(self) -> ssl.SSLSocket:
        """Return the connection to the next host, which may not listen yet. Raises OSError."""
        deadline = time.monotonic() + self.connect
        while True:
            try:
                after = (self.request["next"], self.request["next_port"])
                plain = socket.create_connection(after, HANDSHAKE_LIMIT, (self.request["address"], 0))
                connection = _context(self.request, server=False).wrap_socket(plain)
                connection.settimeout(self.idle)
                return connection
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _write(self, connection: ssl.SSLSocket, file: _File) -> None:
        """Send a file as far as it has arrived, until it is complete. Raises OSError."""
        if not self._arrival(file, 0):
            return  # an empty file
        with self.arrived:
            source = file.readable.open_read()
        with source:
            sent = 0
            while sent < file.size:
                ready = self._arrival(file, sent)
                while sent < ready:
                    block = source.read(min(BLOCK, ready - sent))
                    if not block:
                        raise OSError(f"{file.target} became shorter")
                    connection.sendall(block)
                    sent += len(block)

    def _arrival(self, file: _File, sent: int) -> int:
        """Wait until more than `sent` bytes have arrived, or all; return their number. Raises OSError."""
        with self.arrived:
            while file.have <= sent and file.have < file.size:
                if self.failed:
                    raise OSError(f"nothing to send: {self.failed}")
                self.arrived.wait()
            return file.have


def _listen(address: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(8)
    except OSError:
        listener.close()
        raise
    return listener


def _context(request: dict[str, Any], server: bool) -> ssl.SSLContext:
    """Return TLS 1.3 with the certificate of the transfer, which both sides have and require."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=request["certificate"])
    if server:
        context.num_tickets = 0  # an unread ticket would reset the connection
    # The module reads a key from a file only: one in memory, which no other user can open.
    with os.fdopen(os.memfd_create("transfer"), "wb") as file:
        file.write(f"{request['key']}\n{request['certificate']}".encode())
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


def _umask() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o077


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    return str(error.strerror or error) if isinstance(error, OSError) else str(error)
