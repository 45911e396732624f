"""The built-in rewards, with the signature of TRL's reward functions. Standard library only."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from trainer.config.json_schema import matches

Completion = str | list[Mapping[str, Any]]
Function = Callable[..., list[float | None]]

ANSWER = "answer"  # the column of exact, if no other is given
# TRL's think_format_reward has this pattern.
_FORMAT = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_FENCE = re.compile(r"^```(?:json)?\s*\n(.*?)\n?```$", re.DOTALL)


def text_of(completion: Completion) -> str:
    """Return the text of a completion, which is a text or a list of messages."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)


def answer_of(text: str) -> str:
    """Return the answer in a completion: what is in the last <answer> element, or what follows the reasoning, or all of it."""
    tagged = _TAGGED.findall(text)
    return (tagged[-1] if tagged else text.rpartition("</think>")[2]).strip()


def _number(text: str) -> Decimal | None:
    try:
        found = Decimal(text.replace(",", "")) if len(text) <= 100 else None
    except InvalidOperation:
        return None
    return found if found is not None and found.is_finite() else None


def _is_answer(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    number = _number(found)
    return number is not None and number == _number(wanted)


def exact(column: str) -> Function:
    """Return the reward that is 1 for the answer in a column of the dataset, as text or as a number; None without an answer."""

    def reward(completions: Sequence[Completion], **columns: list[Any]) -> list[float | None]:
        wanted = columns[column]
        return [
            None if right is None else float(_is_answer(answer_of(text_of(each)), str(right).strip()))
            for each, right in zip(completions, wanted, strict=True)
        ]

    return reward


def regex(pattern: str) -> Function:
    """Return the reward that is 1 if a pattern occurs in the completion."""
    compiled = re.compile(pattern)

    def reward(completions: Sequence[Completion], **_: Any) -> list[float | None]:
        return [float(bool(compiled.search(text_of(each)))) for each in completions]

    return reward


def length(limit: int) -> Function:
    """Return the reward that is 1 up to `limit` characters, and falls to 0 at twice as many."""

    def reward(completions: Sequence[Completion], **_: Any) -> list[float | None]:
        return [min(1.0, max(0.0, 2 - len(text_of(each)) / limit)) for each in completions]

    return reward


def think_format(completions: Sequence[Completion], **_: Any) -> list[float | None]:
    """Return 1 for a completion that begins with reasoning in one <think> element."""
    return [float(bool(_FORMAT.match(text_of(each)))) for each in completions]


def json_reward(schema: Mapping[str, Any]) -> Function:
    """Return the reward that is 1 if the completion is JSON, also in a code block, that matches a schema."""

    def reward(completions: Sequence[Completion], **_: Any) -> list[float | None]:
        return [float(_is_json(text_of(each).strip(), schema)) for each in completions]

    return reward


def _is_json(text: str, schema: Mapping[str, Any]) -> bool:
    fenced = _FENCE.match(text)
    try:
        return matches(json.loads(fenced[1] if fenced else text), schema)
    except (ValueError, RecursionError):
        return False


def built_in(entry: Mapping[str, Any]) -> Function:
    """Return the built-in reward of an entry; the names are those of RewardSource."""
    made: dict[str, Callable[[], Function]] = {
        "exact": lambda: exact(entry["column"] or ANSWER),
        "regex": lambda: regex(entry["pattern"]),
        "length": lambda: length(entry["limit"]),
        "format": lambda: think_format,
        "json": lambda: json_reward(entry["json_schema"]),
    }
    return made[entry["use"]]()
