"""Teachers: what they are asked, and a model on an Ollama server that answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from trainer.generation import pool
from trainer.generation.ollama_client import Answer, Cancel, OllamaClient
from trainer.generation.ollama_models import ModelFacts, chat_bytes


@dataclass
class Prompt(pool.Task):
    """One chat to answer.

    Attributes:
        options: options of the model.
        sample: counts repeated answers to the same chat.
        room: tokens of a context in which each chat of all prompts fits with its answer, see `room_for`; 0: the server's default.
        think: whether the thinking before the answer is wanted.
    """

    messages: Sequence[Mapping[str, str]]
    options: Mapping[str, Any]
    sample: int = 0
    room: int = 0
    think: bool = True


class Teacher(pool.Node[Prompt], Protocol):
    """A server that answers prompts."""

    @property
    def digest(self) -> str:
        """Digest of its model."""
        ...


@dataclass(frozen=True)
class OllamaNode:
    """A model on an Ollama server.

    Attributes:
        name: name of the host.
        model: name of the model on the server.
        facts: what the server tells of it.
        limit: seconds for one answer.
    """

    name: str
    client: OllamaClient
    model: str
    facts: ModelFacts
    limit: float = 1800.0

    @property
    def digest(self) -> str:
        """Digest of the model."""
        return self.facts.digest

    def ask(self, prompt: Prompt, cancel: Cancel) -> Answer:
        """Return the answer to a prompt."""
        context = min(prompt.room, self.facts.context or prompt.room)
        options = dict(prompt.options) | ({"num_ctx": context} if context else {})
        more: dict[str, Any] = {"deadline": self.limit, "first": self.limit, "cancel": cancel}
        if self.facts.thinks and not prompt.think:
            more["fields"] = {"think": False}
        answer = self.client.chat(self.model, prompt.messages, options=options, **more)
        if len(prompt.messages) < 2 or answer.truncated or not 0 < context < chat_bytes(prompt.messages):
            return answer
        # A server drops the first messages of a chat that is too long, and tells the tokens of the others.
        rest = prompt.messages[prompt.messages[0]["role"] == "system" :]
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
