"""Derive Ollama's TEMPLATE from the chat template of a Hugging Face model.

The Hugging Face template renders conversations whose contents are markers. The markers cut each result into the texts
before each message and after the last one. A text may depend on the role, on whether the message belongs to the first or
the last turn, and on whether there is a system message. The smallest set of these conditions that explains all texts
becomes a Go template. The answers of the deployed model prove it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import quoted
from trainer.data.hf_template import ChatTemplate, Message, TemplateError
from trainer.data.limited_process import LimitedProcess, LimitError, answer_messages, limit_answer, limit_process
from trainer.data.shapes import with_system_in_first_question
from trainyard import front_end

TURNS = 4  # turns of the longest conversation that a template is derived from
_TIME_LIMIT = 60  # s of processor time to derive a template
_MEMORY_LIMIT = 2 << 30  # bytes
RANGE = "range $index, $message := .Messages"
SYSTEM = "$.System"
_MARKERS = {"system": "zqSyszq", "user": "zqUse{}zq", "assistant": "zqAss{}zq"}
# Conditions of a text, in Go. `last` of an assistant is the answer before the last question.
_CONDITIONS = {
    "first": "$first",
    "system": "$.System",
    "last user": "(eq (len (slice $.Messages $index)) 1)",
    "last assistant": "(eq (len (slice $.Messages $index)) 2)",
}


@dataclass(frozen=True)
class Derived:
    """A derived template."""

    text: str  # the Go template, on one line
    notes: list[str] = field(default_factory=list)  # where the two templates differ on purpose, one line each


@dataclass(frozen=True)
class _Text:
    """The text before a message or at the end: `parts` are literals and `SYSTEM`; `facts` are the conditions there."""

    place: str  # user, assistant or end
    facts: tuple[tuple[str, bool], ...]
    parts: tuple[str, ...]


class _SystemInQuestion(ChatTemplate):
    """The chat template of a run with `system=prepend`."""

    def render(self, messages: Sequence[Message], generation_prompt: bool = True) -> str:
        """Return the text of a conversation whose system message is the beginning of the first question."""
        return super().render(with_system_in_first_question(messages), generation_prompt)


def derive(template: ChatTemplate, added_bos: str = "") -> Derived:
    """Return the Go template that renders conversations as the Hugging Face template does.

    `added_bos`: the text of the token that the server itself puts before each prompt, empty if it adds none. The
    derived template leaves it out. Raises TemplateError: the template rejects conversations, or no Go template of the
    supported form renders the same.
    """
    notes = []
    texts = [text for turns in range(1, TURNS + 1) for text in _cut(template, turns, False)]
    system = _supports_system(template)
    if system:
        texts += [text for turns in range(1, TURNS + 1) for text in _cut(template, turns, True)]
    else:
        notes.append("the chat template has no place for a system message: the deployed model ignores it")
    if added_bos:
        texts = [_without(text, added_bos) for text in texts]
    places = {place: _rules([text for text in texts if text.place == place]) for place in ("user", "assistant", "end")}
    return Derived(_emit(places), notes + _differences(template))


def _refusal(why: str) -> TemplateError:
    return TemplateError(f"chat template: {why}; write a Go template and set {front_end.option('template', 'FILE')}")


def _supports_system(template: ChatTemplate) -> bool:
    try:
        return _MARKERS["system"] in template.render(_marked(1, True))
    except TemplateError:
        return False


def _marked(turns: int, system: bool) -> list[dict[str, str]]:
    """Return a conversation of markers that ends with a question."""
    chat = [{"role": "system", "content": _MARKERS["system"]}] if system else []
    for turn in range(turns):
        chat.append({"role": "user", "content": _MARKERS["user"].format(turn)})
        chat.append({"role": "assistant", "content": _MARKERS["assistant"].format(turn)})
    return chat[:-1]


def _cut(template: ChatTemplate, turns: int, system: bool) -> list[_Text]:
    """Render a conversation of markers and return its texts. Raises TemplateError if they cannot be distinguished."""
    chat = _marked(turns, system)
    rest = template.render(chat)
    texts = []
    spoken = [message for message in chat if message["role"] != "system"]
    for index, message in enumerate(spoken):
        marker, role = message["content"], message["role"]
        if rest.count(marker) != 1:
            raise _refusal(f"it writes the content of the {role} {rest.count(marker)} times or out of order")
        before, rest = rest.split(marker)
        last = index == len(spoken) - (1 if role == "user" else 2)
        facts = (("first", index < 2), ("system", system), (f"last {role}", last))
        texts.append(_Text(role, facts, _parts(before)))
    texts.append(_Text("end", (("first", turns == 1), ("system", system)), _parts(rest)))
    if sum(text.parts.count(SYSTEM) for text in texts) != int(system):
        raise _refusal("it writes the system message several times")
    return texts


def _parts(text: str) -> tuple[str, ...]:
    """Return a text as literals and `SYSTEM`. Raises TemplateError if it holds a part of another marker."""
    if "zqUse" in text or "zqAss" in text:
        raise _refusal("it writes messages out of order")
    pieces: list[str] = []
    for index, literal in enumerate(text.split(_MARKERS["system"])):
        pieces += [SYSTEM] if index else []
        pieces += [literal] if literal else []
    return tuple(pieces)


def _without(text: _Text, bos: str) -> _Text:
    """Return the text before the first question without the token that the server adds. Raises TemplateError."""
    if text.place != "user" or not dict(text.facts)["first"]:
        return text
    if not text.parts or text.parts[0] == SYSTEM or not text.parts[0].startswith(bos):
        raise _refusal(f"it does not begin with {quoted(bos)}, which the server adds to each prompt")
    return _Text(text.place, text.facts, (text.parts[0].removeprefix(bos), *text.parts[1:]))


def _rules(texts: Sequence[_Text]) -> list[tuple[dict[str, bool], tuple[str, ...]]]:
    """Return (conditions, parts) for the smallest set of conditions on which the texts of one place depend.

    Raises TemplateError: no set of conditions explains the texts.
    """
    names = [name for name, _ in texts[0].facts]
    for size in range(len(names) + 1):
        for chosen in itertools.combinations(names, size):
            found: dict[tuple[bool, ...], tuple[str, ...]] = {}
            if all(
                found.setdefault(tuple(dict(text.facts)[name] for name in chosen), text.parts) == text.parts
                for text in texts
            ):
                return [(dict(zip(chosen, values, strict=True)), parts) for values, parts in found.items()]
    where = "after the last message" if texts[0].place == "end" else "before a message"
    raise _refusal(f"its text {where} depends on more than roles, turns and the system message")


def _emit(places: dict[str, list[tuple[dict[str, bool], tuple[str, ...]]]]) -> str:
    """Return the Go template."""
    words = ["$first := true", '$role := ""', RANGE]
    for head, role in (("if", "user"), ("else if", "assistant")):
        words += [f'{head} eq $message.Role "{role}"', *_choose(places[role]), "$message.Content"]
        words += ["$first = false"] if role == "assistant" else []
        words += [f'$role = "{role}"']
    words += ["end", "end", 'if eq $role "user"', *_choose(places["end"]), "end"]
    return "".join(f"{{{{ {word} }}}}" for word in words)


def go_string(text: str) -> str:
    """Return text as a Go string literal without braces and quotes, in printable characters, on one line."""
    parts = []
    for char in text:
        code = ord(char)
        if code < 0x80:
            plain = char.isprintable() and char not in '"\\{}'
            parts.append(char if plain else {"\n": "\\n", "\t": "\\t"}.get(char, f"\\x{code:02x}"))
        else:
            parts.append(char if char.isprintable() else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")
    return '"' + "".join(parts) + '"'


def _choose(rules: Sequence[tuple[dict[str, bool], tuple[str, ...]]]) -> list[str]:
    """Return the actions that write the parts of the first rule whose conditions hold."""
    bodies = [[part if part == SYSTEM else go_string(part) for part in parts] for _, parts in rules]
    if len(rules) == 1:
        return bodies[0]
    words = []
    for index, ((conditions, _), body) in enumerate(zip(rules, bodies, strict=True)):
        terms = [_CONDITIONS[name] if value else f"(not {_CONDITIONS[name]})" for name, value in conditions.items()]
        test = terms[0].removeprefix("(").removesuffix(")") if len(terms) == 1 else f"and {' '.join(terms)}"
        words += [f"{'else if' if index else 'if'} {test}", *body]
    return [*words, "end"]


def _differences(template: ChatTemplate) -> list[str]:
    """Return a note for each kind of content that the chat template changes, and Ollama keeps."""

    def changes(*contents: str) -> bool:
        roles = ("user", "assistant", "user")
        chat: list[Message] = [
            {"role": role, "content": text} for role, text in zip(roles, (*contents, "x"), strict=True)
        ]
        try:
            text = template.render(chat)
        except TemplateError:
            return True
        return not all(content in text for content in contents)

    notes = []
    if changes(" \n a \n ", " \n b \n "):
        notes.append("the chat template removes spaces around a message; Ollama keeps them")
    if changes("a", "<think>\nb\n</think>\n\nc"):
        notes.append(
            "the chat template removes the thoughts of earlier answers; Ollama keeps those that a client sends back"
        )
    return notes


def derive_apart(
    source: str, tokens: Mapping[str, str], today: datetime.datetime, added_bos: str, prepend: bool = False
) -> Derived:
    """Derive a template in a process of its own with limits, because the template is a program of the model.

    `source, tokens, today`: of ChatTemplate. `added_bos`: the argument of `derive`. `prepend`: the system message is
    the beginning of the first question, as in a run with `system=prepend`. Raises TemplateError: see `derive`, or the
    template takes too much time or memory.
    """
    about = {"source": source, "tokens": dict(tokens), "today": today.isoformat()}
    with contextlib.closing(LimitedProcess("trainyard.deploy.chat_template", _MEMORY_LIMIT, _TIME_LIMIT)) as process:
        try:
            error, reply = process.ask(about | {"added_bos": added_bos, "prepend": prepend})
        except LimitError:
            raise _refusal("it takes too much time or memory") from None
    if error:
        raise TemplateError(error)
    return Derived(**reply)


def _answer(request: dict[str, Any]) -> tuple[str, Any]:
    try:
        kind = _SystemInQuestion if request["prepend"] else ChatTemplate
        template = kind(request["source"], request["tokens"], datetime.datetime.fromisoformat(request["today"]))
        return "", dataclasses.asdict(derive(template, request["added_bos"]))
    except UserError as error:
        return str(error), None


if __name__ == "__main__":
    limit_answer(limit_process())
    sys.exit(answer_messages(sys.stdin.buffer, sys.stdout.buffer, _answer))
