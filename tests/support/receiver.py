"""A web server that keeps what it receives by POST."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

from threaded_server import QuietHandler, running


@contextmanager
def receiver() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the URL of a server on this machine, and the list of the JSON values that it has received."""
    received: list[dict[str, Any]] = []

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            received.append(self.asked())
            self.reply(200)

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}/secret-path", received
