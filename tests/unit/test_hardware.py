"""The hardware of a host and the models of its Ollama, as the verb `hardware` reads them."""

import http.server
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_nvidia_smi import write_nvidia_smi
from fake_target import Target, serve_target
from tables import table
from threaded_server import QuietHandler, running

from trainyard.extra_vars import check_names
from trainyard.host_variables import make_host
from trainyard.ollama.servers import host_urls
from trainyard.preflight.hardware_table import gather_hardware, hardware_table
from trainyard.remote.hardware import ollama_models
from trainyard.remote.host_use import ollama_use
from trainyard.wire.connection import HostConnection, InventoryError
from trainyard.wire.openssh import LocalTransport

TOP = Path(__file__).resolve().parents[2]


@contextmanager
def other_server(body: bytes) -> Iterator[str]:
    """A server that answers every path with the same body; yields its URL."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

    with running(http.server.ThreadingHTTPServer(("127.0.13.1", 0), Handler)) as server:
        yield f"http://127.0.13.1:{server.server_address[1]}"


@contextmanager
def ollama(*models: str) -> Iterator[Target]:
    """Serve an Ollama with these models."""
    with serve_target("127.0.13.1", "0.30.0", lambda model, question: "") as server:
        server.models |= {name: {} for name in models}
        yield server


def test_the_hardware_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    write_nvidia_smi(tmp_path, 2)
    with ollama("b:1b", "a:1b") as server:
        variables = {"cluster_data_dir": str(tmp_path / "data"), "cluster_python": sys.executable}
        host = make_host("here", variables | {"ollama_url": f"{server.url}/"})
        found = gather_hardware([host], lambda name: HostConnection(host, LocalTransport()), 30)
    here = found["here"]
    assert here["gpus"] == [{"name": "Stand-in GPU", "memory_mib": 24576, "links": "PCIe 4 x8 of x16, 2 NVLinks"}] * 2
    assert here["models"] == ["a:1b", "b:1b"] and here["free_bytes"] > 0 and here["memory_mib"] > 0
    table = hardware_table(["here", "away"], found)
    assert "2 x Stand-in GPU  2 x 24 GiB  2 x PCIe 4 x8 of x16, 2 NVLinks" in table[1]
    assert table[1].endswith("a:1b, b:1b")
    assert table[2].split() == ["away", *["-"] * 8]


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"version": "1.0.0", "models": 5}', b"[" * 100_000, b"\xff"])
def test_another_server_on_ollamas_port_has_no_models(body: bytes) -> None:
    with other_server(body) as url, ollama() as server:
        assert ollama_models([url]) is None
        assert ollama_models(["http://127.0.13.9:1", url, server.url]) == []


@pytest.mark.parametrize(("variables", "port"), table("hardware")["hosts_whose_ollama_is_part_of_the_cluster"])
def test_hosts_whose_ollama_is_part_of_the_cluster(variables: dict[str, Any], port: int) -> None:
    assert make_host("a", variables).ollama_port == port


def test_the_servers_of_a_host_come_from_its_variables() -> None:
    def urls(**variables: Any) -> list[str]:
        return host_urls(make_host("a", {"cluster_address": "10.0.0.1", **variables}))

    assert urls() == ["http://127.0.0.1:11434", "http://10.0.0.1:11434"]
    assert urls(ollama_port=5) == ["http://127.0.0.1:5", "http://10.0.0.1:5"]
    assert urls(discovered_url="http://10.0.0.1:7")[0] == "http://127.0.0.1:7"
    assert urls(ollama_url="http://other:5/", ollama_port=6) == ["http://other:5"]
    for wrong in ("other:5", "https://other", "http://me:secret@other", "http://other:x"):
        with pytest.raises(InventoryError, match="a: ollama_url is no address of a server: set it to") as caught:
            urls(ollama_url=wrong)
        assert "secret" not in str(caught.value)


def test_the_dashboard_asks_the_server_of_the_host(tmp_path: Path) -> None:
    with ollama("mine:latest") as target:
        host = make_host("a", {"cluster_data_dir": str(tmp_path), "ollama_url": target.url})
        found = ollama_use({"data_dir": str(tmp_path), "ollama_urls": host_urls(host)})
    assert (found["version"], found["installed"]) == ("0.30.0", ["mine:latest"])


def test_ollama_url_is_a_name_for_every_playbook() -> None:
    check_names(["ollama_url"], TOP)
