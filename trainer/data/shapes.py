"""The shapes of a record: messages, ShareGPT conversations, instruction and output, prompt and completion, text."""

import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from trainer.common.formats import printable, quoted
from trainer.config.dataset_source import MESSAGE_KEYS, SHAPES
from trainer.data.chat_marks import REASONING_KEYS
from trainer.data.hf_template import BLOCK_MARKS
from trainer.data.record_keys import LABEL, LOSS_KEYS, MESSAGE_KEYS_REFUSED, RECORD_KEYS, check_keys, has_loss

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
    "messages": ("conversation", "dialog", "dialogue", "chat", "turns"),
    "instruction": (),
    "output": ("response", "answer", "completion", "target"),
    "input": ("context", "passage"),
    "prompt": ("question", "query", "problem", "instruction", "input", "source", "user", "human", "request", "q"),
    "completion": (
        *("answer", "response", "output", "solution", "reply", "target", "assistant", "label", "gpt", "a"),
        *("answers", "summary"),
    ),
    "text": ("content", "body", "document", "article", "story", "code", "sentence", "raw"),
    "role": ("speaker", "author", "sender", "from"),
    "content": ("value", "text", "message", "utterance", "body"),
}
SILENT = "\0silent"  # key of a message that carries no loss, until its sample is made; its value says why
WEIGHT = "weight"
SYSTEM_KEYS = ("system", "system_prompt", "system_message")  # of a record
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "chat_template"}
_MAX_KEYS = 10  # keys of a record in an error message
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.-]{1,40}")  # a key that a suggestion can name without quotes
# A list of messages as text, also as Python prints it.
_MESSAGES = re.compile(
    r"""\s*\[\s*\{\s*(?=["'](role|from|content|value)["']\s*:)(?=.*["'](role|from)["']\s*:).*["'](content|value)["']\s*:""",
    re.DOTALL,
)
NO_COLUMNS: Mapping[str, str] = {}


class UnknownShapeError(ValueError):
    """A record has none of the shapes. `what`: one line without the suggestion, which is for a dataset whose records all have these keys."""

    def __init__(self, what: str, suggestion: str) -> None:
        super().__init__(what + suggestion)
        self.what = what


@dataclass(frozen=True)
class Sample:
    """One sample: either a chat (`messages`), or pieces of raw text with a flag whether they carry loss (`pieces`).

    Every message has `role` and `content`; an answer may have `reasoning_content` and `tool_calls`, and the result of a tool
    `name` and `tool_call_id`. `tools` are the descriptions of the tools of a chat, `variables` those of its chat template.
    `silent` are the indices of the answers without loss; `has_weights`: their own keys say so. Of a pair, this is the chosen
    answer with its prompt, and `rejected` the other one; `desirable` is the label of an answer. `record` is that of a prompt
    without an answer, see `to_prompt`. `where` is the record's place, such as ``file:line``.
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    pieces: tuple[tuple[str, bool], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    silent: frozenset[int] = frozenset()
    has_weights: bool = False
    rejected: "Sample | None" = None
    desirable: bool | None = None
    record: Mapping[str, Any] | None = None
    where: str = field(default="", compare=False)

    def at(self, where: str) -> "Sample":
        """Return the sample with its place."""
        return replace(self, where=where, rejected=self.rejected and replace(self.rejected, where=where))


def with_system_in_first_question(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return a chat whose system message, if it begins with one and a question follows, is the beginning of the question."""
    if [message["role"] for message in messages[:2]] != ["system", "user"]:
        return messages
    system, question = messages[:2]
    joined = "\n\n".join(filter(None, (system["content"], question["content"])))
    return [{**question, "content": joined}, *messages[2:]]


def to_sample(row: Any, columns: Mapping[str, str] = NO_COLUMNS, ignored: Collection[str] = ()) -> Sample:
    """Convert one record of any of the supported shapes to a `Sample`.

    `row`: the record. `columns`: names of a shape, and the names that the record and its messages use instead.
    `ignored`: keys of records and messages that the user ignores. Raises ValueError: the record has none of these
    shapes, or a key whose meaning a run would ignore; the message is one line.
    """
    if not isinstance(row, dict):
        wrapped = ': write {"messages": [...]}' if isinstance(row, list) and row and isinstance(row[0], dict) else ""
        raise ValueError(f"is a {type(row).__name__}, expected an object with {SHAPE_NAMES}{wrapped}")
    known = {*columns.values(), *ignored}
    check_keys(row, RECORD_KEYS, known)
    record, shape = _shape_of(row, columns)
    name = shape[0]
    if name != "text" or isinstance(row.get(LABEL[0]), bool):
        check_keys(row, dict([LABEL]), known)
    if name != "instruction" and record.get("history") and "history" not in known:
        raise ValueError("has 'history', which only instruction and output can have: write its turns as messages")
    if name in ("messages", "conversations"):
        return chat_sample(record, messages_of(record[name], name, columns, ignored), known)
    if name == "instruction":
        return chat_sample(record, instruction_messages(record, "output"), known)
    if name == "prompt":
        if any(are_messages(record[part]) for part in shape):
            prompt = _part(record, "prompt", columns, ignored, "user")
            completion = _part(record, "completion", columns, ignored, "assistant")
            return chat_sample(record, (*muted(prompt), *completion), known)
        refuse_chat_keys(record, ignored)
        return Sample(pieces=((text_of(record, "prompt"), False), (text_of(record, "completion"), True)))
    refuse_chat_keys(record, ignored)
    return Sample(pieces=((text_of(record, "text"), True),))


def muted(prompt: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of the messages of a prompt that carry no loss, whoever speaks in it."""
    return [message | ({SILENT: "prompt"} if message["role"] == "assistant" else {}) for message in prompt]


def instruction_messages(record: Mapping[str, Any], output: str = "") -> tuple[dict[str, Any], ...]:
    """Return the messages of instruction, input and output, after the turns of `history`: pairs of question and answer.

    `output`: name of the answer; empty for the question alone.
    """
    prompt = text_of(record, "instruction")
    if record.get("input"):
        prompt = f"{prompt}\n\n{text_of(record, 'input')}"
    history = _from_json(record.get("history"), "'history'") or []
    turns = [*history, (prompt, text_of(record, output) if output else "")] if isinstance(history, list) else [history]
    messages: list[dict[str, Any]] = []
    for turn in turns:
        pair = list(turn) if isinstance(turn, list | tuple) else []
        if len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ValueError("'history' must be a list of pairs of question and answer")
        texts = [_valid_unicode(text, "'history'") for text in pair]
        messages += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
    return tuple(messages if output else messages[:-1])


def _part(
    record: Mapping[str, Any], name: str, columns: Mapping[str, str], ignored: Collection[str], role: str
) -> tuple[dict[str, Any], ...]:
    """Return the messages of a prompt or a completion; one of them can be text beside the other's messages."""
    if are_messages(record[name]):
        return messages_of(record[name], name, columns, ignored)
    return ({"role": role, "content": text_of(record, name)},)


def are_messages(value: Any) -> bool:
    """Return whether a prompt or a completion is a list of messages; formats of columns often hold a list as text."""
    if isinstance(value, str):
        return bool(_MESSAGES.match(value))
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def refuse_chat_keys(record: Mapping[str, Any], ignored: Collection[str]) -> None:
    """Raise ValueError for a key that only a chat can have, in a record of texts."""
    for name in (*SYSTEM_KEYS, "tools", "functions", "history", "chat_template_kwargs"):
        if record.get(name) and name not in ignored:
            raise ValueError(
                f"has {name!r}, which a chat can have, but not a text: write the record as messages, map its columns to instruction and "
                f"output instead of prompt and completion, or set keep_going={name}"
            )


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
    record = renamed(row, columns)
    shapes = [required for required, optional in SHAPES if set(mapped) <= {*required, *optional}]
    if not shapes:
        raise ValueError(
            f"is an answer alone for this run, and columns maps {' and '.join(mapped)} of preferences: set method"
        )
    # Formats of columns hold null for a name that a record does not have.
    for is_there in (lambda name: record.get(name) is not None, lambda name: name in record):
        for required in shapes:
            if all(map(is_there, required)):
                return record, required
    if mapped:
        missing = [name for name in shapes[0] if name not in record]
        raise ValueError(f"{keys_of(row)}; columns must also map {' and '.join(missing)}")
    raise UnknownShapeError(f"{keys_of(row)}; expected {SHAPE_NAMES}", _suggestion(row))


def renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the record with the names of a shape beside its own. Raises ValueError if it lacks a column."""
    mapped = {name: column for name, column in columns.items() if name not in MESSAGE_KEYS}
    for name, column in mapped.items():
        if column not in row:
            raise ValueError(f"has no column {quoted(column)} (columns maps {name} to it); {keys_of(row)}")
    return {**row, **{name: row[column] for name, column in mapped.items()}}


def keys_of(row: Mapping[Any, Any]) -> str:
    """Return the keys of a record, for a message."""
    keys = ", ".join(printable(key, 40) for key in itertools.islice(row, _MAX_KEYS))
    rest = f" and {len(row) - _MAX_KEYS} more" if len(row) > _MAX_KEYS else ""
    return f"has the keys {keys or '(none)'}{rest}"


def _suggestion(row: Mapping[Any, Any]) -> str:
    """Return the shape that is nearest to the names of the record, with the columns to set; empty for no names."""
    nearest, best = "", dict.fromkeys(row, "")
    for required, optional in SHAPES:
        found = {name: key for name in required if (key := nearest_key(name, row))}
        if len({*found.values()}) < len(required):
            continue
        more = {name: key for name in optional if (key := nearest_key(name, row)) and key not in found.values()}
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
        use = f"columns={','.join(f'{name}={key}' for name, key in best.items())}"
        keys = [best.get(name, name) for name in ("prompt", "completion")]
        if nearest == "prompt and completion" and all(isinstance(row[key], str) for key in keys):
            # Text without the chat template is rarely what a model is asked with later.
            use = f"columns=instruction={keys[0]},output={keys[1]}, or {use} for text without the chat template"
        return f"; nearest: {nearest}: use {use}"
    return ": map them, as in columns=instruction=question,output=answer" if row else ""


def _plain_keys(row: Mapping[Any, Any]) -> list[str]:
    return [key for key in itertools.islice(row, 100) if isinstance(key, str) and _PLAIN_KEY.fullmatch(key)]


def nearest_key(name: str, row: Mapping[Any, Any]) -> str | None:
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


def chat_sample(record: Mapping[str, Any], messages: tuple[dict[str, Any], ...], ignored: Collection[str]) -> Sample:
    """Return the sample of a chat, with what its record says beside the messages."""
    for name in SYSTEM_KEYS:
        if record.get(name) and name not in ignored:
            text = text_of(record, name)
            if messages[0]["role"] != "system":
                messages = ({"role": "system", "content": text}, *messages)
            elif messages[0]["content"] != text:
                raise ValueError(f"has {name!r} {quoted(text, 40)}, and another system message: remove one")
    reasons = {index: reason for index, message in enumerate(messages) if (reason := message.pop(SILENT, ""))}
    silent, has_weights = frozenset(reasons), WEIGHT in reasons.values()
    tools = _from_json(record.get("tools"), "'tools'")
    functions = None if "functions" in ignored else _from_json(record.get("functions"), "'functions'")
    if functions:
        if tools or not isinstance(functions, list):
            raise ValueError("'functions' must be a list of objects, without 'tools' beside it")
        tools = [{"type": "function", "function": function} for function in functions]
    variables = _from_json(record.get("chat_template_kwargs"), "'chat_template_kwargs'") or {}
    if not isinstance(variables, dict) or any(name in _RESERVED for name in variables):
        raise ValueError(f"'chat_template_kwargs' must be an object without {', '.join(sorted(_RESERVED))}")
    if wrong := [each for each in variables.values() if each in ("true", "false", "True", "False")]:
        raise ValueError(f"'chat_template_kwargs' has {quoted(wrong[0])} as text: write it without quotes")
    if variables:
        check_values(variables, "'chat_template_kwargs'")
    if tools is None or "tools" in ignored:
        tools = []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("'tools' must be a list of objects")
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("parameters") or {}, dict):
            raise ValueError(
                "'tools' has a function, or its parameters, that is no object: write it as one, not as text"
            )
    check_values(tools, "'tools'")
    return Sample(messages=messages, tools=tuple(tools), variables=variables, silent=silent, has_weights=has_weights)


def text_of(record: Mapping[str, Any], name: str) -> str:
    """Return the text under `name`. Raises ValueError."""
    value = record[name]
    if not isinstance(value, str):
        hint = ": this record has no value there" if value is None else ""
        raise ValueError(f"{name!r} is {type(value).__name__}, expected a string{hint}")
    if are_messages(value):
        raise ValueError(f"{name!r} is a list of messages as text: map its column to messages")
    return _valid_unicode(value, f"{name!r}")


def _valid_unicode(text: str, what: str) -> str:
    """Return `text`. Raises ValueError for a lone surrogate (``\\ud83d``), which tokenizers reject, and for marks of templates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} has a lone surrogate at character {error.start}: it is not valid Unicode") from None
    for mark in BLOCK_MARKS:
        if mark in text:
            raise ValueError(f"{what} has the code U+{ord(mark):X} at character {text.index(mark)}: it is no character")
    return text


def check_values(value: Any, what: str) -> None:
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


def messages_of(
    value: Any, name: str, columns: Mapping[str, str], ignored: Collection[str]
) -> tuple[dict[str, Any], ...]:
    """Return the messages of a list under `name`. Raises ValueError."""
    value = _from_json(value, f"{name!r}")
    if isinstance(value, dict) and value and all(isinstance(entries, list) for entries in value.values()):
        # A list of objects as an object of lists, as older versions of `datasets` return it.
        value = [dict(zip(value, entries, strict=False)) for entries in zip(*value.values(), strict=False)]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name!r} must be a non-empty list of messages with role and content")
    return tuple(
        _message(message, f"message {index} of {name!r}", columns, ignored) for index, message in enumerate(value)
    )


def _message(message: Any, where: str, columns: Mapping[str, str], ignored: Collection[str]) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{where} must have role and content, but is a {type(message).__name__}")
    role_key, content_key = _message_keys(message, where, columns)
    role = message[role_key]
    if not isinstance(role, str) or role not in _ROLE_OF:
        known = ", ".join(SHAREGPT_ROLES if role_key == "from" else ROLES)
        raise ValueError(f"{where} has {printable(role_key, 40)} {quoted(role)}, expected one of {known}")
    check_keys(message, MESSAGE_KEYS_REFUSED, {role_key, content_key, *ignored}, where)
    calls = _calls(message, where)
    content = _content(message.get(content_key), where, optional=bool(calls))
    converted: dict[str, Any] = {"role": _ROLE_OF[role], "content": content}
    if role == "function_call":
        converted |= {"content": "", "tool_calls": _tool_calls(_called_function(content, where), where)}
    elif calls:
        converted["tool_calls"] = _tool_calls(calls, where)
    if converted["role"] != "assistant":
        if calls or _reasoning(message, where):
            raise ValueError(f"{where} has a call or reasoning, and its role is {role}: only an assistant has them")
    elif reasoning := _reasoning(message, where):
        converted |= dict.fromkeys(REASONING_KEYS, reasoning)
    if converted["role"] != "assistant" and any(message.get(key) is True and key not in ignored for key in LOSS_KEYS):
        raise ValueError(f"{where} is to be trained, and its role is {role}: only what an assistant says is trained")
    if not has_loss(message, where, ignored) and converted["role"] == "assistant":
        converted[SILENT] = WEIGHT
    for key in ("name", "tool_call_id") if converted["role"] == "tool" else ("name",):
        if isinstance(message.get(key), str) and message[key] and key not in {role_key, content_key, *ignored}:
            converted[key] = _valid_unicode(message[key], where)
    return converted


def _calls(message: Mapping[Any, Any], where: str) -> Any:
    """Return the calls of a message in any form; None if there are none. Raises ValueError."""
    calls = _from_json(message.get("tool_calls"), f"'tool_calls' of {where}") or None
    call = _from_json(message.get("function_call"), f"'function_call' of {where}") or None
    if call and calls:
        raise ValueError(f"{where} has both function_call and tool_calls: remove one")
    return [call] if call else calls


def _reasoning(message: Mapping[Any, Any], where: str) -> str:
    """Return the reasoning of a message, under any of its names; empty if there is none. Raises ValueError."""
    found = {name: message[name] for name in ("reasoning_content", "thinking", "reasoning") if message.get(name)}
    if any(not isinstance(text, str) for text in found.values()):
        raise ValueError(f"{where} has {next(iter(found))!r} that is not text")
    if len({*found.values()}) > 1:
        raise ValueError(f"{where} has {' and '.join(found)} that differ: keep one")
    return _valid_unicode(next(iter(found.values())), where) if found else ""


def _message_keys(message: Mapping[Any, Any], where: str, columns: Mapping[str, str]) -> tuple[str, str]:
    """Return the names that a message uses for role and content. Raises ValueError."""
    keys = {}
    for name, other in (("role", "from"), ("content", "value")):
        candidates = [columns[name]] if name in columns else [name, other]
        # Null stands for a name that the message does not have.
        keys[name] = next((key for key in candidates if message.get(key) is not None), None)
    has_more = message.get("tool_calls") or message.get("function_call") or message.get("reasoning_content")
    if keys["role"] is None or (keys["content"] is None and not has_more):
        near = {name: keys[name] or nearest_key(name, message) for name in MESSAGE_KEYS}
        use = ",".join(
            f"{name}={key}" for name, key in near.items() if key not in (name, {"role": "from"}.get(name, "value"))
        )
        suggestion = f": use columns={use}" if use and all(near.values()) else ""
        raise ValueError(f"{where} must have role and content; it {keys_of(message)}{suggestion}")
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


def _called_function(content: str, where: str) -> list[Any]:
    """Return the calls that the text of a ``function_call`` of ShareGPT spells. Raises ValueError."""
    try:
        calls = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError(
            f'{where} is a function_call that is not JSON: write {{"name": ..., "arguments": ...}}'
        ) from None
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise ValueError(f'{where} is a function_call without name: write {{"name": ..., "arguments": ...}}')
    return calls


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls in the form that chat templates expect; arguments stay text or an object. Raises ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"'tool_calls' of {where} must be a list")
    calls = []
    for call in value:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"'tool_calls' of {where} must be a list of objects with function: name and arguments")
        arguments = _arguments(function.get("arguments", function.get("parameters")), where)
        known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        function = {"name": function["name"], "arguments": arguments}
        calls.append({**known, "type": "function", "function": function})
    check_values(calls, f"'tool_calls' of {where}")
    return calls


def _arguments(value: Any, where: str) -> Any:
    """Return the arguments of a call, an object or text that is JSON of one, as they are; no value is no arguments. Raises ValueError."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    try:
        is_object = isinstance(json.loads(value) if isinstance(value, str) else value, dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise ValueError(
            f"'tool_calls' of {where} has arguments that are no JSON object: write them as json.dumps does"
        )
    return value
