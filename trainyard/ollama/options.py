"""The options of a deployment, read from the variables of a playbook."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from trainer.config.fields import declare
from trainer.errors import UserError
from trainer.formats import printable, quoted
from trainer.inputs import user_path

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MODEL = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}(/[A-Za-z0-9][A-Za-z0-9._-]{0,79}){0,2}(:[A-Za-z0-9][A-Za-z0-9._-]{0,79})?"
)
_TEMPLATE_LIMIT = 1 << 20  # bytes


class DeployOptions(BaseModel):
    """What `playbooks/deploy.yml` deploys, and how."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: str = declare("", "name of the run, which has finished")
    deploy_name: str = declare("", "name of the model in Ollama, such as `mine:latest`")
    deploy_base: str = declare("", "model of the hosts that is the base of the adapter, such as `llama3.1:8b`")
    deploy_as: Literal["auto", "adapter", "merged"] = declare(
        "auto", "`adapter` needs deploy_base; `auto`: the adapter where the base of a host fits, else the merged model"
    )
    deploy_quantize: Literal["f16", "q8_0"] = declare("f16", "type of the weights of a merged model")
    deploy_replace: bool = declare(False, "replace a model of this name that trainyard has not deployed")
    template: str = declare("", "file with a Go template, instead of the derived one")

    @field_validator("run")
    @classmethod
    def _check_run(cls, value: str) -> str:
        if value and not _RUN.fullmatch(value):
            raise ValueError("expected the name of a run: letters, digits, '.', '_' and '-'")
        return value

    @field_validator("deploy_name", "deploy_base")
    @classmethod
    def _check_model(cls, value: str) -> str:
        if value and not _MODEL.fullmatch(value):
            raise ValueError("expected the name of a model, such as mine:latest")
        return value

    def template_text(self) -> str:
        """Return the text of the template file without line ends at its end; empty without a file. Raises UserError."""
        if not self.template:
            return ""
        path: Path = user_path(self.template, "template")
        try:
            if path.stat().st_size > _TEMPLATE_LIMIT:
                raise UserError(f"template: {path} is larger than {_TEMPLATE_LIMIT} bytes")
            return path.read_text(encoding="utf-8").rstrip("\n")
        except (OSError, ValueError) as error:
            raise UserError(f"template: cannot read {path}: {error}") from None


def make_deploy_options(values: Mapping[str, Any], *, remove: bool = False) -> DeployOptions:
    """Return the options from variables; None and empty values are defaults.

    Args:
        remove: the model is removed, so the run is not needed.

    Raises:
        UserError: an option is missing or not valid.
    """
    given = {name: value for name, value in values.items() if value not in (None, "")}
    for name in ("deploy_name",) if remove else ("run", "deploy_name"):
        if name not in given:
            raise UserError(f"{name} is missing: set it with -e {name}=NAME")
    try:
        options = DeployOptions(**given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        why = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{name} is {quoted(given.get(name))}: {printable(why)}") from None
    if options.deploy_as == "adapter" and not options.deploy_base:
        raise UserError("deploy_as=adapter needs the name of the base model: -e deploy_base=MODEL")
    return options
