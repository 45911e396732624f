"""The remote programs mesh and health, run on loopback addresses of this machine."""

from __future__ import annotations

import functools
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainyard.connection import Host, HostConnection
from trainyard.openssh import LocalTransport
from trainyard.remote import health

HERE = Host("here", "127.0.0.1", "/nonexistent", sys.executable)
CONNECTION = HostConnection(HERE, LocalTransport())
NAMES = {"node1": "127.0.13.1", "node2": "127.0.13.2"}


def free_ports(count: int) -> list[int]:
    """Return ports that are free on both addresses now."""
    held = [socket.create_server(("127.0.13.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in held]
    for server in held:
        server.close()
    return ports


def pair(ports: list[int], tokens: tuple[str, str] = ("secret", "secret"), limit: float = 8.0) -> list[dict[str, Any]]:
    """Run both hosts' parts at the same time; return their answers."""
    started = []
    for (name, address), token in zip(NAMES.items(), tokens, strict=True):
        about = {"name": name, "names": list(NAMES), "address": address, "head": "node1", "ports": ports}
        about |= {
            "peers": {n: a for n, a in NAMES.items() if n != name},
            "token": token,
            "limit": limit,
            "device": "lo",
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


def test_a_host_that_does_not_listen() -> None:
    about = {"name": "node1", "names": list(NAMES), "address": NAMES["node1"], "head": "node1", "ports": free_ports(1)}
    about |= {"peers": {"node2": NAMES["node2"]}, "token": "secret", "limit": 2.0, "device": "lo"}
    answer = CONNECTION.call("mesh", about)
    assert answer["reached"]["node2"] == {str(about["ports"][0]): "connection refused"}


def test_health_of_this_machine(tmp_path: Path) -> None:
    """Damaged datasets are reported, and the measurements have plausible values."""
    good = b'{"text": "x"}\n'
    store = tmp_path / "store/datasets"
    store.mkdir(parents=True)
    name = health.hashlib.sha256(good).hexdigest()[:16]
    (store / f"{name}.jsonl").write_bytes(good)
    (store / "0123456789abcdef.jsonl").write_bytes(good)
    answer = health.gather(
        {"peers": ["localhost"], "data_dir": str(tmp_path), "run": "", "sudo": False, "memory_mib": 16}
    )
    assert answer["files"]["damaged"] == [str(store / "0123456789abcdef.jsonl")]
    assert answer["names"]["addresses"]["localhost"] == ["127.0.0.1"]
    assert answer["memory_allocated"] and 0 < answer["memory"]["available_mib"] <= answer["memory"]["total_mib"]
    assert any(row["name"] == "lo" and row["address"] == "127.0.0.1" for row in answer["devices"])
    assert 0 < answer["spin"]["share"] <= 1.05


def test_a_process_cannot_allocate_more_than_the_memory() -> None:
    assert health.can_allocate(8)
    assert not health.can_allocate(1 << 40)
