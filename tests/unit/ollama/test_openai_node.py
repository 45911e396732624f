"""Teachers with the API of OpenAI: answers that arrive in pieces, keys, and servers without the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
from tables import table
from threaded_server import QuietHandler, running

from trainer.common.errors import UserError
from trainer.generation.ollama_client import Cancel, OllamaError
from trainyard.ollama.distill_options import make_distill_options
from trainyard.ollama.openai_node import KEY, OpenAINode, openai_teachers
from trainyard.ollama.teacher_nodes import Prompt

SETTINGS = {"temperature": 0.7, "num_predict": 9, "seed": 3}
PROMPT = Prompt([{"role": "user", "content": "hi"}], SETTINGS)


class Handler(QuietHandler):
    server: Server

    def do_GET(self) -> None:
        self.reply(200 if self.path == "/v1/models" else 404, json.dumps({"data": [{"id": "m"}, {"id": "n"}, 7]}))

    def do_POST(self) -> None:
        self.server.asked.append(self.asked() | {"key": self.headers.get("Authorization")})
        self.reply(200, "".join(f"data: {json.dumps(event)}\n\n" for event in self.server.events) + "data: [DONE]\n\n")


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.events: list[Any] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


@pytest.fixture
def server() -> Iterator[Server]:
    with running(Server()) as found:
        yield found


def piece(text: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": reason} | more]}


def test_an_answer_in_pieces(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")
    [node] = openai_teachers([server.url], "m", 30.0)
    server.events = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"reasoning_content": "I think"}}]},
        piece("It is"),
        piece(" ü.", "length"),
        {"choices": [], "usage": {"completion_tokens": 7}},
    ]
    answer = node.ask(PROMPT, Cancel())
    assert (answer.text, answer.thinking, answer.finished, answer.tokens) == ("It is ü.", "I think", "length", 7)
    assert 0 < answer.queued < answer.seconds
    asked = server.asked[-1]
    assert (asked["model"], asked["temperature"], asked["max_tokens"], asked["seed"]) == ("m", 0.7, 9, 3)
    assert asked["key"] == "Bearer secret"


@pytest.mark.parametrize(
    ("events", "message"),
    [*table("openai_node")["hostile_and_broken_replies"], ([piece("It is")], "no complete answer")],
)
def test_hostile_and_broken_replies(server: Server, events: list[Any], message: str) -> None:
    server.events = events
    with pytest.raises(OllamaError, match=message):
        OpenAINode("s", "m", server.url).ask(PROMPT, Cancel())


def test_text_that_cannot_be_written_is_replaced(server: Server) -> None:
    server.events = [piece("a\ud800b", "stop")]
    assert OpenAINode("s", "m", server.url).ask(PROMPT, Cancel()).text == "a?b"


def test_servers_that_cannot_teach_are_named(server: Server) -> None:
    for urls, model, message in (
        ([server.url], "x", rf"teacher_url: {server.url}: it has no model x, but m, n: set teacher to one of them"),
        (
            ["http://127.0.0.1:9/v1"],
            "m",
            r"127\.0\.0\.1:9/v1: connection refused at 127.0.0.1 port 9: start the server, or remove it",
        ),
        ([server.url, "https://h/v1"], "m", r"got 'https://h/v1', expected the address of an API"),
        ([server.url.removesuffix("/v1")], "m", "404"),
    ):
        with pytest.raises(UserError, match=message):
            openai_teachers(urls, model, 5.0)
    options = make_distill_options({"teacher": "m", "prompts": "p", "teacher_url": f"{server.url}, http://b:1/v1"})
    assert options.teacher_url == (server.url, "http://b:1/v1")
