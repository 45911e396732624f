"""What Ollama's API says, parsed strictly. Source: https://github.com/ollama/ollama/blob/main/docs/api.md

Text from the network may not carry control, bidirectional or unassigned characters, nor run longer than 256.
One entry that breaks a rule is left out and counted; a reply of the wrong shape is not Ollama's.
"""

import re
from typing import Annotated, Any

import pydantic_core
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from .http import BadReply

MAX_MODELS = 1000  # per server; what lies beyond is left out and counted


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


def _empty_if_none(value: Any) -> Any:
    return "" if value is None else value


Text = Annotated[str, StringConstraints(max_length=256), AfterValidator(_printable)]
Optional = Annotated[Text, BeforeValidator(_empty_if_none)]
Name = Annotated[Text, StringConstraints(min_length=1)]
Bytes = Annotated[int, Field(ge=0, le=1 << 53)]


class Strict(BaseModel):
    """Types are taken as they come (no text for a number); fields that we do not know are not looked at."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Details(Strict):
    """`details` of a model."""

    family: Optional = ""
    parameter_size: Optional = ""
    quantization_level: Optional = ""


class TaggedModel(Strict):
    """One entry of /api/tags."""

    name: Name
    size: Bytes = 0
    digest: Optional = ""
    modified_at: Optional = ""
    details: Annotated[Details, BeforeValidator(lambda v: {} if v is None else v)] = Details()


class RunningModel(Strict):
    """One entry of /api/ps."""

    name: Name
    size: Bytes = 0
    size_vram: Bytes = 0


class Model(Strict):
    """A model on a server's disk. `size` in bytes; `modified_at` is precise to the nanosecond."""

    name: Name
    size: Bytes
    digest: Text
    family: Text
    parameters: Text
    quantisation: Text
    modified_at: Text


class Loaded(Strict):
    """A model in a server's memory; sizes in bytes."""

    name: Name
    size: Bytes
    vram: Bytes


def parse_version(body: bytes) -> str:
    """The version out of /api/version.

    Raises:
        BadReply: not Ollama's reply.
    """
    reply = _object(body, "/api/version")
    version = reply.get("version")
    if not isinstance(version, str) or not re.fullmatch(r"\d{1,5}\.\d{1,5}\.\d{1,5}[\w.+-]{0,64}", version, re.ASCII):
        raise BadReply("/api/version has no version")
    return version


def parse_tags(body: bytes) -> tuple[list[Model], int]:
    """The models out of /api/tags in order of name, and how many entries were left out.

    Raises:
        BadReply: not Ollama's reply.
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
    """The loaded models out of /api/ps in order of name.

    Raises:
        BadReply: not Ollama's reply.
    """
    entries, _ = _entries(body, "/api/ps", RunningModel)
    return sorted((Loaded(name=e.name, size=e.size, vram=e.size_vram) for e in entries), key=lambda m: m.name)


def _entries(body: bytes, path: str, kind: type[Strict]) -> tuple[list[Any], int]:
    reply = _object(body, path)
    listed = reply.get("models", ...)
    if listed is None:  # Go's empty list
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
