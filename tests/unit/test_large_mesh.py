"""The mesh of more hosts than FULL_MESH: which hosts measure each other, and whom the second measurement adds."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_mesh import free_ports

from trainyard.connection import Host, HostConnection
from trainyard.openssh import LocalTransport
from trainyard.preflight.cluster_checks import connectivity
from trainyard.preflight.host_state import HostState
from trainyard.preflight.mesh import FULL_MESH, choose_peers, find_suspects, measure_mesh

COUNT = FULL_MESH + 4
LIMIT = 15.0  # s for one measurement


@given(st.integers(2, 300), st.integers())
def test_the_pairs_of_a_large_cluster_grow_as_n_log_n(count: int, seed: int) -> None:
    names = [f"node{number}" for number in range(count)]
    peers = choose_peers(names, random.Random(seed))
    pairs = {frozenset((name, other)) for name, others in peers.items() for other in others}
    assert all(len(pair) == 2 for pair in pairs) and set(peers) == set(names)
    assert all(name in peers[other] for name, others in peers.items() for other in others), "both ends measure a pair"
    assert peers[names[0]] == set(names[1:]), "everyone measures its link to the head"
    assert all(name in peers[names[place - 1]] for place, name in enumerate(names)), "the ring"
    if count <= FULL_MESH:
        assert len(pairs) == count * (count - 1) / 2
    else:
        assert len(pairs) <= count * ((count - 1).bit_length() + 2)


def test_the_host_with_most_failures_is_the_first_suspect() -> None:
    states = []
    for number in range(1, COUNT + 1):
        name, others = f"node{number}", (number % COUNT + 1, (number + 1) % COUNT + 1)
        reached = {f"node{other}": {"1": "no answer" if other == 9 else "", "2": "in use"} for other in others}
        mesh = {"taken": [2], "reached": reached, "lines": {"node3": {"stalled": "x"}} if number == 2 else {}}
        states.append(HostState(Host(name, "127.0.0.1", "/", "python"), mesh=mesh))
    assert find_suspects(states) == ["node9", "node2", "node3", "node7", "node8"]
    states[8].mesh = None
    assert find_suspects(states) == ["node2", "node3"], "a host that did not answer has its own finding"


class Connection(HostConnection):
    """A connection to this machine that keeps the requests; that of `stranger` has another token than all others."""

    def __init__(self, host: Host, stranger: str, requests: list[dict[str, Any]]) -> None:
        super().__init__(host, LocalTransport())
        self.stranger, self.requests = stranger, requests

    def call(self, verb: str, request: dict[str, Any], **more: Any) -> dict[str, Any]:
        self.requests.append(request)
        token = "another" if self.host.name == self.stranger else request["token"]
        return super().call(verb, request | {"token": token, "limit": LIMIT}, **more)


def measured(folder: Path, stranger: str = "") -> tuple[list[HostState], list[dict[str, Any]], list[int]]:
    """Return the hosts after the measurement, all requests, and the ports. Two of the hosts share a data directory."""
    states = []
    for number in range(1, COUNT + 1):
        data_dir = folder / ("shared" if number in (5, 15) else f"data{number}")
        data_dir.mkdir(exist_ok=True)
        host = Host(f"node{number}", f"127.0.14.{number}", str(data_dir), sys.executable)
        states.append(HostState(host, {"interface": "lo"}))
    requests: list[dict[str, Any]] = []
    ports = free_ports(2)
    measure_mesh(states, ports, lambda host: Connection(host, stranger, requests), write=True)
    return states, requests, ports


@pytest.mark.slow
def test_a_cluster_without_a_problem_is_measured_once(tmp_path: Path) -> None:
    states, requests, ports = measured(tmp_path)
    assert len(requests) == COUNT
    assert sum(len(request["peers"]) for request in requests) < COUNT * (COUNT - 1)
    findings = connectivity(states, ports, ports[0])
    assert [finding for finding in findings if finding.level == "failure"] == [
        finding for finding in findings if finding.check == "shared"
    ]
    [shared] = [finding for finding in findings if finding.check == "shared"]
    assert shared.host == "node5" and "node15" in shared.text


@pytest.mark.slow
@pytest.mark.long
def test_all_others_measure_the_host_with_a_problem(tmp_path: Path) -> None:
    states, requests, ports = measured(tmp_path, "node9")
    assert len(requests) == 2 * COUNT
    reached = {state.name: state.mesh["reached"] for state in states if state.mesh}
    assert len(reached) == COUNT
    wrong = "another program answers"
    assert all(set(found["node9"].values()) == {wrong} for name, found in reached.items() if name != "node9")
    [firewall] = [f for f in connectivity(states, ports, ports[0]) if f.check == "firewall" and f.host == "node9"]
    assert all(state.name in firewall.text for state in states if state.name != "node9")
