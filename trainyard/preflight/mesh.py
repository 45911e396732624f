"""Measurements that all hosts make together: connectivity of pairs of hosts, and an all-reduce over all of them.

Up to FULL_MESH hosts, every pair is measured. The number of pairs of a larger cluster grows as N log N: every host measures the head,
its neighbours in a ring, and a few random hosts. A second measurement then connects the hosts with a problem to all others, so that a
finding says who cannot reach them.
"""

from __future__ import annotations

import functools
import math
import random
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainyard.connection import FanOut, Host, HostConnection
from trainyard.preflight.host_state import HostState

Connect = Callable[[Host], HostConnection]
Peers = Mapping[str, set[str]]  # for each host those that it measures, and that measure it

FULL_MESH = 16  # hosts of which every pair is measured
HIGH_PORTS = range(33000, 60900)  # ephemeral ports, on which gloo and NCCL listen
REDUCE_PORTS = range(29600, 29999)  # below the ephemeral ports; the rendezvous port may be in use
MESH_LIMIT = 8.0  # s, plus half a second per host
REDUCE_LIMIT = 60.0  # s, most of it for the import of torch


def high_ports() -> list[int]:
    """Return three random ports of the range in which ranks listen."""
    return random.sample(HIGH_PORTS, 3)


def choose_peers(names: Sequence[str], draw: random.Random) -> Peers:
    """Return which hosts measure each other: all, or those on a ring, some random ones, and everyone the head.

    Args:
        names: names of the hosts, the head first.
        draw: chooses the random ones, about log2 N for each host.
    """
    if len(names) <= FULL_MESH:
        return suspects_peers(names, names)
    peers: dict[str, set[str]] = {name: set() for name in names}
    for place, name in enumerate(names):
        for other in (names[0], names[place - 1], *draw.sample(names, math.ceil(math.log2(len(names))))):
            if other != name:
                peers[name].add(other)
                peers[other].add(name)
    return peers


def suspects_peers(names: Sequence[str], suspects: Sequence[str]) -> Peers:
    """Return which hosts measure each other, so that the suspects and all other hosts do."""
    return {name: set(names if name in suspects else suspects) - {name} for name in names}


def find_suspects(states: Sequence[HostState]) -> list[str]:
    """Return the hosts to which or from which a connection failed, at most log2 N, those with the most failures first.

    Args:
        states: the hosts that have a `mesh`.
    """
    answers = {state.name: state.mesh for state in states if state.mesh}
    failures: Counter[str] = Counter()
    for name, answer in answers.items():
        for target in answers.keys() & answer["reached"].keys():
            taken = {str(port) for port in answers[target]["taken"]}
            link = answer["lines"].get(target, {})
            lost = "stalled" in link or (link.get("ping_small") and link.get("ping_large") is False)
            if lost or any(error for port, error in answer["reached"][target].items() if port not in taken):
                failures.update((name, target))
    return [name for name, _ in failures.most_common(math.ceil(math.log2(max(2, len(states)))))]


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
    more: dict[str, Any] = {"system_python": system_python, "write": write, "services": services}
    names = [state.name for state in machines]
    answers = _measure(machines, choose_peers(names, random.Random()), ports, connect, **more)
    for state in machines:
        state.mesh = answers.get(state.name)
    answered = [state for state in machines if state.mesh]
    if len(machines) > FULL_MESH and (suspects := find_suspects(answered)):
        peers = suspects_peers([state.name for state in answered], suspects)
        again = _measure(answered, peers, ports, connect, **more)
        for state in answered:
            if (first := state.mesh) and (second := again.get(state.name)):
                state.mesh = _both(first, second)


def _both(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of a host to two measurements; the second one counts where both measured a peer."""
    joined = {key: {**first[key], **second[key]} for key in ("reached", "lines", "services") if key in first}
    for peer, link in first["lines"].items():
        joined["lines"][peer] = {**link, **second["lines"].get(peer, {})}
    return {
        **first,
        **joined,
        "taken": sorted({*first["taken"], *second["taken"]}),
        "shares_with": {**first["shares_with"], **second["shares_with"]},
        "write_error": first["write_error"] or second["write_error"],
    }


def _measure(
    machines: Sequence[HostState],
    peers: Peers,
    ports: Sequence[int],
    connect: Connect,
    *,
    system_python: bool,
    write: bool,
    services: bool,
) -> dict[str, dict[str, Any]]:
    """Return the answers of the hosts that answer, by name. See `measure_mesh`."""
    limit, token = MESH_LIMIT + len(machines) / 2, secrets.token_hex(16)
    requests: dict[str, Callable[[], dict[str, Any]]] = {}
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
            "services": {other.name: port for other in machines if (port := other.host.ollama_port)}
            if services
            else {},
        }
        interpreter = state.host.system_python if system_python else state.host.python
        requests[state.name] = functools.partial(connect(state.host).call, "mesh", request, python=interpreter)
    return FanOut(requests).wait(limit + 10).answers


def measure_all_reduce(states: Sequence[HostState], connect: Connect) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """Run a gloo all-reduce over all hosts with the cluster's Python.

    Returns:
        The head's answer (`mbit`, `latency_ms`, `torch`), or None if any host failed; and the error of every such host.
    """
    port = random.choice(REDUCE_PORTS)
    requests: dict[str, Callable[[], dict[str, Any]]] = {}
    for rank, state in enumerate(states):
        request = {
            "rank": rank,
            "world": len(states),
            "master": states[0].address,
            "port": port,
            "device": state.facts["interface"],
            "limit": REDUCE_LIMIT,
        }
        requests[state.name] = functools.partial(connect(state.host).call, "all_reduce", request)
    fan_out = FanOut(requests).wait(REDUCE_LIMIT + 15)
    if fan_out.errors:
        return None, dict(fan_out.errors)
    return fan_out.answers[states[0].name], {}
