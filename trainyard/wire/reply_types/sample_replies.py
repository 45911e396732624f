"""The types of the lines that a host's sampler sends, and of its answers to queries."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from trainyard.wire.reply_fields import (
    Count,
    Flag,
    Integer,
    Line,
    Measured,
    Number,
    OpenReply,
    Optional,
    Text,
)

Amount = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1e18)]  # bytes, or bytes/s
Percent = Annotated[float, Field(allow_inf_nan=False, ge=0, le=100)]
Folder = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
Names = Annotated[list[Line], Field(max_length=256)]


class GpuSample(OpenReply):
    uuid: Line
    name: Line
    utilisation_percent: Optional
    memory_used_mib: Optional
    memory_total_mib: Optional
    temperature_c: Optional
    power_w: Optional
    power_limit_w: Optional


class OllamaSample(OpenReply):
    version: Line
    installed: Names
    loaded: Names
    deployed: Names


class HostSample(OpenReply):
    now: Number
    uptime: Number
    cpu_percent: Percent
    cores: Annotated[int, Field(strict=True, ge=1, le=2**20)]
    load: Amount
    memory_total: Amount
    memory_available: Amount
    disk_total: Amount
    disk_free: Amount
    disk_read: Amount
    disk_written: Amount
    received: Amount
    sent: Amount
    interface: Line
    link_mbit: Count
    gpus: NotRequired[Annotated[list[GpuSample], Field(max_length=256)]]
    ollama: NotRequired[OllamaSample]


class Beat(OpenReply):
    now: Number


class Checkpoint(OpenReply):
    step: Count
    bytes: Amount
    time: Number


class RunResultReply(OpenReply):
    status: NotRequired[Line]
    step: NotRequired[Count]
    steps: NotRequired[Count]
    loss_first: NotRequired[Optional]
    loss_last: NotRequired[Optional]
    eval_loss: NotRequired[Optional]
    tokens: NotRequired[Optional]
    tokens_per_second: NotRequired[Optional]
    seconds: NotRequired[Optional]
    strategy: NotRequired[Line]


class RunSample(OpenReply):
    name: Folder
    state: dict[str, Any]  # checked as run_status
    checkpoints: Annotated[list[Checkpoint], Field(max_length=1000)]
    result: RunResultReply | None


class NamedFolder(OpenReply):
    """A run folder that has gone, or cannot be read; its name may be anything."""

    name: Line


class QueryReply(OpenReply):
    id: Count
    answer: NotRequired[dict[str, Any]]  # checked as the answer to its query
    error: NotRequired[Line]


class RecordLines(OpenReply):
    lines: Annotated[list[Annotated[str, Field(max_length=1 << 20)]], Field(max_length=100_000)]
    offset: Count
    inode: Count
    more: Flag
    reset: Flag


METRICS = 500  # of a training method


class StepRecord(TypedDict):
    """A line of metrics.jsonl."""

    step: Count
    loss: Optional
    lr: NotRequired[Optional]
    grad_norm: NotRequired[Optional]
    tokens_per_second: NotRequired[Optional]
    step_seconds: NotRequired[Measured]
    comm_share: NotRequired[Measured]
    mfu: NotRequired[Measured]
    metrics: NotRequired[Annotated[dict[Line, Optional], Field(max_length=METRICS)]]  # of the training method


class EvalRecord(TypedDict):
    """A line of evals.jsonl."""

    step: Count
    eval_loss: Optional


class LogLines(OpenReply):
    offset: Count
    lines: Annotated[list[Line], Field(max_length=70_000)]


class SearchLines(OpenReply):
    lines: Annotated[list[Line], Field(max_length=1000)]
    found: Count
    skipped: Count


class Description(OpenReply):
    spec: Text
    origin: dict[Line, Any]
    logs: Annotated[dict[Line, Count], Field(max_length=4096)]


class SampleEnd(OpenReply):
    error: NotRequired[Line]
    exit_code: NotRequired[Integer]


DASHBOARD_REPLY_TYPES: dict[str, Any] = {
    "sample": SampleEnd,
    "sample host": HostSample,
    "sample beat": Beat,
    "sample run": RunSample,
    "sample gone": NamedFolder,
    "sample unreadable": NamedFolder,
    "sample reply": QueryReply,
    "query records": RecordLines,
    "query log": LogLines,
    "query search": SearchLines,
    "query describe": Description,
    "metrics.jsonl line": StepRecord,
    "evals.jsonl line": EvalRecord,
}
