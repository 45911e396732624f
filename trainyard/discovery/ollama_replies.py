"""Replies of Ollama's API, parsed strictly. Source: https://github.com/ollama/ollama/blob/main/docs/api.md

Text from the network must have no control, bidirectional or unassigned characters and at most 256 characters.
An entry that violates a rule is ignored and counted. A reply with another structure is not from Ollama.
"""

import contextlib
import ipaddress
import re
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)

from trainer.generation.ollama_client import OllamaError

MAX_MODELS = 1000  # per server; further models are ignored and counted


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has characters that are not printable")
    return text


Text = Annotated[str, StringConstraints(max_length=256), AfterValidator(_printable)]
Optional = Annotated[Text, BeforeValidator(lambda value: "" if value is None else value)]
Name = Annotated[Text, StringConstraints(min_length=1)]
Bytes = Annotated[int, Field(ge=0, le=1 << 53)]
Address = Annotated[str, AfterValidator(lambda text: str(ipaddress.ip_address(text)))]
Port = Annotated[int, Field(ge=1, le=65535)]


class Strict(BaseModel):
    """Types are not converted (a number is not accepted as text), and unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


def _detail(name: str, reply_name: str) -> Any:
    """Return a field that a reply has in `details`, and the cache under its own name."""
    return Field("", validation_alias=AliasChoices(name, AliasPath("details", reply_name)))


class Model(Strict):
    """A model on the disk of a server, as in an entry of /api/tags. `size` is in bytes; `modified_at` has nanosecond precision.

    `remote`: the host that computes its answers, for a model of a cloud.
    """

    name: Name
    size: Bytes = 0
    digest: Optional = ""
    family: Optional = _detail("family", "family")
    parameters: Optional = _detail("parameters", "parameter_size")
    quantisation: Optional = _detail("quantisation", "quantization_level")
    modified_at: Optional = ""
    remote: Annotated[Optional, Field(validation_alias=AliasChoices("remote", "remote_host"))] = ""


class Loaded(Strict):
    """A model in the memory of a server, as in an entry of /api/ps; sizes are in bytes."""

    name: Name
    size: Bytes = 0
    vram: Annotated[Bytes, Field(validation_alias=AliasChoices("vram", "size_vram"))] = 0


class Server(BaseModel):
    """An Ollama server. `response_ms` is the time from the connection to the last byte of the reply of /api/version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: Address
    port: Port
    version: Text
    models: tuple[Model, ...] = ()
    loaded: tuple[Loaded, ...] = ()
    response_ms: float = 0.0


Entry = TypeVar("Entry", Model, Loaded)
Reply = dict[str, Any]


def version(reply: Reply) -> str:
    """Return the version from a reply of /api/version. Raises OllamaError if the reply is not from Ollama."""
    text = reply.get("version")
    if not isinstance(text, str) or not re.fullmatch(r"\d{1,5}\.\d{1,5}\.\d{1,5}[\w.+-]{0,64}", text, re.ASCII):
        raise OllamaError("/api/version has no version")
    return text


def models(reply: Reply) -> tuple[list[Model], int]:
    """Return the models from a reply of /api/tags, sorted by name, and the number of ignored entries.

    Raises OllamaError if the reply is not from Ollama.
    """
    return _entries(reply, "/api/tags", Model)


def loaded(reply: Reply) -> list[Loaded]:
    """Return the loaded models from a reply of /api/ps, sorted by name. Raises OllamaError if the reply is not from Ollama."""
    return _entries(reply, "/api/ps", Loaded)[0]


def _entries(reply: Reply, path: str, kind: type[Entry]) -> tuple[list[Entry], int]:
    listed = reply.get("models", ...)
    if listed is None:  # how Go encodes an empty list
        listed = []
    if not isinstance(listed, list):
        raise OllamaError(f"{path} has no list of models")
    entries = []
    for entry in listed[:MAX_MODELS]:
        with contextlib.suppress(ValidationError):
            entries.append(kind.model_validate(entry))
    return sorted(entries, key=lambda entry: entry.name), len(listed) - len(entries)
