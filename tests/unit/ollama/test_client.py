"""The client against servers that answer wrongly, slowly, too much or not at all."""

import contextlib
import resource
import threading
import time
from http.server import ThreadingHTTPServer

import pytest
from fake_ollama import HOSTILE, Server, model, serve
from fake_teacher import Teacher
from fake_teacher import serve as serve_teachers
from run_hosts import free_port
from threaded_server import QuietHandler

from trainer.generation.ollama_client import Cancel, OllamaClient, OllamaError
from trainer.generation.ollama_names import full_name


@pytest.mark.slow
def test_hostile_servers() -> None:
    """Every reply ends within its deadline, as an error of one line, or as an empty list."""
    servers = {kind: Server("127.0.0.3", free_port(), kind=kind, version="x" * 10) for kind in HOSTILE}
    with serve(list(servers.values())):
        for kind, server in servers.items():
            client = OllamaClient(f"http://{server.address}:{server.port}", deadline=0.5)
            start = time.monotonic()
            try:
                assert len(client.tags()) <= 25_000
            except OllamaError as error:
                assert str(error).isprintable()
            with pytest.raises(OllamaError):
                client.version(0.5)
            with pytest.raises(OllamaError):
                client.chat("m", [], deadline=0.5)
            assert time.monotonic() - start < 8, kind


@pytest.mark.parametrize(
    ("status", "part", "why"),
    [
        (200, b'{"message": {"content": "' + b"x" * 60_000 + b'"}}\n', "is too large"),
        (200, b"x" * 60_000, "is too large"),
        (500, b"x" * 60_000, "HTTP status 500"),
    ],
    ids=["answer", "line", "error"],
)
def test_an_endless_answer_is_cut_off(status: int, part: bytes, why: str) -> None:
    class Endless(QuietHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(part)

    with ThreadingHTTPServer(("127.0.0.3", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(OllamaError, match=why):
            OllamaClient(f"http://127.0.0.3:{server.server_port}").chat("m", [], deadline=30)
        assert time.monotonic() - start < 20
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10, "KiB"
        server.shutdown()


def test_tags() -> None:
    server = Server(
        "127.0.0.3",
        free_port(),
        models=[model("a:b"), model("bad", digest=7), model("c", digest="\x1b[1m"), model("words:latest", size="7")],
    )
    with serve([server]):
        client = OllamaClient(f"http://127.0.0.3:{server.port}")
        assert list(client.tags()) == ["a:b", "words:latest"] and client.size("a:b") == 397821319
        assert (client.size("bad"), client.size("words:latest"), client.size("absent")) == (0, 0, 0)
    assert [*map(full_name, ("llama3", "a.b:5000/x/y", "x:8b"))] == ["llama3:latest", "a.b:5000/x/y:latest", "x:8b"]


def test_cancel_ends_a_request() -> None:
    teacher = Teacher("127.0.0.3", free_port(), seconds=30, spread=0)
    with serve_teachers(teacher):
        cancel = Cancel()
        threading.Timer(0.2, cancel.cancel).start()
        start = time.monotonic()
        with pytest.raises(OllamaError, match="cancelled"):
            OllamaClient(teacher.url).chat("teacher:latest", [], cancel=cancel)
        assert time.monotonic() - start < 5


@pytest.mark.parametrize("url", ["https://a", "file:///etc/passwd", "http://", "http://a:b", "a"])
def test_urls(url: str) -> None:
    with pytest.raises(OllamaError, match="no address"):
        OllamaClient(url)
