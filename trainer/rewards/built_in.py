"""The built-in rewards, with the signature of TRL's reward functions. Standard library only."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer.common.number_text import number, plain
from trainer.config.json_schema import matches
from trainer.data.reasoning import CLOSING, OPENING

Completion = str | list[Mapping[str, Any]]
Function = Callable[..., list[float | None]]

ANSWER = "answer"  # the column of exact, if no other is given
_OPENED = re.compile(f"{OPENING.pattern}$")
_END = 100  # characters of a prompt
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_FENCE = re.compile(r"^```(?:json)?\s*\n(.*?)\n?```$", re.DOTALL)


def text_of(completion: Completion) -> str:
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)


def _whole(completions: Sequence[Completion], prompts: Sequence[Any] | None) -> list[str]:
    """Return the texts of completions, with the opening of the reasoning where their prompt ends with it.

    `prompts`: texts as the model gets them. Of others, such as messages, the end is unknown: a completion that only
    closes its reasoning then has the opening in its prompt.
    """
    found = []
    for completion, prompt in zip(completions, prompts or [None] * len(completions), strict=True):
        text = text_of(completion)
        if isinstance(prompt, str):
            opened = _OPENED.search(prompt[-_END:])
            begin = opened[0].strip() if opened else ""
        else:
            closed = CLOSING.search(text)
            begin = closed[0].replace("/", "", 1) if closed and not OPENING.search(text) else ""
        found.append(begin + text)
    return found


def answer_of(text: str) -> str:
    """Return the answer in a completion: what is in the last <answer> element, or what follows the reasoning, or all of it."""
    tagged, closings = _TAGGED.findall(text), list(CLOSING.finditer(text))
    if tagged:
        return str(tagged[-1]).strip()
    if OPENING.match(text) and not closings:
        return ""
    return text[closings[-1].end() if closings else 0 :].strip()


def _is_answer(found: str, wanted: str) -> bool:
    value = number(found)
    return plain(found) == plain(wanted) or (value is not None and value == number(wanted))


def exact(column: str) -> Function:
    """Return the reward that is 1 for the answer in a column of the dataset, as text or as a number; None without an answer."""

    def reward(
        completions: Sequence[Completion], prompts: Sequence[Any] | None = None, **columns: list[Any]
    ) -> list[float | None]:
        return [
            None if right is None else float(_is_answer(answer_of(text), str(right).strip()))
            for text, right in zip(_whole(completions, prompts), columns[column], strict=True)
        ]

    return reward


def regex(pattern: str) -> Function:
    compiled = re.compile(pattern)

    def reward(completions: Sequence[Completion], **_: Any) -> list[float | None]:
        return [float(bool(compiled.search(text_of(each)))) for each in completions]

    return reward


def length(limit: int) -> Function:
    """Return the reward that is 1 up to `limit` characters, and falls to 0 at twice as many."""

    def reward(completions: Sequence[Completion], **_: Any) -> list[float | None]:
        return [min(1.0, max(0.0, 2 - len(text_of(each)) / limit)) for each in completions]

    return reward


def think_format(
    completions: Sequence[Completion], prompts: Sequence[Any] | None = None, **_: Any
) -> list[float | None]:
    """Return 1 for a completion that begins with reasoning in one <think> element, or in one with another mark of reasoning.

    As TRL's think_format_reward, but the opening can be the end of the prompt.
    """
    return [float(_begins_with_reasoning(text)) for text in _whole(completions, prompts)]


def _begins_with_reasoning(text: str) -> bool:
    opening = OPENING.match(text)
    if not opening or text[0].isspace():
        return False
    begin, rest = opening[0].strip(), text[opening.end() :]
    return begin not in rest and f"{begin[0]}/{begin[1:]}" in rest


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
    made: dict[str, Callable[[], Function]] = {
        "exact": lambda: exact(entry["column"] or ANSWER),
        "regex": lambda: regex(entry["pattern"]),
        "length": lambda: length(entry["limit"]),
        "format": lambda: think_format,
        "json": lambda: json_reward(entry["json_schema"]),
    }
    return made[entry["use"]]()
