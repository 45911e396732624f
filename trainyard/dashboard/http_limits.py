"""Limits of a client that sends slowly, or opens many connections: it must not keep others out."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request

REQUEST_LIMIT = 10.0  # s for the line and the headers of a request, and once more for its body
ADDRESS_LIMIT = 128  # connections of one address; not of loopback, where all users have the same
FORM_LIMIT = 64 << 10  # bytes


@dataclass
class _Connection:
    socket: socket.socket
    waits_since: float | None  # None during a request
    requests: int = 0  # the next one may begin before the program is done with the one before it


class LimitedListener(socket.socket):
    """A listening socket whose connections have limits: their number for each address, and the time without a request.

    Both apply before TLS begins, when the server does not know the connection yet.
    """

    def __init__(self, family: int) -> None:
        super().__init__(family)
        self._connections: dict[tuple[str, int], _Connection] = {}

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection, which asyncio closes. Raises ConnectionAbortedError for one that is refused."""
        connection, peer = super().accept()
        address, port = str(peer[0]), int(peer[1])
        self._connections = {name: one for name, one in self._connections.items() if one.socket.fileno() >= 0}
        if not is_loopback(address) and sum(known == address for known, _ in self._connections) >= ADDRESS_LIMIT:
            connection.close()
            raise ConnectionAbortedError(f"{address} has {ADDRESS_LIMIT} connections")
        self._connections[address, port] = _Connection(connection, time.monotonic())
        return connection, peer

    @contextlib.contextmanager
    def request(self, client: tuple[str, int]) -> Iterator[None]:
        """Do not close the connection of a client as long as the context lasts."""
        connection = self._connections.get(client)
        if connection:
            connection.waits_since = None
            connection.requests += 1
        try:
            yield
        finally:
            if connection:
                connection.requests -= 1
                connection.waits_since = None if connection.requests else time.monotonic()

    def close_waiting(self) -> None:
        """Close the connections that have waited for a request for too long."""
        oldest = time.monotonic() - REQUEST_LIMIT
        for connection in self._connections.values():
            if connection.waits_since is not None and connection.waits_since < oldest:
                with contextlib.suppress(OSError):  # it is closed
                    connection.socket.shutdown(socket.SHUT_RDWR)

    async def watch(self) -> None:
        """Close waiting connections until the task is cancelled."""
        while True:
            await asyncio.sleep(1.0)
            self.close_waiting()


def is_loopback(address: str) -> bool:
    """Return whether all users of this machine have an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


async def read_body(request: Request) -> bytes | None:
    """Return the body of a request; None if it has more than FORM_LIMIT bytes, or does not arrive within
    REQUEST_LIMIT."""
    body = b""
    try:
        async with asyncio.timeout(REQUEST_LIMIT):
            async for part in request.stream():
                body += part
                if len(body) > FORM_LIMIT:
                    return None
    except (TimeoutError, ClientDisconnect):
        return None
    return body
