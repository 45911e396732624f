"""Other names of run spec fields: aliases of other tools, deprecated names, and OpenDiLoCo's ``hv.*`` options."""

from collections.abc import Mapping
from typing import Any

from trainer.config.fields import metadata, names_in
from trainer.config.run_spec import FIELDS
from trainer.errors import nearest
from trainer.formats import printable

MUTABLE = frozenset(name for name, field in FIELDS.items() if metadata(field)["mutable"])
ALIASES = names_in(FIELDS, "aliases")
DEPRECATED = names_in(FIELDS, "deprecated_names")

# https://github.com/PrimeIntellect-ai/OpenDiLoCo: the run spec's name of each option, or the reason why it is not needed.
OPENDILOCO: dict[str, str] = {"hv.local_steps": "local_steps", "hv.outer_lr": "outer_lr"}
NOT_NEEDED: dict[str, str] = {
    "hv.galaxy_size": "there is one replica per host (or per replica_hosts hosts)",
    "hv.world_rank": "the rank of a replica is the place of its host in the inventory",
    "hv.initial_peers": "the inventory lists the hosts of a run",
}


def is_known(name: str) -> bool:
    """Return whether `name` is a field, a deprecated name or an option of OpenDiLoCo."""
    return name in FIELDS or name in DEPRECATED or name in OPENDILOCO or name in NOT_NEEDED


def field_of(name: str) -> str:
    """Return the field of an accepted name, or the name itself."""
    return OPENDILOCO.get(name) or DEPRECATED.get(name) or name


def resolve_aliases(
    values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Replace deprecated names and OpenDiLoCo's names (``hv.local_steps``, or a mapping ``hv``) by field names.

    Any of OpenDiLoCo's names implies ``strategy: diloco`` unless a strategy is set.

    Args:
        values: names and values of one source (a file, the flags).
        defaults: values that `values` override.

    Returns:
        The values with field names, and one note for each name that was replaced.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        nested = value.items() if name == "hv" and isinstance(value, Mapping) else [(None, value)]
        flat |= {name if key is None else f"hv.{key}": item for key, item in nested}
    resolved: dict[str, Any] = {}
    notes: list[str] = []
    for name, value in flat.items():
        plain = str(name).replace("-", "_")
        if plain in OPENDILOCO:
            resolved[OPENDILOCO[plain]] = value
            notes.append(f"{name} sets {OPENDILOCO[plain]}={printable(value, 80)}")
        elif plain in NOT_NEEDED:
            notes.append(f"{name} is ignored: {NOT_NEEDED[plain]}")
        elif plain in DEPRECATED:
            resolved.setdefault(DEPRECATED[plain], value)
            notes.append(f"{name} is deprecated: use {DEPRECATED[plain]}")
        else:
            resolved[name] = value
    from_opendiloco = any(str(name).replace("-", "_") in {**OPENDILOCO, **NOT_NEEDED} for name in flat)
    if from_opendiloco and "strategy" not in {**resolved, **(defaults or {})}:
        resolved["strategy"] = "diloco"
        notes.append("options of OpenDiLoCo imply strategy=diloco")
    return resolved, notes


def suggest(name: str, known: list[str] | tuple[str, ...] = ()) -> str:
    """Return ``; did you mean 'x'?`` for the field (or name in `known`) closest to `name`, or an empty string."""
    plain = name.replace("-", "_").lower()
    if plain in FIELDS:
        return f"; did you mean {plain!r}?"
    if plain in ALIASES:
        return f"; did you mean {ALIASES[plain]!r}?"
    return nearest(plain, [*FIELDS, *known])
