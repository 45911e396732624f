"""The network interface of a run where a host resolves its own name to 127.0.1.1: never loopback."""

import socket
import subprocess
from pathlib import Path

import pytest
from tables import table

from trainer.supervise import interface as network
from trainer.tools import slurm_script

# The answers of getent and ip on a host with two NICs: eth0 has the default route, ib0 the network of the cluster.
TOOLS = table("network_interface")["tools"]


@pytest.mark.parametrize(("head", "peer", "nic"), table("network_interface")["scripts_never_choose_loopback"])
def test_scripts_never_choose_loopback_for_the_name_of_a_host(tmp_path: Path, head: str, peer: str, nic: str) -> None:
    for name, text in TOOLS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = f'set -euo pipefail\n{slurm_script.INTERFACE}\necho "$NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME"'
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HEAD": head} | ({"PEER": peer} if peer else {})
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{nic} {nic}\n", "")


@pytest.mark.parametrize(("nodes", "addresses", "expected"), table("network_interface")["a_job_knows_the_addresses"])
def test_a_job_knows_two_addresses(tmp_path: Path, nodes: str, addresses: dict[str, str], expected: str) -> None:
    known = "".join(f'{node}) echo "   NodeAddr={address} X=1" ;; ' for node, address in addresses.items())
    answer = (
        f'#!/bin/bash\nif [ $2 = hostnames ]; then printf "%s\\n" {nodes}; else case $3 in {known} x) ;; esac; fi\n'
    )
    (tmp_path / "scontrol").write_text(answer)
    (tmp_path / "scontrol").chmod(0o755)
    script = f'set -euo pipefail\n{slurm_script.HEAD}\necho "$HEAD $PEER"'
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "x"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{expected}\n", "")


DEFAULT = "Iface Destination\nib0 0000000A\neth0 00000000\n"
NO_DEFAULT = "Iface Destination\nib0 0000000A\n"


@pytest.mark.parametrize(
    ("head", "answers", "routes", "nics", "expected"),
    [
        ("own", ["127.0.1.1"], DEFAULT, ["ib0", "eth0"], "eth0"),
        ("own", ["127.0.1.1"], NO_DEFAULT, ["ib0"], "ib0"),
        ("own", ["127.0.1.1"], NO_DEFAULT, ["ib0", "eth0"], ""),  # nothing says which
        ("both", ["127.0.1.1", "10.0.0.2"], DEFAULT, ["ib0", "eth0"], "ib0"),
        ("head", ["10.0.0.2"], DEFAULT, ["ib0", "eth0"], "ib0"),
        ("localhost", ["127.0.0.1"], DEFAULT, ["ib0", "eth0"], ""),
        ("127.0.0.1", ["127.0.0.1"], DEFAULT, ["ib0", "eth0"], ""),
    ],
)
def test_ranks_never_choose_loopback_for_the_name_of_a_host(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    head: str,
    answers: list[str],
    routes: str,
    nics: list[str],
    expected: str,
) -> None:
    rows = [(socket.AF_INET, 0, 0, "", (address, 0)) for address in answers]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments: rows)
    own = {"ib0": "10.0.0.1", "eth0": "192.168.0.7"}
    found = [{"name": "lo", "address": "127.0.0.1"}, *({"name": nic, "address": own[nic]} for nic in nics)]
    monkeypatch.setattr(network, "interfaces", lambda: found)
    monkeypatch.setattr(network, "source_address", lambda peer: "10.0.0.1")
    file = tmp_path / "route"
    file.write_text(routes)
    assert network.interface_to(head, file) == expected


def test_an_unknown_head_names_no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert network.interface_to("nowhere.invalid") == ""
