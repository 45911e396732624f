"""Options of a playbook, or of a start: a typed model, its checks, and its table in the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from trainer.common.errors import UserError
from trainer.config.fields import check_input, expected_value, metadata, mismatch


class PlaybookOptions(BaseModel):
    """The options of a playbook. A subclass declares them with `declare`."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _check_input(cls, value: Any, info: ValidationInfo) -> Any:
        return check_input(value, cls.model_fields[str(info.field_name)])

    @classmethod
    def from_variables(cls, values: Mapping[str, Any], playbook: str) -> Self:
        """Build the options from the values of ``-e`` that are named like one.

        `playbook`: its name, for the message. Raises UserError: a value is invalid.
        """
        given = {name: value for name, value in values.items() if name in cls.model_fields}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            names = dict.fromkeys(str(problem["loc"][0]) for problem in error.errors())
            lines = [f"{name}: {mismatch(cls.model_fields[name], given.get(name))}" for name in names]
            raise UserError(f"{playbook}: {'; '.join(lines)}") from None


def option_table(fields: Mapping[str, FieldInfo]) -> str:
    """Return options as a Markdown table for the documentation."""
    lines = ["| name | takes | default | description |", "| --- | --- | --- | --- |"]
    for name, info in fields.items():
        shown = "" if info.default in ("", (), {}, None) else f"`{str(info.default).lower()}`"
        others = "".join(f"; deprecated name: `{other}`" for other in metadata(info)["deprecated_names"])
        lines.append(f"| `{name}` | {expected_value(info)} | {shown} | {info.description}{others} |")
    return "\n".join(lines)
