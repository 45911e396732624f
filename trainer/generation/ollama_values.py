"""Values in a reply of a server, which may have any type. Standard library only, for hosts."""

from collections.abc import Mapping
from typing import Any


def text_of(item: Mapping[str, Any], name: str) -> str:
    """Return a text of a reply without lone surrogates, which no file accepts; empty if it has none."""
    value = item.get(name)
    return value.encode(errors="replace").decode() if isinstance(value, str) else ""


def seconds_of(item: Mapping[str, Any], name: str) -> float:
    """Return a duration of a reply, which is in nanoseconds."""
    value = item.get(name)
    return value / 1e9 if isinstance(value, int) and 0 <= value < 1 << 60 else 0.0


def count_of(item: Any, name: str) -> int:
    """Return a number of tokens in a part of a reply; 0 if it has none."""
    value = item.get(name) if isinstance(item, dict) else 0
    return value if isinstance(value, int) and 0 <= value < 1 << 40 else 0
