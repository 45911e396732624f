"""Configuration files of other tools that a user names in a spec. Their contents become part of the spec.

Only files that a user names on this machine are read: a spec that a host sends must contain the options themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from trainer.config.alias_table import is_off
from trainer.errors import UserError
from trainer.formats import printable
from trainer.inputs import read_regular, user_path

_MAX_FILE = 64 * 1024  # bytes
_NAMES = ("deepspeed", "deepspeed_config")


def as_options(value: Any) -> Any:
    """Return the mapping that a JSON text spells; other values unchanged. Raises ValueError."""
    if isinstance(value, str) and value.strip().startswith("{"):
        try:
            return json.loads(value)
        except RecursionError:
            raise ValueError("nested too deeply") from None
    return value


DeepSpeedOptions = Annotated[dict[str, Any], BeforeValidator(as_options)]


def read_tool_files(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the path of a DeepSpeed configuration by its options. `deepspeed` also implies `strategy: deepspeed`.

    Args:
        values: names and values of one source, such as the flags.

    Raises:
        UserError: the file cannot be read, or is not a JSON object.
    """
    found = dict(values)
    for name in _NAMES:
        value = found.get(name)
        if not isinstance(value, str) or value.strip().startswith("{") or is_off(value):
            continue
        path = user_path(value, name)
        try:
            options = json.loads(read_regular(path, _MAX_FILE))
        except OSError as error:
            raise UserError(f"{name}: cannot read {printable(path)}: {error.strerror}") from None
        except (ValueError, RecursionError):
            raise UserError(f"{name}: {printable(path)} is not JSON") from None
        if not isinstance(options, dict):
            raise UserError(f"{name}: {printable(path)}: expected an object with the options of DeepSpeed")
        if name == "deepspeed" and "deepspeed_config" not in found:
            del found[name]
            found["deepspeed_config"] = options
        else:
            found[name] = options
        if name == "deepspeed":
            found.setdefault("strategy", "deepspeed")
    return found
