"""Derive the argument spec of a module from its DOCUMENTATION.

Modules run on hosts that may lack PyYAML, so this reads the subset of YAML that option documentation needs: block
mappings and scalars, plus flow lists of plain scalars for `choices` and `default`. tests/unit/test_argument_spec.py
compares the result with that of PyYAML for every module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

# Keys that AnsibleModule accepts, without descriptions.
KEYS = ("type", "elements", "default", "choices", "required", "aliases")
_ENTRY = re.compile(r" *(\w+): *(.*)")


def argument_spec(documentation: str) -> dict[str, dict[str, Any]]:
    """Return `{option: {"type": ..., "default": ..., "options": {...}}}` of a DOCUMENTATION string."""
    lines = [line for line in documentation.splitlines() if line.strip()]
    for key, _text, body in _entries(lines):
        if key == "options":
            return _options(body)
    return {}


def _options(lines: list[str]) -> dict[str, dict[str, Any]]:
    spec: dict[str, dict[str, Any]] = {}
    for name, _text, body in _entries(lines):
        option: dict[str, Any] = {}
        for key, value, nested in _entries(body):
            if key in KEYS:
                option[key] = _value(value)
            elif key == "suboptions":
                option["options"] = _options(nested)
        spec[name] = option
    return spec


def _entries(lines: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield key, text after the colon and nested lines of every entry of a block mapping."""
    for number, line in enumerate(lines):
        match = _ENTRY.fullmatch(line)
        if match and _indent(line) == _indent(lines[0]):
            nested = takewhile(lambda below: _indent(below) > _indent(lines[0]), lines[number + 1 :])
            yield match[1], match[2], list(nested)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _value(text: str) -> Any:
    """Return a scalar, or a flow list of scalars, as YAML reads it."""
    if text.startswith("["):
        return [_value(item.strip()) for item in text[1:-1].split(",") if item.strip()]
    if text == "{}":
        return {}
    if text[:1] in "\"'" and text:
        return text[1:-1]
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?\d+\.\d+", text) else text
