"""The part of JSON Schema (https://json-schema.org) that a reward checks. A keyword that is not known is refused."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from trainer.common.formats import quoted

_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: (
        not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
    ),
}
# Keywords with one number: how a value is compared with it, and the type to which the keyword applies.
_LIMITS: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "minimum": ("number", lambda value, limit: value >= limit),
    "maximum": ("number", lambda value, limit: value <= limit),
    "exclusiveMinimum": ("number", lambda value, limit: value > limit),
    "exclusiveMaximum": ("number", lambda value, limit: value < limit),
    "minLength": ("string", lambda value, limit: len(value) >= limit),
    "maxLength": ("string", lambda value, limit: len(value) <= limit),
    "minItems": ("array", lambda value, limit: len(value) >= limit),
    "maxItems": ("array", lambda value, limit: len(value) <= limit),
}
_NOTES = ("title", "description", "$schema", "$comment", "default", "examples")
_MAX_DEPTH = 32


def schema_error(schema: object, depth: int = 0) -> str:
    """Return why a schema is not valid or not supported, or an empty string."""
    if isinstance(schema, bool):
        return ""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return f"{quoted(schema, 60)} is not a schema: expected an object of at most {_MAX_DEPTH} levels"
    for name, value in schema.items():
        if name in ("properties", "items", "additionalProperties"):
            parts = value.values() if name == "properties" and isinstance(value, dict) else [value]
            if reason := next((found for part in parts if (found := schema_error(part, depth + 1))), ""):
                return reason
        elif name in _LIMITS:
            if not _TYPES["number"](value):
                return f"{name} must be a number"
        elif name == "type":
            if not all(isinstance(each, str) and each in _TYPES for each in _as_list(value)):
                return f"type must be one of {', '.join(_TYPES)}, got {quoted(value, 60)}"
        elif name == "pattern":
            try:
                re.compile(value)
            except (re.error, TypeError) as error:
                return f"pattern {quoted(value, 60)} is not valid: {error}"
        elif name in ("required", "enum"):
            if not isinstance(value, list):
                return f"{name} must be a list"
        elif name not in ("const", *_NOTES):
            return f"the keyword {quoted(name)} is not supported: omit it"
    return ""


def matches(value: Any, schema: Any) -> bool:
    """Return whether a JSON value matches a schema for which `schema_error` is empty."""
    if isinstance(schema, bool):
        return schema
    if "type" in schema and not any(_TYPES[kind](value) for kind in _as_list(schema["type"])):
        return False
    if "const" in schema and not _equal(value, schema["const"]):
        return False
    if "enum" in schema and not any(_equal(value, each) for each in schema["enum"]):
        return False
    for name, (kind, holds) in _LIMITS.items():
        if name in schema and _TYPES[kind](value) and not holds(value, schema[name]):
            return False
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        return False
    if isinstance(value, dict):
        known = schema.get("properties", {})
        rest = schema.get("additionalProperties", True)
        parts = ((each, known.get(name, rest)) for name, each in value.items())
        return all(name in value for name in schema.get("required", [])) and all(matches(*part) for part in parts)
    return not isinstance(value, list) or all(matches(each, schema.get("items", True)) for each in value)


def _equal(value: Any, other: Any) -> bool:
    """Return whether two JSON values are equal: Python counts true as 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
