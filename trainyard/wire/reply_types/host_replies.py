"""The types of replies about hosts: facts, health, hardware and their connections."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field

from trainyard.wire.reply_fields import (
    FILES_LIMIT,
    RANKS_LIMIT,
    Address,
    Count,
    Counts,
    Flag,
    Interface,
    Line,
    Lines,
    Number,
    OpenReply,
    Port,
)
from trainyard.wire.reply_types.run_replies import NodeReply, Result


class GpuFacts(OpenReply):
    name: Line
    memory_mib: Count
    uuid: Line
    capability: NotRequired[Number]


class HostFacts(OpenReply):
    boot_id: Line
    machine_id: Line
    addresses: Lines
    addresses_v6: NotRequired[Lines]
    firewall: NotRequired[Line]
    system_unit: NotRequired[Flag]
    source: Line
    interface: Interface
    link_mbit: Count
    route_error: Line
    free_ports: Annotated[list[Port], Field(max_length=65_536)]
    bfloat16: NotRequired[Flag]
    cpus: Annotated[int, Field(strict=True, ge=1, le=2**20)]
    memory_mib: Count
    gpus: Annotated[list[GpuFacts], Field(max_length=256)]
    held_gpus: NotRequired[Annotated[dict[Line, Line], Field(max_length=RANKS_LIMIT)]]
    allocator: Line
    compiler: Flag
    versions: Annotated[dict[Line, Line], Field(max_length=1000)]
    python_exists: Flag
    free_bytes: Count
    staged: NotRequired[Annotated[dict[Line, Count], Field(max_length=FILES_LIMIT)]]
    may_write: Flag
    noexec: NotRequired[Flag]
    spec: Annotated[str, Field(max_length=1 << 16)] | None
    result: Result | None
    rows: Counts
    running: Flag
    part: NodeReply | None
    stop_wanted: Flag
    busy_with: Line
    unreadable: Lines


class LinkMeasurement(OpenReply):
    latency_ms: NotRequired[Number]
    mbit: NotRequired[Number]
    ping_small: NotRequired[Flag]
    ping_large: NotRequired[Flag]
    stalled: NotRequired[Line]


class MeshReply(OpenReply):
    mtu: Count
    taken: Annotated[list[Port], Field(max_length=1000)]
    reached: Annotated[dict[Line, dict[Line, Line]], Field(max_length=RANKS_LIMIT)]
    lines: Annotated[dict[Line, LinkMeasurement], Field(max_length=RANKS_LIMIT)]
    services: NotRequired[Annotated[dict[Line, Line], Field(max_length=RANKS_LIMIT)]]
    shares_with: Annotated[dict[Line, Literal["data_dir", "runs"]], Field(max_length=RANKS_LIMIT)]
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


class HostMemory(OpenReply):
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


class GpuState(OpenReply):
    cards: Count
    gpus: Annotated[list[GpuMemory], Field(max_length=256)]
    users: Annotated[list[Line], Field(max_length=1000)]
    exclusive: Annotated[list[Line], Field(max_length=256)]


class GpuCard(OpenReply):
    name: Line
    memory_mib: Count
    links: Line


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


class Wsl(OpenReply):
    networking: Annotated[str, Field(pattern=r"^[a-z0-9]{1,20}$")]
    sshd: Flag
    driver: Annotated[list[Annotated[str, Field(pattern=r"^[a-z0-9.+-]{1,80}$")]], Field(max_length=100)]
    memory_set: Flag


class Health(OpenReply):
    hostname: Line
    devices: Annotated[list[Device], Field(max_length=1000)]
    names: Names
    memory: HostMemory
    memory_allocated: Flag
    quota: Number | None
    load: Number
    busy: Annotated[list[Busy], Field(max_length=1000)]
    spin: Spin
    torchruns: Annotated[list[Torchrun], Field(max_length=1000)]
    gpu: GpuState
    hardware: NotRequired[Hardware]
    files: Files
    wsl: NotRequired[Wsl | None]
    site: Annotated[dict[Line, Line], Field(max_length=10)]
    inodes_free: Count
    clock: Annotated[list[Number], Field(min_length=2, max_length=2)]


HOST_REPLY_TYPES: dict[str, Any] = {
    "host_facts": HostFacts,
    "health": Health,
    "hardware": Hardware,
    "mesh": MeshReply,
}
