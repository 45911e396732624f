"""One address cannot take all connections of the dashboard, also not with connections that never begin TLS."""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from trainyard.dashboard import http_limits
from trainyard.dashboard.certificate import own_certificate
from trainyard.dashboard.http_limits import LimitedConnection, LimitedListener

LIMIT = 8


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"here"})


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A server over TLS, for which addresses of loopback count as those of other machines."""
    monkeypatch.setattr(http_limits, "ADDRESS_LIMIT", LIMIT)
    monkeypatch.setattr(http_limits, "is_loopback", lambda address: False)
    listener = LimitedListener(socket.AF_INET)
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    files = own_certificate(tmp_path, "127.0.0.1")
    how: dict[str, Any] = {"http": LimitedConnection, "log_level": "critical", "lifespan": "off"}
    server = uvicorn.Server(
        uvicorn.Config(
            answer, ssl_certfile=files.file, ssl_keyfile=str(files.key_file), timeout_graceful_shutdown=1, **how
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(10)
    listener.close()
    assert not thread.is_alive()


def ask(port: int, source: str) -> bytes:
    """Return the answer to a client at an address; nothing if its connection is refused."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, source_address=(source, 0), context=context)
    with contextlib.closing(client):
        try:
            client.request("GET", "/", headers={"Connection": "close"})
            return client.getresponse().read()
        except (ConnectionError, ssl.SSLError):
            return b""


def test_connections_without_tls_of_one_address_do_not_keep_others_out(port: int) -> None:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)) for _ in range(3 * LIMIT)]
        deadline = time.monotonic() + 10
        while len(refused := select.select(held, [], [], 0)[0]) < 2 * LIMIT and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(refused) >= 2 * LIMIT and {client.recv(1) for client in refused} == {b""}
        assert ask(port, "127.0.0.1") == b"" and ask(port, "127.0.0.2") == b"here"
    deadline = time.monotonic() + 10
    while not (found := ask(port, "127.0.0.1")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found == b"here", "once its connections have ended"
