"""The options of a deployment, read from the variables of a playbook."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from trainer.common.errors import UserError
from trainer.common.inputs import user_path
from trainer.config.fields import MAX_SECONDS, declare
from trainer.generation.ollama_names import MODEL_NAME, server_form
from trainyard import front_end
from trainyard.deploy.proof import WeightType
from trainyard.playbook_options import PlaybookOptions
from trainyard.remote.ollama import TAGS

MODEL_NAME_RULES: dict[str, Any] = {"pattern": f"^({MODEL_NAME.pattern})?$"}
MODEL_NAME_RULES |= {"expected": "the name of a model, such as mine:latest"}
MODEL_NAME_RULES |= {"coerce_numbers_to_str": True}
_TEMPLATE_LIMIT = 1 << 20  # bytes
CONTEXT = 8192  # tokens of the context of a model that has more: a server keeps memory for all of them


class DeployOptions(PlaybookOptions):
    """What `playbooks/deploy.yml` deploys, and how."""

    run: str = declare("", "name of the run, which has finished", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")
    deploy_name: str = declare("", "name of the model in Ollama, such as `mine:latest`", **MODEL_NAME_RULES)
    deploy_base: str = declare(
        "",
        "model of the hosts that is the base of the adapter, such as `llama3.1:8b`; without it, one that fits is searched for",
        **MODEL_NAME_RULES,
    )
    deploy_as: Literal["auto", "adapter", "merged"] = declare(
        "auto",
        "`adapter`, `merged`, or `auto`: the adapter where the hosts have a base that fits, else the merged model",
    )
    deploy_quantize: WeightType = declare(
        "f16", "type of the weights of a merged model; Ollama makes those below `q8_0`"
    )
    deploy_system: str | None = declare(
        None,
        "system message of chats that have none; without it, that of the training data, if all of its prompts have the same "
        "one; empty for none",
    )
    deploy_context: int = declare(
        0,
        f"length of the context; 0: that of the model, at most {CONTEXT} or `seq_length` of the run",
        unit="tokens",
        ge=0,
        le=1 << 28,
    )
    deploy_answer_limit: float = declare(
        0.0,
        "maximum time for the first answer of the created model, which its server loads; 0: 300 s, or 50 s for each GB",
        unit="seconds",
        ge=0,
        le=MAX_SECONDS,
    )
    deploy_replace: bool = declare(False, "replace a model of this name that trainyard has not deployed")
    template: str = declare("", "file with a Go template, instead of the derived one")

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
    """Return the options from the variables that are named like one; None is a default.

    `remove`: the model is removed, so the run is not needed. Raises UserError: an option is missing or not valid.
    """
    given = {name: value for name, value in values.items() if value is not None}
    options = DeployOptions.from_variables(given, "deploy")
    for name in ("deploy_name",) if remove else ("run", "deploy_name"):
        if not getattr(options, name):
            raise UserError(f"deploy: {name} is missing: set it with {front_end.option(name, 'NAME')}")
    if (tag := server_form(options.deploy_name).rpartition(":")[2]) in TAGS:
        raise UserError(f"deploy_name: deployments use the tag {tag} themselves: choose another tag")
    return options
