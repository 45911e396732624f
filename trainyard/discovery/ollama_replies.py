"""Replies of Ollama's API, parsed strictly. Source: https://github.com/ollama/ollama/blob/main/docs/api.md

Text from the network must have no control, bidirectional or unassigned characters and at most 256 characters.
An entry that violates a rule is ignored and counted. A reply with another structure is not from Ollama.
"""

import re
from typing import Annotated, Any, TypeVar

import pydantic_core
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

from trainyard.discovery.http import BadReply

MAX_MODELS = 1000  # per server; further models are ignored and counted


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has characters that are not printable")
    return text


def _empty_if_none(value: Any) -> Any:
    return "" if value is None else value


Text = Annotated[str, StringConstraints(max_length=256), AfterValidator(_printable)]
Optional = Annotated[Text, BeforeValidator(_empty_if_none)]
Name = Annotated[Text, StringConstraints(min_length=1)]
Bytes = Annotated[int, Field(ge=0, le=1 << 53)]


class Strict(BaseModel):
    """Types are not converted (a number is not accepted as text), and unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


def _detail(name: str, reply_name: str) -> Any:
    """Return a field that a reply has in `details`, and the cache under its own name."""
    return Field("", validation_alias=AliasChoices(name, AliasPath("details", reply_name)))


class Model(Strict):
    """A model on the disk of a server, as in an entry of /api/tags. `size` is in bytes; `modified_at` has nanosecond precision."""

    name: Name
    size: Bytes = 0
    digest: Optional = ""
    family: Optional = _detail("family", "family")
    parameters: Optional = _detail("parameters", "parameter_size")
    quantisation: Optional = _detail("quantisation", "quantization_level")
    modified_at: Optional = ""


class Loaded(Strict):
    """A model in the memory of a server, as in an entry of /api/ps; sizes are in bytes."""

    name: Name
    size: Bytes = 0
    vram: Annotated[Bytes, Field(validation_alias=AliasChoices("vram", "size_vram"))] = 0


Entry = TypeVar("Entry", Model, Loaded)


def parse_version(body: bytes) -> str:
    """Return the version from a reply of /api/version.

    Raises:
        BadReply: the reply is not from Ollama.
    """
    reply = _object(body, "/api/version")
    version = reply.get("version")
    if not isinstance(version, str) or not re.fullmatch(r"\d{1,5}\.\d{1,5}\.\d{1,5}[\w.+-]{0,64}", version, re.ASCII):
        raise BadReply("/api/version has no version")
    return version


def parse_tags(body: bytes) -> tuple[list[Model], int]:
    """Return the models from a reply of /api/tags, sorted by name, and the number of ignored entries.

    Raises:
        BadReply: the reply is not from Ollama.
    """
    models, dropped = _entries(body, "/api/tags", Model)
    return sorted(models, key=lambda m: m.name), dropped


def parse_ps(body: bytes) -> list[Loaded]:
    """Return the loaded models from a reply of /api/ps, sorted by name.

    Raises:
        BadReply: the reply is not from Ollama.
    """
    return sorted(_entries(body, "/api/ps", Loaded)[0], key=lambda m: m.name)


def _entries(body: bytes, path: str, kind: type[Entry]) -> tuple[list[Entry], int]:
    reply = _object(body, path)
    listed = reply.get("models", ...)
    if listed is None:  # how Go encodes an empty list
        listed = []
    if not isinstance(listed, list):
        raise BadReply(f"{path} has no list of models")
    entries = []
    for entry in listed[:MAX_MODELS]:
        try:
            entries.append(kind.model_validate(entry))
        except ValidationError:
            continue
    return entries, len(listed) - len(entries)


def _object(body: bytes, path: str) -> dict:
    try:
        reply = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError:
        raise BadReply(f"{path} is not JSON") from None
    if not isinstance(reply, dict):
        raise BadReply(f"{path} is not a JSON object")
    return reply
