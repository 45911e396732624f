"""How a model is made on an Ollama server. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trainer.generation.ollama_client import OllamaClient

NEW_FORM = (0, 5, 5)  # the first version whose /api/create takes `files` and `adapters`
ADAPTERS_END, ADAPTERS_AGAIN = (0, 6, 0), (0, 30, 0)  # the versions between ran models without adapters

_SMALL = 64_000_000  # bytes of a model whose layers one thread computes faster than threads that wait for each other


def small_model_options(client: OllamaClient, name: str) -> dict[str, Any]:
    """Return the options that make a small model fast; none for another model. Raises OllamaError."""
    return {"num_thread": 1} if 0 < client.size(name) < _SMALL else {}


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

    Args:
        source: name of a model, or `@sha256:` and the digest of a blob, which is a whole model.
        adapter: `@sha256:` and the digest of a blob.
        parameters: numbers and lists of texts.

    Raises:
        ValueError: this version cannot read a text.
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
