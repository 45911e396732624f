"""Declare the fields of a settings schema, and read their metadata back. Shared by `RunSpec` and the controller's options."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BeforeValidator, Field
from pydantic.fields import FieldInfo

MAX_TEXT = 4096  # characters of a text, as of a path (PATH_MAX)
MAX_LIST = 12_000  # characters of all texts of a list; with every field this long, a spec fits into a file of MAX_YAML
MAX_SECONDS = 30 * 24 * 3600  # of a duration; longer than any run, and within the range of every timer
MAX_COUNT = 10**9  # of a number of steps or rows; within the range of 32 bits
MAX_NUMBER = 1e38  # of a learning rate and its kin; within the range of float32
_MAX_INTEGER = 10**1000
# Control characters and separators, at which a file or a terminal begins a new line, and lone surrogates.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))


def declare(
    default: Any,
    description: str,
    *,
    aliases: Sequence[str] = (),
    suggested_names: Sequence[str] = (),
    deprecated_names: Sequence[str] = (),
    mutable: bool = False,
    unit: str = "",
    expected: str = "",
    **constraints: Any,
) -> Any:
    """Declare one field of a schema.

    Args:
        default: the default value.
        description: one line for `--help` and the documentation.
        aliases: names that other tools use. They are accepted; `trainer.config.conversions` converts values that differ.
        suggested_names: names that are not accepted, because they are ambiguous or Ansible reserves them: an error
            message suggests the field instead.
        deprecated_names: former names of the field. They are accepted with a note.
        mutable: whether a resumed run may change the value.
        unit: unit of a number, for example ``steps``.
        expected: the values that the field accepts, where its type does not say it.
        constraints: passed on to pydantic (``ge=1``, ``pattern=...``).
    """
    extra: dict[str, Any] = {
        "aliases": list(aliases),
        "suggested_names": list(suggested_names),
        "deprecated_names": list(deprecated_names),
        "mutable": mutable,
        "unit": unit,
        "expected": expected,
    }
    if isinstance(default, float):
        constraints["allow_inf_nan"] = False
    if isinstance(default, str) and default != "auto" and not expected:
        constraints["coerce_numbers_to_str"] = True  # `run: 7` in YAML is a name
    return Field(default, description=description, json_schema_extra=extra, **constraints)


def metadata(field: FieldInfo) -> dict[str, Any]:
    """Return what `declare` recorded: aliases, suggested_names, deprecated_names, mutable, unit, expected."""
    extra = field.json_schema_extra
    return extra if isinstance(extra, dict) else {}


def names_in(fields: Mapping[str, FieldInfo], kind: str) -> dict[str, str]:
    """Return {other name: field name} for one kind of other names (``aliases``, ``deprecated_names``, ...) of all `fields`."""
    return {other: name for name, field in fields.items() for other in metadata(field)[kind]}


def check_input(value: Any, field: FieldInfo) -> Any:
    """Return the value of a field before pydantic validates it.

    Raises:
        ValueError: a boolean for a field that is not a switch, a number that Python cannot print, or text that is too
        long
            or has control characters.
    """
    if isinstance(value, bool) and not is_switch(field):
        raise ValueError("only a switch accepts true or false")  # Python counts True as 1: `lr: yes` would be 1
    # The mapping of another field, such as run_env, has a check of its own.
    own_check = isinstance(value, Mapping) and not metadata(field)["expected"]
    parts = [] if own_check else list(_leaves(value))
    if any(isinstance(part, int) and abs(part) >= _MAX_INTEGER for part in parts):
        raise ValueError("too large to print")
    texts = [part for part in parts if isinstance(part, str)]
    if sum(map(len, texts)) > MAX_LIST or any(len(text) > MAX_TEXT or UNPRINTABLE.search(text) for text in texts):
        raise ValueError("control characters, or too long")
    return value


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the keys and values of nested mappings, lists and tuples."""
    rest = [value]
    while rest:
        part = rest.pop()
        if isinstance(part, Mapping):
            rest += [*part.values(), *part.keys()]
        elif isinstance(part, list | tuple):
            rest += part
        else:
            yield part


def split_words(value: Any) -> Any:
    """Turn ``a,b`` into a tuple of words, because flags and ``-e`` carry only strings; return other values unchanged."""
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(",") if word.strip())
    return value


Words = Annotated[tuple[str, ...], BeforeValidator(split_words)]


def is_switch(field: FieldInfo) -> bool:
    """Return whether a field accepts true and false."""
    return field.annotation is bool or bool in get_args(field.annotation)


def expected_value(field: FieldInfo) -> str:
    """Describe the values that a field accepts, derived from its type and constraints."""
    if said := metadata(field)["expected"]:
        return str(said)
    kind = field.annotation
    options = [option for option in get_args(kind) if option is not type(None)]
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, options))
    if get_origin(kind) is tuple:
        if get_origin(options[0]) is Literal:
            return "one or more of " + ", ".join(map(str, get_args(options[0])))
        return f"a list such as {','.join(map(str, field.default))}" if field.default else "a list such as a,b"
    if get_origin(kind) is dict:
        return "names and values"
    if is_switch(field):
        return "true or false" if kind is bool else "auto, true or false"
    if kind is str or str in options:
        pattern = any(getattr(limit, "pattern", None) for limit in field.metadata)
        return (
            "letters, digits, '.', '_' and '-', at most 64"
            if pattern
            else f"one line of text, at most {MAX_TEXT} characters"
        )
    number = "an integer" if kind is int or int in options else "a number"
    unit = f" of {metadata(field)['unit']}" if metadata(field)["unit"] else ""
    bounds = [
        f"{sign} {getattr(limit, word)}"
        for limit in field.metadata
        for word, sign in _BOUNDS
        if getattr(limit, word, None) is not None
    ]
    return number + unit + (" " + " and ".join(bounds) if bounds else "")
