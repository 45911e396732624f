"""The types of replies of the queue and of Slurm."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import Field

from trainyard.wire.reply_fields import (
    FILES_LIMIT,
    RANKS_LIMIT,
    Count,
    Digest,
    Flag,
    Integer,
    Line,
    Lines,
    Number,
    OpenReply,
    Text,
)


class QueueFolder(OpenReply):
    """The texts of a run's folder, which `trainyard.queue` parses"""

    request: Text | None
    state: Text | None


class QueueSpec(OpenReply):
    spec: dict[str, Any]
    digests: Annotated[list[tuple[Line, Digest]], Field(max_length=1000)]


class QueueInfo(OpenReply):
    jobs: Annotated[list[Line], Field(max_length=FILES_LIMIT)]
    nodes: Lines
    hosts: Annotated[dict[Line, Lines], Field(max_length=FILES_LIMIT)]
    runs: Annotated[dict[str, QueueFolder], Field(max_length=FILES_LIMIT)]
    specs: Annotated[dict[str, QueueSpec], Field(max_length=1000)]
    now: Number


Moment = Annotated[float, Field(ge=0, le=4e9)]  # s since the epoch


class Granted(OpenReply):
    """What an attempt had of a host: numbers or UUIDs of GPUs"""

    gpus: NotRequired[Annotated[list[Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")]], Field(max_length=64)]]


class Attempt(OpenReply):
    begin: Moment
    hosts: Annotated[dict[Line, Granted], Field(max_length=RANKS_LIMIT)]
    end: NotRequired[Moment | None]
    reason: NotRequired[Line]
    order: NotRequired[Integer | None]


class RunEnd(OpenReply):
    reason: Line
    time: NotRequired[Moment]


class RunRecord(OpenReply):
    """What the driver of a run records"""

    job: NotRequired[Count]
    phase: NotRequired[Line]
    attempts: NotRequired[Annotated[list[Attempt], Field(max_length=FILES_LIMIT)]]
    exit: NotRequired[RunEnd | None]


class QueueAdd(OpenReply):
    job: NotRequired[Count]
    exists: NotRequired[Count]


class QueueChange(OpenReply):
    changed: Annotated[list[Count], Field(max_length=FILES_LIMIT)]
    refused: Annotated[dict[Line, Line], Field(max_length=FILES_LIMIT)]


class Lease(OpenReply):
    held: Flag
    restart: Integer
    gpus: Annotated[list[Annotated[str, Field(pattern=r"^\d{1,3}$")]], Field(max_length=RANKS_LIMIT)]
    ending: Flag
    time: Number
    alive: Flag


QUEUE_REPLY_TYPES: dict[str, Any] = {
    "queue_info": QueueInfo,
    "query queue": QueueInfo,
    "state.json": RunRecord,
    "queue_add": QueueAdd,
    "queue_again": QueueAdd,
    "queue_change": QueueChange,
    "lease": Lease,
}
