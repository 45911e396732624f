"""Samples as people have them: JSONL of Alpaca, chat, prompt/completion or plain text. Needs no torch, no tokenizer."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import UserError

SHAPES = "messages; instruction and output (input if any); prompt and completion; text"
ROLES = ("system", "user", "assistant", "tool")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Sample:
    """One sample: a chat (`messages`), or pieces of raw text, each with whether it carries loss (`pieces`)."""

    messages: tuple[Mapping[str, str], ...] = ()
    pieces: tuple[tuple[str, bool], ...] = ()


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is {type(value).__name__}, takes text")
    return _whole(value, f"{name!r}")


def _whole(text: str, what: str) -> str:
    """Refuse half a surrogate pair (``\\ud83d`` alone): JSON can say it, no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} has half a surrogate pair at character {error.start}: it is not text") from None
    return text


def _messages(value: Any, name: str) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name!r} takes a list of messages with role and content")
    messages = []
    for place, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(f"message {place} of {name!r} takes role and content, both text")
        if message.get("role") not in ROLES:
            raise ValueError(f"message {place} of {name!r} has role {message.get('role')!r}, takes {', '.join(ROLES)}")
        content = _whole(message["content"], f"message {place} of {name!r}")
        messages.append({"role": message["role"], "content": content})
    return tuple(messages)


def to_sample(row: Any) -> Sample:
    """Turn one record of any of the four shapes into a `Sample`.

    Raises:
        ValueError: one line that says what the record lacks.
    """
    if not isinstance(row, dict):
        raise ValueError(f"holds a {type(row).__name__}, takes an object with {SHAPES}")
    if "messages" in row:
        return Sample(messages=_messages(row["messages"], "messages"))
    if "instruction" in row and "output" in row:
        asked = _text(row, "instruction")
        if row.get("input"):
            asked = f"{asked}\n\n{_text(row, 'input')}"
        return Sample(
            messages=({"role": "user", "content": asked}, {"role": "assistant", "content": _text(row, "output")})
        )
    if "prompt" in row and "completion" in row:
        if isinstance(row["prompt"], list):
            return Sample(messages=_messages(row["prompt"], "prompt") + _messages(row["completion"], "completion"))
        return Sample(pieces=((_text(row, "prompt"), False), (_text(row, "completion"), True)))
    if "text" in row:
        return Sample(pieces=((_text(row, "text"), True),))
    raise ValueError(f"has {', '.join(map(str, row)) or 'nothing'}; takes {SHAPES}")


def _why(error: ValueError) -> str:
    return "not UTF-8 text" if isinstance(error, UnicodeError) else getattr(error, "msg", str(error))


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (line number, record) of a JSONL file, or (item number, record) of a .json list."""
    if path.suffix == ".json":
        try:
            items = json.loads(path.read_bytes())
        except ValueError as error:
            raise UserError(f"{path}:{getattr(error, 'lineno', 1)}: not JSON: {_why(error)}") from None
        except RecursionError:
            raise UserError(f"{path}:1: not JSON: nested too deep") from None
        if not isinstance(items, list):
            raise UserError(
                f"{path}: holds a {type(items).__name__}, takes a list of samples (or one a line, as .jsonl)"
            )
        yield from enumerate(items, 1)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}:{number}: not JSON: {_why(error)}") from None
            except RecursionError:
                raise UserError(f"{path}:{number}: not JSON: nested too deep") from None


def read_samples(path: Path) -> list[Sample]:
    """Read a dataset file; every line is checked.

    Raises:
        UserError: ``file:line: what is wrong`` for the first bad line, or a word if there is no file or no sample.
    """
    samples = []
    try:
        for number, record in _records(path):
            try:
                samples.append(to_sample(record))
            except ValueError as error:
                raise UserError(f"{path}:{number}: {error}") from None
    except FileNotFoundError:
        raise UserError(f"dataset: no file {path}: give a JSONL file, 'ansible-docs', or a hub id (org/name)") from None
    except OSError as error:
        raise UserError(f"dataset: cannot read {path}: {error.strerror}") from None
    if not samples:
        raise UserError(f"dataset: {path} is empty: it takes one JSON object a line, with {SHAPES}")
    return samples


def is_hub_id(name: str) -> bool:
    """Tell whether `name` can only mean a dataset or model on the hub: org/name, and no such path here."""
    return bool(HUB_ID.fullmatch(name)) and not Path(name).exists() and not name.endswith((".jsonl", ".json"))


def read_hub(name: str, split: str) -> list[Sample]:
    """Read a hub dataset (extra `hub`); HF_HUB_OFFLINE is honoured by the library itself.

    Raises:
        UserError: the extra is missing, the dataset cannot be had, or a record has none of the known shapes.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"dataset: {name} is a hub id, and 'datasets' is not here: pip install 'trainyard[hub]'"
        ) from None
    try:
        rows: Iterable[Any] = datasets.load_dataset(name, split=split)
    except Exception as error:
        line = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"dataset: cannot have {name} ({split}) from the hub or its cache: {line[0]}") from None
    samples = []
    for number, row in enumerate(rows):
        try:
            samples.append(to_sample({key: value for key, value in row.items() if value is not None}))
        except ValueError as error:
            raise UserError(f"dataset: {name} record {number}: {error}") from None
    if not samples:
        raise UserError(f"dataset: {name} ({split}) is empty")
    return samples
