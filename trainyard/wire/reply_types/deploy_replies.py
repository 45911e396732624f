"""The types of the replies to the verbs that deploy a model."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import Field

from trainer.generation.ollama_names import MODEL_NAME
from trainyard.remote.ollama import BASES_LIMIT
from trainyard.wire.reply_fields import Count, Digest, Flag, Line, OpenReply, Text


class OllamaBase(OpenReply):
    name: Annotated[str, Field(pattern=f"^{MODEL_NAME.pattern}$")]
    digest: Digest
    architecture: Line
    shape: Annotated[list[Count], Field(min_length=5, max_length=5)]
    tokens: Digest
    context: Count
    fields: Annotated[dict[Line, Line], Field(max_length=1000)]
    parameters: Annotated[list[Line], Field(max_length=100)]


class OllamaRecord(OpenReply):
    key: Line
    digest: Line
    refused: Annotated[list[Line], Field(max_length=BASES_LIMIT)]


class OllamaState(OpenReply):
    server: Line
    version: Annotated[list[Count], Field(min_length=3, max_length=3)]
    adapters: Flag
    digest: Line
    record: OllamaRecord | None
    bases: Annotated[list[OllamaBase], Field(max_length=BASES_LIMIT)]
    models: Count
    read: Count


class OllamaPrepare(OpenReply):
    lacking: Flag


class OllamaCreate(OpenReply):
    answers: Annotated[list[Text], Field(max_length=1000)]
    accepted: Flag
    error: NotRequired[Line]


class OllamaRemove(OpenReply):
    changed: Flag
    foreign: NotRequired[Flag]


class GreedyPrompt(OpenReply):
    messages: NotRequired[Annotated[list[dict[str, Text]], Field(min_length=1, max_length=1000)]]
    prompt: NotRequired[Text]


class GreedyAnswers(OpenReply):
    created: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d$")]
    max_tokens: Annotated[int, Field(strict=True, ge=1, le=1000)]
    bos: Annotated[str, Field(max_length=100)]
    stop: NotRequired[Annotated[str, Field(max_length=100)]]
    prompts: Annotated[list[GreedyPrompt], Field(max_length=1000)]
    answers: Annotated[list[Text], Field(max_length=1000)]


class GgufFile(OpenReply):
    path: Line
    bytes: Count
    sha256: Digest
    adds_bos: Flag
    context: Count


class GgufExport(OpenReply):
    answers: GreedyAnswers | None
    gguf: GgufFile | None
    needs_converter: Flag


OLLAMA_REPLY_TYPES: dict[str, Any] = {
    "ollama_state": OllamaState,
    "ollama_prepare": OllamaPrepare,
    "ollama_create": OllamaCreate,
    "ollama_remove": OllamaRemove,
    "gguf_export": GgufExport,
}
