"""The types of replies about runs: their state, their files and their results."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import BeforeValidator, Field

from trainyard.wire.reply_fields import (
    FILES_LIMIT,
    RANKS_LIMIT,
    Count,
    Digest,
    Flag,
    Integer,
    Line,
    Lines,
    Measured,
    Number,
    OpenReply,
    Optional,
    RanksHere,
    Text,
    by_rank,
)


class Failure(OpenReply):
    rank: Integer
    exit_code: NotRequired[Integer | None]
    signal: NotRequired[Line | None]


class NodeReply(OpenReply):
    """The contents of `state/node.json`: the place of a host in a run."""

    run: NotRequired[Line]
    node_rank: Count
    ranks: RanksHere
    hosts: Lines
    attempt: Count
    devices: NotRequired[Lines]
    started: Number
    status: Line
    ended: NotRequired[Number | None]
    exit_code: NotRequired[Integer | None]
    failures: Annotated[list[Failure], Field(max_length=RANKS_LIMIT)]
    oom: NotRequired[Flag]
    error: NotRequired[Line | None]
    restarts: NotRequired[Flag]
    unit: NotRequired[Line | None]
    backend: NotRequired[Line]
    job: NotRequired[Count]
    nodes: NotRequired[Lines]


class RankError(OpenReply):
    type: NotRequired[Line | None]
    message: NotRequired[Text | None]
    traceback: NotRequired[Text | None]
    plain: NotRequired[Flag]
    secondary: NotRequired[Flag]


class GpuUse(OpenReply):
    utilisation_percent: NotRequired[Optional]
    memory_gb: NotRequired[Optional]
    temperature_c: NotRequired[Optional]
    power_w: NotRequired[Optional]
    memory_peak_gb: NotRequired[Optional]


class HeartbeatReply(OpenReply):
    """The contents of `state/rank<R>.json`: the last sign of life of a rank."""

    status: NotRequired[Line]
    note: NotRequired[Line | None]
    step: NotRequired[Count | None]
    steps: NotRequired[Count | None]
    resumed: NotRequired[Count | None]
    loss: NotRequired[Optional]
    reward: NotRequired[Optional]
    tokens_per_second: NotRequired[Optional]
    memory_peak_gb: NotRequired[Optional]
    eta: NotRequired[Optional]
    time: NotRequired[Number | None]
    pid: NotRequired[Integer | None]
    process: NotRequired[Line | None]
    step_seconds: NotRequired[Measured]
    comm_share: NotRequired[Measured]
    mfu: NotRequired[Measured]
    gpu: NotRequired[GpuUse | None]
    error: NotRequired[RankError | None]


class Log(OpenReply):
    path: Line
    offset: Count
    lines: Annotated[list[Line], Field(max_length=FILES_LIMIT)]


class RunStatus(OpenReply):
    status: Line
    alive: Flag
    now: Number
    run_dir: Line
    node: NodeReply | None
    ranks: Annotated[dict[str, HeartbeatReply], BeforeValidator(by_rank), Field(max_length=RANKS_LIMIT)]
    stop_wanted: NotRequired[Flag]
    left: NotRequired[Flag]
    halted: NotRequired[Flag]
    disk_full: NotRequired[Flag]
    why: NotRequired[Line]
    logs: NotRequired[dict[str, Log]]
    outside: NotRequired[Flag]


class RunListReply(OpenReply):
    runs: Annotated[list[dict[str, Any]], Field(max_length=FILES_LIMIT)]  # each is checked as run_status
    skipped: NotRequired[Lines]


class RunStop(OpenReply):
    status: Line
    killed: Count


class Started(OpenReply):
    pid: Count
    started: Number
    ignored: NotRequired[Lines]


class Begun(OpenReply):
    now: Number


class Result(OpenReply):
    """The contents of `result.json`: how a rank ended."""

    run: NotRequired[Line]
    status: Line


class DataTotals(OpenReply):
    """The fields of DataReport"""

    samples: Count
    answers: Count
    tokens: Count
    truncated: Count
    dropped: Annotated[dict[Line, Count], Field(max_length=100)]
    notes: Annotated[dict[Line, Count], Field(max_length=100)]
    unread: NotRequired[Count]


class FinalResult(OpenReply):
    """result.json of a run that has ended, for the summary"""

    status: Line
    script: NotRequired[Line | None]
    step: Count
    steps: Count
    world_size: Count
    tokens: Count | Number
    samples: Count | Number
    tokens_per_second: Optional
    mfu: NotRequired[Optional]
    mfu_ranks: NotRequired[Measured]
    data: NotRequired[DataTotals]
    train_samples: NotRequired[Count]
    loss_first: Optional
    loss_last: Optional
    eval_loss: NotRequired[Optional]
    eval_loss_first: NotRequired[Optional]
    reward_first: NotRequired[Optional]
    reward_last: NotRequired[Optional]
    learning_steps: NotRequired[Count]
    adapter: NotRequired[Line | None]
    adapter_rank: NotRequired[Count]
    averaging_error: NotRequired[Optional]
    model: NotRequired[Line | None]
    merged: NotRequired[Line | None]
    tensorboard: NotRequired[Line | None]
    adapter_sha256: NotRequired[Digest | None]
    model_sha256: NotRequired[Digest | None]


class TrainedResult(OpenReply):
    """result.json of a run that is deployed; a merged run has no steps"""

    status: Line
    adapter_sha256: NotRequired[Digest | None]
    model_sha256: NotRequired[Digest | None]


class MergedPart(OpenReply):
    run: Line
    eval_loss: Optional


class VotedAnswer(OpenReply):
    text: Text
    votes: Count
    logprob: Optional


class MergeReply(OpenReply):
    """The answer of ``python -m trainer merge``"""

    parts: NotRequired[Annotated[list[MergedPart], Field(max_length=RANKS_LIMIT)]]
    base_loss: NotRequired[Optional]
    eval_loss: NotRequired[Optional]
    rank: NotRequired[Count]
    adapter: NotRequired[Line]
    model: NotRequired[Line]
    answers: NotRequired[Count]
    unanimous: NotRequired[Count]
    equal: NotRequired[
        Annotated[list[Annotated[list[Count], Field(max_length=RANKS_LIMIT)]], Field(max_length=RANKS_LIMIT)]
    ]
    path: NotRequired[Line]
    first: NotRequired[Annotated[list[VotedAnswer], Field(max_length=RANKS_LIMIT)]]


class EvaluatedAnswer(OpenReply):
    text: Text
    tokens: Count
    cut: Flag
    loss: Optional
    loss_tokens: Count


class Evaluated(OpenReply):
    """The answer of ``python -m trainer evaluate``"""

    seconds: Number
    answers: Annotated[list[EvaluatedAnswer], Field(max_length=10_000)]


class Step(OpenReply):
    step: Count
    loss: NotRequired[Optional]
    tokens: NotRequired[Count | Number]
    tokens_per_second: NotRequired[Optional]


class Metrics(OpenReply):
    """The records of `metrics.jsonl`. Those of a script may have no more than `step`."""

    records: Annotated[list[Step], Field(max_length=FILES_LIMIT)]


class Shards(OpenReply):
    elsewhere: Annotated[list[Line], Field(max_length=RANKS_LIMIT)]
    digest: Digest


class Checkpoints(OpenReply):
    steps: Annotated[dict[Line, Annotated[dict[Line, Count], Field(max_length=1000)]], Field(max_length=1000)]
    shards: Annotated[dict[Line, Shards], Field(max_length=1000)]


RUN_REPLY_TYPES: dict[str, Any] = {
    "checkpoints": Checkpoints,
    "run_status": RunStatus,
    "run_stop": RunStop,
    "run_list": RunListReply,
    "run_start": Started,
    "begin": Begun,
    "result.json": FinalResult,
    "trained result.json": TrainedResult,
    "merge": MergeReply,
    "evaluate": Evaluated,
    "metrics.jsonl": Metrics,
}
