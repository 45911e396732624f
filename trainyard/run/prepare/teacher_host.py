"""The host of a run on which the teacher computes, and which trains nothing (`teacher_host` of the run spec)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TypeVar

from trainer.common.errors import UserError
from trainer.common.formats import mib
from trainer.config import RunSpec
from trainer.costs.cost import RowStats
from trainer.costs.host_memory import BASE
from trainer.costs.teacher_cost import teacher_process_memory, teacher_shape, teacher_step_bytes
from trainyard.preflight.host_state import HostState
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.prepare.host_files import HostAccess
from trainyard.run.types import Files, PlanEntry
from trainyard.wire.connection import Host
from trainyard.wire.run_errors import PlanError

H = TypeVar("H", Host, HostState)


def check_teacher_host(spec: RunSpec, hosts: Sequence[Host], options: LaunchOptions) -> None:
    """Check without contacting a host that the teacher's host and the launch options fit the spec. Raises UserError."""
    name = spec.teacher_host
    if not name:
        return
    names = [host.name for host in hosts]
    if name not in names:
        raise UserError(f"teacher_host: {name} is not a host of this run; its hosts are {', '.join(names)}")
    if len(names) < 2:
        raise UserError(
            f"teacher_host: {name} is the only host of this run: add a host that trains, or omit teacher_host"
        )
    if options.head == name:
        raise UserError(
            f"head: {name} is the teacher's host, which trains nothing: choose another head or teacher_host"
        )
    for option in ("elastic", "render_only"):
        if getattr(options, option):
            raise UserError(
                f"{option}: a run with teacher_host cannot be started this way: omit {option} or teacher_host"
            )


def split_teacher(hosts: Iterable[H], name: str) -> tuple[list[H], H | None]:
    """Return the hosts that train, and the one of the teacher if there is one."""
    hosts = list(hosts)
    return [host for host in hosts if host.name != name], next((host for host in hosts if host.name == name), None)


def access_for(access: HostAccess, spec: RunSpec, setting: str) -> HostAccess:
    """Return the access to the hosts that need what a setting of the spec names: only one host needs the teacher."""
    if not spec.teacher_host:
        return access
    train, teacher = split_teacher(access.hosts, spec.teacher_host)
    return dataclasses.replace(access, hosts=[teacher] if setting == "teacher" and teacher else train)


def files_of(files: Files, teacher_host: str, *, teaches: bool) -> Files:
    """Return the files of PreparedRun that a host needs: the teacher is on its own host only, which has no other
    files."""
    if not teacher_host:
        return files
    return [file for file in files if file.kind == "trainer" or (file.kind == "teacher") == teaches]


def teacher_port(teacher: HostState, taken: int) -> int:
    """Return a free port on the teacher's host. `taken`: one that another host, which may be the same machine, uses.

    Raises:
        PlanError: no port is free.
    """
    free = [port for port in teacher.facts["free_ports"] if port != taken]
    if not free:
        raise PlanError(f"no port for the teacher is free on {teacher.name}: stop the processes that use them")
    return int(free[0])


def teacher_line(spec: RunSpec, teacher: HostState, address: str, name: str) -> str:
    """Return the line of the plan about the teacher: its host, memory and bytes per step.

    Args:
        spec: with a teacher whose config the controller can read.
        address: address at which it listens.
        name: name of the teacher.
    """
    shape = teacher_shape(spec)
    assert shape is not None
    need = teacher_process_memory(spec, shape)
    sizes = [gpu["memory_mib"] for gpu in teacher.gpus[:1]] or [teacher.facts["memory_mib"]]
    base = 0 if teacher.gpus else BASE
    small = ""
    if need / 2**20 + base > sizes[0]:
        small = f"; warning: {teacher.name} has only {sizes[0]:,.0f} MiB: decrease batch_size, or choose another teacher_host"
    return (
        f"teacher {name} on {teacher.name} ({address}): {mib(need + base * 2**20)} MiB, the {spec.teacher_top_k} most probable "
        f"tokens per place, at most {teacher_step_bytes(spec, RowStats.full(spec)) / 1e6:.3g} MB per step{small}"
    )


def staged_groups(entries: Sequence[PlanEntry], files: Files) -> list[tuple[list[PlanEntry], Files]]:
    """Return the entries of a plan in groups that receive the same files."""
    teacher = next((entry for entry in entries if entry.teaches), None)
    if teacher is None:
        return [(list(entries), files)]
    train = [entry for entry in entries if entry is not teacher]
    name = teacher.host
    return [
        (train, files_of(files, name, teaches=False)),
        ([teacher], files_of(files, name, teaches=True)),
    ]


def training_entries(entries: Iterable[PlanEntry]) -> list[PlanEntry]:
    """Return the entries of a plan whose hosts train."""
    return [entry for entry in entries if not entry.teaches]
