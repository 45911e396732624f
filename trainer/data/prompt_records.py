"""Records of prompts without answers: the model writes its own, and the other columns are for rewards, as in TRL."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from trainer.common.formats import quoted
from trainer.config.dataset_source import MESSAGE_KEYS
from trainer.data.record_keys import ABOUT_ANSWERS, RECORD_KEYS, check_keys
from trainer.data.shapes import (
    NO_COLUMNS,
    Sample,
    UnknownShapeError,
    are_messages,
    chat_sample,
    check_values,
    keys_of,
    messages_of,
    nearest_key,
    refuse_chat_keys,
    text_of,
)

REWARD_NAMES = ("prompts", "completions", "completion_ids", "trainer_state")  # what rewards get beside the columns


def to_prompt(row: Any, columns: Mapping[str, str] = NO_COLUMNS, ignored: Collection[str] = ()) -> Sample:
    """Convert a record with a prompt; arguments and errors as for `to_sample`.

    Returns:
        The sample of the prompt alone. `record` has `prompt`, a text or a list of messages, and `columns`: the other columns by
        name, without completion.
    """
    if not isinstance(row, dict):
        raise ValueError(f"is a {type(row).__name__}, expected an object with prompt")
    if unused := sorted(set(columns) - {"prompt", *MESSAGE_KEYS}):
        raise ValueError(
            f"is a prompt for this run, and columns maps {' and '.join(unused)}: rewards get columns by their names"
        )
    name = columns.get("prompt", "prompt")
    if row.get(name) is None:
        near = nearest_key("prompt", row)
        hint = f": use columns=prompt={near}" if near else ": name its column, as in columns=prompt=question"
        raise UnknownShapeError(f"{keys_of(row)}; expected prompt", hint)
    others = {str(key): value for key, value in row.items() if key not in (name, "completion")}
    if taken := next((key for key in others if key in REWARD_NAMES), ""):
        raise ValueError(f"has the column {quoted(taken)}, a name that rewards have for something else: rename it")
    check_values(others, "a column")
    check_keys(row, RECORD_KEYS, {*ABOUT_ANSWERS, name, *ignored})
    record = {**row, "prompt": row[name]}
    if not are_messages(record["prompt"]):
        text = text_of(record, "prompt")
        refuse_chat_keys(record, ignored)
        return Sample(pieces=((text, False),), record={"prompt": text, "columns": others})
    messages = messages_of(record["prompt"], "prompt", columns, (*ABOUT_ANSWERS, *ignored))
    sample = chat_sample(record, messages, {*ignored})
    if sample.messages[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with an answer: remove it, the model writes its own")
    plain = [{"role": message["role"], "content": message["content"]} for message in sample.messages]
    return replace(sample, silent=frozenset(), has_weights=False, record={"prompt": plain, "columns": others})
