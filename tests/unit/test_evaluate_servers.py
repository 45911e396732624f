"""A server with the API of OpenAI as a subject, also a hostile one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from threaded_server import running

from trainer.common.errors import UserError
from trainer.generation.ollama_client import Cancel, OllamaError
from trainyard.evaluate import subjects
from trainyard.evaluate.kept_evaluations import kept_evaluations
from trainyard.evaluate.questions import Question
from trainyard.evaluate.side_by_side import EvaluateOptions, evaluate
from trainyard.evaluate.subjects import Subject, ask_servers, parse_subjects, server_nodes
from trainyard.ollama.teacher_nodes import Prompt, Teacher
from trainyard.run.launch_options import LaunchOptions

QUESTIONS = [Question("q", ({"role": "user", "content": f"{n}?"},), str(n)) for n in range(5)]
SETTINGS = {"temperature": 0.0, "num_predict": 9, "seed": 1}


class Server(ThreadingHTTPServer):
    """Answers `It is N.` to `N?`, or with `reply` if it is set; keeps the requests."""

    reply: Any = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, dict[str, Any]]] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        number = body["messages"][-1]["content"].rstrip("?")
        choice = {"message": {"role": "assistant", "content": f"It is {number}."}, "finish_reason": "stop"}
        right = {"choices": [choice], "usage": {"completion_tokens": 4}}
        data = json.dumps(right if self.server.reply is None else self.server.reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[Server]:
    with running(Server()) as found:
        yield found


def nodes(server: Server) -> tuple[Subject, Sequence[Teacher]]:
    [subject] = parse_subjects([f"openai:m@http://127.0.0.1:{server.server_port}/v1"])
    return subject, server_nodes(subject, [], print)


def test_a_server_with_the_api_of_openai(server: Server) -> None:
    found = ask_servers(*nodes(server), QUESTIONS, SETTINGS, print)
    assert [answer and answer.text for answer in found.answers] == [f"It is {n}." for n in range(5)]
    assert {answer and answer.tokens for answer in found.answers} == {4} and found.tokens_per_second > 0
    for path, body in server.asked:
        assert path == "/v1/chat/completions"
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0, 9)


def test_hostile_replies(server: Server) -> None:
    _, [node] = nodes(server)
    prompt = Prompt(QUESTIONS[0].messages, SETTINGS, 0)
    for reply in ({}, {"choices": []}, {"choices": [7]}, {"choices": [{"message": {"content": ["x"]}}]}):
        server.reply = reply
        with pytest.raises(OllamaError, match="the reply of /chat/completions has no"):
            node.ask(prompt, Cancel())
    for usage in ({"completion_tokens": -1}, {"completion_tokens": "x"}, None, 7):
        server.reply = {"choices": [{"message": {"content": "1"}, "finish_reason": "stop"}], "usage": usage}
        assert node.ask(prompt, Cancel()).tokens == 1, "the pieces of the answer"


def test_a_server_without_any_answer_is_an_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "PATIENCE", 0.5)
    server.reply = {}
    with pytest.raises(UserError, match="the reply of /chat/completions has no answer"):
        ask_servers(*nodes(server), QUESTIONS[:1], SETTINGS, print)


def test_the_result_is_kept_for_the_dashboard(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"prompt": "1?", "answer": "1"}\n')
    subject = f"openai:m@http://127.0.0.1:{server.server_port}/v1"
    options = EvaluateOptions(subjects=(subject,), questions=(str(file),))

    def run(check: bool) -> dict[str, Any]:
        return evaluate(options, [], Mock(), LaunchOptions(), check=check, report=lambda line: None, home=tmp_path)

    run(True)
    assert not (tmp_path / ".trainyard").exists()
    assert run(False)["changed"] is False
    [found] = kept_evaluations(tmp_path / ".trainyard/evaluations").values()
    assert found.files[0].scores[0].right == 1
