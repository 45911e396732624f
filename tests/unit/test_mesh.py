"""The remote programs mesh and health, run on loopback addresses of this machine."""

import functools
import hashlib
import os
import random
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_hosts import free_port
from tables import table

from trainyard.preflight.cluster_checks import connectivity
from trainyard.preflight.host_state import HostState
from trainyard.preflight.measurements import FULL_MESH, choose_peers, measure_mesh
from trainyard.preflight.runner import NOT_WRITTEN
from trainyard.remote import health
from trainyard.remote.folder_marker import FolderMarkers
from trainyard.remote.mesh import Mesh
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.session import RunSession
from trainyard.run.types import PlanEntry, SessionState
from trainyard.wire.connection import Host, HostConnection
from trainyard.wire.openssh import LocalTransport
from trainyard.wire.run_errors import RunError

HERE = Host("here", "127.0.0.1", "/nonexistent", sys.executable)
CONNECTION = HostConnection(HERE, LocalTransport())
NAMES = {"node1": "127.0.13.1", "node2": "127.0.13.2"}


def free_ports(count: int) -> list[int]:
    """Return free ports, below those that the kernel gives to connections of other tests."""
    return [free_port() for _ in range(count)]


def pair(
    ports: list[int],
    tokens: tuple[str, str] = ("secret", "secret"),
    limit: float = 8.0,
    data_dirs: tuple[Path | str, Path | str] = ("", ""),
    **more: Any,
) -> list[dict[str, Any]]:
    """Run both hosts' parts at the same time; return their answers."""
    started = []
    for (name, address), token, data_dir in zip(NAMES.items(), tokens, data_dirs, strict=True):
        about = {"name": name, "names": list(NAMES), "address": address, "head": "node1", "ports": ports}
        about |= {
            "peers": {n: a for n, a in NAMES.items() if n != name},
            "token": token,
            "limit": limit,
            "device": "lo",
            "data_dir": str(data_dir),
            **more,
        }
        started.append(functools.partial(CONNECTION.call, "mesh", about))
    with ThreadPoolExecutor(len(started)) as pool:
        return [answer.result(60) for answer in [pool.submit(one) for one in started]]


def test_two_hosts_reach_each_other_and_measure_their_connection() -> None:
    ports = free_ports(3)
    first, second = pair(ports)
    assert first["taken"] == second["taken"] == []
    assert first["reached"] == {"node2": {str(port): "" for port in ports}}
    assert second["reached"] == {"node1": {str(port): "" for port in ports}}
    assert second["lines"]["node1"]["mbit"] > 0 and second["lines"]["node1"]["latency_ms"] > 0
    assert "mbit" not in first["lines"]["node2"]


def test_the_port_of_ollama_is_tried_with_and_without_a_server() -> None:
    ports, (free, taken) = free_ports(1), free_ports(2)
    with socket.create_server((NAMES["node2"], taken)):
        first, second = pair(ports, services={"node1": free, "node2": taken})
    assert first["services"] == {"node2": ""} and second["services"] == {"node1": ""}
    first, second = pair(ports, services={"node3": 1})
    assert first["services"] == second["services"] == {}
    peer = Mesh(
        {"name": "a", "names": [], "address": "", "head": "", "peers": {}, "ports": [], "limit": 0.5}
        | {"device": "lo", "token": "x", "data_dir": ""}
    )
    assert peer.connect_service(NAMES["node1"], free) == "Connection refused"


@pytest.mark.slow
def test_a_peer_without_the_token_is_another_program() -> None:
    ports = free_ports(1)
    for answer in pair(ports, ("one", "another"), limit=3.0):
        [(_, reached)] = answer["reached"].items()
        assert reached == {str(ports[0]): "another program answers"}


def test_another_server_on_a_port() -> None:
    ports = free_ports(2)
    with socket.create_server((NAMES["node2"], ports[0])) as other:

        def greet() -> None:
            while True:
                try:
                    peer, _ = other.accept()
                except OSError:
                    return
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4)

        threading.Thread(target=greet, daemon=True).start()
        first, second = pair(ports)
    assert second["taken"] == [ports[0]] and first["taken"] == []
    assert first["reached"]["node2"] == {str(ports[0]): "another program answers", str(ports[1]): ""}
    assert second["reached"]["node1"] == {str(ports[0]): "", str(ports[1]): ""}


@pytest.mark.slow
def test_a_host_that_does_not_listen() -> None:
    about = {"name": "node1", "names": list(NAMES), "address": NAMES["node1"], "head": "node1", "ports": free_ports(1)}
    about |= {"peers": {"node2": NAMES["node2"]}, "token": "secret", "limit": 2.0, "device": "lo", "data_dir": ""}
    answer = CONNECTION.call("mesh", about)
    assert answer["reached"]["node2"] == {str(about["ports"][0]): "connection refused"}


@pytest.mark.parametrize(("first", "second", "exist", "runs", "shared"), table("mesh")["a_shared_data_dir_is_seen"])
def test_a_shared_data_dir_is_seen(tmp_path: Path, first: str, second: str, exist: str, runs: str, shared: str) -> None:
    for name in exist.split():
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("one")
    for name in {first, second} if runs else ():
        (tmp_path / name / "runs").symlink_to(tmp_path / runs)
    before = sorted(tmp_path.rglob("*"))
    markers = [FolderMarkers(str(tmp_path / data_dir), "secret") for data_dir in (first, second)]
    for marker, name in zip(markers, NAMES, strict=True):
        assert marker.create(name) == ""
    created = set(tmp_path.rglob("*")) - set(before)
    assert created and not any(str(path.readlink()) != "trainyard" or "secret" in path.name for path in created)
    assert markers[0].create("node1") == "File exists", "no file is replaced"
    assert [marker.shared_with(peer) for marker, peer in zip(markers, reversed(NAMES), strict=True)] == [shared] * 2
    assert not FolderMarkers(str(tmp_path / first), "another secret").shared_with("node1")
    for marker in markers:
        marker.remove()
    assert sorted(tmp_path.rglob("*")) == before


def sharing(answers: list[dict[str, Any]]) -> bool:
    """Return whether a host has seen the marker of the other one. The host that ends first has removed its marker."""
    assert all(answer["write_error"] == "" for answer in answers)
    assert all(set(answer["shares_with"]) <= set(NAMES) - {name} for name, answer in zip(NAMES, answers, strict=True))
    return any(answer["shares_with"] for answer in answers)


def test_hosts_of_a_mesh_see_a_shared_data_dir(tmp_path: Path) -> None:
    assert sharing(pair(free_ports(1), data_dirs=(tmp_path, tmp_path)))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_shared_data_dir_is_seen_although_no_port_is_open(tmp_path: Path) -> None:
    ports = free_ports(1)
    with socket.socket() as first, socket.socket() as second:
        for taken, address in zip((first, second), NAMES.values(), strict=True):
            taken.bind((address, ports[0]))
        answers = pair(ports, limit=3.0, data_dirs=(tmp_path, tmp_path))
    assert all(answer["taken"] == ports for answer in answers)
    assert sharing(answers) and not list(tmp_path.iterdir())


def test_markers_of_a_killed_preflight_are_ignored_and_removed(tmp_path: Path) -> None:
    old, new = (FolderMarkers(str(tmp_path), secret) for secret in ("old", "new"))
    for marker in (old, new):
        for name in NAMES:
            assert marker.create(name) == ""
    for path in tmp_path.iterdir():
        if path not in new.created:
            os.utime(path, (1e9, 1e9), follow_symlinks=False)
    answer, _ = pair(free_ports(1), data_dirs=(tmp_path, tmp_path.parent))
    assert not answer["shares_with"]
    # The recent one may belong to a preflight that runs now.
    assert {*tmp_path.iterdir()} == {*new.created}


def test_the_marker_is_removed_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = table("mesh")["the_marker_is_removed"] | {"names": list(NAMES), "address": NAMES["node1"]}
    about |= {"token": "secret", "limit": 1.0, "device": "lo", "data_dir": str(tmp_path)}
    seen = []

    def fail(mesh: Mesh) -> None:
        seen.extend(tmp_path.iterdir())
        raise OSError("too many open files")

    monkeypatch.setattr(Mesh, "listen", fail)
    with pytest.raises(OSError, match="too many"):
        Mesh(about).run()
    assert len(seen) == 2 and not list(tmp_path.iterdir())


def test_a_data_dir_without_write_access_is_reported(tmp_path: Path) -> None:
    first, second = pair(free_ports(1), data_dirs=("/proc/self", tmp_path))
    assert first["write_error"] and not second["write_error"]
    assert first["reached"]["node2"] == dict.fromkeys(second["reached"]["node1"], "")


@pytest.mark.parametrize("check", [False, True])
def test_a_run_on_hosts_that_share_a_data_dir_is_refused(tmp_path: Path, check: bool) -> None:
    """In check mode nothing is written, so nothing is found."""
    hosts = [Host(name, address, str(tmp_path), sys.executable) for name, address in NAMES.items()]
    entries = [PlanEntry(host.name, rank, interface="lo") for rank, host in enumerate(hosts)]
    session = RunSession(
        hosts,
        lambda host: HostConnection(host, LocalTransport()),
        LaunchOptions(),
        check=check,
        state=SessionState(plan=entries, port=free_ports(1)[0]),
    )
    before = tmp_path.stat().st_mtime_ns
    if check:
        assert session.preflight()["lines"] == [NOT_WRITTEN]
        assert tmp_path.stat().st_mtime_ns == before
        return
    with pytest.raises(RunError, match=f"node1: shares its data directory {tmp_path} with node2: set cluster_data_dir"):
        session.preflight()
    assert tmp_path.stat().st_mtime_ns != before and not list(tmp_path.iterdir())


def test_health_of_this_machine(tmp_path: Path) -> None:
    """Damaged datasets are reported, and the measurements have plausible values."""
    good = b'{"text": "x"}\n'
    store = tmp_path / "store/datasets"
    store.mkdir(parents=True)
    name = hashlib.sha256(good).hexdigest()[:16]
    (store / f"{name}.jsonl").write_bytes(good)
    (store / "0123456789abcdef.jsonl").write_bytes(good)
    answer = health.gather(
        table("mesh")["health_of_this_machine"] | {"data_dir": str(tmp_path), "ollama_port": free_ports(1)[0]}
    )
    assert answer["wsl"] is None
    assert answer["files"]["damaged"] == [str(store / "0123456789abcdef.jsonl")]
    assert answer["hardware"]["models"] is None and answer["hardware"]["cores"] >= 1 and answer["hardware"]["cpu"]
    assert answer["names"]["addresses"]["localhost"] == ["127.0.0.1"]
    assert answer["memory_allocated"] and 0 < answer["memory"]["available_mib"] <= answer["memory"]["total_mib"]
    assert any(row["name"] == "lo" and row["address"] == "127.0.0.1" for row in answer["devices"])
    assert 0 < answer["spin"]["share"] <= 1.05


def test_a_folder_that_root_cannot_open_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS with root_squash: a sudo whose root may not open one folder, of which the nearest one that exists is asked."""
    (tmp_path / "sudo").write_text('#!/bin/sh\nshift; case "$*" in *closed*) exit 2;; esac; exec "$@"\n')
    (tmp_path / "sudo").chmod(0o755)
    (tmp_path / "closed").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = health.site([], [tmp_path, tmp_path / "closed/home/data"])
    assert found["folders"] == str(tmp_path / "closed") and "sudo" not in found, found


def test_a_process_cannot_allocate_more_than_the_memory() -> None:
    assert health.can_allocate(8)
    assert not health.can_allocate(1 << 40)


# Larger meshes -------------------------------------------------------------------------------------------------------

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


@pytest.mark.long
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
