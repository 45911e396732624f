"""Machines are identified by hints before login, and by facts after it."""

import itertools

import pytest
from fake_ollama import Server, serve
from test_ssh import sshd

from trainyard.discovery.duplicates import find_duplicates
from trainyard.discovery.engine import discover
from trainyard.discovery.identity import Endpoint, machines
from trainyard.discovery.identity import Server as Seen
from trainyard.discovery.settings import Settings

KEY, OTHER_KEY = ("ssh-ed25519 " + c * 68 for c in "AB")


def endpoint(address: str, mac: str = "", key: str = "") -> Endpoint:
    seen = Seen(port=11434, version="0.12.3", models=(), loaded=(), response_ms=1)
    return Endpoint(address=address, mac=mac, host_keys=(key,) if key else (), servers=(seen,))


A, B = "02:00:00:00:00:0a", "02:00:00:00:00:0b"
ONE, TWO = "10.0.0.5", "10.0.0.6"


@pytest.mark.parametrize(
    ("first", "second", "count", "warning"),
    [
        # one network card with two addresses
        (endpoint(ONE, A, KEY), endpoint(TWO, A, KEY), 1, ""),
        (endpoint(ONE, A), endpoint(TWO, A), 1, ""),
        (endpoint(ONE, A, KEY), endpoint(TWO, A), 1, ""),
        # clones of one image, or one machine with two cards
        (endpoint(ONE, A, KEY), endpoint(TWO, B, KEY), 2, "the same SSH host key"),
        # behind a router: no MAC address
        (endpoint(ONE, "", KEY), endpoint(TWO, "", KEY), 1, ""),
        (endpoint(ONE, A, KEY), endpoint(TWO, "", KEY), 1, ""),
        (endpoint(ONE, "", KEY), endpoint(TWO, "", OTHER_KEY), 2, ""),
        # a Wi-Fi repeater presents its own MAC address for all machines
        (endpoint(ONE, A, KEY), endpoint(TWO, A, OTHER_KEY), 2, ""),
        # two machines
        (endpoint(ONE, A), endpoint(TWO, B), 2, ""),
        (endpoint(ONE), endpoint(TWO), 2, ""),
    ],
)
def test_hints(first, second, count, warning):
    for order in ([first, second], [second, first]):
        found, warnings = machines(order, set())
        assert len(found) == count
        assert [m.endpoints[0].address for m in found] == [ONE, TWO][:count]
        assert [warning in w for w in warnings] == ([True] if warning else [])


def test_addresses_of_this_machine_are_one_machine():
    endpoints = [endpoint(a) for a in ("10.0.0.9", "127.0.0.1", "10.0.0.1", "fe80::1%eth0", "192.168.7.1", "::1")]
    found, _ = machines(endpoints, {"10.0.0.1", "192.168.7.1", "fe80::1"})
    assert [(m.local, m.addresses) for m in found] == [
        (True, ["10.0.0.1", "192.168.7.1", "fe80::1%eth0", "127.0.0.1", "::1"]),
        (False, ["10.0.0.9"]),
    ]


def test_a_chain_of_hints_makes_one_machine_in_any_order():
    chain = [
        endpoint("10.0.0.5", A, KEY),
        endpoint("10.0.0.6", A),
        endpoint("10.0.0.7", B, OTHER_KEY),
        endpoint("10.0.0.8", "", OTHER_KEY),
    ]
    for order in itertools.permutations(chain):
        found, _ = machines(order, set())
        assert [m.addresses for m in found] == [["10.0.0.5", "10.0.0.6"], ["10.0.0.7", "10.0.0.8"]]


@pytest.mark.lab
def test_two_addresses_two_ports_and_a_clone_with_real_ssh(lab, tmp_path):
    lab.controller("10.32.0.1/28")
    twin = lab.node("twin", "10.32.0.5/28", "10.32.0.6/28")
    clone = lab.node("clone", "10.32.0.9/28")
    lab.wait_for_links()
    servers = [Server(a, namespace=twin) for a in ("10.32.0.5", "10.32.0.6")]
    servers += [Server("10.32.0.5", 11500, namespace=twin), Server("10.32.0.9", namespace=clone)]
    settings = Settings(ports=(11434, 11500), this_machine=False)
    with (
        serve(servers),
        sshd(tmp_path, "host", "0.0.0.0", 22, twin),
        sshd(tmp_path, "host", "10.32.0.9", 22, clone),
    ):
        for _ in range(50):  # until both sshds listen
            report = lab.run(lambda: discover(settings))
            if all(p.host_keys for m in report.machines for p in m.endpoints):
                break
    assert len({p.host_keys for m in report.machines for p in m.endpoints}) == 1
    assert [m.addresses for m in report.machines] == [["10.32.0.5", "10.32.0.6"], ["10.32.0.9"]]
    assert [s.port for s in report.machines[0].endpoints[0].servers] == [11434, 11500]
    assert any("10.32.0.5 and 10.32.0.9 present the same SSH host key" in w for w in report.warnings)


def facts(
    boot: str, *links: tuple[str, int], machine: str = "m", keys: tuple = (), gpus: tuple = (), wifi: bool = False
):
    return {
        "boot_id": boot,
        "machine_id": machine,
        "host_keys": list(keys),
        "gpus": list(gpus),
        "links": [{"address": a, "device": f"eth{i}", "mbit": s, "wireless": wifi} for i, (a, s) in enumerate(links)],
    }


def test_duplicates_by_boot_id():
    entries = {"a": facts("1", (ONE, 1000)), "b": facts("1", (ONE, 1000)), "c": facts("2", (TWO, 1000), machine="n")}
    result = find_duplicates(entries, {"a": ONE, "b": "", "c": TWO}, {})
    assert result.drop == {"b": ("a", "same boot id")}
    assert result.machines == 2
    assert result.verdict.startswith("2 machines in 3 entries: distributed training is useful")


def test_duplicates_by_a_listed_address_but_not_by_a_shared_docker0():
    docker = ("172.17.0.1", 0)
    entries = {
        "a": facts("1", (ONE, 1000), docker),
        "b": facts("", (TWO, 1000), (ONE, 1000), docker, machine="n"),
        "c": facts("3", ("10.0.0.7", 1000), docker, machine="o"),
    }
    result = find_duplicates(entries, {"a": ONE, "b": TWO, "c": "10.0.0.7"}, {})
    assert result.drop == {"b": ("a", f"both have the address {ONE}")}


def test_clones_shared_gpus_and_false_aliases_are_warnings():
    entries = {
        "a": facts("1", (ONE, 1000), keys=("k",), gpus=("GPU-1",)),
        "b": facts("2", (TWO, 1000), keys=("k",), gpus=("GPU-1", "GPU-2")),
    }
    result = find_duplicates(entries, {"a": ONE, "b": TWO}, {"a": [ONE, "10.0.0.77", "127.0.0.1"]})
    assert not result.drop
    text = "\n".join(result.warnings)
    assert len(result.warnings) == 4
    for words in (
        "same machine-id",
        "same SSH host key",
        "share one GPU (GPU-1)",
        "a does not have the address 10.0.0.77",
    ):
        assert words in text
    assert result.verdict == "2 machines: distributed training is not useful: they share a GPU"


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (
            facts("2", (TWO, 10000), machine="n"),
            "distributed training is useful; the slowest link is that of a with 1000 Mbit/s",
        ),
        (facts("2", (TWO, 100), machine="n"), "with LoRA or DiLoCo only: the link of b has 100 Mbit/s"),
        (facts("2", (TWO, 0), machine="n", wifi=True), "with LoRA or DiLoCo only: b uses Wi-Fi (eth0)"),
        (facts("1", (TWO, 1000)), "not useful: there is only one machine"),
    ],
)
def test_the_verdict_has_a_reason(second, words):
    result = find_duplicates({"a": facts("1", (ONE, 1000)), "b": second}, {"a": ONE, "b": TWO}, {})
    assert words in result.verdict and "\n" not in result.verdict


def test_no_machine_to_compare():
    assert find_duplicates({}, {}, {}).verdict == "0 machines: no machine could be reached"
