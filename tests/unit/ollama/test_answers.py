"""Answers on disk: a controller that is killed loses only the requests in flight."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from trainer.common.errors import UserError
from trainer.generation.ollama_client import Answer, Cancel
from trainyard.ollama.answers import AnswerFile
from trainyard.ollama.collect import Questions, collect_answers
from trainyard.ollama.distill_options import DistillOptions
from trainyard.ollama.teacher_nodes import Prompt

PROMPTS = [f"question {number}" for number in range(30)]


class Node:
    """A server that answers at once, and what it was asked."""

    name, digest = "node1", "d" * 64

    def __init__(self) -> None:
        self.asked: list[str] = []

    def ask(self, prompt: Prompt, cancel: Cancel) -> Answer:
        self.asked.append(prompt.messages[0]["content"])
        return Answer("text", "", "stop", 1, 0.0, 0.0)

    def probe(self) -> None: ...


class KilledError(Exception):
    """The controller is killed at this point."""


def test_a_killed_collection_asks_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "answers.jsonl", AnswerFile._write
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    questions = Questions(chats, DistillOptions(teacher="t", prompts="-"))

    def cut(self: AnswerFile, data: bytes) -> None:
        if len(self) >= 5:
            write(self, data[:20])
            raise KilledError
        write(self, data)

    monkeypatch.setattr(AnswerFile, "_write", cut)
    with pytest.raises(KilledError), AnswerFile(path) as answers:
        collect_answers(questions, [Node()], answers, print)
    monkeypatch.undo()
    node = Node()
    with AnswerFile(path) as answers:
        left = len(PROMPTS) - len(answers)
        assert answers.repaired == 20 and 0 < left <= len(PROMPTS) - 5
        with pytest.raises(UserError, match="another controller collects answers"):
            AnswerFile(path)
        collect_answers(questions, [node], answers, print)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert Counter(record["messages"][0]["content"] for record in records) == Counter(PROMPTS)
    assert len(node.asked) == left
