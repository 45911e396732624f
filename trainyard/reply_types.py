"""The types of the replies to each remote verb. `replies` checks what a host sends against them.

A reply may have more keys than its type names. Numbers have bounds, so that arithmetic and formats cannot fail; lists have
lengths, so that tables stay short.
"""

from __future__ import annotations

import ipaddress
import math
import re
from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from trainer.formats import printable

RANKS_LIMIT = 4096  # ranks of one host, and hosts of one run
FILES_LIMIT = 20_000  # files of one reply
NUMBER_LIMIT = 1e15

Line = Annotated[str, AfterValidator(lambda text: printable(text, 500))]
Lines = Annotated[list[Line], Field(max_length=RANKS_LIMIT)]
Text = Annotated[str, Field(max_length=1 << 20)]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
Integer = Annotated[int, Field(strict=True, gt=-(2**53), lt=2**53)]
Number = Annotated[float, Field(allow_inf_nan=False, ge=-NUMBER_LIMIT, le=NUMBER_LIMIT)]
Port = Annotated[int, Field(strict=True, ge=1, le=65_535)]
Interface = Annotated[str, Field(pattern=r"^[^\s/]{0,15}$")]
Address = Annotated[str, AfterValidator(lambda text: str(ipaddress.ip_address(text)))]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
RanksHere = Annotated[list[Annotated[int, Field(strict=True, ge=0, le=10**6)]], Field(max_length=RANKS_LIMIT)]
Counts = Annotated[list[Count], Field(max_length=RANKS_LIMIT)]


def _measured(value: Any) -> Any:
    """Return a list of numbers, or an empty one if a number is missing, as where a rank measured nothing."""
    if not isinstance(value, list) or len(value) > RANKS_LIMIT:
        return []
    numbers = [isinstance(item, (int, float)) and abs(item) <= NUMBER_LIMIT for item in value]
    return value if all(numbers) else []


def _by_rank(value: Any) -> Any:
    """Return the entries of a mapping whose name is the number of a rank."""
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if re.fullmatch(r"\d{1,6}", name)}


def _loss(value: Any) -> Any:
    """Return a number, or None for one that no format shows."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= NUMBER_LIMIT
    return float(value) if known and math.isfinite(value) else None


Measured = Annotated[list[float], BeforeValidator(_measured)]
Optional = Annotated[float | None, BeforeValidator(_loss)]


class _Open(TypedDict):
    """A reply that may have more keys."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]


class Failure(_Open):
    rank: Integer
    exit_code: NotRequired[Integer | None]
    signal: NotRequired[Line | None]


class Node(_Open):
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
    restarted: NotRequired[Integer | None]
    unit: NotRequired[Line | None]


class RankError(_Open):
    type: NotRequired[Line | None]
    message: NotRequired[Text | None]
    traceback: NotRequired[Text | None]
    plain: NotRequired[Flag]
    secondary: NotRequired[Flag]


class GpuUse(_Open):
    utilisation_percent: NotRequired[Optional]
    memory_gb: NotRequired[Optional]
    temperature_c: NotRequired[Optional]
    power_w: NotRequired[Optional]
    memory_peak_gb: NotRequired[Optional]


class Heartbeat(_Open):
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
    gpu: NotRequired[GpuUse | None]
    error: NotRequired[RankError | None]


class Log(_Open):
    path: Line
    offset: Count
    lines: Annotated[list[Line], Field(max_length=FILES_LIMIT)]


class RunStatus(_Open):
    status: Line
    alive: Flag
    now: Number
    run_dir: Line
    node: Node | None
    ranks: Annotated[dict[str, Heartbeat], BeforeValidator(_by_rank), Field(max_length=RANKS_LIMIT)]
    stop_wanted: NotRequired[Flag]
    why: NotRequired[Line]
    logs: NotRequired[dict[str, Log]]


class RunList(_Open):
    runs: Annotated[list[dict[str, Any]], Field(max_length=FILES_LIMIT)]  # each is checked as run_status
    skipped: NotRequired[Lines]


class RunStop(_Open):
    status: Line
    killed: Count


class Started(_Open):
    pid: Count
    started: Number
    ignored: NotRequired[Lines]


class Begun(_Open):
    now: Number


class Gpu(_Open):
    name: Line
    memory_mib: Count
    uuid: Line


class Result(_Open):
    """result.json"""

    run: NotRequired[Line]
    status: Line


class FinalResult(_Open):
    """result.json of a run that has ended, for the summary"""

    status: Line
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
    model: NotRequired[Line | None]
    merged: NotRequired[Line | None]
    tensorboard: NotRequired[Line | None]
    adapter_sha256: NotRequired[Digest | None]
    model_sha256: NotRequired[Digest | None]


class MergedPart(_Open):
    run: Line
    eval_loss: Optional


class VotedAnswer(_Open):
    text: Text
    votes: Count
    logprob: Optional


class Merged(_Open):
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


class PlanEntry(_Open):
    host: Line
    node_rank: Count
    ranks: RanksHere
    replica: NotRequired[Count | None]


class PlanFile(_Open):
    """plan.json"""

    entries: Annotated[list[PlanEntry], Field(max_length=RANKS_LIMIT)]


class MetricsRecord(_Open):
    step: Count
    loss: Optional
    tokens: Count | Number
    tokens_per_second: Optional


class Metrics(_Open):
    """metrics.jsonl"""

    records: Annotated[list[MetricsRecord], Field(max_length=FILES_LIMIT)]


class HostFacts(_Open):
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


class LocalFile(_Open):
    kind: Literal["file", "folder", ""]
    names: FileNames
    texts: Annotated[dict[str, Text], Field(max_length=100)]
    error: Line


class LocalFiles(_Open):
    files: Annotated[dict[str, LocalFile], Field(max_length=100)]


class HubFetch(_Open):
    names: FileNames
    texts: Annotated[dict[str, Text], Field(max_length=100)]
    unreachable: Line


class Receive(_Open):
    lacking: Annotated[list[str], Field(max_length=FILES_LIMIT)]
    changed: NotRequired[Annotated[list[Line], Field(max_length=FILES_LIMIT)]]


class Relay(_Open):
    installed: Annotated[list[str], Field(max_length=FILES_LIMIT)]
    receive_error: Line
    send_error: Line


class Commit(_Open):
    changed: NotRequired[Annotated[list[Line], Field(max_length=FILES_LIMIT)]]
    claimed: NotRequired[Line]


class ReadFiles(_Open):
    text: dict[str, Annotated[str, Field(max_length=4 << 20)] | None]
    sizes: Annotated[dict[str, Count], Field(max_length=FILES_LIMIT)]
    sha256: Annotated[dict[str, Digest], Field(max_length=FILES_LIMIT)]


class Link(_Open):
    latency_ms: NotRequired[Number]
    mbit: NotRequired[Number]
    ping_small: NotRequired[Flag]
    ping_large: NotRequired[Flag]
    stalled: NotRequired[Line]


class Mesh(_Open):
    mtu: Count
    taken: Annotated[list[Port], Field(max_length=1000)]
    reached: Annotated[dict[Line, dict[Line, Line]], Field(max_length=RANKS_LIMIT)]
    lines: Annotated[dict[Line, Link], Field(max_length=RANKS_LIMIT)]
    services: NotRequired[Annotated[dict[Line, Line], Field(max_length=RANKS_LIMIT)]]
    shares_with: Lines
    write_error: Line


class Device(_Open):
    name: Interface
    address: Address
    mask: Address
    mtu: Count
    mbit: Count
    wireless: Flag
    virtual: Flag


class Names(_Open):
    addresses: Annotated[dict[Line, Annotated[list[Address], Field(max_length=100)]], Field(max_length=RANKS_LIMIT)]
    seconds: Number


class Memory(_Open):
    total_mib: Count
    available_mib: Count


class Spin(_Open):
    share: Number
    gap: Number
    pauses: Count


class Busy(_Open):
    pid: Count
    name: Line
    uid: Count
    cores: Number


class Torchrun(_Open):
    pid: Count
    command: Line


class GpuMemory(_Open):
    name: Line
    total_mib: Count
    used_mib: Count


class GpuState(_Open):
    cards: Count
    gpus: Annotated[list[GpuMemory], Field(max_length=256)]
    users: Annotated[list[Line], Field(max_length=1000)]


class GpuCard(_Open):
    name: Line
    memory_mib: Count


class Hardware(_Open):
    gpus: Annotated[list[GpuCard], Field(max_length=256)]
    cpu: Line
    cores: Count
    memory_mib: Count
    free_bytes: Count
    models: Annotated[list[Line], Field(max_length=1000)] | None
    model_count: Count


class Files(_Open):
    damaged: Annotated[list[Line], Field(max_length=FILES_LIMIT)]
    equal: Annotated[dict[Line, Line], Field(max_length=FILES_LIMIT)]


class Health(_Open):
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


class AllReduce(_Open):
    mbit: Number
    latency_ms: Number
    torch: Line


class OllamaBase(_Open):
    digest: Digest
    architecture: Line
    shape: Annotated[list[Count], Field(min_length=5, max_length=5)]
    tokens: Digest
    fields: Annotated[dict[Line, Line], Field(max_length=1000)]


class OllamaRecord(_Open):
    key: Line
    digest: Line


class OllamaState(_Open):
    version: Annotated[list[Count], Field(min_length=3, max_length=3)]
    adapters: Flag
    digest: Line
    record: OllamaRecord | None
    base: OllamaBase | None


class OllamaCreate(_Open):
    answers: Annotated[list[Text], Field(max_length=1000)]


class OllamaChange(_Open):
    changed: Flag
    foreign: NotRequired[Flag]


class GreedyPrompt(_Open):
    messages: NotRequired[Annotated[list[dict[str, Text]], Field(min_length=1, max_length=1000)]]
    prompt: NotRequired[Text]


class GreedyAnswers(_Open):
    created: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d$")]
    max_tokens: Annotated[int, Field(strict=True, ge=1, le=1000)]
    bos: Annotated[str, Field(max_length=100)]
    prompts: Annotated[list[GreedyPrompt], Field(max_length=1000)]
    answers: Annotated[list[Text], Field(max_length=1000)]


class GgufFile(_Open):
    path: Line
    bytes: Count
    sha256: Digest
    adds_bos: Flag


class GgufExport(_Open):
    answers: GreedyAnswers
    gguf: GgufFile | None


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
    "run_status": RunStatus,
    "run_stop": RunStop,
    "run_list": RunList,
    "ollama_state": OllamaState,
    "ollama_create": OllamaCreate,
    "ollama_change": OllamaChange,
    "gguf_export": GgufExport,
    "start": Started,
    "begin": Begun,
    "plan.json": PlanFile,
    "result.json": FinalResult,
    "merge": Merged,
    "metrics.jsonl": Metrics,
}
