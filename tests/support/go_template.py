"""Evaluate the subset of Go's text/template that `trainyard.deploy.chat_template` emits.

A template of the subset consists of actions only; there is no text between them. The actions are string literals,
`$.System`, `$message.Content`, assignments of true, false or a role, `if`, `else if`, `else`, `range` over the messages, and
`end`. Conditions use `and`, `not`, `eq`, `len` and `slice`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainyard.deploy.chat_template import RANGE

_ACTION = re.compile(r"\{\{ ((?:(?!\}\}).)*) \}\}", re.DOTALL)
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[()]|[^\s()"]+')
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})")


def _text_of(literal: str) -> str:
    text = _ESCAPE.sub(r"\\u00\1", literal)
    text = re.sub(r"\\U([0-9a-f]{8})", lambda match: chr(int(match[1], 16)), text)
    return str(json.loads(text, strict=False))


def collate(messages: Sequence[Mapping[str, str]]) -> tuple[str, list[dict[str, str]]]:
    """Return the system text and the messages as Ollama passes them: neighbours of equal role become one message."""
    merged: list[dict[str, str]] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"]:
            merged[-1]["content"] += "\n\n" + message["content"]
        else:
            merged.append(dict(message))
    return "\n\n".join(message["content"] for message in messages if message["role"] == "system"), merged


def render(template: str, messages: Sequence[Mapping[str, str]]) -> str:
    """Return what Ollama sends to the model for a conversation. Raises ValueError: the template is outside the subset."""
    actions = _ACTION.findall(template)
    if "".join(f"{{{{ {action} }}}}" for action in actions) != template:
        raise ValueError("there is text between the actions")
    system, merged = collate(messages)
    out: list[str] = []
    state = {"$.System": system, "$.Messages": merged}
    nodes, rest = _parse(actions, 0)
    if rest != len(actions):
        raise ValueError("there is an end without a beginning")
    _run(nodes, state, out)
    return "".join(out)


def _parse(actions: Sequence[str], at: int) -> tuple[list[Any], int]:
    """Return the nodes from `at` to the action that ends the block, and the place of that action."""
    nodes: list[Any] = []
    while at < len(actions):
        action = actions[at]
        if action == "end" or action.startswith("else"):
            return nodes, at
        if action.startswith("if "):
            branches, at = _branches(actions, at)
            nodes.append(("if", branches))
        elif action == RANGE:
            body, at = _parse(actions, at + 1)
            nodes.append(("range", body))
        else:
            nodes.append(("action", action))
        at += 1
    return nodes, at


def _branches(actions: Sequence[str], at: int) -> tuple[list[tuple[str, list[Any]]], int]:
    """Return (condition, nodes) of each branch of the `if` at `at`, and the place of its end."""
    branches = []
    while actions[at] != "end":
        condition = actions[at].removeprefix("else").strip().removeprefix("if").strip()
        body, at = _parse(actions, at + 1)
        branches.append((condition, body))
        if at >= len(actions):
            raise ValueError("an if has no end")
    return branches, at


def _run(nodes: Sequence[Any], state: dict[str, Any], out: list[str]) -> None:
    for kind, value in nodes:
        if kind == "range":
            for index, message in enumerate(state["$.Messages"]):
                names = {"$index": index, "$message.Role": message["role"], "$message.Content": message["content"]}
                state.update(names)
                _run(value, state, out)
        elif kind == "if":
            chosen = (body for condition, body in value if not condition or _evaluate(condition, state))
            _run(next(chosen, []), state, out)
        elif match := re.fullmatch(r"(\$\w+) :?= (\S+)", value):
            state[match[1]] = _evaluate(match[2], state)
        else:
            out.append(str(_evaluate(value, state)))


def _evaluate(expression: str, state: Mapping[str, Any]) -> Any:
    words = iter(_WORD.findall(expression))
    values = list(_values(words, state))
    return _call(values) if len(values) > 1 else values[0]


def _values(words: Iterator[str], state: Mapping[str, Any]) -> Iterator[Any]:
    for word in words:
        if word == ")":
            return
        if word == "(":
            yield _call(list(_values(words, state)))
        elif word.startswith('"'):
            yield _text_of(word)
        elif word in ("true", "false"):
            yield word == "true"
        elif word.isdecimal():
            yield int(word)
        elif word in _FUNCTIONS:
            yield _FUNCTIONS[word]
        elif word in state:
            yield state[word]
        else:
            raise ValueError(f"{word} is not part of the subset")


def _call(values: list[Any]) -> Any:
    return values[0](*values[1:]) if callable(values[0]) else values[0]


_FUNCTIONS: dict[str, Any] = {
    "and": lambda *values: all(values),
    "not": lambda value: not value,
    "eq": lambda one, other: one == other,
    "len": len,
    "slice": lambda items, start: items[start:],
}
