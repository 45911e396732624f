"""Questions to models from the dashboard: who is asked, the limits, and servers that belong to an attacker."""

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlencode

import pytest
from run_hosts import until
from test_dashboard_http import Served, served
from threaded_server import running

from trainer.generation.ollama_models import GREEDY
from trainyard.dashboard import model_questions

__all__ = ["served"]
Write = Callable[[bytes], Any]


class Server(ThreadingHTTPServer):
    """An Ollama that writes a reply with `behave`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.behave: Callable[[Write], None] = answer
        self.left = threading.Event()  # a client has closed the connection before the end
        self.shown: dict[str, Any] = {}  # /api/show


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(
            json.dumps({"models": [{"name": name, "digest": "d" * 64} for name in ("m:latest", "<b>")]}).encode()
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        if self.path == "/api/show":
            self.wfile.write(json.dumps(self.server.shown).encode())
            return
        self.server.asked.append(body)
        try:
            self.server.behave(self.wfile.write)
        except OSError:
            self.server.left.set()


def line(text: str, **more: Any) -> bytes:
    return json.dumps({"message": {"content": text}, **more}).encode() + b"\n"


def answer(write: Write) -> None:
    for text in ("The ", "frog\n", "is\x1b[2J \x00blue."):
        write(line(text))
    write(line("", done=True, done_reason="length", eval_count=9))


def forever(part: bytes, pause: float = 0.0) -> Callable[[Write], None]:
    def write_all(write: Write) -> None:
        while True:
            write(part)
            time.sleep(pause)

    return write_all


@pytest.fixture
def ollama(served: Served) -> Iterator[Server]:
    """The server of node1, which has the models `m` and `<b>`; node2 has `m`, loaded, and answers nobody."""
    with running(Server()) as server:
        sample = {"version": "0.9.3", "installed": ["m", "<b>"], "loaded": [], "deployed": ["<b>"]}
        for name, url, own in (
            ("node1", f"http://127.0.0.1:{server.server_port}", sample),
            ("node2", "http://127.0.0.1:9", sample | {"installed": ["m"], "loaded": ["m"]}),
        ):
            host = served.pages.cluster.hosts[name]
            host.host, host.sample = replace(host.host, ollama_urls=(url,)), {"ollama": own}
            host.connected = name == "node1"
        yield server


def form(served: Served, session: str, **fields: str) -> str:
    return urlencode({"csrf": served.csrf(session), "model": "m", "question": "What?"} | fields)


def ask(served: Served, **fields: str) -> tuple[int, list[dict[str, str]]]:
    session = served.session()
    how = {"Cookie": session, "Content_Type": "application/x-www-form-urlencoded"}
    status, _, text = served.ask("POST", "/models/ask", form(served, session, **fields), **how)
    return status, list(map(json.loads, text.splitlines())) if status == 200 else [{"error": text}]


def open_question(served: Served, session: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    client = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    headers = {"Cookie": session, "Content-Type": "application/x-www-form-urlencoded"}
    client.request("POST", "/models/ask", form(served, session), headers)
    return client, client.getresponse()


def test_an_answer_is_streamed_from_a_host_that_has_the_model(served: Served, ollama: Server) -> None:
    status, (host, *texts, end) = ask(served, question="What?\nTell me.")
    assert (status, host) == (200, {"host": "node1"})
    assert [each["text"] for each in texts] == ["The ", "frog\n", "is\ufffd[2J \ufffdblue.", ""]
    assert end["end"].startswith("9 tokens, ") and end["end"].endswith("ended at the limit of 512 tokens")
    [sent] = ollama.asked
    assert (sent["model"], sent["messages"]) == ("m", [{"role": "user", "content": "What?\nTell me."}])
    assert (
        sent["options"] == GREEDY | {"num_predict": model_questions.TOKENS, "num_ctx": 1024} and sent["stream"] is True
    )
    served.pages.cluster.hosts["node2"].connected = True
    assert ask(served)[1][0] == {"host": "node2"}, "it has loaded the model"
    page = served.ask("GET", "/models", Cookie=served.session())[2]
    assert '<option value="&lt;b&gt;">&lt;b&gt; · node1</option>' in page and "<b>" not in page
    assert page.index("&lt;b&gt; · node1") < page.index("m · node1, node2"), "deployed models first"


def test_only_models_of_hosts_that_answer_are_asked(served: Served, ollama: Server) -> None:
    for model in ("", "other", "http://127.0.0.1:9/m", "ollama:m@http://127.0.0.1:9", "../m", "m\0", "M"):
        assert ask(served, model=model)[0] == 404, model
    for question in ("", " \n", "x" * (model_questions.QUESTION + 1)):
        assert ask(served, question=question)[0] == 400
    assert ask(served, question="\u6771" * model_questions.QUESTION)[0] == 200, "three bytes each, and nine in a form"
    assert ask(served, csrf="wrong")[0] == 403 and served.ask("GET", "/models/ask", Cookie=served.session())[0] == 405
    assert served.post("/models/ask", form(served, served.session()), "") == 401
    node = served.pages.cluster.hosts["node1"]
    node.connected = False
    assert ask(served)[0] == 404 and len(ollama.asked) == 1


def test_what_the_end_of_an_answer_says(served: Served, ollama: Server) -> None:
    """Thinking that took all tokens, a question that was read in part, and a model whose answers a cloud computes."""
    ollama.shown = {
        "capabilities": ["completion", "thinking"],
        "model_info": {"general.architecture": "x", "x.context_length": 99},
    }
    cut = {"done": True, "done_reason": "length", "eval_count": 9}
    for text, more, end in (
        ("<think>Maybe", cut, "tokens, within its thinking"),
        ("Yes.", cut | {"prompt_eval_count": 99}, "read a part of the question: its context is too small"),
    ):
        ollama.behave = lambda write, text=text, more=more: write(line(text, **more))
        assert ask(served)[1][-1]["end"].endswith(end)
        assert ollama.asked[-1]["think"] is False and ollama.asked[-1]["options"]["num_ctx"] == 99
    ollama.shown = {"remote_host": "ollama.com:443"}
    assert "ollama.com:443 computes the answers" in ask(served)[1][-1]["error"] and len(ollama.asked) == 2


def test_two_spellings_are_one_model(served: Served, ollama: Server) -> None:
    hosts = served.pages.cluster.hosts
    hosts["node2"].sample = {"ollama": {"installed": ["M:latest"], "loaded": ["M:latest"], "deployed": ["M:latest"]}}
    hosts["node2"].connected = True
    found = served.pages.questions.models()
    assert list(found)[1] == "m" and found["m"] == ["node1", "node2"]
    assert ask(served)[1][0] == {"host": "node2"}, "it has loaded the model"


@pytest.mark.parametrize(
    "behave",
    [
        forever(b" " * 65536),
        forever(line("x" * 1000)),
        pytest.param(forever(line("")), marks=pytest.mark.slow),
        lambda write: write(b'{"message": "' + b"x" * (2 << 20)),
        lambda write: write(b"[]\n"),
        lambda write: write(b'{"message": []}\n'),
        lambda write: write(b"[" * 100_000 + b"\n"),
        lambda write: write(line("half an answer")),
        lambda write: write(b'{"error": "<script>\\u001b[2J"}\n'),
    ],
)
def test_hostile_servers(served: Served, ollama: Server, behave: Callable[[Write], None]) -> None:
    ollama.behave = behave
    status, lines = ask(served)
    assert status == 200 and lines[-1].keys() == {"error"} and "\x1b" not in lines[-1]["error"]
    assert sum(len(each.get("text", "")) for each in lines) <= model_questions.ANSWER
    until(lambda: sum(served.pages.questions._open.values()) == 0, 5, "the end of the request")


def test_a_silent_server_has_a_limit(served: Served, ollama: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_questions, "ANSWER_LIMIT", 1.0)
    monkeypatch.setattr(model_questions, "LOOK", 0.1)
    ollama.behave = lambda write: time.sleep(2)
    assert "within the time limit" in ask(served)[1][-1]["error"]


@pytest.mark.parametrize("pause", [0.05, 0.0])
def test_the_request_ends_with_its_reader(served: Served, ollama: Server, pause: float) -> None:
    """A reader that takes nothing stops the stream; then it goes away."""
    ollama.behave = forever(line("x" * (100 if pause else 0)), pause)
    session = served.session()
    client, reply = open_question(served, session)
    assert json.loads(reply.readline()) == {"host": "node1"} and reply.readline()
    assert not ollama.left.is_set()
    reply.close()
    client.close()
    assert ollama.left.wait(5), "the server of the model works on"
    until(lambda: sum(served.pages.questions._open.values()) == 0, 5, "the end of the request")


def test_limits_of_number_and_rate(served: Served, ollama: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    ollama.behave = forever(line("x"), 0.1)
    session = served.session()
    pending = [open_question(served, session) for _ in range(model_questions.AT_ONCE)]
    assert all(json.loads(reply.readline()) for _, reply in pending)
    status, [refused] = ask(served)
    assert status == 429 and "wait for them" in refused["error"]
    for client, reply in pending:
        reply.close()
        client.close()
    until(lambda: sum(served.pages.questions._open.values()) == 0, 5, "the end of the requests")
    ollama.behave = answer
    found = [ask(served)[0] for _ in range(model_questions.PER_MINUTE - model_questions.AT_ONCE + 1)]
    assert found[-1] == 429 and set(found[:-1]) == {200}
