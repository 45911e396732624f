"""The shapes of a record: messages, ShareGPT conversations, instruction and output, prompt and completion, text."""

import contextlib
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from trainer.config.dataset_source import MESSAGE_KEYS, SHAPES
from trainer.formats import printable, quoted

if TYPE_CHECKING:
    from trainer.data.logprobs import Logprobs  # imports numpy, which the controller does not need

SHAPE_NAMES = (
    "messages; conversations; instruction and output (input if any); prompt and completion; text"  # in error messages
)
ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES = ("human", "gpt", "system", "tool", "function_call", "observation")
# Names of roles in datasets; `function_call` is an answer that calls a tool.
_ROLE_OF = {role: role for role in ROLES} | {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bard", "bing", "model", "function_call"), "assistant"),
    "developer": "system",
    **dict.fromkeys(("observation", "function", "function_response", "tool_response", "ipython"), "tool"),
}
# Names of columns that mean what a name of a shape means, for the suggestion in an error message.
_SYNONYMS = {
    "messages": ("conversation", "dialog", "dialogue", "chat", "turns", "chosen"),
    "instruction": (),
    "output": ("response", "answer", "completion", "target"),
    "input": ("context", "passage"),
    "prompt": ("question", "query", "problem", "instruction", "input", "source", "user", "human", "request", "q"),
    "completion": (
        *("answer", "response", "output", "solution", "reply", "target", "assistant", "chosen", "label", "gpt", "a"),
        *("answers", "summary"),
    ),
    "text": ("content", "body", "document", "article", "story", "code", "sentence", "raw"),
    "role": ("speaker", "author", "sender", "from"),
    "content": ("value", "text", "message", "utterance", "body"),
}
_MAX_KEYS = 10  # keys of a record in an error message
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.-]{1,40}")  # a key that a suggestion can name without quotes
NO_COLUMNS: Mapping[str, str] = {}


class UnknownShapeError(ValueError):
    """A record has none of the shapes. `what`: one line without the suggestion, which is for a dataset whose records all have these keys."""

    def __init__(self, what: str, suggestion: str) -> None:
        super().__init__(what + suggestion)
        self.what = what


@dataclass(frozen=True)
class Sample:
    """One sample: either a chat (`messages`), or pieces of raw text with a flag whether they carry loss (`pieces`).

    Every message has `role` and `content`; an answer may have `tool_calls`, and the result of a tool `name` and
    `tool_call_id`. `tools` are the descriptions of the tools of a chat. `logprobs` are those of a teacher for the last answer.
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    pieces: tuple[tuple[str, bool], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    logprobs: "Logprobs | None" = None


def to_sample(row: Any, columns: Mapping[str, str] = NO_COLUMNS) -> Sample:
    """Convert one record of any of the supported shapes to a `Sample`.

    Args:
        row: the record.
        columns: names of a shape, and the names that the record and its messages use instead.

    Raises:
        ValueError: the record has none of these shapes; the message is one line.
    """
    if not isinstance(row, dict):
        wrapped = ': write {"messages": [...]}' if isinstance(row, list) and row and isinstance(row[0], dict) else ""
        raise ValueError(f"is a {type(row).__name__}, expected an object with {SHAPE_NAMES}{wrapped}")
    record, shape = _shape_of(row, columns)
    name = shape[0]
    if name in ("messages", "conversations"):
        return _chat_sample(record, _messages(record[name], name, columns))
    if name == "instruction":
        prompt = _text(record, "instruction")
        if record.get("input"):
            prompt = f"{prompt}\n\n{_text(record, 'input')}"
        answer = _text(record, "output")
        return _chat_sample(record, ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer}))
    if name == "prompt":
        if isinstance(record["prompt"], list):
            messages = _messages(record["prompt"], "prompt", columns)
            return _chat_sample(record, messages + _messages(record["completion"], "completion", columns))
        return Sample(pieces=((_text(record, "prompt"), False), (_text(record, "completion"), True)))
    return Sample(pieces=((_text(record, "text"), True),))


def _shape_of(row: Mapping[str, Any], columns: Mapping[str, str]) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the record with the names of a shape, and the required names of the shape. Raises ValueError."""
    if not columns:  # the most frequent case, fast
        for required, _ in SHAPES:
            for name in required:
                if row.get(name) is None:
                    break
            else:
                return row, required
    mapped = {name: column for name, column in columns.items() if name not in MESSAGE_KEYS}
    for name, column in mapped.items():
        if column not in row:
            raise ValueError(f"has no column {quoted(column)} (columns maps {name} to it); {_keys(row)}")
    record = {**row, **{name: row[column] for name, column in mapped.items()}}
    shapes = [required for required, optional in SHAPES if set(mapped) <= {*required, *optional}]
    # Formats of columns hold null for a name that a record does not have.
    for is_there in (lambda name: record.get(name) is not None, lambda name: name in record):
        for required in shapes:
            if all(map(is_there, required)):
                return record, required
    if mapped:
        missing = [name for name in shapes[0] if name not in record]
        raise ValueError(f"{_keys(row)}; columns must also map {' and '.join(missing)}")
    raise UnknownShapeError(f"{_keys(row)}; expected {SHAPE_NAMES}", _suggestion(row))


def _keys(row: Mapping[Any, Any]) -> str:
    keys = ", ".join(printable(key, 40) for key in itertools.islice(row, _MAX_KEYS))
    rest = f" and {len(row) - _MAX_KEYS} more" if len(row) > _MAX_KEYS else ""
    return f"has the keys {keys or '(none)'}{rest}"


def _suggestion(row: Mapping[Any, Any]) -> str:
    """Return the shape that is nearest to the names of the record, with the columns to set; empty for no names."""
    nearest, best = "", dict.fromkeys(row, "")
    for required, optional in SHAPES:
        found = {name: key for name in required if (key := _nearest_key(name, row))}
        if len({*found.values()}) < len(required):
            continue
        more = {name: key for name in optional if (key := _nearest_key(name, row)) and key not in found.values()}
        mapping = {name: key for name, key in (found | more).items() if name != key}
        if not nearest or len(mapping) < len(best):
            nearest, best = " and ".join(required), mapping
    if not nearest:
        for required, _ in SHAPES:
            missing = [name for name in required if name not in row]
            if missing and len(missing) < len(required):
                return f"; it lacks {' and '.join(missing)}"
    if not nearest and len(row) == 1 and (keys := _plain_keys(row)):
        nearest, best = "text", {"text": keys[0]}
    if nearest:
        return f"; nearest: {nearest}: use columns={','.join(f'{name}={key}' for name, key in best.items())}"
    return ": map them, as in columns=prompt=question,completion=answer" if row else ""


def _plain_keys(row: Mapping[Any, Any]) -> list[str]:
    return [key for key in itertools.islice(row, 100) if isinstance(key, str) and _PLAIN_KEY.fullmatch(key)]


def _nearest_key(name: str, row: Mapping[Any, Any]) -> str | None:
    """Return the key of a record or a message that means `name`, or None."""
    is_list = name in ("messages", "conversations", "tools")
    plain = {}
    for key in _plain_keys(row):
        value = row[key]
        if isinstance(value, list | dict) or (isinstance(value, str) and value.startswith("[")):
            fits = is_list or name in ("prompt", "completion", "content")
        else:
            fits = not is_list
        if fits:
            plain[key.lower()] = key
    for wanted in (name, *_SYNONYMS.get(name, ())):
        if wanted in plain:
            return plain[wanted]
    near = get_close_matches(name, plain, n=1, cutoff=0.8)
    return plain[near[0]] if near else None


def _chat_sample(record: Mapping[str, Any], messages: tuple[dict[str, Any], ...]) -> Sample:
    """Return the sample of a chat, with the columns `system` and `tools` of its record."""
    if record.get("system") and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": _text(record, "system")}, *messages)
    tools = _from_json(record.get("tools"), "'tools'")
    if tools is None:
        return Sample(messages=messages)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("'tools' must be a list of objects")
    _check_values(tools, "'tools'")
    return Sample(messages=messages, tools=tuple(tools))


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record[name]
    if not isinstance(value, str):
        hint = ": this record has no value there" if value is None else ""
        raise ValueError(f"{name!r} is {type(value).__name__}, expected a string{hint}")
    return _valid_unicode(value, f"{name!r}")


def _valid_unicode(text: str, what: str) -> str:
    """Return `text`. Raises ValueError for a lone surrogate (``\\ud83d``): JSON can express it, tokenizers reject it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} has a lone surrogate at character {error.start}: it is not valid Unicode") from None
    return text


def _check_values(value: Any, what: str) -> None:
    """Check that a nested value can be printed as JSON and has no lone surrogate. Raises ValueError."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not JSON: {printable(error)}") from None
    _valid_unicode(text, what)


def _from_json(value: Any, what: str) -> Any:
    """Return the value that a text spells as JSON: formats of columns often hold lists as text. Raises ValueError."""
    if not isinstance(value, str) or not value.strip().startswith(("[", "{")):
        return value or None if isinstance(value, str) and not value.strip() else value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"{what} is text that is not JSON: write it with double quotes, as json.dumps does") from None


def _messages(value: Any, name: str, columns: Mapping[str, str]) -> tuple[dict[str, Any], ...]:
    value = _from_json(value, f"{name!r}")
    if isinstance(value, dict) and value and all(isinstance(entries, list) for entries in value.values()):
        # A list of objects as an object of lists, as older versions of `datasets` return it.
        value = [dict(zip(value, entries, strict=False)) for entries in zip(*value.values(), strict=False)]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name!r} must be a non-empty list of messages with role and content")
    return tuple(_message(message, f"message {index} of {name!r}", columns) for index, message in enumerate(value))


def _message(message: Any, where: str, columns: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{where} must have role and content, but is a {type(message).__name__}")
    role_key, content_key = _message_keys(message, where, columns)
    role = message[role_key]
    if not isinstance(role, str) or role not in _ROLE_OF:
        known = ", ".join(SHAREGPT_ROLES if role_key == "from" else ROLES)
        raise ValueError(f"{where} has {printable(role_key, 40)} {quoted(role)}, expected one of {known}")
    content, calls = message.get(content_key), message.get("tool_calls")
    converted: dict[str, Any] = {"role": _ROLE_OF[role], "content": _content(content, where, optional=bool(calls))}
    if role == "function_call" and (call := _called_function(converted["content"])):
        converted |= {"content": "", "tool_calls": _tool_calls(call, where)}
    elif calls:
        converted["tool_calls"] = _tool_calls(_from_json(calls, f"'tool_calls' of {where}"), where)
    if converted["role"] == "tool":
        for key in ("name", "tool_call_id"):
            if isinstance(message.get(key), str):
                converted[key] = _valid_unicode(message[key], where)
    return converted


def _message_keys(message: Mapping[Any, Any], where: str, columns: Mapping[str, str]) -> tuple[str, str]:
    """Return the names that a message uses for role and content. Raises ValueError."""
    keys = {}
    for name, other in (("role", "from"), ("content", "value")):
        candidates = [columns[name]] if name in columns else [name, other]
        # Null stands for a name that the message does not have.
        keys[name] = next((key for key in candidates if message.get(key) is not None), None)
    if keys["role"] is None or (keys["content"] is None and not message.get("tool_calls")):
        near = {name: keys[name] or _nearest_key(name, message) for name in MESSAGE_KEYS}
        use = ",".join(
            f"{name}={key}" for name, key in near.items() if key not in (name, {"role": "from"}.get(name, "value"))
        )
        suggestion = f": use columns={use}" if use and all(near.values()) else ""
        raise ValueError(f"{where} must have role and content; it {_keys(message)}{suggestion}")
    return keys["role"], keys["content"] or "content"


def _content(value: Any, where: str, *, optional: bool) -> str:
    """Return the text of a message; that of a list of parts is the text of all parts. Raises ValueError."""
    if value is None and optional:
        return ""
    if isinstance(value, str):
        return _valid_unicode(value, where)
    if not isinstance(value, list):
        raise ValueError(
            f"{where} must have role and content; its content is {type(value).__name__}, expected a string"
        )
    texts = []
    for part in value:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        text = part.get("text") if isinstance(part, dict) else part
        if kind != "text":
            raise ValueError(
                f"{where} has a part of type {quoted(kind, 40)}: only text can be trained, remove the sample"
            )
        if not isinstance(text, str):
            raise ValueError(f"{where} has a part without text: expected {{'type': 'text', 'text': '...'}}")
        texts.append(_valid_unicode(text, where))
    return "".join(texts)


def _called_function(content: str) -> list[Any] | None:
    """Return the calls that the text of a ``function_call`` of ShareGPT spells, or None."""
    try:
        calls = json.loads(content)
    except (ValueError, RecursionError):
        return None
    calls = calls if isinstance(calls, list) else [calls]
    return calls if calls and all(isinstance(call, dict) and "name" in call for call in calls) else None


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls in the form that chat templates expect: arguments as an object. Raises ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"'tool_calls' of {where} must be a list")
    calls = []
    for call in value:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"'tool_calls' of {where} must be a list of objects with function: name and arguments")
        arguments = function.get("arguments")
        with contextlib.suppress(ValueError, RecursionError):  # text that is not JSON: templates print it as it is
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        function = {"name": function["name"], "arguments": {} if arguments is None else arguments}
        calls.append({**known, "type": "function", "function": function})
    _check_values(calls, f"'tool_calls' of {where}")
    return calls
