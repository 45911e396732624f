"""Questions with their right answers, and the verdict on an answer. Every model's answers are judged here, in the same way."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import printable, quoted
from trainer.common.inputs import path_kind, user_path
from trainer.common.number_text import number, plain
from trainer.config import OBSERVATORY
from trainer.data.limited_process import LimitedProcess, LimitError, answer_messages, limit_answer, limit_process
from trainer.data.samples import read_records, source_of
from trainyard.run.prepare.spec_files import DATASETS

EMBEDDED = {OBSERVATORY: "observatory-questions.jsonl", "general": "general-questions.jsonl"}
MAX_QUESTIONS = 10_000
MAX_TEXT = 20_000  # characters of an answer that are judged
SEARCH_MEMORY, SEARCH_LIMIT = 1 << 30, 2  # bytes, and seconds of processor time, to search an answer for a pattern
_KEYS = {"prompt", "messages", "answer", "choices", "regex"}
_ROLES = ("system", "user", "assistant")
_SHAPE = 'expected {"prompt": "...", "answer": "..."}, with choices or regex if any, or {"messages": [...]} whose last one is the answer'


@dataclass(frozen=True)
class Question:
    """A question with what a right answer is."""

    file: str  # name of the file that has it
    messages: tuple[Mapping[str, str], ...]  # the chat up to the question
    answer: str = ""  # the right answer, or the reference; empty if there is only a pattern
    choices: tuple[str, ...] = ()  # the answers to choose from, of which `answer` is one; empty for any
    pattern: re.Pattern[str] | None = None  # what a right answer matches; None to look for `answer`

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
        contained: it contains the words of the right answer, and does not deny them. A number is one word, with sign and decimals.
    """

    right: bool
    exact: bool | None = None  # it is the right answer and no more. Case, punctuation and spaces do not count.
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


class Searcher:
    """Searches answers in a process of its own: some patterns would search some texts for years. Such a text has no match."""

    def __init__(self) -> None:
        self._process: LimitedProcess | None = None

    def __call__(self, pattern: re.Pattern[str], text: str) -> bool:
        if self._process is None:
            self._process = LimitedProcess(__name__, SEARCH_MEMORY, SEARCH_LIMIT)
            try:
                self._process.ask(("", ""))  # one that cannot start must not pass for texts without a match
            except LimitError as error:
                raise UserError(f"regex: the process that searches answers does not start: {error}") from None
        try:
            return bool(self._process.ask((pattern.pattern, text))[1])
        except LimitError:
            self.close()
            return False

    def close(self) -> None:
        if self._process:
            self._process.close()
        self._process = None


def search_messages() -> int:
    """Answer the messages of a Searcher on standard input."""
    seconds = limit_process()

    def answer(request: tuple[str, str]) -> tuple[str, bool]:
        limit_answer(seconds)
        return "", bool(re.search(*request))

    return answer_messages(sys.stdin.buffer, sys.stdout.buffer, answer)


def judge(question: Question, text: str, search: Callable[[re.Pattern[str], str], bool]) -> Verdict:
    """Return the verdict on an answer. `search`: a Searcher."""
    text = text[:MAX_TEXT]
    exact = contained = None
    negated = bool(_NEGATION.search(plain(question.text).casefold()))
    said = plain(text).casefold()
    words = _words(said)
    if question.answer:
        wanted = [word for word, _, _ in _words(plain(question.answer).casefold())]
        exact = [word for word, _, _ in words] == wanted if wanted else text.strip() == question.answer
        contained = _position(said, words, question.answer, negated) is not None
    if question.pattern:
        return Verdict(search(question.pattern, text), exact, contained)
    if question.choices:
        places = {each: _position(said, words, each, negated) for each in question.choices}
        named = [(place, -len(each), each) for each, place in places.items() if place is not None]
        # The longest of those at one place.
        return Verdict(bool(named) and min(named)[2] == question.answer, exact, contained)
    return Verdict(bool(contained), exact, contained)


_SCRIPTS = r"\u3040-\u30ff\u3400-\u9fff\u0e00-\u0eff"  # they have no spaces between words
_LETTER = rf"(?:(?![{_SCRIPTS}])\w)"
# A number with its sign and currency; a number with letters, or a unit after a number, as one word; letters; signs that are units.
_WORD = re.compile(
    r"(?P<sign>(?<![\w)])(?:[-+]|(?:minus|negative) +))?(?P<money>[$€£¥] ?)?(?<![a-z_\d])"
    rf"(?P<number>(?>\d+(?:(?:[.,:/^'_]| (?=\d{{3}}(?!\d)))\d+)*|(?<![\w.])\.\d+)(?:e[-+]?\d+)?)(?!{_LETTER})"
    rf"|\d(?:[.,:/^']?{_LETTER})*|(?<=\d ){_LETTER}+(?:[/^]{_LETTER}+)+|[{_SCRIPTS}]+|{_LETTER}+|[%‰°$€£¥]"
)
_ONLY = r"(?! +(?:only|just|merely|until|least)\b)"
_NEGATION = re.compile(
    rf"(?:\b(?:not|never|cannot|neither|nor|nicht|keine?[mnrs]?|pas|jamais|niet|geen|ikke|inte)|n't)\b{_ONLY}"
    r"|\b(?:no|non)\b(?: +\w+)? *$|(?:不是|并非|並非|没有|沒有) *$"
)
_DENIAL = re.compile(
    rf" +(?:is|was|are|were)(?: +not|n't)\b{_ONLY}| +(?:is|was) +(?:wrong|incorrect|false)\b|(?:では|じゃ)(?:ない|あり)"
)
_CLAUSE = re.compile(r"[.,](?!\d)|[;:!?()\n—。、，]|\b(?:but|rather|sondern|mais|sino)\b")


def _words(text: str) -> list[tuple[str, int, int]]:
    """Return the words of a text in lower case, with the characters [start, end) of each; equal numbers are equal words."""
    found = []
    for each in _WORD.finditer(text):
        word = each[0]
        if digits := each["number"]:
            sign = "-" if (each["sign"] or "+")[0] in "-mn" else ""
            value = number(sign + digits)
            if value is None and digits.count(",") > 1:  # a list: no decimal has two commas
                found += [
                    (word, each.start() + start, each.start() + end)
                    for word, start, end in _words(word.replace(",", ";"))
                ]
                continue
            word = sign + digits if value is None else str(value)
            found += [(each["money"].strip(), *each.span())] if each["money"] else []
        found.append((word, *each.span()))
    return found


def _position(text: str, words: list[tuple[str, int, int]], part: str, negated: bool) -> int | None:
    """Return where `text`, with its `words`, has those of `part` and does not deny them, unless the question is `negated`; or None."""
    part = plain(part).casefold().strip()
    wanted = [word for word, _, _ in _words(part)]
    places: Iterable[tuple[int, int]]
    if not wanted or re.search(f"[{_SCRIPTS}]", part):
        edges = [r"(?<![\d.,-])" if part[:1].isdecimal() else "", r"(?![.,]?\d)" if part[-1:].isdecimal() else ""]
        places = (each.span() for each in re.finditer(re.escape(part).join(edges), text))
    else:
        starts = (i for i in range(len(words)) if [word for word, _, _ in words[i : i + len(wanted)]] == wanted)
        places = ((words[i][1], words[i + len(wanted) - 1][2]) for i in starts)
    for start, end in places:
        clause = _CLAUSE.split(text[:start])[-1]
        if negated or not (_NEGATION.search(clause) or _DENIAL.match(text, end)):
            return start
    return None


if __name__ == "__main__":
    sys.exit(search_messages())
