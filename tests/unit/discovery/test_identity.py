"""Every address is a machine before login; facts after it show which are one machine."""

import pytest
from fake_ollama import Server, serve
from test_ssh import sshd

from trainyard.discovery.duplicates import find_duplicates
from trainyard.discovery.engine import discover
from trainyard.discovery.ollama_replies import Server as Seen
from trainyard.discovery.scan import LanServer
from trainyard.discovery.scan_result import machines
from trainyard.discovery.settings import Settings

ONE, TWO = "10.0.0.5", "10.0.0.6"


def answer(address: str, port: int, *keys: str) -> LanServer:
    return LanServer(Seen(address=address, port=port, version="0.12.3"), host_keys=keys)


def test_addresses_of_this_machine_are_one_machine():
    addresses = ("10.0.0.9", "127.0.0.1", "10.0.0.1", "fe80::1%eth0", "192.168.7.1", "::1", "10.0.0.10")
    answers = [answer(a, 11434) for a in addresses]
    found = machines(answers, {"10.0.0.1", "192.168.7.1", "fe80::1"}, {}, 22)
    assert [(m.local, m.addresses) for m in found] == [
        (True, ["10.0.0.1", "192.168.7.1", "fe80::1%eth0", "127.0.0.1", "::1"]),
        (False, ["10.0.0.9"]),
        (False, ["10.0.0.10"]),
    ]


def test_every_port_of_an_address_is_one_machine():
    answers = [answer("10.0.0.5", port, "ssh-ed25519 " + "A" * 68) for port in (2, 1)]
    [machine] = machines(answers, set(), {"10.0.0.5": 2222}, 22)
    assert [server.port for server in machine.servers] == [1, 2]
    assert (machine.ssh_port, machine.host_keys) == (2222, answers[0].host_keys)


@pytest.mark.lab
def test_two_addresses_are_two_machines_until_login_with_real_ssh(lab, tmp_path):
    lab.controller("10.32.0.1/28")
    twin = lab.node("twin", "10.32.0.5/28", "10.32.0.6/28")
    lab.wait_for_links()
    servers = [Server(a, namespace=twin) for a in ("10.32.0.5", "10.32.0.6")]
    servers.append(Server("10.32.0.5", 11500, namespace=twin))
    scan = Settings(ports=(11434, 11500), this_machine=False)
    with serve(servers), sshd(tmp_path, "host", "0.0.0.0", 22, twin):
        for _ in range(50):  # until sshd listens
            report = lab.run(lambda: discover(scan))
            if all(machine.host_keys for machine in report.machines):
                break
    assert len({machine.host_keys for machine in report.machines}) == 1
    assert [m.addresses for m in report.machines] == [["10.32.0.5"], ["10.32.0.6"]]
    assert [server.port for server in report.machines[0].servers] == [11434, 11500]


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
    result = find_duplicates(entries, {"a": ONE, "b": "", "c": TWO})
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
    result = find_duplicates(entries, {"a": ONE, "b": TWO, "c": "10.0.0.7"})
    assert result.drop == {"b": ("a", f"both have the address {ONE}")}


def test_clones_and_shared_gpus_are_warnings():
    entries = {
        "a": facts("1", (ONE, 1000), keys=("k",), gpus=("GPU-1",)),
        "b": facts("2", (TWO, 1000), keys=("k",), gpus=("GPU-1", "GPU-2")),
    }
    result = find_duplicates(entries, {"a": ONE, "b": TWO})
    assert not result.drop
    text = "\n".join(result.warnings)
    assert len(result.warnings) == 3
    for words in ("same machine-id", "same SSH host key", "share one GPU (GPU-1)"):
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
    result = find_duplicates({"a": facts("1", (ONE, 1000)), "b": second}, {"a": ONE, "b": TWO})
    assert words in result.verdict and "\n" not in result.verdict


def test_no_machine_to_compare():
    assert find_duplicates({}, {}).verdict == "0 machines: no machine could be reached"
