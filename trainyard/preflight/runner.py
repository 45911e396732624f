"""The complete preflight, and the part of it that every run performs before it starts."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from trainyard.preflight import cluster_checks, host_checks
from trainyard.preflight.findings import Finding, PreflightReport, by_severity, host_table
from trainyard.preflight.gpu_choice import assign_gpus
from trainyard.preflight.host_requests import gather
from trainyard.preflight.host_state import HostState, responding
from trainyard.preflight.measurements import Connect, high_ports, measure_mesh
from trainyard.wire.connection import FanOut, Host

MEMORY_MIB = 512  # that one process must be able to allocate: torch imported, and a small model
CONTROLLER_LIMIT = 3.0  # s for a connection of the controller to a host's Ollama
NOT_WRITTEN = "data directories shared by hosts: not checked, because check mode writes nothing"


def run_preflight(
    hosts: Sequence[Host],
    connect: Connect,
    port: int,
    *,
    run: str = "",
    write: bool = True,
    known: Sequence[Finding] = (),
) -> PreflightReport:
    """Query all hosts, the head first, measure the network between them, and report problems. Leaves no file on the hosts.

    `port`: of the rendezvous. `known`: findings about the inventory. `run`: whose trainer must be the same on all hosts; empty for none.
    `write`: whether to create a temporary link in each data directory, to find hosts that share it.
    """
    ports = [port, *high_ports()]
    states = gather(hosts, connect, run, MEMORY_MIB)
    measure_mesh(responding(states), ports, connect, system_python=True, write=write, services=True)
    found = check(states, ports, port, controller_connections(responding(states)))
    findings = by_severity([*known, *found], [state.name for state in states])
    lines = [*host_table(states, findings), *skipped_checks(states, write)]
    return PreflightReport(findings, lines, states)


def skipped_checks(states: Sequence[HostState], write: bool) -> list[str]:
    """Return a line about the check that check mode skips; none if the mesh has one machine only."""
    return [] if write or len({state.address for state in states}) < 2 else [NOT_WRITTEN]


def controller_connections(states: Sequence[HostState]) -> dict[str, str]:
    """Connect from the controller to the Ollama of every other machine; return why that fails, by host.

    A refused connection counts as one: the port is open, and no server listens.
    """

    def connect(address: str, port: int) -> dict[str, Any]:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection((address, port), timeout=CONTROLLER_LIMIT).close()
        return {}

    hosts = [state.host for state in states if state.host.ollama_port and state.host.login.address]
    calls = {host.name: functools.partial(connect, host.address, host.ollama_port) for host in hosts}
    return FanOut(calls).wait(CONTROLLER_LIMIT + 1).errors


def check(
    states: Sequence[HostState], ports: Sequence[int], master_port: int, unreached: Mapping[str, str] | None = None
) -> list[Finding]:
    """Return all findings about these answers, the most severe first; see `connectivity` and `ollama_ports`."""
    answered = responding(list(states))
    chosen = assign_gpus(answered)
    findings = [finding for state in states if state.error for finding in host_checks.reachability(state)]
    for state in cluster_checks.machines(answered):
        findings += host_checks.memory(state, MEMORY_MIB)
        findings += host_checks.processor(state)
        findings += host_checks.accelerator(state)
        findings += host_checks.wsl(state, len(states))
    for state in answered:
        findings += host_checks.environment(state)
        findings += host_checks.disk_space(state, host_checks.RUN_OVERHEAD)
        findings += host_checks.resources(state)
        findings += host_checks.datasets(state)
        findings += host_checks.network(state, states)
    for compare in (cluster_checks.duplicates, cluster_checks.clones, cluster_checks.package_versions):
        findings += compare(answered)
    for compare in (cluster_checks.clocks, cluster_checks.mtus, cluster_checks.gpus, cluster_checks.checksums):
        findings += compare(answered)
    findings += chosen
    findings += cluster_checks.ollama_ports(answered, unreached or {})
    findings += cluster_checks.connectivity([state for state in answered if state.mesh], ports, master_port)
    return by_severity(findings, [state.name for state in states])


def check_plan(states: Sequence[HostState], connect: Connect, master_port: int, *, write: bool = True) -> list[Finding]:
    """Measure the mesh of a run's hosts, the head first, just before the start, and return the findings.

    Their `facts` have `interface`. A host that does not answer has no finding: the start of the run reports it.
    """
    ports = [master_port, *high_ports()]
    measure_mesh(states, ports, connect, write=write)
    return cluster_checks.connectivity([state for state in states if state.mesh], ports, master_port)
