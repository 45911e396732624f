"""What a deployed model has beside its weights, as the run was trained: chat template, stop, context and system message."""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import quoted
from trainer.data.hf_template import read_template
from trainer.data.plain_template import PLAIN_TEMPLATE
from trainer.generation.ollama_models import DEFAULTS
from trainyard import front_end
from trainyard.deploy.chat_template import SYSTEM, Derived, derive_apart
from trainyard.deploy.deploy_options import CONTEXT, DeployOptions
from trainyard.deploy.trained_run import TrainedRun


@dataclass(frozen=True)
class ModelSettings:
    """Settings of a deployed model."""

    template: str  # the Go template
    stop: tuple[str, ...]  # texts that end an answer
    context: int  # number of tokens (num_ctx); 0: the server's default
    system: str  # system message of chats that have none; empty for none
    bos: str  # the text of the token that raw prompts need and the server does not add
    notes: list[str] = field(default_factory=list)  # for the user, one line each
    reset: tuple[str, ...] = ()  # names of parameters that the base of an adapter sets

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of the model, as Ollama names them."""
        values = {"stop": list(self.stop), "num_ctx": self.context}
        return {name: DEFAULTS[name] for name in self.reset} | {name: value for name, value in values.items() if value}


class SettingsReader:
    """Reads the settings of the model of one run. `folder`: holds the tokenizer's files."""

    def __init__(self, run: TrainedRun, folder: Path, options: DeployOptions) -> None:
        """Raises UserError: the tokenizer's files are not valid."""
        self._run, self._options = run, options
        self._source, self._special = read_template(folder)

    def read(self, answers: Mapping[str, Any], adds_bos: bool, context: int) -> ModelSettings:
        """Return the settings.

        `answers`: those of the run, with their prompts. `adds_bos`: whether the server puts the first token before each
        prompt. `context`: tokens of the context of the model; 0 if it is unknown. Raises UserError: no Go template
        renders as the chat template does, it has no place for `deploy_system`, or `deploy_context` is more than the
        model has.
        """
        bos, notes = self._special.get("bos_token", ""), []
        template = self._options.template_text()
        if not template and answers["prompts"] and all("prompt" in prompt for prompt in answers["prompts"]):
            template = "{{ .Prompt }}"
            notes.append("the run was trained on text without a chat template, so the model gets prompts as they are")
        elif not template:
            derived = self._derive(answers["created"], bos if adds_bos else "")
            template, notes = derived.text, list(derived.notes)
            if self._options.deploy_system and SYSTEM not in template:
                raise UserError(
                    f"deploy_system: the chat template of {self._options.run} has no place for a system message: remove "
                    "deploy_system"
                )
        system = self._options.deploy_system
        if system is None and (system := common_system(answers["prompts"])):
            how = front_end.option("deploy_system", "TEXT")
            notes.append(f"system message of the training data: {quoted(system, 60)}; {how} sets another one")
        ends = dict.fromkeys([answers.get("stop", ""), self._special.get("eos_token", "")])
        return ModelSettings(
            template,
            tuple(filter(None, ends)),
            self._num_ctx(context),
            system or "",
            "" if adds_bos else answers.get("bos", ""),
            notes,
        )

    @functools.cache  # noqa: B019
    def _derive(self, created: str, added: str) -> Derived:
        today, source = datetime.datetime.fromisoformat(created), self._source or PLAIN_TEMPLATE
        return derive_apart(source, self._special, today, added, prepend=self._run.prepend)

    def _num_ctx(self, most: int) -> int:
        """Return the tokens of the context: what the model has, at most `CONTEXT` or a row of the training."""
        wanted = self._options.deploy_context
        if 0 < most < wanted:
            raise UserError(f"deploy_context: {wanted} tokens are more than the {most} of the model")
        return wanted or min(most, max(CONTEXT, self._run.seq_length))


def common_system(prompts: list[dict[str, Any]]) -> str:
    """Return the system message with which all prompts begin; empty if there is none."""
    first = {json.dumps(prompt.get("messages", [{}])[0]) for prompt in prompts}
    message = json.loads(first.pop()) if len(first) == 1 else {}
    return str(message.get("content", "")) if message.get("role") == "system" else ""
