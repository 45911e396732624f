"""Questions, verdicts on answers, scores, and what changed."""

import json
from collections.abc import Iterator, Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tables import table
from threaded_server import QuietHandler, running

from trainer.common.errors import UserError
from trainer.generation.ollama_client import Cancel, OllamaError
from trainyard.evaluate import subjects
from trainyard.evaluate.kept_evaluations import kept_evaluations
from trainyard.evaluate.questions import Question, Searcher, judge, read_questions
from trainyard.evaluate.scores import Answered, Outputs, sign_test, summarise, wilson
from trainyard.evaluate.side_by_side import EvaluateOptions, evaluate
from trainyard.evaluate.subjects import Subject, ask_servers, parse_subjects, server_nodes
from trainyard.ollama.teacher_nodes import Prompt, Teacher
from trainyard.run.launch_options import LaunchOptions

SEARCH = Searcher()


def questions(tmp_path: Path, *rows: Any) -> Any:
    file = tmp_path / "q.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return read_questions([str(file)])


@pytest.mark.parametrize(("row", "text", "right", "exact"), table("evaluate_scores")["verdicts"])
def test_verdicts(tmp_path: Path, row: dict[str, Any], text: str, right: bool, exact: bool | None) -> None:
    [question] = questions(tmp_path, {"prompt": "?"} | row)
    found = judge(question, text, SEARCH)
    assert (found.right, found.exact) == (right, exact)


@pytest.mark.parametrize(("answer", "said", "right"), table("evaluate_scores")["judged_by_numbers_and_denials"])
def test_numbers_and_denials(answer: str, said: str, right: bool) -> None:
    assert judge(Question("q", ({"role": "user", "content": "?"},), answer), said, SEARCH).right is right


def test_a_question_for_what_is_not(tmp_path: Path) -> None:
    [question] = questions(tmp_path, {"prompt": "Which is not a metal?", "answer": "oxygen"})
    assert judge(question, "Oxygen is not a metal.", SEARCH).right
    [chosen] = questions(tmp_path, {"prompt": "?", "choices": ["gas", "metal"], "answer": "metal"})
    assert judge(chosen, "It is not a gas, it is a metal", SEARCH).right
    assert not judge(chosen, "A gas, not a metal", SEARCH).right


@pytest.mark.slow
def test_a_pattern_that_would_search_for_years_matches_nothing(tmp_path: Path) -> None:
    slow, good = questions(tmp_path, {"prompt": "?", "regex": "(a|aa)+$"}, {"prompt": "?", "regex": "b$"})
    assert [judge(each, "a" * 60 + "b", SEARCH).right for each in (slow, good)] == [False, True]


def test_the_last_message_of_the_assistant_is_the_reference(tmp_path: Path) -> None:
    chat = table("evaluate_scores")["chat"]
    [question] = questions(tmp_path, {"messages": chat})
    assert question.answer == "a b" and [message["role"] for message in question.messages] == ["system", "user"]


@pytest.mark.parametrize(("row", "why"), table("evaluate_scores")["what_is_no_question"])
def test_what_is_no_question(tmp_path: Path, row: Any, why: str) -> None:
    with pytest.raises(UserError) as error:
        questions(tmp_path, {"prompt": "?", "answer": "x"}, row)
    assert why in str(error.value) and "2" in str(error.value) and "\n" not in str(error.value)


def test_intervals_and_the_test_of_signs() -> None:
    """Values of R: binom::binom.wilson(8, 10), (0, 10); mcnemar.exact, that is binom.test(1, 9) and (0, 5)."""
    assert wilson(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775328), abs=1e-6)
    assert sign_test(8, 1) == pytest.approx(0.0390625) and sign_test(0, 5) == pytest.approx(0.0625)
    assert sign_test(0, 0) == 1.0


def test_what_changed(tmp_path: Path) -> None:
    """Every subject is compared with the first one; the loss weighs tokens; a missing answer is neither right nor wrong."""
    asked = questions(tmp_path, *({"prompt": f"{n}?", "answer": str(n)} for n in range(3)))
    reports = [
        Outputs("base", [Answered("0", 1, False, 2.0, 1), Answered("x", 1, False, 1.0, 3), None], 10.0),
        Outputs("run", [Answered("x", 3, True), Answered("It is 1.", 5, False), Answered("2", 1, False)], 20.0),
    ]
    result, lines = summarise(asked, reports, show=2)
    [before, after] = result["scores"]["q"]
    assert (before["right"], before["questions"], before["loss"], before["cut"]) == (1, 2, 1.25, 0)
    assert (after["right"], after["exact"], after["loss"], after["cut"], after["tokens"]) == (2, 1 / 3, None, 1, 3.0)
    [change] = result["changes"]
    assert (change["gained"], change["lost"], change["p"]) == ([1], [0], 1.0)
    text = "\n".join(lines)
    assert "base -> run: 1 wrong answers became right, 1 right ones wrong (p = 1.000)" in text
    assert text.count("? ") == 2 and "It is 1." in text
    assert json.loads(json.dumps(result))["questions"][2]["answers"]["base"] is None


def test_subjects() -> None:
    names = ["base", "run-a", "base:b", "ollama:llama3:8b", "ollama:m@http://10.0.0.5:11434", "openai:m@http://h:1/v1"]
    assert parse_subjects(names) == [
        Subject("base", "base", "run-a"),
        Subject("run-a", "run", "run-a"),
        Subject("base:b", "base", "b"),
        Subject("ollama:llama3:8b", "ollama", "llama3:8b"),
        Subject(names[4], "ollama", "m", "http://10.0.0.5:11434"),
        Subject(names[5], "openai", "m", "http://h:1/v1"),
    ]
    for wrong in (["base"], ["a", "a"], ["../x"], ["openai:m"], ["openai:m@https://h/v1"], ["ollama:"], ["ollama:m@x"]):
        with pytest.raises(UserError, match="evaluate: subjects: "):
            parse_subjects(wrong)


# A server with the API of OpenAI as a subject ------------------------------------------------------------------------

QUESTIONS = [Question("q", ({"role": "user", "content": f"{n}?"},), str(n)) for n in range(5)]
SETTINGS = {"temperature": 0.0, "num_predict": 9, "seed": 1}


class Server(ThreadingHTTPServer):
    """Answers `It is N.` to `N?`, or with `answer` if it is set; keeps the requests."""

    answer: Any = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, dict[str, Any]]] = []


class Handler(QuietHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.asked()
        self.server.asked.append((self.path, body))
        number = body["messages"][-1]["content"].rstrip("?")
        choice = {"message": {"role": "assistant", "content": f"It is {number}."}, "finish_reason": "stop"}
        right = {"choices": [choice], "usage": {"completion_tokens": 4}}
        self.reply(200, json.dumps(right if self.server.answer is None else self.server.answer))


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
        server.answer = reply
        with pytest.raises(OllamaError, match="the reply of /chat/completions has no"):
            node.ask(prompt, Cancel())
    for usage in ({"completion_tokens": -1}, {"completion_tokens": "x"}, None, 7):
        server.answer = {"choices": [{"message": {"content": "1"}, "finish_reason": "stop"}], "usage": usage}
        assert node.ask(prompt, Cancel()).tokens == 1, "the pieces of the answer"


def test_a_server_without_any_answer_is_an_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "PATIENCE", 0.5)
    server.answer = {}
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
