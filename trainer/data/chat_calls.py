"""The calls of a chat: the forms in which templates expect them, and whether a template writes all of them."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trainer.common.formats import quoted
from trainer.data.chat_marks import Piece, Reading
from trainer.data.hf_template import TemplateError


def forms_of_calls(messages: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Yield the forms in which a template can expect a chat with calls; the chat as it is first.

    Templates test by different values whether an answer with calls has no content (empty text here, null there), and print the
    arguments of a call as text, or as JSON of an object.
    """
    tried: list[Sequence[Mapping[str, Any]]] = []
    for arguments in (None, _as_object, _as_text):
        for is_null in (False, True):
            form = [_form(message, arguments, is_null) for message in messages]
            if form not in tried:
                tried.append(form)
                yield form


def _form(message: Mapping[str, Any], arguments: Callable[[Any], Any] | None, is_null: bool) -> Mapping[str, Any]:
    """Return a message with calls in a form. `arguments` changes those of calls; `is_null`: null stands for no content."""
    if not message.get("tool_calls"):
        return message
    changed = dict(message)
    if is_null and not message.get("content"):
        changed["content"] = None
    if arguments:
        changed["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": arguments(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return changed


def _as_object(arguments: Any) -> Any:
    """Return the arguments of a call as an object, or a text that is no JSON as it is."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def check_text_of_arguments(piece: Piece, reading: Reading) -> None:
    """Check that a template writes the text of arguments as it is, not as a JSON string. Raises TemplateError."""
    if piece.what != "arguments" or not piece.text.startswith(("{", "[")):
        return
    first, last = reading.places[piece.open], reading.places.get(piece.close, -1)
    around = reading.text[first - 1 : first] + reading.text[last : last + 3].lstrip("\\")[:1]
    if reading.text[first:last] != piece.text or around in ('""', "{}"):
        raise TemplateError("chat template: it writes the arguments of a call, which are text, in quotes or braces")


def check_values(message: Mapping[str, Any], text: str) -> None:
    """Check that a template writes all arguments of calls. Raises TemplateError."""
    bare = text.replace("\\", "")  # quotes are escaped in several ways
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        if isinstance(arguments, dict):
            for value in _leaves(arguments):
                if not any(spelled.replace("\\", "") in bare for spelled in _spellings(value)):
                    what = quoted(value, 40) if isinstance(value, str) else json.dumps(value)
                    raise TemplateError(f"chat template: it leaves out or changes {what} in the arguments of a call")


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value


def _spellings(value: Any) -> Iterator[str]:
    """Yield what templates write for a name or a value: text, JSON, or Python."""
    yield str(value).strip()
    for spelled in (json.dumps(value, ensure_ascii=False), json.dumps(value), repr(value)):
        yield spelled[1:-1] if isinstance(value, str) else spelled


def check_json(message: Mapping[str, Any], text: str) -> None:
    """Check that a template does not write the arguments of calls as Python does. Raises TemplateError."""
    for call in message.get("tool_calls") or ():
        for value in _containers(call["function"]["arguments"]):
            if repr(value) in text and repr(value) != json.dumps(value, ensure_ascii=False):
                raise TemplateError("chat template: it writes the arguments of a call as Python does, not as JSON")


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list) and value:
        yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from _containers(each)
