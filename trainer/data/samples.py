"""Read datasets: JSONL records in Alpaca, chat, prompt/completion or plain text form. Needs no torch and no tokenizer."""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config import EMBEDDED_DATASET, RunSpec
from trainer.errors import UserError, first_line
from trainer.formats import printable, quoted
from trainer.inputs import open_regular, path_kind

SHAPES = "messages; instruction and output (input if any); prompt and completion; text"
ROLES = ("system", "user", "assistant", "tool")
MAX_LINE = 64 * 1024 * 1024  # bytes of one record
_MAX_KEYS = 10  # keys of a record in an error message
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Sample:
    """One sample: either a chat (`messages`), or pieces of raw text with a flag whether they carry loss (`pieces`)."""

    messages: tuple[Mapping[str, str], ...] = ()
    pieces: tuple[tuple[str, bool], ...] = ()


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is {type(value).__name__}, expected a string")
    return _valid_unicode(value, f"{name!r}")


def _valid_unicode(text: str, what: str) -> str:
    """Return `text`. Raises ValueError for a lone surrogate (``\\ud83d``): JSON can express it, tokenizers reject it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} has a lone surrogate at character {error.start}: it is not valid Unicode") from None
    return text


def _messages(value: Any, name: str) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name!r} must be a non-empty list of messages with role and content")
    messages = []
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(f"message {index} of {name!r} must have role and content, both strings")
        if message.get("role") not in ROLES:
            role, known = message.get("role"), ", ".join(ROLES)
            raise ValueError(f"message {index} of {name!r} has role {quoted(role)}, expected one of {known}")
        content = _valid_unicode(message["content"], f"message {index} of {name!r}")
        messages.append({"role": message["role"], "content": content})
    return tuple(messages)


def to_sample(row: Any) -> Sample:
    """Convert one record of any of the four supported forms to a `Sample`.

    Raises:
        ValueError: the record has none of these forms; the message is one line.
    """
    if not isinstance(row, dict):
        raise ValueError(f"is a {type(row).__name__}, expected an object with {SHAPES}")
    if "messages" in row:
        return Sample(messages=_messages(row["messages"], "messages"))
    if "instruction" in row and "output" in row:
        prompt = _text(row, "instruction")
        if row.get("input"):
            prompt = f"{prompt}\n\n{_text(row, 'input')}"
        return Sample(
            messages=({"role": "user", "content": prompt}, {"role": "assistant", "content": _text(row, "output")})
        )
    if "prompt" in row and "completion" in row:
        if isinstance(row["prompt"], list):
            return Sample(messages=_messages(row["prompt"], "prompt") + _messages(row["completion"], "completion"))
        return Sample(pieces=((_text(row, "prompt"), False), (_text(row, "completion"), True)))
    if "text" in row:
        return Sample(pieces=((_text(row, "text"), True),))
    keys = ", ".join(printable(key, 40) for key in itertools.islice(row, _MAX_KEYS))
    rest = f" and {len(row) - _MAX_KEYS} more" if len(row) > _MAX_KEYS else ""
    raise ValueError(f"has the keys {keys or '(none)'}{rest}; expected {SHAPES}")


def _reason(error: ValueError) -> str:
    return "not UTF-8 text" if isinstance(error, UnicodeError) else getattr(error, "msg", str(error))


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (line number, record) of a JSONL file, or (item number, record) of a list in a .json file."""
    if path.suffix == ".json":
        try:
            with open_regular(path) as file:
                items = json.loads(file.read())
        except ValueError as error:
            raise UserError(f"{path}:{getattr(error, 'lineno', 1)}: not JSON: {_reason(error)}") from None
        except RecursionError:
            raise UserError(f"{path}:1: not JSON: nested too deeply") from None
        if not isinstance(items, list):
            raise UserError(
                f"{path}: contains a {type(items).__name__}, expected a list of samples (or use .jsonl, one sample per line)"
            )
        yield from enumerate(items, 1)
        return
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
            if len(line) > MAX_LINE:
                raise UserError(
                    f"{path}:{number}: longer than {MAX_LINE // 1024 // 1024} MiB: expected one sample per line"
                )
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}:{number}: not JSON: {_reason(error)}") from None
            except RecursionError:
                raise UserError(f"{path}:{number}: not JSON: nested too deeply") from None


def read_samples(path: Path) -> list[Sample]:
    """Read a dataset file and check every line.

    Raises:
        UserError: the file is missing, unreadable or empty, or a line is invalid (``file:line: reason`` for the first).
    """
    samples = []
    try:
        for number, record in _records(path):
            try:
                samples.append(to_sample(record))
            except ValueError as error:
                raise UserError(f"{path}:{number}: {error}") from None
    except FileNotFoundError:
        raise UserError(
            f"dataset: no such file: {path}: set a JSONL file, '{EMBEDDED_DATASET}', or a hub id (org/name)"
        ) from None
    except OSError as error:
        raise UserError(f"dataset: cannot read {path}: {error.strerror}") from None
    if not samples:
        raise UserError(f"dataset: {path} is empty: expected one JSON object per line, with {SHAPES}")
    return samples


def is_hub_id(name: str) -> bool:
    """Return whether `name` can only be a dataset or model on the hub: org/name, and not an existing path."""
    return bool(HUB_ID.fullmatch(name)) and not path_kind(Path(name)) and not name.endswith((".jsonl", ".json"))


def read_hub(name: str, split: str) -> list[Sample]:
    """Read a dataset of the hub; needs the extra `hub`. The library itself honours HF_HUB_OFFLINE.

    Raises:
        UserError: the extra is not installed, the dataset is unavailable, or a record has no supported form.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"dataset: {name} is a hub id, but the package 'datasets' is not installed: pip install 'trainyard[hub]'"
        ) from None
    try:
        rows: Iterable[Any] = datasets.load_dataset(name, split=split)
    except Exception as error:
        raise UserError(
            f"dataset: cannot load {name} ({split}) from the hub or its cache: {first_line(error)}"
        ) from None
    samples = []
    for number, row in enumerate(rows):
        try:
            samples.append(to_sample({key: value for key, value in row.items() if value is not None}))
        except ValueError as error:
            raise UserError(f"dataset: {name} record {number}: {error}") from None
    if not samples:
        raise UserError(f"dataset: {name} ({split}) is empty")
    return samples


def read_dataset(spec: RunSpec) -> list[Sample]:
    """Read the samples of the dataset in the spec: a file or a dataset of the hub.

    Raises:
        UserError: the dataset is unavailable, empty or has an invalid record.
    """
    if spec.dataset == EMBEDDED_DATASET:
        raise UserError(
            f"dataset: only ansible-playbook train.yml can generate {EMBEDDED_DATASET}: set dataset to a JSONL file"
        )
    if is_hub_id(spec.dataset_name):
        return read_hub(spec.dataset_name, spec.dataset_split)
    return read_samples(Path(spec.dataset_name))
