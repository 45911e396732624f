"""Teachers: what they are asked, and a model on an Ollama server that answers."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from trainer.common.errors import UserError
from trainer.common.formats import printable
from trainer.generation import pool
from trainer.generation.ollama_client import Answer, Cancel, OllamaClient, OllamaError
from trainer.generation.ollama_models import ModelFacts, chat_bytes
from trainyard import front_end


@dataclass
class Prompt(pool.Task):
    """One chat to answer.

    Attributes:
        room: tokens of a context in which each chat of all prompts fits with its answer, see `room_for`; 0: the server's default.
    """

    messages: Sequence[Mapping[str, str]]
    options: Mapping[str, Any]  # options of the model
    sample: int = 0  # counts repeated answers to the same chat
    room: int = 0
    think: bool = True  # whether the thinking before the answer is wanted


class Teacher(pool.Node[Prompt], Protocol):
    """A server that answers prompts."""

    @property
    def digest(self) -> str:
        """Digest of its model."""
        ...


def require_local(remote: str, model: str, name: str) -> None:
    """Raise UserError if `remote`, a host outside of the server `name`, computes the answers of a model."""
    if remote:
        raise UserError(
            f"teacher: {remote} computes {printable(model, 80)} of {name}: prompts would leave this network; choose another model, "
            f"or permit it with {front_end.option('teacher_remote')}"
        )


@dataclass(frozen=True)
class OllamaNode:
    """A model on an Ollama server."""

    name: str  # name of the host
    client: OllamaClient
    model: str  # name of the model on the server
    facts: ModelFacts  # what the server tells of it
    limit: float = 1800.0  # seconds for one answer

    @property
    def digest(self) -> str:
        """Digest of the model."""
        return self.facts.digest

    def ask(self, prompt: Prompt, cancel: Cancel, **how: Any) -> Answer:
        """Return the answer to a prompt. `how`: as in `OllamaClient.chat`."""
        context = min(prompt.room, self.facts.context or prompt.room)
        options = dict(prompt.options) | ({"num_ctx": context} if context else {})
        more: dict[str, Any] = {"deadline": self.limit, "first": self.limit, "cancel": cancel}
        if self.facts.thinks and not prompt.think:
            more["fields"] = {"think": False}
        answer = self.client.chat(self.model, prompt.messages, options=options, **more, **how)
        rest = prompt.messages[prompt.messages[0]["role"] == "system" :]
        if len(rest) < 2 or answer.truncated or not 0 < context < chat_bytes(prompt.messages):
            return answer
        # A server drops the first messages of a chat that is too long, and tells the tokens of the others.
        whole = [
            *prompt.messages[: -len(rest)],
            {"role": "user", "content": "\n".join(each["content"] for each in rest)},
        ]
        read = self.client.chat(self.model, whole, options=options | {"num_predict": 1}, **more)
        dropped = read.truncated or read.prompt_tokens > answer.prompt_tokens + len(rest)
        return replace(answer, truncated=dropped)

    def probe(self) -> None:
        """Return if the server answers at all."""
        self.client.version()

    def replaced(self) -> bool:
        """Return whether the server has another model of this name now."""
        with contextlib.suppress(OllamaError):
            return self.client.digest(self.model) != self.digest
        return False
