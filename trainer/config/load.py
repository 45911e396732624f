"""Build a run spec from a YAML file, flags or ``-e`` values, and compare two specs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from trainer.config.aliases import MUTABLE, resolve_aliases, suggest
from trainer.config.fields import expected_value
from trainer.config.run_spec import FIELDS, RunSpec
from trainer.errors import UserError


def make_spec(values: Mapping[str, Any], source: str) -> RunSpec:
    """Build a spec from `values`; error messages name their `source`.

    Raises:
        UserError: an unknown name (with the closest known one), or an invalid value (with what is expected).
    """
    values, _ = resolve_aliases(values)
    unknown = [f"unknown name {name!r} in {source}{suggest(str(name))}" for name in values if name not in FIELDS]
    if unknown:
        raise UserError(f"run spec: {', and '.join(unknown)}")
    try:
        return RunSpec.model_validate(dict(values))
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            if not problem["loc"]:
                lines.append(problem["msg"].removeprefix("Value error, "))
                continue
            name = str(problem["loc"][0])
            lines.append(f"{name}: expected {expected_value(FIELDS[name])}, got {values.get(name)!r}")
        raise UserError(f"run spec: {'; '.join(dict.fromkeys(lines))} ({source})") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the names and values of a YAML file.

    Raises:
        UserError: the file is missing, is not YAML (with the line), or is not a mapping.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"run spec: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"run spec: {path} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        why = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"run spec: {path}{line}: not YAML: {why}") from None
    except ValueError as error:  # YAML parses 2024-99-99 as a date
        raise UserError(f"run spec: {path}: not YAML: {error}") from None
    except RecursionError:
        raise UserError(f"run spec: {path}: not YAML: nested too deeply") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(
            f"run spec: {path}: expected names and values (model: tiny), got a value of type {type(values).__name__}"
        )
    return {str(name): value for name, value in values.items()}


def read_spec(path: Path | None, overrides: Mapping[str, Any], source: str) -> RunSpec:
    """Read a spec from a YAML file (or none) and apply `overrides`; error messages name the `source` of the overrides."""
    values, _ = resolve_aliases(read_yaml(path) if path else {})
    if path:
        make_spec(values, str(path))
    resolved, _ = resolve_aliases(overrides, values)
    return make_spec({**values, **resolved}, source)


def changed_fields(before: RunSpec, now: RunSpec) -> list[str]:
    """Return ``name: was X, now Y`` for every field that differs although a resumed run must not change it."""
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    return [
        f"{name}: was {old[name]!r}, now {new[name]!r}"
        for name in FIELDS
        if name not in MUTABLE and old[name] != new[name]
    ]
