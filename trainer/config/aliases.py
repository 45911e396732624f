"""Replace other names of run spec fields: those of `alias_table`, and deprecated ones."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.common.errors import UserError, nearest
from trainer.common.formats import printable, quoted
from trainer.config.alias_table import ACCUMULATION, ALIASES, REFUSED, Alias, Fields, is_off
from trainer.config.automatic import without_state
from trainer.config.fields import in_quotes, is_switch, metadata, names_in
from trainer.config.removed_fields import REMOVED_FIELDS, removed, replacement
from trainer.config.run_spec import FIELDS

MUTABLE = frozenset(name for name, field in FIELDS.items() if metadata(field)["mutable"])
SUGGESTED = names_in(FIELDS, "suggested_names")
DEPRECATED = names_in(FIELDS, "deprecated_names")
REMOVED = removed(REMOVED_FIELDS, (*FIELDS, *DEPRECATED))
MAX_ROWS = 1_048_576  # of a step


@dataclass
class Resolved:
    """Values by field, and the messages about names that were replaced."""

    where: str  # the source of the names, for error messages
    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    origin: dict[str, str] = field(default_factory=dict)  # field -> the name that set it
    weak: dict[str, tuple[str, Any, list[str]]] = field(default_factory=dict)  # field -> name, value, notes

    def set(self, name: str, target: str, value: Any) -> None:
        """Set a field. Raises UserError if another name set it to a different value."""
        if target in self.values and not _equal(self.values[target], value):
            raise UserError(
                f"run spec: {printable(self.origin[target], 80)} and {printable(name, 80)} set {target} to different "
                f"values{self.where}: set only {target}"
            )
        self.values.setdefault(target, value)
        self.origin.setdefault(target, name)


def is_of_a_run(names: Collection[str]) -> bool:
    """Return whether these are the names in the file of a run, which has all fields: it was not written by hand."""
    return len(names) > 0.8 * len(FIELDS)


def plain_name(name: object) -> str:
    """Return a name with underscores: flags and ``-e`` may have dashes."""
    return str(name).replace("-", "_")


def is_known(name: str) -> bool:
    """Return whether `name` is a field or another name that is understood."""
    return any(name in names for names in (FIELDS, ALIASES, DEPRECATED, REFUSED, REMOVED))


def takes_no_value(name: str) -> bool:
    """Return whether a flag of this name may have no value: it is a switch, or refused unless it is false."""
    if name in ALIASES and ALIASES[name].words is not None:
        return ALIASES[name].is_switch
    target = field_of(name)
    return is_switch(FIELDS[target]) if target in FIELDS else name in REFUSED


def field_of(name: str) -> str:
    """Return the field of an accepted name, or the name itself."""
    return ALIASES[name].field if name in ALIASES else DEPRECATED.get(name, name)


def resolve_aliases(
    values: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
    *,
    source: str = "",
    ranks: int | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Replace other names (``learning_rate``, ``hv.local_steps``) by field names, and convert their values.

    Any of OpenDiLoCo's names ``hv.*`` implies ``strategy: diloco`` unless a strategy is set.

    Args:
        values: names and values of one source (a file, the flags).
        defaults: values that `values` override.
        source: the source, for error messages.
        ranks: number of ranks of the run, if it is known.

    Returns:
        The values with field names, and one note for each name whose meaning differs. Unknown names stay as they are.

    Raises:
        UserError: a value that cannot be converted, a name that a run cannot honour, or two names of one field with
            different values.
    """
    if values.keys() <= FIELDS.keys():
        return dict(values), []
    if is_of_a_run(values):
        values = without_state(values)
    plain = {plain_name(name): value for name, value in values.items()}
    opendiloco = any(name.startswith("hv.") for name in plain)
    found = Resolved(f" in {source}" if source else "")
    for name in sorted(values, key=lambda name: plain_name(name) not in FIELDS):  # fields first
        _resolve(found, name, values[name], ranks, opendiloco)
    for target, (name, value, notes) in found.weak.items():
        if target not in found.values:
            found.set(name, target, value)
            found.notes += notes
    if plain.get("assistant_only_loss") is not None and "train_on" not in found.values:
        raise UserError(
            f"run spec: assistant_only_loss=false{found.where} trains all of a chat, but only the completion of a pair, in TRL: "
            f"set train_on=all or train_on=answer{found.where} instead"
        )
    if opendiloco and "strategy" not in {**found.values, **(defaults or {})}:
        found.values["strategy"] = "diloco"
        found.notes.append("options of OpenDiLoCo imply strategy=diloco")
    return found.values, found.notes


def _resolve(found: Resolved, name: str, value: Any, ranks: int | None, opendiloco: bool) -> None:
    """Add one name and its value to `found`."""
    plain = plain_name(name)
    if plain in FIELDS:
        found.set(name, plain, value)
    elif plain in REFUSED:
        if not is_off(value):
            raise UserError(f"run spec: {name}{found.where}: {REFUSED[plain]}")
    elif plain in REMOVED:
        if reason := replacement(value, REMOVED[plain]):
            raise UserError(f"run spec: {name}{found.where} {reason}")
    elif plain in DEPRECATED:
        found.set(name, DEPRECATED[plain], value)
        found.notes.append(f"{name} is deprecated: use {DEPRECATED[plain]}")
    elif plain == ACCUMULATION:
        count = _accumulation(name, value, found.where, ranks)
        found.set(name, "gradient_accumulation", count)
        shown = f"{printable(name, 80)}={printable(value, 80)}"
        found.notes.append(f"{shown} is understood as gradient_accumulation={count}: the micro-batches of all ranks")
    elif plain in ALIASES and value is not None:
        alias = ALIASES[plain]
        fields = _convert(alias, name, value, found.where)
        if plain == "sharding_strategy" and opendiloco:
            fields = {"replica_strategy": fields["strategy"]}
        notes = _notes(alias, name, value, fields)
        if alias.word(value) in alias.weak:
            for target, converted in fields.items():
                found.weak.setdefault(target, (name, converted, notes))
            return
        for target, converted in fields.items():
            found.set(name, target, converted)
        found.notes += notes
    elif plain not in ALIASES:
        found.values[name] = value


def _convert(alias: Alias, name: str, value: Any, where: str) -> Fields:
    try:
        return alias.fields(value)
    except ValueError as error:
        hint = in_quotes(value) if alias.convert else ""
        raise UserError(f"run spec: {name}: expected {error}, got {quoted(value)}{hint}{where}") from None


def _notes(alias: Alias, name: str, value: Any, fields: Fields) -> list[str]:
    """Return the meaning of a name whose values differ from those of its field."""
    if not alias.note and all(_equal(_plain_value(converted), value) for converted in fields.values()):
        return []
    meaning = " ".join(f"{target}={_plain_value(converted)}" for target, converted in fields.items())
    note = f": {alias.note}" if alias.note else ""
    return [f"{printable(name, 80)}={printable(value, 80)} is understood as {meaning or 'the default'}{note}"]


def _plain_value(value: Any) -> str:
    return printable(",".join(map(str, value)) if isinstance(value, tuple) else str(value), 80)


def _accumulation(name: str, value: Any, where: str, ranks: int | None) -> int:
    """Return the micro-batches of all ranks for those of one rank. Raises UserError if the number of ranks is unknown."""
    try:
        count = 0 if isinstance(value, bool) else int(value)
    except (ValueError, TypeError, OverflowError):
        count = 0
    if not 0 < count <= MAX_ROWS:
        raise UserError(f"run spec: {name}: expected an integer >= 1, got {quoted(value)}{where}")
    if ranks is None:
        raise UserError(
            f"run spec: {name}{where} counts the micro-batches of one rank, and a step has the same rows on any number of "
            f"ranks: set total_batch_size to {count} x batch_size x ranks, or gradient_accumulation to {count} x ranks"
        )
    return count * ranks


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values of a field are equal; values of flags and ``-e`` are texts."""
    if type(one) is type(other) and one == other:
        return True
    try:
        return float(one) == float(other)
    except (ValueError, TypeError, OverflowError):
        return printable(one, 10_000).lower() == printable(other, 10_000).lower()


def suggest(name: str, known: list[str] | tuple[str, ...] = ()) -> str:
    """Return ``; did you mean 'x'?`` for the field (or name in `known`) closest to `name`, or an empty string."""
    plain = plain_name(name).lower()
    if plain in FIELDS:
        return f"; did you mean {plain!r}?"
    if plain in SUGGESTED or plain in ALIASES:
        return f"; did you mean {SUGGESTED.get(plain) or field_of(plain)!r}?"
    return nearest(plain, [*FIELDS, *(name for name in ALIASES if not name.startswith("distributed.")), *known])
