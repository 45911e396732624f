"""Configuration files of other tools that a user names in a spec. Their contents become part of the spec.

Only files that a user names on this machine are read: a spec that a host sends must contain the options themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from trainer.common.errors import UserError, first_line
from trainer.common.formats import printable, quoted
from trainer.common.inputs import read_regular, user_path
from trainer.config.alias_table import HOST_NAMES, is_off

_MAX_FILE = 64 * 1024  # bytes
_NAMES = ("deepspeed", "deepspeed_config", "fsdp_config")
_SECTIONS = ("distributed", "training")


def as_options(value: Any) -> Any:
    """Return the mapping that a JSON text spells; other values unchanged. Raises ValueError."""
    if isinstance(value, str) and value.strip().startswith("{"):
        try:
            return json.loads(value)
        except RecursionError:
            raise ValueError("nested too deeply") from None
    return value


def read_object(path: Path, what: str) -> dict[str, Any]:
    """Return the names and values of a JSON file, which error messages call `what`. Raises UserError."""
    try:
        options = json.loads(read_regular(path, _MAX_FILE), object_pairs_hook=_once)
    except OSError as error:
        raise UserError(f"{what}: cannot read {printable(path)}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what}: {printable(path)} is not JSON: {first_line(error)}") from None
    if not isinstance(options, dict):
        raise UserError(f"{what}: {printable(path)}: expected an object with names and values")
    return options


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        raise ValueError("a name is given twice")
    return names


DeepSpeedOptions = Annotated[dict[str, Any], BeforeValidator(as_options)]


def read_tool_files(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the path of a configuration of DeepSpeed or FSDP by its options, and the sections of a file by their names.

    `deepspeed` also implies `strategy: deepspeed`.

    Args:
        values: names and values of one source, such as the flags.

    Raises:
        UserError: the file cannot be read, or is not a JSON object; or a section and another one set a name differently.
    """
    found = _without_sections(values)
    for name in _NAMES:
        value = found.get(name)
        if name == "fsdp_config":
            try:
                value = found[name] = as_options(value) if name in found else None
            except ValueError as error:
                raise UserError(f"{name}: {printable(value, 80)} is not JSON: {first_line(error)}") from None
        if not isinstance(value, str) or value.strip().startswith("{") or is_off(value):
            continue
        options = read_object(user_path(value, name), name)
        if name == "deepspeed" and "deepspeed_config" not in found:
            del found[name]
            found["deepspeed_config"] = options
        else:
            found[name] = options
        if name == "deepspeed":
            found.setdefault("strategy", "deepspeed")
    return found


def _without_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of the sections `distributed` and `training` beside the others; those of hosts as `distributed.NAME`."""
    found = {name: value for name, value in values.items() if name not in _SECTIONS or not isinstance(value, Mapping)}
    for section in values.keys() - found.keys():
        for name, value in values[section].items():
            place = f"distributed.{name}" if section == "distributed" and name in HOST_NAMES else str(name)
            if found.setdefault(place, value) != value:
                raise UserError(
                    f"run spec: {section}.{printable(place, 80)} is {quoted(value)}, and {quoted(found[place])} elsewhere: remove one of them"
                )
    return found
