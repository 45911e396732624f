"""The mesh of more hosts than FULL_MESH: which hosts measure each other."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_mesh import free_ports

from trainyard.preflight.cluster_checks import connectivity
from trainyard.preflight.host_state import HostState
from trainyard.preflight.measurements import FULL_MESH, choose_peers, measure_mesh
from trainyard.wire.connection import Host, HostConnection
from trainyard.wire.openssh import LocalTransport

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


class Connection(HostConnection):
    """A connection to this machine that keeps the requests; that of node9 has another token than all others."""

    def __init__(self, host: Host, requests: list[dict[str, Any]]) -> None:
        super().__init__(host, LocalTransport())
        self.requests = requests

    def call(self, verb: str, request: dict[str, Any], **more: Any) -> dict[str, Any]:
        self.requests.append(request)
        token = "another" if self.host.name == "node9" else request["token"]
        return super().call(verb, request | {"token": token, "limit": LIMIT}, **more)


@pytest.mark.slow
def test_problems_of_a_large_cluster_are_found(tmp_path: Path) -> None:
    """Two hosts share a data directory, and a host cannot be reached by those that measure it."""
    states = []
    for number in range(1, COUNT + 1):
        data_dir = tmp_path / ("shared" if number in (5, 15) else f"data{number}")
        data_dir.mkdir(exist_ok=True)
        host = Host(f"node{number}", f"127.0.14.{number}", str(data_dir), sys.executable)
        states.append(HostState(host, {"interface": "lo"}))
    requests: list[dict[str, Any]] = []
    ports = free_ports(2)
    measure_mesh(states, ports, lambda host: Connection(host, requests), write=True)
    assert len(requests) == COUNT and sum(len(request["peers"]) for request in requests) < COUNT * (COUNT - 1)
    findings = connectivity(states, ports, ports[0])
    [shared] = [finding for finding in findings if finding.check == "shared"]
    assert shared.host == "node5" and "node15" in shared.text
    [firewall] = [finding for finding in findings if finding.check == "firewall" and finding.host == "node9"]
    assert all(name in firewall.text for name in ("node1,", "node8", "node10")), (
        "the head, and the neighbours in the ring"
    )
