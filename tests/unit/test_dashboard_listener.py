"""Clients that open many connections, or send no request, do not keep others out; also without TLS."""

import asyncio
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
from dashboard_site import certificate_file

from trainyard.dashboard import http_limits
from trainyard.dashboard.http_limits import LimitedListener

LIMIT = 8
SLOW, LATE, CLOSED = threading.Event(), threading.Event(), threading.Event()


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LimitedListener]:
    """Of a server over TLS, for which addresses of loopback count as those of other machines."""
    monkeypatch.setattr(http_limits, "ADDRESS_LIMIT", LIMIT)
    monkeypatch.setattr(http_limits, "is_loopback", lambda address: False)
    listener = LimitedListener(socket.AF_INET)
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        with listener.request(scope["client"]):
            if scope["path"] == "/slow":
                SLOW.set()
                await asyncio.sleep(0.5)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            if scope["path"] == "/next":
                SLOW.set()
                await asyncio.to_thread(CLOSED.wait, 10)
            await send({"type": "http.response.body", "body": b"here"})
            if scope["path"] == "/late":
                await asyncio.to_thread(SLOW.wait, 10)
        LATE.set()

    how: dict[str, Any] = {"ssl_certfile": certificate_file(tmp_path / "tls.pem"), "lifespan": "off"}
    server = uvicorn.Server(uvicorn.Config(answer, log_level="critical", timeout_graceful_shutdown=1, **how))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield listener
    server.should_exit = True
    thread.join(10)
    listener.close()
    assert not thread.is_alive()


def connection(listener: LimitedListener, source: str = "127.0.0.1") -> http.client.HTTPSConnection:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    port = listener.getsockname()[1]
    return http.client.HTTPSConnection("127.0.0.1", port, timeout=10, source_address=(source, 0), context=context)


def ask(listener: LimitedListener, source: str, path: str = "/") -> bytes:
    """Return the answer to a client at an address; nothing if its connection is refused."""
    with contextlib.closing(connection(listener, source)) as client:
        try:
            client.request("GET", path, headers={"Connection": "close"})
            return client.getresponse().read()
        except (ConnectionError, ssl.SSLError):
            return b""


def test_connections_without_tls_of_one_address_do_not_keep_others_out(listener: LimitedListener) -> None:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(listener.getsockname(), 10)) for _ in range(3 * LIMIT)]
        deadline = time.monotonic() + 10
        while len(refused := select.select(held, [], [], 0)[0]) < 2 * LIMIT and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(refused) >= 2 * LIMIT and {client.recv(1) for client in refused} == {b""}
        assert ask(listener, "127.0.0.1") == b"" and ask(listener, "127.0.0.2") == b"here"
    deadline = time.monotonic() + 10
    while not (found := ask(listener, "127.0.0.1")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found == b"here", "once its connections have ended"


def test_a_connection_without_a_request_is_closed(listener: LimitedListener, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = socket.create_connection(listener.getsockname(), 10)
    halting, kept = connection(listener), connection(listener)
    halting.connect()
    halting.sock.sendall(b"GET / HTT")
    for _ in range(2):
        kept.request("GET", "/")
        assert kept.getresponse().read() == b"here"
        listener.close_waiting()  # REQUEST_LIMIT has not passed
    answers: list[bytes] = []
    slow = threading.Thread(target=lambda: answers.append(ask(listener, "127.0.0.2", "/slow")))
    slow.start()
    assert SLOW.wait(10)
    monkeypatch.setattr(http_limits, "REQUEST_LIMIT", 0.0)
    listener.close_waiting()
    assert silent.recv(1) == halting.sock.recv(1) == kept.sock.recv(1) == b""
    slow.join(10)
    assert answers == [b"here"], "it was closed during a request"


def test_a_request_that_begins_before_the_last_one_has_ended_is_not_closed(
    listener: LimitedListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program still closes a file when the browser has received it, and asks for the next one on the same connection."""
    for event in (SLOW, LATE, CLOSED):
        event.clear()
    with contextlib.closing(connection(listener)) as client:
        client.request("GET", "/late")
        assert client.getresponse().read() == b"here"
        client.request("GET", "/next")
        assert SLOW.wait(10) and LATE.wait(10)
        monkeypatch.setattr(http_limits, "REQUEST_LIMIT", 0.0)
        listener.close_waiting()
        CLOSED.set()
        assert client.getresponse().read() == b"here"
