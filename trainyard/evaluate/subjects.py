"""What is evaluated: the result of a run, the base model of a run, or a model on servers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import printable, quoted
from trainer.generation.ollama_client import Answer, hide_password, is_server_url
from trainer.generation.ollama_models import room_for
from trainer.generation.pool import Listed, ServerPool
from trainyard.evaluate.questions import Question
from trainyard.evaluate.scores import Answered, Outputs, answered
from trainyard.ollama.openai_node import OpenAINode
from trainyard.ollama.servers import host_urls
from trainyard.ollama.teacher_nodes import Prompt, Teacher, require_local
from trainyard.ollama.teachers import Candidate, find_teachers
from trainyard.wire.connection import Host

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ANSWER_LIMIT = 1800.0  # s for one answer of a server
PATIENCE = 60.0  # s without any answer of the servers
_EXPECTED = (
    "expected the name of a run, base:RUN, ollama:MODEL[@http://ADDRESS:PORT] or openai:MODEL@http://ADDRESS:PORT/v1"
)


@dataclass(frozen=True)
class Subject:
    """One model to evaluate."""

    name: str  # as the user wrote it
    kind: str  # run, base, ollama or openai
    model: str  # the run (of `run` and `base`), or the name of the model on the server
    url: str = ""  # of the server; empty for all servers of the hosts that have the model


def parse_subjects(names: Sequence[str]) -> list[Subject]:
    """Return the subjects. `base` is that of the first run. Raises UserError."""
    first = next((name for name in names if name != "base" and _RUN.fullmatch(name)), "")
    found = []
    for name in names:
        kind, colon, rest = name.partition(":")
        model, _, url = rest.partition("@")
        subject = None
        if name == "base":
            if not first:
                raise UserError(
                    "evaluate: subjects: base is the base model of a run, and no run is named: use base:RUN"
                )
            subject = Subject(name, "base", first)
        elif not colon and _RUN.fullmatch(name):
            subject = Subject(name, "run", name)
        elif kind == "base" and _RUN.fullmatch(rest):
            subject = Subject(name, "base", rest)
        elif kind == "ollama" and model and (not url or is_server_url(url)):
            subject = Subject(name, "ollama", model, url)
        elif kind == "openai" and model and is_server_url(url):
            subject = Subject(name, "openai", model, url)
        if subject is None:
            raise UserError(f"evaluate: subjects: {quoted(hide_password(name))}: {_EXPECTED}")
        found.append(subject)
    if len(set(names)) < len(names):
        raise UserError("evaluate: subjects: name each one once")
    return found


def server_nodes(
    subject: Subject, hosts: Sequence[Host], report: Callable[[str], None], **accepted: bool
) -> Sequence[Teacher]:
    """Return the servers that answer for a subject. `accepted`: see `find_teachers`. Raises UserError if none has the model."""
    if subject.kind == "openai":
        node = OpenAINode(subject.name, subject.model, subject.url, limit=ANSWER_LIMIT)
        require_local("" if accepted.get("remote") else node.remote(), subject.model, subject.url)
        return [node]
    if subject.url:
        machines = [Candidate(subject.url, subject.url, True)]
    else:
        machines = list(
            {url: Candidate(host.name, url, True) for host in hosts for url in [host_urls(host)[-1]]}.values()
        )
    try:
        return find_teachers(machines, subject.model, pull=None, limit=ANSWER_LIMIT, report=report, **accepted)
    except UserError as error:
        raise UserError(f"evaluate: {subject.name}: {str(error).removeprefix('teacher: ')}") from None


def ask_servers(
    subject: Subject,
    nodes: Sequence[Teacher],
    questions: Sequence[Question],
    options: Mapping[str, Any],
    report: Callable[[str], None],
) -> Outputs:
    """Let servers answer all questions.

    `options`: of the model, as Ollama names them, with `num_predict`. Raises UserError: there is no answer at all.
    """
    answers: dict[int, Answered] = {}
    chats = [question.messages for question in questions]
    room = room_for(chats, options["num_predict"])
    prompts = [Prompt(chat, options, place, room, think=False) for place, chat in enumerate(chats)]
    failed: list[tuple[Prompt, str]] = []

    def deliver(new: list[tuple[Prompt, Teacher, Answer]]) -> None:
        for prompt, node, answer in new:
            if answer.truncated:
                failed.append((prompt, f"{node.name} read a part of it, for its context is too small"))
                continue
            cut = answer.finished == "length"
            answers[prompt.sample] = answered(answer.text, answer.tokens, cut, thinking=answer.thinking)

    result = ServerPool(nodes, deliver, report, patience=PATIENCE).run(Listed(prompts))
    failed += result.failed
    if not answers:
        raise UserError(f"evaluate: {printable(subject.name)}: no answer: {failed[0][1]}")
    for prompt, reason in failed[:3]:
        report(f"{printable(subject.name, 60)}: no answer to question {prompt.sample + 1}: {reason}")
    speed = sum(result.tokens.values()) / max(result.seconds, 1e-3)
    return Outputs(subject.name, [answers.get(place) for place in range(len(questions))], speed)
