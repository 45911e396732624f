"""The output of a command: readable lines, or one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from trainer.common.formats import printable

_ESCAPES = 200  # characters by which the escapes of control characters may lengthen a line


class Output:
    """Prints lines while a command runs, and its result at the end."""

    def __init__(self, as_json: bool = False) -> None:
        """With `as_json`, stdout receives the result as one JSON object, and stderr receives the lines."""
        self.as_json = as_json

    def report(self, line: str) -> None:
        """Print a line. It may quote what a host sent, so control characters are escaped."""
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
        _print_errors([f"error: {message}", *map(str, found.get("lines", []))])
        if self.as_json:
            print(json.dumps({"error": str(message), **found}, default=str), flush=True)


def _print_errors(lines: Iterable[str]) -> None:
    for line in lines:
        print(_shown(line), file=sys.stderr)
    sys.stderr.flush()


def _shown(line: str) -> str:
    plain = line.expandtabs()
    return printable(plain, len(plain) + _ESCAPES)
