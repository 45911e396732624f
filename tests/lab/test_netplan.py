"""The role `netplan` on real hosts: SSH stays reachable, other NICs are unchanged, and removal restores the previous files."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from lab_hosts import NEEDS_LAB, Host, Lab, Played, inventory_with, remove_role, run_playbook
from run_hosts import kill_playbook, start_playbook
from testbed import faults

pytestmark = [*NEEDS_LAB, pytest.mark.slow, pytest.mark.long]

FILES = "cd /; sha256sum $(find etc/netplan etc/cloud -type f 2>/dev/null | sort); ls -A run/netplan var/lib/trainyard 2>&1 || :"


def inventory(lab: Lab, folder: Path, **hosts: dict[str, Any]) -> Path:
    """Write an inventory of these hosts with additional variables and without cluster_address; return its path."""
    return inventory_with(lab, folder, {name: {"cluster_address": None} | more for name, more in hosts.items()})


def netplan(inventory: Path, *arguments: str) -> Played:
    return run_playbook("site.yml", inventory, {}, "--tags", "netplan", *arguments)


def addresses(lab: Lab, host: Host, nic: str) -> list[str]:
    links = json.loads(lab.inside(host, f"ip -json -4 address show dev {nic}"))
    return [f"{a['local']}/{a['prefixlen']}" for link in links for a in link.get("addr_info", [])]


def accepts_login(lab: Lab, host: Host, address: str) -> bool:
    """Return whether SSH accepts a login at that address with the host keys in known_hosts."""
    argv = [str(word).replace(f"@{host.address}", f"@{address}") for word in lab.ssh(host)]
    return subprocess.run([*argv, "hostname"], capture_output=True, text=True).stdout.strip() == host.name


def test_valid_address_stays_and_unreachable_address_is_rolled_back(bare: Lab, tmp_path: Path) -> None:
    lab, (one, two, three) = bare, bare.hosts
    net = f"10.231.{one.net}"
    second = f"10.232.{three.net}.{8 + three.index}/24"
    faults.inject(lab, three, "nic")
    lab.inside(
        three, f"sed -i '/ethernets:/a\\    {three.nic}b: {{addresses: [{second}]}}' /etc/netplan/50-cloud-init.yaml"
    )
    lab.inside(one, "mkdir -p /etc/cloud/cloud.cfg.d")
    before = {host.name: lab.inside(host, FILES) for host in lab.hosts}
    hosts: dict[str, dict[str, Any]] = {
        "node1": {"netplan_address": f"{net}.109/24"},
        # No host has this address, and no route leads to it.
        "node2": {"netplan_address": "10.99.0.5/24", "netplan_mtu": 1300, "netplan_timeout": 15},
        "node3": {"netplan_address": f"{net}.111/24", "netplan_mtu": 1400, "netplan_dns": ["192.0.2.53"]},
    }
    written = inventory(lab, tmp_path, **hosts)
    shown = netplan(written, "--check", "--diff")
    assert shown.rc == 0 and shown.count("changed") == 3, shown.stdout
    assert f"+      - {net}.109/24" in shown.stdout
    assert {host.name: lab.inside(host, FILES) for host in lab.hosts} == before

    began = time.monotonic()
    played = netplan(written)
    assert played.rc != 0
    assert "error: node2: not reached at 10.99.0.5 (" in played.stdout, played.stdout
    assert f"so it rolled back to {two.address}" in played.stdout
    assert played.stats["changed"] == {"node1": 1, "node3": 1}
    assert time.monotonic() - began < 60 and accepts_login(lab, two, two.address)
    assert lab.inside(two, FILES) == before["node2"]
    assert lab.inside(two, f"cat /sys/class/net/{two.nic}/mtu") == "1500\n"

    assert addresses(lab, one, one.nic) == [f"{net}.109/24"] and accepts_login(lab, one, f"{net}.109")
    assert addresses(lab, three, three.nic) == [f"{net}.111/24"] and accepts_login(lab, three, f"{net}.111")
    assert addresses(lab, three, f"{three.nic}b") == [second]
    assert f"{three.nic}b" in lab.inside(three, "cat /etc/netplan/50-cloud-init.yaml")
    assert lab.inside(three, f"cat /sys/class/net/{three.nic}/mtu") == "1400\n"
    assert f"via {net}.1" in lab.inside(one, "ip route show default")
    assert lab.inside(one, "stat -c %a /etc/netplan/*").split() == ["600", "600"]
    assert lab.inside(one, "cat /etc/cloud/cloud.cfg.d/*").endswith("network: {config: disabled}\n")
    assert lab.inside(one, "systemctl list-units --all --plain --no-legend 'trainyard*'") == ""

    # The inventory still has the old addresses: the role finds the hosts at the new ones and changes nothing.
    del hosts["node2"]
    again = netplan(inventory(lab, tmp_path, **hosts))
    assert again.rc == 0 and again.count("changed") == 0, again.stdout
    assert f"node1 is at {net}.109 now" in again.stdout

    # The configuration is persistent: a reboot changes nothing.
    boot = lab.inside(one, "stat -c %Y /proc/1")
    lab.inside(one, "systemctl reboot --no-block", check=False)
    lab.wait(
        lambda: lab.init_pid(one) is not None and lab.inside(one, "stat -c %Y /proc/1", check=False) not in ("", boot),
        "no reboot",
    )
    lab.wait(lambda: accepts_login(lab, one, f"{net}.109"), "node1 is not at its address after a reboot")

    for name in hosts:
        hosts[name] = {"ansible_host": hosts[name]["netplan_address"].split("/")[0]}
    removed = remove_role("netplan", inventory(lab, tmp_path, **hosts), tmp_path)
    assert removed.rc == 0 and removed.count("changed") == 2, removed.stdout
    for host in lab.hosts:
        lab.inside(host, "rmdir /var/lib/trainyard 2>/dev/null || :")
        assert lab.inside(host, FILES) == before[host.name]
        assert addresses(lab, host, host.nic) == [f"{host.address}/24"] and accepts_login(lab, host, host.address)
        assert lab.inside(host, f"cat /sys/class/net/{host.nic}/mtu") == "1500\n"
    assert addresses(lab, three, f"{three.nic}b") == [second]
    removed = remove_role("netplan", lab.inventory, tmp_path)
    assert removed.rc == 0 and removed.count("changed") == 0, removed.stdout


def test_unconfirmed_change_is_rolled_back(bare: Lab, tmp_path: Path) -> None:
    """The controller is killed during the change: the rollback timer restores one host, a reboot the other."""
    lab, (one, two, _) = bare, bare.hosts
    before = {host.name: lab.inside(host, FILES) for host in (one, two)}
    wrong = {"netplan_address": "10.99.0.5/24"}
    written = inventory(
        lab,
        tmp_path,
        node1=wrong | {"netplan_timeout": 15},
        node2=wrong | {"netplan_address": "10.99.0.6/24", "netplan_timeout": 110},
    )
    playbook = start_playbook(written, "site.yml", "--tags", "netplan")
    try:
        for host, address in ((one, "10.99.0.5/24"), (two, "10.99.0.6/24")):
            lab.wait(
                lambda host=host, address=address: address in addresses(lab, host, host.nic),
                "the address was not changed",
                60,
            )
    finally:
        kill_playbook(playbook)
    lab.inside(two, "systemctl reboot --no-block", check=False)
    for host in (one, two):
        lab.wait(lambda host=host: accepts_login(lab, host, host.address), f"{host.name} is locked out", 60)
        lab.wait(lambda host=host: lab.inside(host, FILES) == before[host.name], "the change was not undone")


def test_invalid_addresses_are_reported_before_any_change(bare: Lab, tmp_path: Path) -> None:
    lab, (one, two, three) = bare, bare.hosts
    hosts = {"node1": {"netplan_address": "10.1.1.1"}, "node2": {"netplan_mtu": 1400}, "node3": {}}
    played = netplan(inventory(lab, tmp_path, **hosts))
    assert played.rc != 0 and played.count("changed") == 0
    assert "error: node1: netplan_address is '10.1.1.1', expected an address with its prefix" in played.stdout
    # Addresses in use: the gateway's, which only the host can detect, and that of a machine with another host key.
    hosts = {
        "node1": {"netplan_address": f"10.231.{one.net}.1/24"},
        "node2": {"netplan_address": f"{three.address}/24"},
    }
    played = netplan(inventory(lab, tmp_path, **hosts))
    assert played.rc != 0 and played.count("changed") == 0
    assert f"error: node1: 10.231.{one.net}.1 is in use by the machine with the MAC address" in played.stdout
    assert (
        f"error: node2: known_hosts has another SSH host key for {three.address} than for {two.address}"
        in played.stdout
    )
    assert "removed" in lab.inside(
        one, "apt-get -qq remove -y --no-autoremove netplan.io >/dev/null 2>&1 && echo removed"
    )
    played = netplan(inventory(lab, tmp_path, node1={"netplan_address": f"{one.address}/24"}))
    assert played.rc != 0 and played.count("changed") == 0
    assert "error: node1: netplan is not installed: install netplan.io, or remove netplan_address" in played.stdout
