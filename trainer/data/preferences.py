"""The shapes of a record of preferences: pairs of a chosen and a rejected answer, and answers with a label.

The formats of TRL (preference with an explicit or implicit prompt, unpaired preference; plain or conversational), and the pairs of
LLaMA-Factory (conversations or instruction, with chosen and rejected). https://huggingface.co/docs/trl/dataset_formats
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainer.common.formats import quoted
from trainer.config.dataset_source import LABEL_NAMES, MESSAGE_KEYS, PAIR, PREFERENCES
from trainer.config.methods import METHODS, Data
from trainer.data.prompt_records import to_prompt
from trainer.data.record_keys import PAIR_KEYS, check_keys
from trainer.data.shapes import (
    NO_COLUMNS,
    Sample,
    UnknownShapeError,
    are_messages,
    chat_sample,
    instruction_messages,
    keys_of,
    messages_of,
    muted,
    refuse_chat_keys,
    renamed,
    text_of,
    to_sample,
)

Messages = tuple[dict[str, Any], ...]
Reader = Callable[[Any, Mapping[str, str], Collection[str]], Sample]
PAIR_NAMES = "chosen and rejected, alone or beside prompt, messages, conversations or instruction"
_NAMES = {name for required, optional in PREFERENCES if PAIR[0] in required for name in (*required, *optional)} | {
    *MESSAGE_KEYS
}
_PROMPTS = ("messages", "conversations")  # keys of a prompt as a list of messages
_TRUE, _FALSE = ("true", "1", "1.0", "yes"), ("false", "0", "0.0", "no")


def to_record(data: Data, row: Any, columns: Mapping[str, str] = NO_COLUMNS, ignored: Collection[str] = ()) -> Sample:
    """Convert one record to a sample of what a method learns from.

    `data`: of the method, see `METHODS`. `row`, `columns`, `ignored`: as for `to_sample`. Raises ValueError: as
    `to_sample`.
    """
    return _READERS[data](row, columns, ignored)


def to_pair(row: Any, columns: Mapping[str, str] = NO_COLUMNS, ignored: Collection[str] = ()) -> Sample:
    """Convert a record with two answers to one prompt to a sample whose `rejected` is that of the rejected answer.

    Only the answers carry loss. Without a prompt beside the answers, it is what both have in common at their beginning.
    Raises ValueError: as `to_sample`; or the answers have no prompt in common, or are equal.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"is a {type(row).__name__}, expected an object with {PAIR_NAMES}")
    known = {*columns.values(), *ignored}
    check_keys(row, PAIR_KEYS, known)
    if unused := sorted(set(columns) - _NAMES):
        raise ValueError(f"is a pair for this run, and columns maps {' and '.join(unused)}, which a pair does not have")
    record = renamed(row, columns)
    if lost := [name for name in PAIR if record.get(name) is None]:
        hint = "" if len(lost) == 1 else f"; set method={_method_for('answers')} to learn answers alone"
        what = f"{keys_of(row)}; method={_method_for('pairs')} needs {PAIR_NAMES}"
        raise UnknownShapeError(what, f"; it lacks {' and '.join(lost)}{hint}")
    prompt = _prompt(record, columns, ignored)
    if isinstance(prompt, str) and all(
        isinstance(record[name], str) and not are_messages(record[name]) for name in PAIR
    ):
        refuse_chat_keys(record, ignored)
        return _text_pair(record, prompt if record.get("prompt") is not None and "prompt" not in ignored else None)
    answers = {name: _answer(record, name, columns, ignored) for name in PAIR}
    shared = _common(*answers.values())
    if isinstance(prompt, str):
        prompt = _from_text(prompt, answers["chosen"][:shared], record)
    elif all(answer[: len(prompt)] == prompt for answer in answers.values()):
        shared = len(prompt)  # the answers repeat the prompt
    else:
        shared = 0
    prompt = prompt or answers["chosen"][:shared]
    if not prompt:
        raise ValueError("'chosen' and 'rejected' have no message in common, which would be the prompt: give a prompt")
    chosen, rejected = (chat_sample(record, (*muted(prompt), *answer[shared:]), known) for answer in answers.values())
    if chosen == rejected:
        raise ValueError("'chosen' and 'rejected' are equal: remove the record")
    return replace(chosen, rejected=rejected)


def _prompt(record: Mapping[str, Any], columns: Mapping[str, str], ignored: Collection[str]) -> Messages | str:
    """Return the prompt beside the answers: messages, or text; empty if there is none."""
    keys = (*_PROMPTS, "instruction", "prompt")
    names = [name for name in keys if record.get(name) is not None and name not in ignored]
    if len(names) > 1:
        raise ValueError(f"has {' and '.join(names)}: a pair has one prompt, set keep_going={names[-1]}")
    if not names:
        return ""
    if names[0] == "instruction":
        return instruction_messages(record)
    if names[0] in _PROMPTS or are_messages(record["prompt"]):
        return messages_of(record[names[0]], names[0], columns, ignored)
    return text_of(record, "prompt")


def _answer(record: Mapping[str, Any], name: str, columns: Mapping[str, str], ignored: Collection[str]) -> Messages:
    """Return the messages of an answer: a list of them, one, or its text."""
    value = record[name]
    if isinstance(value, Mapping):
        return messages_of([value], name, columns, ignored)
    if are_messages(value):
        return messages_of(value, name, columns, ignored)
    return ({"role": "assistant", "content": text_of(record, name)},)


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many parts two answers have in common at their beginning, without the last part of either."""
    pairs = zip(one[:-1], other[:-1], strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _from_text(prompt: str, shared: Messages, record: Mapping[str, Any]) -> Messages:
    """Return the messages of a prompt that is text beside chats: those that the chats share if one of them has this text."""
    if not prompt or any(part["role"] == "user" and part["content"].strip() == prompt.strip() for part in shared):
        return shared
    if shared:
        raise ValueError(
            f"'prompt' {quoted(record['prompt'], 40)} is none of the messages with which 'chosen' and 'rejected' begin: "
            "correct it, or set keep_going=prompt"
        )
    return ({"role": "user", "content": prompt},)


def _text_pair(record: Mapping[str, Any], prompt: str | None) -> Sample:
    """Return a pair of texts. Without a prompt, it is what both texts begin with, up to a space, as TRL takes it."""
    chosen, rejected = (text_of(record, name) for name in PAIR)
    if chosen == rejected:
        raise ValueError("'chosen' and 'rejected' are equal: remove the record")
    if prompt is None:
        shared = _common(chosen, rejected)
        if not shared:
            raise ValueError(
                "'chosen' and 'rejected' have no beginning in common, which would be the prompt: give a prompt"
            )
        shared -= chosen[shared - 1] == " "
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    one, other = (Sample(pieces=((prompt, False), (answer, True))) for answer in (chosen, rejected))
    return replace(one, rejected=other)


def to_labelled(row: Any, columns: Mapping[str, str] = NO_COLUMNS, ignored: Collection[str] = ()) -> Sample:
    """Convert a record with an answer and its label to a sample. Only the last answer of a chat carries loss.

    Raises ValueError: as `to_sample`; or the record has no label, or no prompt.
    """
    key = columns.get("label") or next(
        (name for name in LABEL_NAMES if isinstance(row, Mapping) and name in row), "label"
    )
    others = {name: column for name, column in columns.items() if name != "label"}
    sample = to_sample(row, others, {*ignored, key})
    label = _label(row.get(key), key)
    if not sample.messages and len(sample.pieces) < 2:
        raise ValueError(f"has a text without a prompt, and method={_method_for('labels')} needs prompt and completion")
    answers = [index for index, message in enumerate(sample.messages) if message["role"] == "assistant"]
    return replace(sample, silent=sample.silent | frozenset(answers[:-1]), desirable=label)


def _label(value: Any, key: str) -> bool:
    word = str(value).strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ValueError(
        f"has {key} {quoted(value)}: method={_method_for('labels')} needs true for a good answer, and false for a bad one"
        if value is not None
        else f"has no {key}: method={_method_for('labels')} needs true for a good answer, and false for a bad one; set "
        f"method={_method_for('answers')} to learn all answers"
    )


def _method_for(data: Data) -> str:
    return " or ".join(name for name, entry in METHODS.items() if entry.data == data)


_READERS: Mapping[Data, Reader] = {"answers": to_sample, "pairs": to_pair, "labels": to_labelled, "prompts": to_prompt}
