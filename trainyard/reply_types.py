"""The types of the replies to each remote verb. `replies` checks what a host sends against them.

A reply may have more keys than its type names.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, Field

from trainyard.dashboard.reply_types import DASHBOARD_REPLY_TYPES
from trainyard.ollama.reply_types import OLLAMA_REPLY_TYPES
from trainyard.reply_fields import (
    FILES_LIMIT,
    RANKS_LIMIT,
    Address,
    Count,
    Counts,
    Digest,
    Flag,
    Integer,
    Interface,
    Line,
    Lines,
    Measured,
    Number,
    OpenReply,
    Optional,
    Port,
    RanksHere,
    Text,
    by_rank,
)


class Failure(OpenReply):
    rank: Integer
    exit_code: NotRequired[Integer | None]
    signal: NotRequired[Line | None]


class Node(OpenReply):
    """state/node.json"""

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
    replica: NotRequired[Count | None]
    teaches: NotRequired[Flag]
    restarted: NotRequired[Integer | None]
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


class Heartbeat(OpenReply):
    """state/rank<R>.json"""

    status: NotRequired[Line]
    note: NotRequired[Line | None]
    step: NotRequired[Count | None]
    steps: NotRequired[Count | None]
    loss: NotRequired[Optional]
    tokens_per_second: NotRequired[Optional]
    memory_peak_gb: NotRequired[Optional]
    eta: NotRequired[Optional]
    time: NotRequired[Number | None]
    pid: NotRequired[Integer | None]
    process: NotRequired[Line | None]
    step_seconds: NotRequired[Measured]
    comm_share: NotRequired[Measured]
    gpu: NotRequired[GpuUse | None]
    error: NotRequired[RankError | None]


class Log(OpenReply):
    path: Line
    offset: Count
    lines: Annotated[list[Line], Field(max_length=FILES_LIMIT)]


class SlurmJob(OpenReply):
    """What Slurm says of the job of a run; empty without one"""

    state: NotRequired[Line]
    reason: NotRequired[Line]
    start: NotRequired[Line]


class RunStatus(OpenReply):
    status: Line
    alive: Flag
    now: Number
    run_dir: Line
    node: Node | None
    ranks: Annotated[dict[str, Heartbeat], BeforeValidator(by_rank), Field(max_length=RANKS_LIMIT)]
    stop_wanted: NotRequired[Flag]
    why: NotRequired[Line]
    job: NotRequired[SlurmJob]
    logs: NotRequired[dict[str, Log]]


class RunList(OpenReply):
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


class Gpu(OpenReply):
    name: Line
    memory_mib: Count
    uuid: Line


class Result(OpenReply):
    """result.json"""

    run: NotRequired[Line]
    status: Line


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
    loss_first: Optional
    loss_last: Optional
    eval_loss: NotRequired[Optional]
    eval_loss_first: NotRequired[Optional]
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


class Merged(OpenReply):
    """The answer of ``python -m trainer merge``"""

    parts: NotRequired[Annotated[list[MergedPart], Field(max_length=RANKS_LIMIT)]]
    base_loss: NotRequired[Optional]
    eval_loss: NotRequired[Optional]
    rank: NotRequired[Count]
    adapter: NotRequired[Line]
    model: NotRequired[Line]
    answers: NotRequired[Count]
    unanimous: NotRequired[Count]
    path: NotRequired[Line]
    first: NotRequired[Annotated[list[VotedAnswer], Field(max_length=RANKS_LIMIT)]]


class PlanEntry(OpenReply):
    host: Line
    node_rank: Count
    ranks: RanksHere
    replica: NotRequired[Count | None]


class PlanFile(OpenReply):
    """plan.json"""

    entries: Annotated[list[PlanEntry], Field(max_length=RANKS_LIMIT)]


class MetricsRecord(OpenReply):
    step: Count
    loss: Optional
    tokens: Count | Number
    tokens_per_second: Optional


class Metrics(OpenReply):
    """metrics.jsonl"""

    records: Annotated[list[MetricsRecord], Field(max_length=FILES_LIMIT)]


class HostFacts(OpenReply):
    boot_id: Line
    machine_id: Line
    addresses: Lines
    addresses_v6: NotRequired[Lines]
    firewall: NotRequired[Line]
    socket_filter: NotRequired[Flag]
    source: Line
    interface: Interface
    link_mbit: Count
    route_error: Line
    free_ports: Annotated[list[Port], Field(max_length=65_536)]
    cpus: Annotated[int, Field(strict=True, ge=1, le=2**20)]
    memory_mib: Count
    gpus: Annotated[list[Gpu], Field(max_length=256)]
    held_gpus: NotRequired[Annotated[dict[Line, Line], Field(max_length=RANKS_LIMIT)]]
    allocator: Line
    compiler: Flag
    versions: Annotated[dict[Line, Line], Field(max_length=1000)]
    python_exists: Flag
    free_bytes: Count
    may_write: Flag
    spec: Annotated[str, Field(max_length=1 << 16)] | None
    result: Result | None
    rows: Counts
    running: Flag
    part: Node | None
    stop_wanted: Flag
    busy_with: Line
    unreadable: Lines


FileNames = Annotated[dict[Annotated[str, Field(max_length=4096)], tuple[Count, Digest]], Field(max_length=FILES_LIMIT)]


class LocalFile(OpenReply):
    kind: Literal["file", "folder", ""]
    names: FileNames
    texts: Annotated[dict[str, Text], Field(max_length=100)]
    error: Line


class LocalFiles(OpenReply):
    files: Annotated[dict[str, LocalFile], Field(max_length=100)]


class HubFetch(OpenReply):
    names: FileNames
    texts: Annotated[dict[str, Text], Field(max_length=100)]
    unreachable: Line


class Receive(OpenReply):
    lacking: Annotated[list[str], Field(max_length=FILES_LIMIT)]
    changed: NotRequired[Annotated[list[Line], Field(max_length=FILES_LIMIT)]]


class Relay(OpenReply):
    installed: Annotated[list[str], Field(max_length=FILES_LIMIT)]
    receive_error: Line
    send_error: Line


class Commit(OpenReply):
    changed: NotRequired[Annotated[list[Line], Field(max_length=FILES_LIMIT)]]
    claimed: NotRequired[Line]


class ReadFiles(OpenReply):
    text: dict[str, Annotated[str, Field(max_length=4 << 20)] | None]
    sizes: Annotated[dict[str, Count], Field(max_length=FILES_LIMIT)]
    sha256: Annotated[dict[str, Digest], Field(max_length=FILES_LIMIT)]


class Link(OpenReply):
    latency_ms: NotRequired[Number]
    mbit: NotRequired[Number]
    ping_small: NotRequired[Flag]
    ping_large: NotRequired[Flag]
    stalled: NotRequired[Line]


class Mesh(OpenReply):
    mtu: Count
    taken: Annotated[list[Port], Field(max_length=1000)]
    reached: Annotated[dict[Line, dict[Line, Line]], Field(max_length=RANKS_LIMIT)]
    lines: Annotated[dict[Line, Link], Field(max_length=RANKS_LIMIT)]
    services: NotRequired[Annotated[dict[Line, Line], Field(max_length=RANKS_LIMIT)]]
    shares_with: Lines
    write_error: Line


class Device(OpenReply):
    name: Interface
    address: Address
    mask: Address
    mtu: Count
    mbit: Count
    wireless: Flag
    virtual: Flag


class Names(OpenReply):
    addresses: Annotated[dict[Line, Annotated[list[Address], Field(max_length=100)]], Field(max_length=RANKS_LIMIT)]
    seconds: Number


class Memory(OpenReply):
    total_mib: Count
    available_mib: Count


class Spin(OpenReply):
    share: Number
    gap: Number
    pauses: Count


class Busy(OpenReply):
    pid: Count
    name: Line
    uid: Count
    cores: Number


class Torchrun(OpenReply):
    pid: Count
    command: Line


class GpuMemory(OpenReply):
    name: Line
    total_mib: Count
    used_mib: Count


class GpuState(OpenReply):
    cards: Count
    gpus: Annotated[list[GpuMemory], Field(max_length=256)]
    users: Annotated[list[Line], Field(max_length=1000)]


class GpuCard(OpenReply):
    name: Line
    memory_mib: Count


class Hardware(OpenReply):
    gpus: Annotated[list[GpuCard], Field(max_length=256)]
    cpu: Line
    cores: Count
    memory_mib: Count
    free_bytes: Count
    models: Annotated[list[Line], Field(max_length=1000)] | None
    model_count: Count


class Files(OpenReply):
    damaged: Annotated[list[Line], Field(max_length=FILES_LIMIT)]
    equal: Annotated[dict[Line, Line], Field(max_length=FILES_LIMIT)]


class Health(OpenReply):
    hostname: Line
    devices: Annotated[list[Device], Field(max_length=1000)]
    names: Names
    memory: Memory
    memory_allocated: Flag
    quota: Number | None
    load: Number
    busy: Annotated[list[Busy], Field(max_length=1000)]
    spin: Spin
    torchruns: Annotated[list[Torchrun], Field(max_length=1000)]
    gpu: GpuState
    hardware: NotRequired[Hardware]
    files: Files
    sudo: Flag
    inodes_free: Count
    clock: Annotated[list[Number], Field(min_length=2, max_length=2)]


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
    completed: Annotated[list[Annotated[str, Field(max_length=1 << 16)]], Field(max_length=FILES_LIMIT)]
    offset: Integer
    now: Number


class QueueAdd(OpenReply):
    job: NotRequired[Count]
    exists: NotRequired[Count]


class QueueChange(OpenReply):
    changed: Annotated[list[Count], Field(max_length=FILES_LIMIT)]
    refused: Annotated[dict[Line, Line], Field(max_length=FILES_LIMIT)]


class AllReduce(OpenReply):
    mbit: Number
    latency_ms: Number
    torch: Line


class SlurmCheck(OpenReply):
    refused: Line
    partitions: Lines
    nodes: Annotated[list[tuple[Line, Flag, Literal["torch", "python", "none"]]], Field(max_length=RANKS_LIMIT)]
    unseen: Line


class Checkpoints(OpenReply):
    steps: Annotated[dict[Line, Annotated[dict[Line, Count], Field(max_length=1000)]], Field(max_length=1000)]


class Lease(OpenReply):
    held: Flag
    restart: Integer
    gpus: Annotated[list[Annotated[str, Field(pattern=r"^\d{1,3}$")]], Field(max_length=RANKS_LIMIT)]
    ending: Flag
    alive: Flag


REPLY_TYPES: dict[str, Any] = {
    "host_facts": HostFacts,
    "health": Health,
    "hardware": Hardware,
    "mesh": Mesh,
    "all_reduce": AllReduce,
    "local_files": LocalFiles,
    "hub_fetch": HubFetch,
    "receive": Receive,
    "relay": Relay,
    "commit": Commit,
    "read_files": ReadFiles,
    "queue_info": QueueInfo,
    "query queue": QueueInfo,
    "slurm_check": SlurmCheck,
    "queue_add": QueueAdd,
    "queue_change": QueueChange,
    "checkpoints": Checkpoints,
    "lease": Lease,
    "run_status": RunStatus,
    "run_stop": RunStop,
    "run_list": RunList,
    "start": Started,
    "begin": Begun,
    "plan.json": PlanFile,
    "result.json": FinalResult,
    "trained result.json": TrainedResult,
    "merge": Merged,
    "metrics.jsonl": Metrics,
    **OLLAMA_REPLY_TYPES,
    **DASHBOARD_REPLY_TYPES,
}
