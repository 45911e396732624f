"""Limits of a client that sends slowly, or opens many connections: it must not keep others out."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Any

from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_LIMIT = 10.0  # s for the line and the headers of a request, and once more for its body
ADDRESS_LIMIT = 128  # connections of one address; not of loopback, where all users have the same
FORM_LIMIT = 16 << 10  # bytes


class LimitedListener(socket.socket):
    """A listening socket that refuses a connection which exceeds the limit of its address, before TLS begins."""

    def __init__(self, family: int) -> None:
        super().__init__(family)
        self._of_address: dict[str, list[socket.socket]] = {}

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection, which asyncio closes. Raises ConnectionAbortedError for one that is refused."""
        connection, peer = super().accept()
        address = str(peer[0])
        if is_loopback(address):
            return connection, peer
        self._of_address = {
            name: left
            for name, known in self._of_address.items()
            if (left := [one for one in known if one.fileno() >= 0])
        }
        known = self._of_address.setdefault(address, [])
        if len(known) >= ADDRESS_LIMIT:
            connection.close()
            raise ConnectionAbortedError(f"{address} has {ADDRESS_LIMIT} connections")
        known.append(connection)
        return connection, peer


def is_loopback(address: str) -> bool:
    """Return whether all users of this machine have an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


class LimitedConnection(H11Protocol):
    """A connection that is closed when no request arrives."""

    _timer: asyncio.TimerHandle | None = None
    _seen: Any = None  # the request at the last check

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(REQUEST_LIMIT, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer of the request that was awaited."""
        if self._timer:
            self._timer.cancel()
        super().connection_lost(exc)

    def _check(self) -> None:
        """Close the connection if it has waited for a request since the last check."""
        cycle = self.cycle
        waits = cycle is None or cycle.response_complete
        if waits and cycle is self._seen:
            self.transport.abort()
            return
        self._seen = cycle if waits else self._seen
        self._timer = self.loop.call_later(REQUEST_LIMIT, self._check)


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
