"""The output of a command: readable lines, or one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from trainer.common.formats import printable

_ESCAPES = 200  # characters by which the escapes of control characters may lengthen a line


class Output:
    """Prints lines while a command runs, and its result at the end."""

    def __init__(self, as_json: bool = False, receive: Callable[[str], None] | None = None) -> None:
        """With `as_json`, stdout receives the result as one JSON object, and `receive`, or else stderr, the lines."""
        self.as_json, self.receive = as_json, receive

    def report(self, line: str) -> None:
        """Hand on a line. It may quote what a host sent, so control characters are escaped when it is printed."""
        if self.receive:
            self.receive(line)
        else:
            print(_shown(line), file=sys.stderr if self.as_json else sys.stdout, flush=True)

    def result(self, result: Mapping[str, Any]) -> None:
        """Print the result of a command: its `lines` or its `msg`, or all of it as JSON."""
        if self.as_json:
            print(json.dumps(result, default=str), flush=True)
            return
        for line in result.get("lines", [result["msg"]] if "msg" in result else []):
            self.report(str(line))

    def error(self, message: object, details: Mapping[str, Any] | None = None) -> None:
        """Print an error as one line on stderr, and the `lines` of its details after it; as JSON also on stdout."""
        found = details or {}
        for line in [f"error: {message}", *map(str, found.get("lines", []))]:
            print(_shown(line), file=sys.stderr)
        sys.stderr.flush()
        if self.as_json:
            print(json.dumps({"error": str(message), **found}, default=str), flush=True)


def _shown(line: str) -> str:
    plain = line.expandtabs()
    return printable(plain, len(plain) + _ESCAPES)
