"""The permitted connections to and from the ranks of a run."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from typing import Any

import pytest

from trainer.config import RunSpec
from trainer.distributed.listeners import PEERS, listen, peer_filter, restrict_listeners
from trainer.supervise.socket_filter import permits_socket_filter
from trainyard.preflight.host_state import HostState
from trainyard.remote.network import addresses
from trainyard.run.launch.start_ranks import start_request
from trainyard.run.plan.isolation import choose_isolation, isolation_lines, unit_lines
from trainyard.run.plan.nodes import environment, plan_nodes
from trainyard.wire.connection import Host
from trainyard.wire.run_errors import PlanError

SPEC = RunSpec()
OWN = next(iter(addresses()), "")  # an address of this machine besides loopback
NEEDS_ADDRESS = pytest.mark.skipif(not OWN, reason="this machine has no address besides loopback")

NEEDS_FILTER = pytest.mark.privileged(
    permitted=permits_socket_filter(), reason="this kernel permits no socket filter without privileges"
)


def host(name: str, address: str, **facts: Any) -> HostState:
    found = {"gpus": [], "boot_id": name, "route_error": "", "interface": "eth0", "source": address, "cpus": 8}
    found |= {"memory_mib": 1000, "link_mbit": 0, "versions": {}, "part": None, "stop_wanted": False}
    return HostState(Host(name, address, data_dir="/d", python="/p"), facts=found | facts)


def connects(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), 0.5):
            return True
    except TimeoutError:  # the filter drops the packets; a refusal would be another error
        return False


# The filter of a listening socket ---------------------------------------------------------------------------------------


@NEEDS_ADDRESS
@NEEDS_FILTER
@pytest.mark.parametrize(("peers", "reached"), [("198.51.100.7", False), (f"198.51.100.7,{OWN}", True), ("", True)])
def test_a_listener_accepts_hosts_of_the_run_only(monkeypatch: pytest.MonkeyPatch, peers: str, reached: bool) -> None:
    monkeypatch.setenv(PEERS, peers)
    with listen(OWN, 0) as server:
        assert server.getsockname()[0] == OWN
        assert connects(OWN, server.getsockname()[1]) is reached


@NEEDS_ADDRESS
@NEEDS_FILTER
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_sockets_of_libraries_are_restricted_too(monkeypatch: pytest.MonkeyPatch, family: socket.AddressFamily) -> None:
    dual = family == socket.AF_INET6
    with socket.create_server(("", 0), family=family, dualstack_ipv6=dual) as server:
        port = server.getsockname()[1]
        assert connects(OWN, port)
        monkeypatch.setenv(PEERS, "198.51.100.7")
        assert restrict_listeners() >= 1
        assert connects("127.0.0.1", port) and (not dual or connects("::1", port))
        assert not connects(OWN, port)


# In a network of its own, which has an IPv6 address of a peer and one of another machine.
IPV6 = """
import os, socket, subprocess
from trainer.distributed.listeners import restrict_listeners
for words in ("link set lo up", "addr add fd00::1/128 dev lo nodad", "addr add fd00::2/128 dev lo nodad"):
    subprocess.run(["ip", *words.split()], check=True)
os.environ["TRAINYARD_PEERS"] = "198.51.100.7,fd00::1"
with socket.create_server(("fd00::1", 0), family=socket.AF_INET6) as server:
    print(restrict_listeners())
    for source in ("fd00::1", "fd00::2"):
        try:
            socket.create_connection(server.getsockname()[:2], 0.5, (source, 0)).close()
            print("connected")
        except TimeoutError:
            print("dropped")
"""
UNSHARE = ["unshare", "--user", "--map-root-user", "--net"]


@pytest.mark.privileged(
    permitted=bool(shutil.which("ip")) and subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0,
    reason="network namespaces are unavailable (unshare --net)",
)
def test_packets_from_other_ipv6_addresses_are_dropped() -> None:
    done = subprocess.run([*UNSHARE, sys.executable, "-c", IPV6], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "connected", "dropped"]


@NEEDS_FILTER
@pytest.mark.parametrize("name", ["198.51.100.7", "localhost"])
def test_a_listener_at_all_addresses_is_still_restricted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(PEERS, "198.51.100.7")
    with listen(name, 0) as server:
        assert server.getsockname()[0] in ("0.0.0.0", "::")
        assert connects("127.0.0.1", server.getsockname()[1])
        assert not OWN or not connects(OWN, server.getsockname()[1])


def test_the_filter_of_a_large_cluster_fits_into_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [f"10.0.{n // 250}.{n % 250}" for n in range(1000)]
    assert len(peer_filter(many)) < 4096  # BPF_MAXINSNS
    monkeypatch.setenv(PEERS, ",".join([*many, "fd00::1", "fe80::1%eth0"]))
    with listen("127.0.0.1", 0) as server:
        assert connects("127.0.0.1", server.getsockname()[1])


def test_a_kernel_that_permits_no_filter_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reserved(socket.socket):
        def setsockopt(self, *arguments: Any) -> None:
            if arguments[1] == 26:
                raise PermissionError(1, "Operation not permitted")
            super().setsockopt(*arguments)

    monkeypatch.setenv(PEERS, "198.51.100.7")
    monkeypatch.setattr(socket, "socket", Reserved)
    with listen("127.0.0.1", 0) as server:
        assert server.getsockname()[0] == "127.0.0.1"


# The plan ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hosts", [[host("a", "10.0.0.1")], [host("a", "10.0.0.1"), host("b", "10.0.0.1")], [host("a", "127.0.0.1")]]
)
@pytest.mark.parametrize("elastic", [0, 1])
def test_ranks_of_one_machine_use_loopback(hosts: list[HostState], elastic: int) -> None:
    isolation = choose_isolation("auto", SPEC, True, {})
    for node in plan_nodes(hosts, run="r", port=29500, elastic=elastic, isolation=isolation):
        assert (node.address, node.interface, node.peers) == ("127.0.0.1", "lo", ["127.0.0.1"])
        assert "10.0.0.1" not in " ".join(node.command)
        assert f"\n{PEERS}=127.0.0.1\n" in environment(node, {})


def test_ranks_of_several_hosts_accept_every_address_of_these() -> None:
    hosts = [
        host("a", "10.0.0.1", addresses=["10.0.0.1", "192.168.0.1"], addresses_v6=["fd00::1"]),
        host("b", "10.0.0.2", source="192.168.0.2"),
    ]
    isolation = choose_isolation("auto", SPEC, True, {})
    for node in plan_nodes(hosts, run="r", port=29500, isolation=isolation):
        assert set(node.peers) == {"10.0.0.1", "192.168.0.1", "fd00::1", "10.0.0.2", "192.168.0.2"}
        assert start_request(node, ["a", "b"], [])["reachable"] == node.peers
        assert "\nHF_HUB_OFFLINE=1\n" in environment(node, {})
        assert "\nHF_HUB_OFFLINE=0\n" in environment(node, {"HF_HUB_OFFLINE": "0"})


def test_a_host_cannot_name_anything_but_addresses() -> None:
    lies = [
        "10.0.0.3\nLD_PRELOAD=/tmp/x",
        "any",
        "0.0.0.0/0",
        7,
        None,
        "2001:db8::1",
        *(f"10.9.0.{n}" for n in range(200)),
    ]
    hosts = [host("a", "10.0.0.1"), host("b", "10.0.0.2", addresses=lies, addresses_v6="fd00::1")]
    peers = plan_nodes(hosts, run="r", port=29500, isolation=choose_isolation("auto", SPEC, True, {}))[0].peers
    assert peers[:3] == ["10.0.0.1", "10.0.0.2", "2001:db8::1"] and len(peers) < 70


def test_every_host_has_the_rendezvous_id_of_the_start() -> None:
    hosts = [host("a", "10.0.0.1"), host("b", "10.0.0.2")]
    for elastic in (0, 1):
        for node in plan_nodes(hosts, run="r", port=29500, elastic=elastic, identity="r-5ec2e7"):
            assert "--rdzv-id=r-5ec2e7" in node.command


@pytest.mark.parametrize(
    ("changed", "has_dataset", "run_env", "reason"),
    [
        ({}, True, {}, ""),
        ({"model": "org/name"}, True, {}, ""),  # the controller stages it
        ({"loggers": ["tensorboard", "wandb"]}, True, {}, "loggers=wandb"),
        ({"dataset": "org/data"}, False, {}, "dataset=org/data"),
        ({"dataset": "org/data", "fake_data": True}, False, {}, ""),
        ({"backend": "unsloth"}, True, {}, "backend=unsloth"),
        ({}, True, {"https_proxy": "10.0.0.9:3128"}, "https_proxy in run_env or cluster_env"),
        ({}, True, {"TRACKER": "https://10.0.0.9"}, "TRACKER in run_env or cluster_env"),
        ({}, True, {"NCCL_SOCKET_IFNAME": "ib0"}, "NCCL_SOCKET_IFNAME in run_env or cluster_env"),
        ({}, True, {"NCCL_DEBUG": "INFO"}, ""),
    ],
)
def test_a_run_that_needs_other_machines_is_not_isolated(
    changed: dict[str, Any], has_dataset: bool, run_env: dict[str, str], reason: str
) -> None:
    isolation = choose_isolation("auto", SPEC.model_copy(update=changed), has_dataset, run_env)
    assert (isolation.incoming, isolation.outgoing, isolation.reason) == (True, not reason, reason)
    hosts = [host("a", "10.0.0.1"), host("b", "10.0.0.2")]
    entry = plan_nodes(hosts, run="r", port=29500, isolation=isolation)[1]
    reachable = start_request(entry, ["a", "b"], [])["reachable"]
    assert reachable == ([] if reason else ["10.0.0.1", "10.0.0.2"])
    assert entry.peers == ["10.0.0.1", "10.0.0.2"]  # others cannot connect in any case
    assert [reason in line for line in isolation_lines(isolation, hosts)] == ([True] if reason else [])
    always = choose_isolation("always", SPEC.model_copy(update=changed), has_dataset, run_env)
    assert always.outgoing and not always.reason


def test_a_run_that_nothing_protects_is_warned_of() -> None:
    isolation = choose_isolation("never", SPEC, True, {})
    hosts = [host("a", "10.0.0.1", firewall="ufw"), host("b", "10.0.0.2", firewall="")]
    nodes = plan_nodes(hosts, run="r", port=29500, isolation=isolation)
    assert PEERS not in environment(nodes[0], {}) and not nodes[0].isolated
    (line,) = isolation_lines(isolation, hosts)
    assert line.startswith("warning: isolate=never, and no firewall is active on b:") and "site.yml" in line
    assert isolation_lines(isolation, hosts[:1]) == []
    hosts[1].facts["firewall"] = "nftables"
    assert isolation_lines(isolation, hosts) == []


def test_a_kernel_without_socket_filters_is_warned_of() -> None:
    isolation = choose_isolation("auto", SPEC.model_copy(update={"loggers": ("wandb",)}), True, {})
    hosts = [host("a", "10.0.0.1", socket_filter=False, firewall="ufw"), host("b", "10.0.0.2", socket_filter=False)]
    _, walled, bare = isolation_lines(isolation, hosts)
    assert walled.startswith("a: the kernel permits no socket filter without privileges; their firewalls keep")
    assert bare.startswith("warning: nothing keeps other machines from the ports of the run on b:")
    assert bare.endswith("or set isolate=always")
    for each in hosts:
        each.facts["socket_filter"] = True
    assert len(isolation_lines(isolation, hosts)) == 1


def test_the_plan_names_what_protects_a_run_without_a_socket_filter() -> None:
    isolation = choose_isolation("auto", SPEC, True, {})
    hosts = [host("a", "10.0.0.1"), host("b", "10.0.0.2", socket_filter=False, system_unit=True)]
    (line,) = isolation_lines(isolation, hosts)
    assert line.startswith("b: the kernel permits no socket filter") and "the systemd units of the run keep" in line
    hosts[1].facts["system_unit"] = False  # a unit of the user's service manager, or none
    (line,) = isolation_lines(isolation, hosts)
    assert line.startswith("warning: nothing keeps other machines") and "isolate=always" not in line
    assert isolation_lines(isolation, [host("a", "10.0.0.1", socket_filter=False)]) == []


def test_the_plan_names_hosts_whose_login_user_nothing_protects() -> None:
    hosts = [host("a", "10.0.0.1", system_unit=True), host("b", "10.0.0.2", system_unit=False), host("c", "10.0.0.3")]
    (line,) = unit_lines(hosts)
    assert line.startswith("b: no system unit protects") and "sudo without a password" in line
    assert unit_lines([hosts[0], hosts[2]]) == []


def test_the_addresses_cannot_be_set_by_run_env() -> None:
    nodes = plan_nodes([host("a", "10.0.0.1")], run="r", port=29500, isolation=choose_isolation("auto", SPEC, True, {}))
    with pytest.raises(PlanError, match=f"run_env: {PEERS} is set by the plan: use isolate=never"):
        environment(nodes[0], {PEERS: "0.0.0.0"})
