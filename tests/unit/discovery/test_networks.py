"""The addresses to scan: netmasks, private and public networks, limits, names."""

import ipaddress

import pytest
from tables import table

from trainyard.discovery import networks
from trainyard.discovery.networks import Attached, address_order, host_and_port, plan
from trainyard.discovery.settings import Settings, SettingsError


def here(*interfaces: str) -> list[Attached]:
    """`eth0 192.168.1.5/24` -> Attached."""
    found = []
    for text in interfaces:
        name, address = text.split()
        interface = ipaddress.ip_interface(address)
        found.append(Attached(name, interface.ip, interface.network))
    return found


HOME = here("lo 127.0.0.1/8", "eth0 192.168.1.5/24")


def asked(settings: Settings, attached=HOME, resolved=None) -> list[str]:
    return [t.address for t in plan(settings, attached, resolved or {}).targets]


@pytest.mark.parametrize(("interface", "count"), table("networks")["auto_scans_private_networks_with_their_netmask"])
def test_auto_scans_private_networks_with_their_netmask(interface, count):
    assert len(asked(Settings(this_machine=False), here(interface))) == count


def test_auto_skips_a_large_network_with_a_warning():
    result = plan(Settings(), here("eth0 192.168.1.5/24", "eth1 10.0.0.1/16"), {})
    assert result.networks == ("192.168.1.0/24",)
    [skipped] = result.skipped
    assert "10.0.0.0/16 on eth1 has 65,536 addresses" in skipped and "max_addresses" in skipped
    larger = plan(Settings(max_addresses=70_000), here("eth0 192.168.1.5/24", "eth1 10.0.0.1/16"), {})
    assert larger.networks == ("192.168.1.0/24", "10.0.0.0/16")


@pytest.mark.parametrize(("settings", "words"), table("networks")["bad_settings"])
def test_bad_settings_are_one_line(settings, words):
    with pytest.raises(SettingsError) as error:
        asked(Settings(**settings))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("settings", "words"), table("networks")["ranges"])
def test_numbers_have_ranges(settings, words):
    with pytest.raises(SettingsError, match=words):
        Settings(**settings)


def test_host_bits_are_ignored_and_networks_are_counted_once():
    settings = Settings(networks=("192.168.1.77/24", "auto", "192.168.1.0/25"), this_machine=False)
    assert len(asked(settings)) == 254


def test_exclude_interface_hosts_and_ports():
    both = here("eth0 192.168.1.5/29", "eth1 192.168.2.5/29")
    settings = Settings(
        interfaces=("eth1",),
        exclude=("192.168.2.4/30", "192.168.2.1"),
        hosts=("node9:11500", "192.168.2.3"),
        ports=(11434, 11435),
        this_machine=False,
    )
    targets = plan(settings, both, {"node9": ["10.0.0.9"], "192.168.2.3": ["192.168.2.3"]}).targets
    assert targets == (("10.0.0.9", 11500), *((f"192.168.2.{i}", port) for i in (2, 3) for port in (11434, 11435)))


@pytest.mark.parametrize(("text", "host", "port"), table("networks")["host_and_port"])
def test_host_and_port(text, host, port):
    assert host_and_port(text) == (host, port)


def test_addresses_sort_by_number():
    addresses = ["fd00::2", "10.0.0.10", "10.0.0.9", "fd00::1", "10.0.0.200"]
    assert sorted(addresses, key=address_order) == ["10.0.0.9", "10.0.0.10", "10.0.0.200", "fd00::1", "fd00::2"]


def test_a_resolver_without_an_answer_takes_its_timeout(monkeypatch):
    import threading
    import time

    forever = threading.Event()
    monkeypatch.setattr(networks.socket, "getaddrinfo", lambda *a, **k: forever.wait(30) and [])
    start = time.monotonic()
    assert networks.resolve(["a", "b", "10.0.0.1"], timeout=0.2) == {"a": [], "b": [], "10.0.0.1": ["10.0.0.1"]}
    assert time.monotonic() - start < 1
    forever.set()


@pytest.mark.lab
def test_ipv6_hosts_and_link_local_neighbours(lab):
    from fake_ollama import Server, model, serve

    from trainyard.discovery.engine import discover

    lab.controller("10.31.0.1/28", "fe80::1/64", "fd00:31::1/64")
    node = lab.node("n", "10.31.0.5/28", "fe80::5/64", "fd00:31::5/64")
    lab.wait_for_links()
    with serve([Server("::", namespace=node, models=[model("six")])]):  # also accepts IPv4, as Ollama does
        named = lab.run(lambda: discover(Settings(hosts=("[fd00:31::5]:11434", "fe80::5%eth0"), networks=())))
        neighbours = lab.run(lambda: discover(Settings(ipv6_neighbours=True, interfaces=("eth0",))))
    assert [m.addresses for m in named.machines] == [["fd00:31::5"], ["fe80::5%eth0"]]
    assert [m.addresses for m in neighbours.machines] == [["10.31.0.5"], ["fe80::5%eth0"]]
