"""Servers that write completions of a run, each with the newest adapter: Ollama, and servers with the API of vLLM.

The servers get the tokens of a prompt as the trainer has them, and sample from all tokens: no template, no penalty and no limit to
likely tokens changes the probabilities. Their replies are hostile: the client limits them, and `trainer.generation.rollouts` checks them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from trainer.common.formats import printable
from trainer.generation.ollama_client import MAX_ANSWER, Answer, Cancel, OllamaClient, OllamaError
from trainer.generation.ollama_models import NEUTRAL, adapter_misfit, create_body, small_model_options
from trainer.generation.pool import Task

_KEPT = 2  # adapters on a server: requests with the one before the newest may be under way
_LINE = 1024  # bytes of a token in a streamed answer, with the JSON around it
_REPEATS = 30  # of a token, after which Ollama may end an answer
_LOAD_LIMIT = 600.0  # s for a server to take an adapter, and to load its model
_UPLOAD_LIMIT = 7200.0  # s for a server to take the base model


@dataclass(frozen=True)
class Adapter:
    """An adapter of the run after `version` steps: its folder as peft writes it, and as GGUF with its SHA-256."""

    version: int
    folder: Path
    gguf: Path
    sha256: str


@dataclass(frozen=True)
class Base:
    """The base model on the servers: `name`, or the GGUF file `gguf` with its SHA-256 that they get.

    `tokens`: the vocabulary of the run, by id. `bos`: the text of the token that begins a prompt; empty if none does.
    """

    name: str
    tokens: Sequence[str]
    bos: str = ""
    gguf: Path | None = None
    sha256: str = ""


@dataclass(frozen=True)
class Sampling:
    """How servers write completions."""

    prefix: str  # of the names that adapters have on the servers; no other model of a server has it
    temperature: float  # of the probabilities
    limit: int  # tokens of a completion at most
    context: int  # tokens of a prompt with its completion at most
    timeout: float  # seconds for one completion


@dataclass
class RolloutRequest(Task):
    """One completion that a server writes.

    `step, place`: for which step of the run, and where in it. `tokens, text`: the prompt.
    """

    step: int
    place: int
    tokens: Sequence[int]
    text: str
    seed: int  # of the random numbers
    version: int = -1  # of the adapter; the server sets it
    ids: Sequence[int] | None = None  # tokens of the completion, from a server that tells them


class RolloutServer(ABC):
    """A Node of a pool that loads the newest adapter before it answers. Its methods raise OllamaError."""

    def __init__(self, name: str, sampling: Sampling, newest: Callable[[], Adapter]) -> None:
        """`newest` returns the newest adapter; any thread may call it."""
        self.name, self._sampling, self._newest = name, sampling, newest
        self._lock = threading.Lock()
        self._live: list[int] = []

    @abstractmethod
    def prepare(self, base: Base, prompt: RolloutRequest) -> None:
        """Get the server ready, and check with one prompt that it reads the prompt's tokens."""

    @abstractmethod
    def ask(self, prompt: RolloutRequest, cancel: Cancel) -> Answer:
        """Return the completion of a prompt by the newest adapter."""

    @abstractmethod
    def probe(self) -> None:
        """Return if the server answers at all."""

    @abstractmethod
    def load(self, adapter: Adapter) -> None:
        """Give the server an adapter."""

    @abstractmethod
    def unload(self, version: int) -> None:
        """Remove an adapter from the server."""

    def model(self, version: int) -> str:
        """Return the name of an adapter on the server."""
        return f"{self._sampling.prefix}{version}"

    def current(self) -> tuple[int, str]:
        """Return version and name of the newest adapter, which the server has now."""
        with self._lock:
            newest = self._newest()
            if newest.version not in self._live:
                self.load(newest)
                self._live.append(newest.version)
            while len(self._live) > _KEPT:
                self.unload(self._live.pop(0))
            return newest.version, self.model(newest.version)

    def _with_newest(self, prompt: RolloutRequest, write: Callable[[str], Answer]) -> Answer:
        """Return what `write` returns for the name of the newest adapter."""
        try:
            prompt.version, model = self.current()
            return write(model)
        except OllamaError as error:
            if error.failure in ("wait", "lost"):
                raise
            if error.status == 404:
                with self._lock:  # the server has started anew, without the adapter
                    self._live = [version for version in self._live if version != prompt.version]
            raise OllamaError(str(error), 500) from None  # another completion may succeed

    def close(self) -> None:
        """Remove from the server what it got."""
        while self._live:
            self.unload(self._live.pop())


class OllamaServer(RolloutServer):
    """Ollama, in a version that runs adapters. It gets an adapter as a blob, as `deploy.yml` does."""

    def __init__(self, name: str, url: str, sampling: Sampling, newest: Callable[[], Adapter]) -> None:
        super().__init__(name, sampling, newest)
        self._client = OllamaClient(url)
        self._version, self._base, self._adds = (0, 0, 0), "", ""
        self._options = {
            **NEUTRAL,
            "stop": [],  # a model may bring texts that end an answer
            "temperature": sampling.temperature,
            "num_predict": sampling.limit,
            "num_ctx": sampling.context,
        }

    def prepare(self, base: Base, prompt: RolloutRequest) -> None:
        """Put the base model and the newest adapter on the server, and check that it reads the prompt's tokens.

        Raises OllamaError: the server runs no adapters, lacks the base model, or has another vocabulary.
        """
        self._version = self._client.version()
        if why := adapter_misfit(self._version):
            raise OllamaError(why)
        for name in self._client.tags():  # of an earlier start that was killed
            if name.startswith(self._sampling.prefix):
                self._client.delete(name)
        self._base = base.name or f"{self._sampling.prefix}base"
        if base.gguf:
            self._client.put_blob(base.gguf, base.sha256, deadline=_UPLOAD_LIMIT)
            self._client.create(create_body(self._version, self._base, f"@sha256:{base.sha256}"), _UPLOAD_LIMIT)
        elif not self._client.digest(base.name):
            raise OllamaError(
                f"it has no model {printable(base.name, 80)}: run ollama pull there, or omit rollout_model"
            )
        info = self._client.show(self._base, verbose=True).get("model_info")
        fields = info if isinstance(info, dict) else {}
        self._check_tokens(fields.get("tokenizer.ggml.tokens"), base)
        self._adds = base.bos if fields.get("tokenizer.ggml.add_bos_token") is not False else ""
        self._options |= small_model_options(self._client, self._base)
        self._check_prompt(prompt, base)

    def _check_tokens(self, found: Any, base: Base) -> None:
        known = found[: len(base.tokens)] if isinstance(found, list) else []
        if known != list(base.tokens):
            raise OllamaError(
                f"the vocabulary of {printable(self._base, 80)} is not that of the run: set rollout_model to the same model"
            )

    def _check_prompt(self, prompt: RolloutRequest, base: Base) -> None:
        """Compare the number of tokens that the server reads. Without a token that it adds itself, it may be one less."""
        _, model = self.current()
        more: dict[str, Any] = {"options": self._options | {"num_predict": 1}, "raw": True}
        for adds in dict.fromkeys([self._adds, base.bos, ""]):
            self._adds = adds
            answer = self._client.generate(model, self._text(prompt), deadline=_LOAD_LIMIT, first=_LOAD_LIMIT, **more)
            if answer.prompt_tokens == len(prompt.tokens):
                return
        raise OllamaError(
            f"it reads a prompt of {len(prompt.tokens)} tokens as {answer.prompt_tokens}: the tokenizer differs from that of the run"
        )

    def ask(self, prompt: RolloutRequest, cancel: Cancel) -> Answer:
        """Return the completion of a prompt by the newest adapter. Raises OllamaError."""
        return self._with_newest(prompt, lambda model: self._generate(model, prompt, cancel))

    def _generate(self, model: str, prompt: RolloutRequest, cancel: Cancel) -> Answer:
        more: dict[str, Any] = {"deadline": self._sampling.timeout, "first": self._sampling.timeout, "cancel": cancel}
        more["keep"] = min(MAX_ANSWER, (self._sampling.limit + 16) * _LINE)  # the pool waits while a text is encoded
        text, left = "", self._sampling.limit
        while True:
            pieces: list[str] = []
            options = self._options | {"seed": prompt.seed + len(text), "num_predict": left}
            try:
                asked = self._text(prompt) + text
                answer = self._client.generate(model, asked, raw=True, options=options, hear=pieces.append, **more)
                return replace(answer, text=text + answer.text)
            except OllamaError:
                if len(pieces) < _REPEATS or len({piece.strip() for piece in pieces[-_REPEATS:]}) > 1:
                    raise
            # Ollama ends an answer at the 31st repetition of a token, which it keeps to itself: let it go on from there.
            text, left = text + "".join([*pieces, pieces[-1]]), left - len(pieces) - 1
            if left < 1:
                return Answer(text, "", "length", 0, 0.0, 0.0)

    def _text(self, prompt: RolloutRequest) -> str:
        return prompt.text.removeprefix(self._adds)

    def probe(self) -> None:
        """Return if the server answers at all. Raises OllamaError."""
        self._client.version()

    def load(self, adapter: Adapter) -> None:
        """Create a model of the base with this adapter. Raises OllamaError."""
        try:
            self._client.put_blob(adapter.gguf, adapter.sha256, deadline=_LOAD_LIMIT)
        except FileNotFoundError:
            raise OllamaError("a newer adapter has replaced the one that was sent", 503) from None
        body = create_body(self._version, self.model(adapter.version), self._base, adapter=f"@sha256:{adapter.sha256}")
        self._client.create(body, _LOAD_LIMIT)

    def unload(self, version: int) -> None:
        """Delete the model of this adapter. Raises OllamaError."""
        self._client.delete(self.model(version))

    def close(self) -> None:
        """Delete the models of this run, and the base that the server got. Raises OllamaError."""
        super().close()
        self._client.delete(f"{self._sampling.prefix}base")


class VLLMServer(RolloutServer):
    """A server with vLLM's API, such as vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1. It reads adapters from a folder that it shares.

    https://docs.vllm.ai/en/stable/features/lora.html
    """

    # What a request does not set is that of the model's generation_config.json, such as Qwen's repetition_penalty.
    _OPTIONS: ClassVar[Mapping[str, Any]] = {
        "top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }  # fmt: skip

    def __init__(self, name: str, url: str, sampling: Sampling, newest: Callable[[], Adapter], folder: str) -> None:
        """`folder`: where the server finds the adapters, each in a folder with its name."""
        super().__init__(name, sampling, newest)
        self._folder, self._client = folder, OllamaClient(url, port=80)

    def prepare(self, base: Base, prompt: RolloutRequest) -> None:
        """Load the newest adapter and write one token. Raises OllamaError."""
        _, model = self.current()
        self._complete(model, prompt, 1, None)

    def ask(self, prompt: RolloutRequest, cancel: Cancel) -> Answer:
        """Return the completion of a prompt by the newest adapter. Raises OllamaError."""
        return self._with_newest(prompt, lambda model: self._complete(model, prompt, self._sampling.limit, cancel))

    def _complete(self, model: str, prompt: RolloutRequest, limit: int, cancel: Cancel | None) -> Answer:
        body = {"model": model, "prompt": list(prompt.tokens), "max_tokens": limit, "seed": prompt.seed}
        body |= {"temperature": self._sampling.temperature, "return_token_ids": True, **self._OPTIONS}
        limits = {"deadline": self._sampling.timeout, "first": self._sampling.timeout}
        found = self._client.post("/completions", body, cancel=cancel, **limits)
        choices = found.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict) or not isinstance(choice.get("text"), str):
            raise OllamaError("the reply of /completions has no text")
        ids = choice.get("token_ids")
        prompt.ids = ids if isinstance(ids, list) else None
        finished = "length" if choice.get("finish_reason") == "length" else "stop"
        text = choice["text"].encode(errors="replace").decode()
        return Answer(text, "", finished, len(ids or ()), 0.0, 0.0)

    def probe(self) -> None:
        """Return if the server answers at all. Raises OllamaError."""
        self._client.get("/models", deadline=5.0)

    def load(self, adapter: Adapter) -> None:
        """Let the server read the adapter from the shared folder. Raises OllamaError."""
        name = self.model(adapter.version)
        self.unload(adapter.version)  # of an earlier start that was killed: vLLM takes no name twice
        body = {"lora_name": name, "lora_path": f"{self._folder}/{name}"}
        self._client.send("/load_lora_adapter", body, deadline=_LOAD_LIMIT)

    def unload(self, version: int) -> None:
        """Let the server forget an adapter, if it has it. Raises OllamaError."""
        try:
            self._client.send("/unload_lora_adapter", {"lora_name": self.model(version)})
        except OllamaError as error:
            if error.status != 404:
                raise


def model_prefix(run: str, token: str) -> str:
    """Return the beginning of the names that the models of a run have on its servers, where a name has at most 80 characters.

    `token`: 8 characters that no other run has.
    """
    return f"trainyard-rollouts-{run[:40]}-{token[:8]}-v"
