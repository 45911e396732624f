"""The permitted connections to and from the ranks of a run."""

import socket
from typing import Any

import pytest
from tables import table

from trainer.config import RunSpec
from trainer.distributed.listeners import listen
from trainyard.preflight.host_state import HostState
from trainyard.run.launch.start_ranks import start_request
from trainyard.run.plan.isolation import choose_isolation, exposed_hosts, isolation_lines, unit_lines
from trainyard.run.plan.nodes import environment, plan_nodes
from trainyard.wire.connection import Host

SPEC = RunSpec()


def host(name: str, address: str, **facts: Any) -> HostState:
    found = {"gpus": [], "boot_id": name, "route_error": "", "interface": "eth0", "source": address, "cpus": 8}
    found |= {"memory_mib": 1000, "link_mbit": 0, "versions": {}, "part": None, "stop_wanted": False}
    return HostState(Host(name, address, data_dir="/d", python="/p"), facts=found | facts)


@pytest.mark.parametrize("place", ["127.0.0.1", "::1"])
def test_a_listener_has_one_address(place: str) -> None:
    with listen(place, 0) as server:
        assert server.getsockname()[0] == place
        socket.create_connection(server.getsockname()[:2], 5).close()


@pytest.mark.parametrize("name", ["198.51.100.7", "localhost"])
def test_a_listener_without_an_address_of_this_host_has_all(name: str) -> None:
    with listen(name, 0) as server:
        assert server.getsockname()[0] in ("0.0.0.0", "::")
        socket.create_connection(("127.0.0.1", server.getsockname()[1]), 5).close()


@pytest.mark.parametrize(
    "hosts", [[host("a", "10.0.0.1")], [host("a", "10.0.0.1"), host("b", "10.0.0.1")], [host("a", "127.0.0.1")]]
)
@pytest.mark.parametrize("elastic", [0, 1])
def test_ranks_of_one_machine_use_loopback(hosts: list[HostState], elastic: int) -> None:
    isolation = choose_isolation("auto", SPEC, True, {})
    for node in plan_nodes(hosts, run="r", port=29500, elastic=elastic, isolation=isolation):
        assert (node.address, node.interface, node.peers) == ("127.0.0.1", "lo", ["127.0.0.1"])
        assert "10.0.0.1" not in " ".join(node.command)


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
    table("isolation_plan")["a_run_that_needs_other_machines_is_not_isolated"],
)
def test_a_run_that_needs_other_machines_is_not_isolated(
    changed: dict[str, Any], has_dataset: bool, run_env: dict[str, str], reason: str
) -> None:
    isolation = choose_isolation("auto", SPEC.model_copy(update=changed), has_dataset, run_env)
    assert (isolation.limited, isolation.reason) == (not reason, reason)
    hosts = [host("a", "10.0.0.1"), host("b", "10.0.0.2")]
    entry = plan_nodes(hosts, run="r", port=29500, isolation=isolation)[1]
    reachable = start_request(entry, ["a", "b"], [])["reachable"]
    assert reachable == ([] if reason else ["10.0.0.1", "10.0.0.2"])
    lines = isolation_lines(isolation, hosts)
    assert [reason in line for line in lines[:1]] == ([True] if reason else [])
    always = choose_isolation("always", SPEC.model_copy(update=changed), has_dataset, run_env)
    assert always.limited and not always.reason


def test_a_run_that_nothing_protects_is_warned_of() -> None:
    isolation = choose_isolation("never", SPEC, True, {})
    hosts = [host("a", "10.0.0.1", firewall="ufw"), host("b", "10.0.0.2", firewall="")]
    nodes = plan_nodes(hosts, run="r", port=29500, isolation=isolation)
    assert not nodes[0].isolated and not nodes[0].peers
    (line,) = isolation_lines(isolation, hosts)
    assert line.startswith("warning: nothing keeps other machines from the ports of the run on b,")
    assert "site.yml" in line and line.endswith("or omit isolate")
    assert isolation_lines(isolation, hosts[:1]) == []
    hosts[1].facts["firewall"] = "nftables"
    assert isolation_lines(isolation, hosts) == []


def test_a_run_that_needs_other_machines_has_no_unit_that_protects_it() -> None:
    isolation = choose_isolation("auto", SPEC.model_copy(update={"loggers": ("wandb",)}), True, {})
    hosts = [host("a", "10.0.0.1", firewall="ufw"), host("b", "10.0.0.2", system_unit=True)]
    why, bare = isolation_lines(isolation, hosts)
    assert why.endswith("because of loggers=wandb")
    assert bare.startswith("warning: nothing keeps other machines from the ports of the run on b,")
    assert bare.endswith("or set isolate=always")


def test_a_unit_protects_a_run_without_a_firewall() -> None:
    isolation = choose_isolation("auto", SPEC, True, {})
    hosts = [host("a", "10.0.0.1", firewall="ufw"), host("b", "10.0.0.2", system_unit=True)]
    assert isolation_lines(isolation, hosts) == []
    hosts[1].facts["system_unit"] = False  # a unit of the user's service manager, or none
    assert exposed_hosts(isolation, hosts) == ["b"]
    (line,) = isolation_lines(isolation, hosts)
    assert "no system unit limits the ranks" in line and "isolate=" not in line
    assert isolation_lines(isolation, [host("a", "10.0.0.1", system_unit=False)]) == []  # on loopback


def test_the_plan_names_hosts_whose_login_user_nothing_protects() -> None:
    hosts = [host("a", "10.0.0.1", system_unit=True), host("b", "10.0.0.2", system_unit=False), host("c", "10.0.0.3")]
    (line,) = unit_lines(hosts, SPEC, {})
    assert line.startswith("b: no system unit protects") and "sudo without a password" in line
    assert unit_lines([hosts[0], hosts[2]], SPEC, {}) == []
    wandb = SPEC.model_copy(update={"loggers": ("wandb",)})
    (line,) = unit_lines(hosts[:1], wandb, {})
    assert line == "warning: loggers=wandb: runs on a do not see ~/.netrc: give WANDB_API_KEY in run_env"
    assert unit_lines(hosts[:1], wandb, {"WANDB_MODE": "offline"}) == [] and len(unit_lines(hosts[1:2], wandb, {})) == 1
