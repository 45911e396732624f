"""A server of the standard library that answers in a thread of the test."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from socketserver import BaseServer
from typing import Any, TypeVar

S = TypeVar("S", bound=BaseServer)


class QuietHandler(BaseHTTPRequestHandler):
    """Logs nothing, reads the JSON of a request, and replies with a text of a known length."""

    def log_message(self, format: str, *_: object) -> None: ...

    def asked(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def reply(self, status: int, text: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


@contextlib.contextmanager
def running(server: S) -> Iterator[S]:
    """Serve until the block ends."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
