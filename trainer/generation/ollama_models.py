"""How a model is made on an Ollama server, what a server tells of one, and how it is asked. Standard library only."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from trainer.generation.ollama_client import OllamaClient

# What a request leaves open, a Modelfile may set. All tokens may be drawn, at their probabilities.
NEUTRAL: dict[str, Any] = {
    "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "mirostat": 0,
}  # fmt: skip
GREEDY = NEUTRAL | {"temperature": 0, "top_k": 1, "seed": 1}  # what ends an answer (`stop`) belongs to the model

NEW_FORM = (0, 5, 5)  # the first version whose /api/create takes `files` and `adapters`
ADAPTERS_END, ADAPTERS_AGAIN = (0, 6, 0), (0, 30, 0)  # the versions between ran models without adapters

# What a server takes where a Modelfile leaves it open. A model that is made of another one inherits what that one sets.
DEFAULTS: dict[str, Any] = {
    "temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.0, "typical_p": 1.0, "repeat_last_n": 64, "repeat_penalty": 1.1,
    "presence_penalty": 0.0, "frequency_penalty": 0.0, "mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5.0, "seed": -1,
    "num_predict": -1, "num_keep": 4,
}  # fmt: skip

_SPARSE = 10  # bytes of a token that no text has on average
_AROUND, _BETWEEN = 128, 16  # tokens of a chat template: a default system message, and for each message
_BLOB = re.compile(r"\S*sha256[-:]([0-9a-f]{64})")
_SMALL = 64_000_000  # bytes of a model whose layers one thread computes faster than threads that wait for each other


def small_model_options(client: OllamaClient, name: str) -> dict[str, Any]:
    """Return the options that make a small model fast; none for another model. Raises OllamaError."""
    return {"num_thread": 1} if 0 < client.size(name) < _SMALL else {}


@dataclass(frozen=True)
class ModelFacts:
    """What a server tells of a model.

    Attributes:
        remote: the host that computes its answers outside of this server, for a model of a cloud; empty for none.
    """

    digest: str  # of the model on this server; empty if it is not there
    contents: str = ""  # of its files and settings, wherever the server keeps the files; empty if it is unknown
    context: int = 0  # tokens of its context at most; 0 if it is unknown
    thinks: bool = False  # whether a request may say that it shall not think
    chats: bool = True  # whether it answers chats
    remote: str = ""


ABSENT = ModelFacts("")


def read_facts(client: OllamaClient, model: str) -> ModelFacts:
    """Return what a server tells of a model. Raises OllamaError."""
    entry = client.entry(model)
    if not entry:
        return ABSENT
    shown = client.show(model)
    info, able, text = shown.get("model_info"), shown.get("capabilities"), shown.get("modelfile")
    context = info.get(f"{info.get('general.architecture')}.context_length") if isinstance(info, dict) else 0
    words = able if isinstance(able, list) else []  # none before 0.6.4
    remote = next((str(each["remote_host"]) for each in (entry, shown) if each.get("remote_host")), "")
    return ModelFacts(
        entry["digest"],
        _contents(text) if isinstance(text, str) else "",
        context if isinstance(context, int) and context > 0 else 0,
        thinks="thinking" in words,
        chats="completion" in words or not words,
        remote="".join(filter(str.isprintable, remote))[:80],
    )


def _contents(modelfile: str) -> str:
    """Return a digest of a Modelfile without its first comments, the folder of the files, and the order of its lines."""
    lines = itertools.dropwhile(lambda line: not line.strip() or line.startswith("#"), modelfile.splitlines())
    plain = sorted(_BLOB.sub(r"\1", line) for line in lines if line.strip())
    return hashlib.sha256("\n".join(plain).encode(errors="replace")).hexdigest() if plain else ""


def chat_bytes(messages: Sequence[Mapping[str, str]]) -> int:
    """Return an upper bound of the tokens of a chat."""
    return _AROUND + sum(_BETWEEN + len(message["content"].encode(errors="replace")) for message in messages)


def room_for(chats: Iterable[Sequence[Mapping[str, str]]], tokens: int) -> int:
    """Return the tokens of a context (num_ctx) in which the longest chat and an answer of `tokens` fit, at 2 bytes a token."""
    return -(-(max(map(chat_bytes, chats), default=0) // 2 + tokens) // 1024) * 1024


def seems_truncated(messages: Sequence[Mapping[str, str]], read: int) -> bool:
    """Return whether a server has read a part of a chat, by the number of tokens that it has read; 0: it does not tell.

    For servers without num_ctx: a truncated prompt fills the context, which has a multiple of 1024 tokens.
    """
    return read > 0 and (read % 1024 == 0 or chat_bytes(messages) - _AROUND > _SPARSE * read + _BETWEEN * len(messages))


def takes_adapters(version: tuple[int, int, int]) -> bool:
    """Return whether this version runs models with adapters."""
    return version < ADAPTERS_END or version >= ADAPTERS_AGAIN


def adapter_misfit(version: tuple[int, int, int]) -> str:
    """Return why this version writes no completions with adapters; empty if it does."""
    shown = ".".join(map(str, version))
    return "" if takes_adapters(version) else f"Ollama {shown} runs no adapters: update it to 0.30 or later"


def create_body(
    version: tuple[int, int, int],
    name: str,
    source: str,
    *,
    adapter: str = "",
    quantize: str = "",
    template: str = "",
    system: str = "",
    parameters: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the body of /api/create in the form that this version of the server takes.

    `source`: name of a model, or `@sha256:` and the digest of a blob, which is a whole model. `adapter`: `@sha256:` and
    the digest of a blob. `parameters`: numbers and lists of texts. Raises ValueError: this version cannot read a text.
    """
    if version >= NEW_FORM:
        blob = source.startswith("@")
        body: dict[str, Any] = {"files": {"model.gguf": source[1:]}} if blob else {"from": source}
        body |= {"adapters": {"adapter.gguf": adapter[1:]}} if adapter else {}
        body |= {"template": template, "system": system, "parameters": dict(parameters), "quantize": quantize}
        return {"model": name} | {key: value for key, value in body.items() if value}
    lines = [f"FROM {source}"] + ([f"ADAPTER {adapter}"] if adapter else [])
    for word, text in (("TEMPLATE", template), ("SYSTEM", system)):
        if '"""' in text or text.endswith('"'):
            raise ValueError(
                f'the {word.lower()} contains """ or ends with ", which this version of Ollama cannot read'
            )
        lines += [f'{word} """{text}"""'] if text else []
    for key, value in parameters.items():
        for part in value if isinstance(value, list) else [value]:
            if '"' in str(part) or "\n" in str(part):
                raise ValueError(f'{key} contains " or a line end, which this version of Ollama cannot read')
            lines.append(f"PARAMETER {key} {part}" if isinstance(part, int) else f'PARAMETER {key} "{part}"')
    return {"model": name, "modelfile": "\n".join(lines) + "\n"} | ({"quantize": quantize} if quantize else {})
