"""Teachers: what they are asked, and a model on an Ollama server that answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.generation import pool
from trainer.generation.ollama_client import Answer, Cancel, OllamaClient


@dataclass
class Prompt(pool.Task):
    """One chat to answer.

    Attributes:
        options: options of the model.
        sample: counts repeated answers to the same chat.
    """

    messages: Sequence[Mapping[str, str]]
    options: Mapping[str, Any]
    sample: int = 0


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
        digest: digest of the model.
        limit: seconds for one answer.
    """

    name: str
    client: OllamaClient
    model: str
    digest: str
    limit: float = 1800.0

    def ask(self, prompt: Prompt, cancel: Cancel) -> Answer:
        """Return the answer to a prompt."""
        more: dict[str, Any] = {"deadline": self.limit, "first": self.limit, "cancel": cancel}
        return self.client.chat(self.model, prompt.messages, options=prompt.options, **more)

    def probe(self) -> None:
        """Return if the server answers at all."""
        self.client.version()
