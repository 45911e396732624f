"""Chat templates of the field, reductions of what they do, and records of many situations: what `template_loss` tries. The data is in chat_templates.yml."""

import importlib.util
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Row = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """What the templates of one family write around an answer: regular expressions.

    `header` comes before an answer and is not trained. `end` closes the answer and is trained. `not_said` is text inside an answer
    that the model does not write. `optional` may be trained or not: the template or the generation prompt writes it for the model.
    `chained`: a header that follows directly on an answer is written by the model. `no_end`: nothing ends an answer; `end` is the
    marker of the next role. `after`: text behind the end that may be trained or not. `never`: what no rendering may hold. `own` is the family's own way to write reasoning into the content.
    """

    header: str
    end: str
    eos: str
    bos: str | None = None
    not_said: str = ""
    optional: str = r"\s+|<think>|</think>"
    chained: bool = False
    no_end: bool = False
    after: str = r"\s*"
    never: str = ""
    own: tuple[str, str] = ("<think>\n", "\n</think>\n\n")


@dataclass(frozen=True)
class Template:
    """A chat template under test. `tokens`: more special tokens than its text names."""

    name: str
    text: str
    family: Family


_DATA = yaml.safe_load(Path(__file__).with_suffix(".yml").read_text(encoding="utf-8"))
_FAMILIES = {
    name: Family(**{key: tuple(value) if key == "own" else value for key, value in fields.items()})
    for name, fields in _DATA["families"].items()
}
# Reductions of what templates in the field do; none is the text of one.
REDUCTIONS = [Template(name, one["text"], _FAMILIES[one["family"]]) for name, one in _DATA["reductions"].items()]


def trl_templates() -> list[Template]:
    """Return the chat templates that come with the package trl; none without it."""
    found = importlib.util.find_spec("trl")
    if not found or not found.origin:
        return []
    folder = Path(found.origin).parent / "chat_templates"
    return [
        Template(path.stem, path.read_text(encoding="utf-8"), _family(path.stem))
        for path in sorted(folder.glob("*.jinja"))
    ]


def _family(name: str) -> Family:
    return _FAMILIES[next(family for prefix, family in _DATA["prefixes"].items() if name.startswith(prefix))]


def situations(family: Family = _FAMILIES["chatml"]) -> dict[str, Row]:
    """Return the records to try, by name: with the family's own marks around reasoning."""
    return {name: _with_marks(row, family.own) for name, row in _DATA["situations"].items()}


def _with_marks(value: Any, own: tuple[str, str]) -> Any:
    """Return a copy of a value in which OPEN and CLOSE are the marks of a family."""
    if isinstance(value, str):
        return value.replace("OPEN", own[0]).replace("CLOSE", own[1])
    if isinstance(value, list):
        return [_with_marks(one, own) for one in value]
    return {key: _with_marks(one, own) for key, one in value.items()} if isinstance(value, dict) else value


def _user(text: str) -> Row:
    return {"role": "user", "content": text}


def _said(text: str | None, **more: Any) -> Row:
    return {"role": "assistant", "content": text, **more}


def _call(arguments: Any, number: int) -> Row:
    return {"id": f"id{number}abcdefg", "type": "function", "function": {"name": "call1name", "arguments": arguments}}


def _result(text: str, call: Row) -> Row:
    return {"role": "tool", "name": "call1name", "tool_call_id": call["id"], "content": text}


class RandomChats:
    """Makes records of random chats: systems, calls in any form, results, reasoning, and texts with spaces and other scripts."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._count = 0

    def _word(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{chr(97 + self._count % 26)}{self._count % 10}word"

    def _text(self, kind: str) -> str:
        word = self._word(kind)
        forms = [
            f" {word}",
            f"{word}\n",
            f"é {word} 猫🚂",
            f"{word}\n\n{self._word(kind)}",
            f"{{{{ {word} }}}}",
            f'"{word}"',
        ]
        return self._draw.choice([word, *forms])

    def _value(self) -> Any:
        word = self._word("v")
        return self._draw.choice([word, word, {"key": word}, [word, self._word("v")], 3, True, None, ""])

    def _calls(self, first: int) -> list[Row]:
        calls = []
        for number in range(first, first + self._draw.choice((1, 1, 2))):
            arguments = {
                f"arg{self._draw.choice('abcdef')}1name": self._value() for _ in range(self._draw.randrange(4))
            }
            calls.append(_call(json.dumps(arguments) if self._draw.random() < 0.3 else arguments, number))
        return calls

    def _steps(self, count: int) -> list[Row]:
        """Return calls with their results."""
        messages: list[Row] = []
        for _ in range(count):
            calls = self._calls(len(messages))
            reasoning = {"reasoning_content": self._text("r")} if self._draw.random() < 0.3 else {}
            messages.append(_said(self._draw.choice(["", "", None, self._text("a")]), tool_calls=calls, **reasoning))
            messages += [_result(self._text("t"), call) for call in calls]
        return messages

    def __call__(self) -> Row:
        with_tools = self._draw.random() < 0.5
        messages = [{"role": "system", "content": self._text("s")}] if self._draw.random() < 0.3 else []
        for _ in range(self._draw.randint(1, 4)):
            messages.append(_user(self._text("u")))
            messages += self._steps(self._draw.choice((0, 1, 1, 2)) if with_tools else 0)
            said = self._text("a")
            forms = [_said(said)] * 5 + [_said(""), _said(f"<think>\n{self._word('r')}\n</think>\n\n{said}")]
            messages.append(self._draw.choice([*forms, _said(said, reasoning_content=self._text("r"))]))
        messages += [_user(self._text("u"))] if self._draw.random() < 0.1 else []
        return {"messages": messages, **({"tools": _DATA["situations"]["tools"]["tools"]} if with_tools else {})}
