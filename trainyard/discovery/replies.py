"""Replies of Ollama's API, parsed strictly. Source: https://github.com/ollama/ollama/blob/main/docs/api.md

Text from the network must have no control, bidirectional or unassigned characters and at most 256 characters.
An entry that violates a rule is ignored and counted. A reply with another structure is not from Ollama.
"""

import re
from typing import Annotated, Any

import pydantic_core
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from .http import BadReply

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


class Details(Strict):
    """`details` of a model."""

    family: Optional = ""
    parameter_size: Optional = ""
    quantization_level: Optional = ""


class TaggedModel(Strict):
    """An entry of /api/tags."""

    name: Name
    size: Bytes = 0
    digest: Optional = ""
    modified_at: Optional = ""
    details: Annotated[Details, BeforeValidator(lambda v: {} if v is None else v)] = Details()


class RunningModel(Strict):
    """An entry of /api/ps."""

    name: Name
    size: Bytes = 0
    size_vram: Bytes = 0


class Model(Strict):
    """A model on the disk of a server. `size` is in bytes; `modified_at` has nanosecond precision."""

    name: Name
    size: Bytes
    digest: Text
    family: Text
    parameters: Text
    quantisation: Text
    modified_at: Text


class Loaded(Strict):
    """A model in the memory of a server; sizes are in bytes."""

    name: Name
    size: Bytes
    vram: Bytes


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
    entries, dropped = _entries(body, "/api/tags", TaggedModel)
    models = [
        Model(
            name=e.name,
            size=e.size,
            digest=e.digest,
            family=e.details.family,
            parameters=e.details.parameter_size,
            quantisation=e.details.quantization_level,
            modified_at=e.modified_at,
        )
        for e in entries
    ]
    return sorted(models, key=lambda m: m.name), dropped


def parse_ps(body: bytes) -> list[Loaded]:
    """Return the loaded models from a reply of /api/ps, sorted by name.

    Raises:
        BadReply: the reply is not from Ollama.
    """
    entries, _ = _entries(body, "/api/ps", RunningModel)
    return sorted((Loaded(name=e.name, size=e.size, vram=e.size_vram) for e in entries), key=lambda m: m.name)


def _entries(body: bytes, path: str, kind: type[Strict]) -> tuple[list[Any], int]:
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
