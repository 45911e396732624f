"""Read the replies of hosts. A host may be compromised: its replies are bounded, plain data of the declared types.

A reply is accepted only if it matches the type of its verb in `reply_types`. A string in an accepted reply has no control
characters but tab and line feed, so that it can be shown on a terminal; numbers are finite.
"""

from __future__ import annotations

import functools
import json
import math
import re
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trainer.common.formats import printable
from trainyard.wire.reply_types import REPLY_TYPES

REPLY_LIMIT = 8 << 20  # bytes of one reply
DEPTH_LIMIT = 24  # nested lists and objects
_HARMLESS = re.compile(r"[\n\t -~]*")


class ReplyError(ValueError):
    """A host sent something else than the reply of the verb; the message is one line."""


def last_object(output: bytes) -> dict[str, Any] | None:
    """Return the last line of a program's output that begins with ``{``, as plain data; None if there is none.

    Raises ReplyError: the line is too long, is not JSON, or is nested too deeply.
    """
    start = output.rfind(b"\n{") + 1
    if not output.startswith(b"{", start):
        return None
    line = output[start:].partition(b"\n")[0]
    if len(line) > REPLY_LIMIT:
        raise ReplyError(f"sent a reply of more than {REPLY_LIMIT >> 20} MiB")
    value = untrusted_json(line.decode(errors="replace"))
    return value if isinstance(value, dict) else None


def untrusted_json(text: str) -> Any:
    """Return the value of a JSON text from a host; what JSON does not allow, such as NaN, becomes None.

    Raises ReplyError: the text is not JSON, or is nested too deeply.
    """
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=lambda _: None)
        return _plain(value, DEPTH_LIMIT)
    except (ValueError, RecursionError):
        raise ReplyError(f"sent a reply that cannot be read: {printable(text, 60)}") from None


def checked_reply(verb: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a verb with the types that `reply_types` declares. Raises ReplyError."""
    if verb not in REPLY_TYPES:
        return answer
    try:
        reply: dict[str, Any] = _adapter(verb).validate_python(answer)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = printable(".".join(map(str, first["loc"])) or verb, 80)
        raise ReplyError(f"sent an invalid reply to {verb}: {place}: {printable(first['msg'], 80)}") from None
    return reply


@functools.cache
def _adapter(verb: str) -> TypeAdapter[Any]:
    return TypeAdapter(REPLY_TYPES[verb])


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return value if _HARMLESS.fullmatch(value) else clean_text(value)
    if isinstance(value, (list, dict)):
        if not depth:
            raise ReplyError("nested too deeply")
        if isinstance(value, list):
            return [_plain(item, depth - 1) for item in value]
        return {_plain(name, depth - 1): _plain(item, depth - 1) for name, item in value.items()}
    return value


def clean_text(text: str) -> str:
    """Return text of several lines with all control characters but tab and line feed as escapes."""
    return "\n".join(
        "\t".join(printable(part, 10 * len(part)) for part in line.split("\t")) for line in text.split("\n")
    )
