"""Declare the fields of a settings schema, and read their metadata back. Shared by `RunSpec` and the controller's options."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BeforeValidator, Field
from pydantic.fields import FieldInfo

from trainer.common.formats import quoted

MAX_TEXT = 4096  # characters of a text, as of a path (PATH_MAX)
MAX_LIST = 12_000  # characters of all texts of a list; with every field this long, a spec fits into a file of MAX_YAML
MAX_SECONDS = 30 * 24 * 3600  # of a duration; longer than any run, and within the range of every timer
MAX_COUNT = 10**9  # of a number of steps or rows; within the range of 32 bits
MAX_NUMBER = 1e38  # of a learning rate and its kin; within the range of float32
_MAX_INTEGER = 10**1000
# Control characters and separators, at which a file or a terminal begins a new line, and lone surrogates.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
NO_WORDS = ("no", "off", "false", "none")
YES_WORDS = ("yes", "on", "true")
_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))


def declare(
    default: Any,
    description: str,
    *,
    suggested_names: Sequence[str] = (),
    deprecated_names: Sequence[str] = (),
    mutable: bool = False,
    unit: str = "",
    expected: str = "",
    minus_one: int | None = None,
    automatic: bool = False,
    needs: str = "",
    **constraints: Any,
) -> Any:
    """Declare one field of a schema.

    Args:
        default: the default value.
        description: one line for `--help` and the documentation.
        suggested_names: names that are not accepted, because they are ambiguous or Ansible reserves them: an error
            message suggests the field instead.
        deprecated_names: former names of the field. They are accepted with a note.
        mutable: whether a resumed run may change the value.
        unit: unit of a number, for example ``steps``.
        expected: the values that the field accepts, where its type does not say it.
        minus_one: the value that other tools write as -1, such as 0 for a limit that 0 disables.
        automatic: whether the value `auto`, which is the default then, leaves the field to the hosts; `default` stands in until
            they have decided.
        needs: without which the field has no effect: conditions with spaces between them, such as ``method=dpo|kto`` and ``lora_r``,
            which is a field that is not off, or has more than its least value; of ``a|b``, one suffices.
        constraints: passed on to pydantic (``ge=1``, ``pattern=...``).
    """
    extra: dict[str, Any] = {
        "suggested_names": list(suggested_names),
        "deprecated_names": list(deprecated_names),
        "mutable": mutable,
        "unit": unit,
        "expected": expected,
        "minus_one": minus_one,
        "automatic": automatic,
        "needs": needs,
    }
    if isinstance(default, float):
        constraints["allow_inf_nan"] = False
    if isinstance(default, str) and default != "auto" and not expected:
        constraints["coerce_numbers_to_str"] = True  # `run: 7` in YAML is a name
    return Field(default, description=description, json_schema_extra=extra, **constraints)


def metadata(field: FieldInfo) -> dict[str, Any]:
    """Return what `declare` recorded: suggested_names, deprecated_names, mutable, unit, expected, minus_one."""
    extra = field.json_schema_extra
    return extra if isinstance(extra, dict) else {}


def names_in(fields: Mapping[str, FieldInfo], kind: str) -> dict[str, str]:
    """Return {other name: field name} for one kind of other names (``suggested_names``, ``deprecated_names``) of all `fields`."""
    return {other: name for name, field in fields.items() for other in metadata(field)[kind]}


def word_for(value: Any, words: Sequence[str]) -> Any:
    """Return the one of `words` that `value` means, or `value` itself if it means none of them, or several.

    YAML reads the words no, off, yes and on as booleans, so the word that was written is lost: false is any of no, off, false
    and none, and true any of yes, on and true. The same words as text mean the same.
    """
    said = str(value).strip().lower() if isinstance(value, bool | str) else ""
    if said in words:
        return said
    for group in (NO_WORDS, YES_WORDS):
        known = [word for word in group if word in words]
        if said in group and len(known) == 1:
            return known[0]
    return value


def as_text(value: Any) -> str:
    """Return a value of YAML, a flag or ``-e`` as a word in lower case: ``true`` for True, ``none`` for None."""
    try:
        return str(value).strip().lower()
    except (ValueError, RecursionError):  # Python refuses to print an integer of more than 4300 digits
        return ""


def is_off(value: Any) -> bool:
    """Return whether a value of an option that has no words of its own disables it."""
    return as_text(value) in (*NO_WORDS, "0", "0.0", "", "{}", "[]", "()")


def meant_word(value: Any, words: Collection[str]) -> str:
    """Return the one of `words` that a value of YAML, a flag or ``-e`` means, or its text."""
    word = as_text(word_for(value, tuple(words)))
    return {"1": "true", "0": "false"}.get(word, word) if "true" in words else word


def _words_of(kind: Any) -> tuple[str, ...]:
    """Return the words that a field, or every entry of its list, may have; nothing for other types."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(word for part in get_args(kind) if part is not Ellipsis for word in _words_of(part))


def _meant(value: Any, field: FieldInfo) -> Any:
    """Return the value that a field has for a word of YAML, and for the -1 of other tools."""
    limit = metadata(field).get("minus_one")
    if limit is not None and not isinstance(value, bool) and str(value).strip() in ("-1", "-1.0"):
        return limit
    words = _words_of(field.annotation)
    if isinstance(value, list | tuple):
        return [word_for(part, words) for part in value] if words else value
    return word_for(value, words) if words else value


def check_input(value: Any, field: FieldInfo) -> Any:
    """Return the value of a field before pydantic validates it.

    Raises ValueError: a boolean for a field that is neither a switch nor has a word for it, a fraction for a text, a
    number that Python cannot print, or text that is too long or has control characters.
    """
    value = _meant(value, field)
    if isinstance(value, bool) and not is_switch(field):
        raise ValueError("only a switch accepts true or false")  # Python counts True as 1: `lr: yes` would be 1
    if isinstance(value, float) and _takes_text(field.annotation):
        raise ValueError("a fraction is no text")  # `run: 1.10` would be 1.1
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
    return field.annotation is bool or bool in get_args(field.annotation)


def mismatch(field: FieldInfo, value: Any) -> str:
    """Say which values a field accepts, and that `value` is none of them."""
    hint = ""
    if _takes_text(field.annotation) and any(isinstance(part, bool) for part in _leaves(value)):
        hint = " (YAML reads no, off, yes and on as false and true: write the word in quotes)"
    elif _takes_text(field.annotation) and isinstance(value, float):
        hint = " (YAML reads 1.10 as 1.1: write the text in quotes)"
    return f"expected {expected_value(field)}, got {quoted(value)}{hint}"


def _takes_text(kind: Any) -> bool:
    """Return whether a field, an entry of its list or a value of its mapping may be any text."""
    parts = get_args(kind)[-1:] if get_origin(kind) is dict else get_args(kind)
    return kind is str or (get_origin(kind) is not Literal and any(map(_takes_text, parts)))


def default_of(field: FieldInfo) -> Any:
    return "auto" if metadata(field).get("automatic") else field.default


def expected_value(field: FieldInfo) -> str:
    """Describe the values that a field accepts, derived from its type and constraints."""
    kinds = _expected_value(field)
    return f"auto, or {kinds}" if metadata(field).get("automatic") else kinds


def _expected_value(field: FieldInfo) -> str:
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
        if any(getattr(limit, "pattern", None) for limit in field.metadata):
            return "letters, digits, '.', '_' and '-', at most 64"
        return f"one line of text, at most {MAX_TEXT} characters"
    number = "an integer" if kind is int or int in options else "a number"
    unit = f" of {metadata(field)['unit']}" if metadata(field)["unit"] else ""
    bounds = [
        f"{sign} {getattr(limit, word)}"
        for limit in field.metadata
        for word, sign in _BOUNDS
        if getattr(limit, word, None) is not None
    ]
    return number + unit + (" " + " and ".join(bounds) if bounds else "")
