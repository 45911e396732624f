"""Translate the names of a file into fields of the run spec, by a table of the tool; every name is accounted for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from trainer.common.errors import UserError
from trainer.common.formats import printable, quoted
from trainer.config import FIELDS, RunSpec
from trainer.config.aliases import Fields, expected_words
from trainer.config.fields import as_text, is_off, meant_word, mismatch

MAX_SHOWN = 2000  # characters of a value in a comment
BY_DEFAULT = "the default of"
HOSTS = "the inventory and the launch options say which hosts and devices take part"


@dataclass(frozen=True)
class Row:
    """What a name means.

    Attributes:
        kind: field: the name has the values of a field; function: a function handles it; section: its value is a mapping with rows
            of its own; unused: it has no effect on a run; impossible: a run cannot honour it; missing: it asks for a method that
            trainyard lacks.
        words: what each of its values sets, where these are not the values of the field.
        weak: values that another name of the same field overrides, as in ``bf16: false`` beside ``fp16: true``.
    """

    kind: Literal["field", "function", "section", "unused", "impossible", "missing"]
    text: str = ""  # the field, the function, the reason, or the method
    words: Mapping[str, Fields] = field(default_factory=dict)
    weak: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()  # values that ask for nothing
    function: Callable[[Translation, str, Any], None] = lambda found, key, value: None  # handles the name
    rows: Mapping[str, Row] = field(default_factory=dict)  # those of a section


Rows = Mapping[str, Row]


@dataclass
class Translation:
    """What the names of a file, or of several, have become.

    Attributes:
        origins: the names that set a field, with their values and what differs.
        missing: names that ask for a method that trainyard lacks, by method.
        weak: values that other names of the field override: field, key, given value, converted value.
        refused: fields whose value in the files is none that they accept; they keep the default of the run spec.
        accumulation: micro-batches of one rank in a step, by the name that sets them.
        seen: the names and values of the file, as far as a table asks for them together.
    """

    where: Path  # the file that is read
    ranks: int = 0  # number of ranks in the original run; 0: unknown
    values: dict[str, Any] = field(default_factory=dict)  # values of fields, as in the JSON form of a spec
    origins: dict[str, list[str]] = field(default_factory=dict)
    unused: dict[str, list[str]] = field(default_factory=dict)  # names without effect, by reason
    impossible: dict[str, list[str]] = field(default_factory=dict)  # names that a run cannot honour, by reason
    missing: dict[str, list[str]] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)  # names without a value
    unknown: list[str] = field(default_factory=list)  # names that the table of the tool lacks, with their values
    weak: list[tuple[str, str, Any, Any]] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    accumulation: dict[str, int] = field(default_factory=dict)
    deepspeed: tuple[Mapping[str, Any], str] = field(default_factory=lambda: ({}, ""))
    seen: Mapping[str, Any] = field(default_factory=dict)

    def read(self, names: Mapping[str, Any], rows: Rows, prefix: str = "") -> None:
        """Account for the names and values of a file or of one of its sections. Raises UserError."""
        for name, value in names.items():
            key = f"{prefix}{name}"
            if is_empty(value):
                self.unset.append(printable(key))
            elif (row := rows.get(str(name).replace("-", "_"))) is None:
                self.unknown.append(shown(key, value))
            else:
                self.apply(row, key, value)

    def apply(self, row: Row, key: str, value: Any) -> None:
        """Account for one name and its value, which is not empty."""
        asks = not is_off(value) and as_text(value) not in row.harmless
        if row.words:
            self._convert(row, key, value)
        elif row.kind == "field":
            self.set(row.text, value, key, value)
        elif row.kind == "function":
            row.function(self, key, value)
        elif row.kind == "section" and isinstance(value, Mapping):
            self.read(value, row.rows, f"{key}.")
        elif row.kind == "section":
            self.refuse(key, value, "expected names and values")
        elif row.kind == "unused":
            self.ignore(key, value, row.text)
        elif not asks:
            self.ignore(key, value, "it asks for nothing")
        else:
            self._lacks(row, key, value)

    def _lacks(self, row: Row, key: str, value: Any) -> None:
        if row.kind == "missing" and is_off(value):
            self.ignore(key, value, "it asks for nothing")
        elif row.kind == "missing":
            self.missing.setdefault(row.text, []).append(shown(key, value, 80))
        else:
            self.refuse(key, value, row.text or f"expected {expected_words(row.words)}")

    def _convert(self, row: Row, key: str, value: Any) -> None:
        """Set the fields that a word means."""
        word = meant_word(value, row.words)
        fields = row.words.get(word)
        if fields is None:
            self._lacks(row, key, value)
        elif not fields:
            self.ignore(key, value, "the default")
        elif word in row.weak:
            self.weak += [(name, key, value, each) for name, each in fields.items()]
        else:
            for name, each in fields.items():
                self.set(name, each, key, value)

    def set(self, name: str, value: Any, key: str, given: Any, note: str = "") -> None:
        """Set a field. A value that it does not accept is refused. Raises UserError if another name set another value."""
        converted, wrong = checked(name, value)
        if wrong:
            self.refuse(key, given, f"{name}: {wrong}")
            self.refused.add(name)
        elif name in self.values and self.values[name] != converted:
            raise UserError(
                f"import: {printable(self.where)}: {self.origins[name][0]} and {shown(key, given, 80)} set {name} to different "
                "values: remove one of them"
            )
        else:
            self.values[name] = converted
            self.note(name, key, given, note)

    def drop(self, name: str, reason: str, *, unused: bool = False) -> None:
        """Take back a field that cannot be combined with others, or is `unused`: the names that set it are refused, if they ask for something."""
        where = self.unused if self.values.pop(name, None) is False or unused else self.impossible
        for origin in self.origins.pop(name, []):
            if not origin.startswith(BY_DEFAULT) and origin not in where.setdefault(reason, []):
                where[reason].append(origin)

    def note(self, name: str, key: str, value: Any, note: str = "") -> None:
        """Add a name to the origins of a field that is set."""
        self.origins.setdefault(name, []).append(shown(key, value) + (f" ({note})" if note else ""))

    def ignore(self, key: str, value: Any, reason: str) -> None:
        """Record a name without effect."""
        self.unused.setdefault(reason, []).append(shown(key, value))

    def refuse(self, key: str, value: Any, reason: str) -> None:
        """Record a name that a run cannot honour."""
        self.impossible.setdefault(reason, []).append(shown(key, value))

    def settle_weak(self) -> None:
        """Set the fields that no other name has set."""
        for name, key, given, converted in self.weak:
            if self.values.get(name, converted) == converted:
                self.set(name, converted, key, given)
            else:
                self.ignore(key, given, "another name decides")
        self.weak = []

    def set_default(self, name: str, value: Any, tool: str) -> None:
        """Set a field that no name sets to the default of a tool."""
        if name not in self.values and name not in self.refused:
            self.values[name], _ = checked(name, value)
            self.origins[name] = [f"{BY_DEFAULT} {tool}"]

    def count_rows(self, tool: str) -> None:
        """Turn the micro-batches of one rank into those of all ranks. Raises UserError if two names differ."""
        if {"total_batch_size", "gradient_accumulation"} & self.values.keys():
            for key, count in self.accumulation.items():
                self.ignore(key, count, "another name sets the rows of a step")
            return
        note = (
            f"of each of {self.ranks} ranks"
            if self.ranks
            else "of one rank; for N ranks, multiply it, or import with --ranks N"
        )
        for key, count in self.accumulation.items():
            self.set("gradient_accumulation", count * (self.ranks or 1), key, count, note)
        if not self.accumulation:
            self.set_default("gradient_accumulation", self.ranks or 1, f"{tool} ({note})")


def is_empty(value: Any) -> bool:
    """Return whether a value says nothing: null, an empty text, list or mapping."""
    return value is None or value in ("", [], {})


def shown(key: str, value: Any, limit: int = MAX_SHOWN) -> str:
    """Return a name and its value on one line, as a YAML file has them."""
    try:
        text = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False)
    except (ValueError, RecursionError):  # a number that Python refuses to print, or deep nesting
        text = quoted(value, limit)
    return printable(f"{key}: {text.removesuffix(chr(10)).removesuffix('...').strip()}", limit)


def checked(name: str, value: Any) -> tuple[Any, str]:
    """Return the value of a field in the JSON form of a spec, or what is wrong with it."""
    try:
        spec = RunSpec.model_validate({name: value})
    except ValidationError:
        return None, mismatch(FIELDS[name], value)
    return "auto" if name in spec.automatic else spec.model_dump(mode="json", exclude_unset=True)[name], ""


def whole_number(value: Any) -> int:
    """Return a count of 1 or more, or 0 if a value is none."""
    try:
        number = 0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return 0
    return int(number) if 1 <= number <= 10**9 and number == int(number) else 0


def accumulation(found: Translation, key: str, value: Any) -> None:
    """Handle the micro-batches of one rank."""
    if count := whole_number(value):
        found.accumulation[key] = count
    else:
        found.refuse(key, value, "expected an integer >= 1")
