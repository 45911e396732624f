"""Measurements that all hosts make together: connectivity of pairs of hosts.

Up to FULL_MESH hosts, every pair is measured. The number of pairs of a larger cluster grows as N log N: every host measures the head,
its neighbours in a ring, and a few random hosts.
"""

from __future__ import annotations

import functools
import math
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainyard.preflight.host_state import HostState
from trainyard.wire.connection import FanOut, Host, HostConnection
from trainyard.wire.host_relay import HIGH_PORTS

Connect = Callable[[Host], HostConnection]
Peers = Mapping[str, set[str]]  # for each host those that it measures, and that measure it

FULL_MESH = 16  # hosts of which every pair is measured
MESH_LIMIT = 8.0  # s, plus half a second per host


def high_ports() -> list[int]:
    """Return three random ports of the range in which ranks listen."""
    return random.sample(HIGH_PORTS, 3)


def choose_peers(names: Sequence[str], draw: random.Random) -> Peers:
    """Return which hosts, the head first, measure each other: all, or those on a ring, about log2 N random ones, and the head."""
    if len(names) <= FULL_MESH:
        return {name: set(names) - {name} for name in names}
    peers: dict[str, set[str]] = {name: set() for name in names}
    for place, name in enumerate(names):
        for other in (names[0], names[place - 1], *draw.sample(names, math.ceil(math.log2(len(names))))):
            if other != name:
                peers[name].add(other)
                peers[other].add(name)
    return peers


def measure_mesh(
    states: Sequence[HostState],
    ports: Sequence[int],
    connect: Connect,
    *,
    system_python: bool = False,
    write: bool = False,
    services: bool = False,
) -> None:
    """Set `mesh` of every host that answers. All hosts listen and connect to their peers at the same time.

    One machine that is several hosts takes part once. A single host has no mesh.

    Args:
        states: hosts whose `facts` have `interface`, with the head first.
        ports: TCP ports on which every host listens and is reached.
        connect: makes the connection to a host; called in this thread.
        system_python: use the interpreter that Ansible uses, instead of the cluster's.
        write: create marker files in the data directory and the folder of runs of every host for the time of the
            measurement, to find hosts that share one.
        services: whether to connect to the Ollama of every host that has one, too.
    """
    machines = list({state.address: state for state in reversed(states)}.values())[::-1]
    if len(machines) < 2:
        return
    peers = choose_peers([state.name for state in machines], random.Random())
    limit, token = MESH_LIMIT + len(machines) / 2, secrets.token_hex(16)
    requests: dict[str, Callable[[], dict[str, Any]]] = {}
    servers = {state.name: port for state in machines if services and (port := state.host.ollama_port)}
    for state in machines:
        request = {
            "name": state.name,
            "device": state.facts["interface"],
            "names": [other.name for other in machines],
            "address": state.address,
            "peers": {other.name: other.address for other in machines if other.name in peers[state.name]},
            "head": machines[0].name,
            "ports": list(ports),
            "token": token,
            "limit": limit,
            "data_dir": state.host.data_dir if write else "",
            "services": servers,
        }
        interpreter = state.host.system_python if system_python else state.host.python
        requests[state.name] = functools.partial(connect(state.host).call, "mesh", request, python=interpreter)
    answers = FanOut(requests).wait(limit + 10).answers
    for state in machines:
        state.mesh = answers.get(state.name)
