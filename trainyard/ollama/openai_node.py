"""Servers with the API of OpenAI, such as vLLM, llama.cpp's server and LM Studio: `/chat/completions` over HTTP."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from trainer.common.errors import UserError
from trainer.common.formats import printable, quoted
from trainer.generation.ollama_client import (
    Answer,
    Cancel,
    OllamaClient,
    OllamaError,
    count_of,
    hide_password,
    is_server_url,
)
from trainer.generation.ollama_models import seems_truncated
from trainyard.ollama.teacher_nodes import Prompt, require_local

KEY = "TRAINYARD_TEACHER_KEY"  # the environment variable with the key that the servers ask for
_SHOWN = 5  # models in a message


@dataclass(frozen=True)
class OpenAINode:
    """A model on such a server. It is a Node of a ServerPool."""

    name: str  # of the server, for messages
    model: str
    url: str  # of the API, such as http://10.0.0.5:8000/v1; without a port, the port is 80
    digest: str = ""  # what the answers are kept under; the API has no digest of a model
    limit: float = 1800.0  # seconds for one answer
    key: str = field(default="", repr=False)  # that the server asks for; empty for none
    _client: OllamaClient = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Raises OllamaError if `url` is no address of an API."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        client = OllamaClient(self.url, port=80, idle_timeout=self.limit, deadline=self.limit, headers=headers)
        object.__setattr__(self, "_client", client)

    def ask(self, prompt: Prompt, cancel: Cancel) -> Answer:
        """Return the answer to a prompt. Raises OllamaError.

        The time until the first token counts as the time in the queue, because the API does not tell it.
        """
        options = prompt.options
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(prompt.messages),
            "temperature": options.get("temperature", 0),
            "max_tokens": options["num_predict"],
            "seed": options.get("seed"),
            # What a request leaves open, a server may take from the model's settings.
            **{name: options[name] for name in ("top_p", "presence_penalty", "frequency_penalty") if name in options},
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text: list[str] = []
        thinking: list[str] = []
        began, first, reason, tokens, read = time.monotonic(), 0.0, "", 0, 0
        for event in self._client.events("/chat/completions", body, cancel=cancel, first=self.limit):
            for choice in _choices(event):
                message = choice.get("delta") or choice.get("message") or {}
                # One field, two names: `reasoning` of Ollama and newer vLLM.
                reasoning = "reasoning_content" if message.get("reasoning_content") else "reasoning"
                for name, parts in (("content", text), (reasoning, thinking)):
                    part = message.get(name)
                    if part is not None and not isinstance(part, str):
                        raise OllamaError("the reply of /chat/completions has no text", 500)
                    # A lone surrogate could not be written.
                    parts.append((part or "").encode(errors="replace").decode())
                first = first or (time.monotonic() if message else 0.0)
                tokens += bool(message)
                reason = choice.get("finish_reason") or reason
            tokens = count_of(event.get("usage"), "completion_tokens") or tokens
            read = count_of(event.get("usage"), "prompt_tokens") or read
        if not reason:
            raise OllamaError("the reply of /chat/completions has no complete answer")
        seconds = time.monotonic() - began
        finished = "length" if reason == "length" else "stop"
        queued = first - began if len(text) > 1 else 0.0  # unknown where the answer comes in one piece
        truncated = seems_truncated(prompt.messages, read)
        return Answer("".join(text), "".join(thinking), finished, tokens, queued, seconds, read, truncated)

    def probe(self) -> None:
        """Return if the server answers at all."""
        self.models(5.0)

    def remote(self) -> str:
        """Return the host that computes the answers, if the server is an Ollama with a model of a cloud; empty for none."""
        with contextlib.suppress(OllamaError):
            parts = urlsplit(self.url)
            entry = OllamaClient(f"{parts.scheme}://{parts.netloc}", port=80, deadline=5.0).entry(self.model)
            return printable(entry.get("remote_host") or "", 80)
        return ""

    def models(self, limit: float) -> list[str]:
        """Return the names of the models that the server lists within `limit` seconds. Raises OllamaError."""
        found = self._client.get("/models", deadline=limit).get("data")
        names = [each.get("id") for each in found if isinstance(each, dict)] if isinstance(found, list) else []
        return [name for name in names if isinstance(name, str)]


def _choices(event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    found = event.get("choices")
    if not isinstance(found, list) or not all(
        isinstance(choice, dict) and isinstance(choice.get("delta") or choice.get("message") or {}, dict)
        for choice in found
    ):
        raise OllamaError("the reply of /chat/completions has no answer", 500)
    yield from found[:1]


def openai_teachers(urls: Sequence[str], model: str, limit: float, remote: bool = False) -> list[OpenAINode]:
    """Return the servers at these URLs, which all have the model. `remote`: also that of a cloud. Raises UserError."""
    for url in urls:
        if not is_server_url(url):
            shown = quoted(hide_password(url))
            raise UserError(
                f"teacher_url: got {shown}, expected the address of an API without user: http://10.0.0.5:8000/v1"
            )
    key = os.environ.get(KEY, "")
    if not key.isprintable() or not key.isascii():
        raise UserError(f"teacher_url: the environment variable {KEY} has characters that no key has")
    nodes = [
        OpenAINode(url.removeprefix("http://").partition("/")[0], model, url, f"openai {model}", limit, key)
        for url in urls
    ]
    with concurrent.futures.ThreadPoolExecutor(len(nodes)) as executor:
        for node, error in zip(nodes, executor.map(_problem, nodes), strict=True):
            if error:
                raise UserError(f"teacher_url: {printable(node.url, 80)}: {error}")
    for node in nodes:
        if not remote:
            require_local(node.remote(), node.model, node.name)
    return nodes


def _problem(node: OpenAINode) -> str:
    """Return why a server does not teach; empty if it does."""
    try:
        names = node.models(10.0)
    except OllamaError as error:
        return f"{error}: start the server, or remove it (a key belongs in the environment variable {KEY})"
    if node.model in names:
        return ""
    shown = ", ".join(printable(name, 60) for name in names[:_SHOWN]) or "none"
    return f"it has no model {printable(node.model, 80)}, but {shown}: set teacher to one of them"
