"""Configuration files of other tools that a user names in a spec. Their contents become part of the spec.

Only files that a user names on this machine are read: a spec that a host sends must contain the options themselves.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from trainer.common.errors import UserError, first_line
from trainer.common.formats import printable, quoted
from trainer.common.inputs import read_regular, user_path
from trainer.config.fields import is_off

_MAX_FILE = 64 * 1024  # bytes


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
    """Replace the path of a configuration of DeepSpeed or FSDP by its options, and the sections `distributed` and `training` by their names.

    `deepspeed` also implies `strategy: deepspeed`. `values`: names and values of one source, such as the flags. Raises
    UserError: the file cannot be read, or is not a JSON object; or a section and another one set a name differently.
    """
    found: dict[str, Any] = {}
    for section, value in values.items():
        inside = section in ("distributed", "training") and isinstance(value, Mapping)
        for name, each in value.items() if inside else [(section, value)]:
            if found.setdefault(name, each) != each:
                raise UserError(
                    f"run spec: {printable(name, 80)} is {quoted(found[name])} and {quoted(each)}: remove one of them"
                )
    for name in ("deepspeed", "deepspeed_config", "fsdp_config"):
        value = found.get(name)
        if isinstance(value, str) and not is_off(value):
            try:
                options = as_options(value)
            except ValueError as error:
                raise UserError(f"{name}: {printable(value, 80)} is not JSON: {first_line(error)}") from None
            found[name] = read_object(user_path(value, name), name) if options is value else options
    if not is_off(found.get("deepspeed")):
        found.setdefault("strategy", "deepspeed")
    return found
