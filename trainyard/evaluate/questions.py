"""Questions with their right answers, and the verdict on an answer. Every model's answers are judged here, in the same way."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import printable, quoted
from trainer.common.inputs import path_kind, user_path
from trainer.config import OBSERVATORY
from trainer.data.samples import read_records, source_of
from trainyard.run.prepare.spec_files import DATASETS

EMBEDDED = {OBSERVATORY: "observatory-questions.jsonl", "general": "general-questions.jsonl"}
MAX_QUESTIONS = 10_000
MAX_TEXT = 20_000  # characters of an answer that are judged
_KEYS = {"prompt", "messages", "answer", "choices", "regex"}
_ROLES = ("system", "user", "assistant")
_SHAPE = 'expected {"prompt": "...", "answer": "..."}, with choices or regex if any, or {"messages": [...]} whose last one is the answer'


@dataclass(frozen=True)
class Question:
    """A question with what a right answer is.

    Attributes:
        file: name of the file that has it.
        messages: the chat up to the question.
        answer: the right answer, or the reference; empty if there is only a pattern.
        choices: the answers to choose from, of which `answer` is one; empty for any.
        pattern: what a right answer matches; None to look for `answer`.
    """

    file: str
    messages: tuple[Mapping[str, str], ...]
    answer: str = ""
    choices: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None

    @property
    def text(self) -> str:
        """The last message of the user."""
        return self.messages[-1]["content"]


@dataclass(frozen=True)
class Verdict:
    """What is right about an answer. `exact` and `contained` are None for a question without `answer`.

    Attributes:
        right: the answer counts as right: the pattern matches, or the first choice that it names is the right one, or it
            contains the right answer.
        exact: it is the right answer and no more. Case, punctuation and spaces do not count.
        contained: it contains the words of the right answer.
    """

    right: bool
    exact: bool | None = None
    contained: bool | None = None


def read_questions(names: Sequence[str]) -> list[Question]:
    """Return the questions of several files; the name of an embedded set is one of `EMBEDDED`. Raises UserError."""
    found = [question for name in names for question in _read_file(name)]
    if len(found) > MAX_QUESTIONS:
        raise UserError(f"questions: {len(found)} are more than {MAX_QUESTIONS}: use a part of them")
    return found


def _read_file(name: str) -> list[Question]:
    path = DATASETS / EMBEDDED[name] if name in EMBEDDED else user_path(name, "questions")
    if not path_kind(path):
        known = ", ".join(map(repr, EMBEDDED))
        raise UserError(f"questions: no such file: {printable(path)}: give a file of questions, or one of {known}")
    stem = name if name in EMBEDDED else path.name.partition(".")[0]
    found = []
    try:
        for where, record in read_records(source_of(path)):
            try:
                found.append(_question(stem, record))
            except ValueError as error:
                raise UserError(f"{where.removeprefix('dataset: ')}: {error}") from None
    except UserError as error:
        raise UserError(f"questions: {str(error).removeprefix('dataset: ')}") from None
    if not found:
        raise UserError(f"questions: {printable(path)} is empty: {_SHAPE}")
    return found


def _question(file: str, record: Any) -> Question:
    """Return the question of a record. Raises ValueError."""
    values = {key: value for key, value in record.items() if value is not None} if isinstance(record, dict) else {}
    if ("prompt" in values) == ("messages" in values):
        raise ValueError(f"has {'both' if 'prompt' in values else 'neither'} prompt and messages: {_SHAPE}")
    if unknown := sorted(values.keys() - _KEYS):
        raise ValueError(f"has the unknown key {quoted(unknown[0])}: {_SHAPE}")
    messages = _messages(values)
    answer = values.get("answer", "")
    if messages[-1]["role"] == "assistant":
        if answer:
            raise ValueError("has answer, and messages that end with an answer: remove one of them")
        answer = messages.pop()["content"]
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("has no question of a user before the answer")
    choices = values.get("choices", [])
    if (
        not isinstance(answer, str)
        or not isinstance(choices, list)
        or not all(isinstance(each, str) for each in choices)
    ):
        raise ValueError("needs text as answer, and a list of texts as choices")
    if choices and answer not in choices:
        raise ValueError(f"has the answer {quoted(answer)}, which is none of its choices")
    if "regex" in values and choices:
        raise ValueError("has both regex and choices: remove one of them")
    if not answer.strip() and "regex" not in values:
        raise ValueError(f"has no right answer: {_SHAPE}")
    try:
        pattern = re.compile(values["regex"]) if "regex" in values else None
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(f"has a regex that is not valid: {error}") from None
    return Question(file, tuple(messages), answer.strip(), tuple(choices), pattern)


def _messages(values: Mapping[str, Any]) -> list[dict[str, str]]:
    messages = values.get("messages", [{"role": "user", "content": values.get("prompt")}])
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ValueError(f"needs messages with role ({', '.join(_ROLES)}) and content, both text")
    return [dict(message) for message in messages]


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"role", "content"} or value["role"] not in _ROLES:
        return False
    return isinstance(value["content"], str) and bool(value["content"].strip())


def judge(question: Question, text: str) -> Verdict:
    """Return the verdict on an answer."""
    text = text[:MAX_TEXT]
    exact = contained = None
    if question.answer:
        exact = _words(text) == _words(question.answer)
        contained = _position(text, question.answer) is not None
    if question.pattern:
        return Verdict(bool(question.pattern.search(text)), exact, contained)
    if question.choices:
        return Verdict(_first_choice(text, question.choices) == question.answer, exact, contained)
    return Verdict(bool(contained), exact, contained)


def _first_choice(text: str, choices: Sequence[str]) -> str | None:
    """Return the choice that an answer names first, the longest of those at one place; None if it names none."""
    places = [(place, -len(choice), choice) for choice in choices if (place := _position(text, choice)) is not None]
    return min(places)[2] if places else None


def _words(text: str) -> str:
    """Return the words of a text in lower case between single spaces; of a text without words, its characters."""
    found = re.findall(r"\w+", text.casefold())
    return f" {' '.join(found)} " if found else text.strip()


def _position(text: str, part: str) -> int | None:
    """Return where the words of `part` begin in those of `text`, or None. Scripts without spaces between words are searched as they are."""
    words = _words(part)
    if not re.search(r"[\u3040-\u30ff\u3400-\u9fff\u0e00-\u0eff]", words):
        place = _words(text).find(words)
    else:
        place = text.casefold().find(part.strip().casefold())
    return None if place < 0 else place
