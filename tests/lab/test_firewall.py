"""The role `firewall` on real hosts: access of peers and of other hosts, rollback, and removal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_hosts import NEEDS_LAB, OLLAMA, REPO, Host, Lab, Played, inventory_with, remove_role, run_playbook

pytestmark = [*NEEDS_LAB, pytest.mark.slow]

HIGH = 40123  # in the range of ports that gloo and NCCL use
CONNECT = """
import socket, sys
source, target, *ports = sys.argv[1:]
for port in ports:
    try:
        socket.create_connection((target, int(port)), 0.7, source_address=(source, 0)).close()
        print(port)
    except OSError:
        pass
"""
ECHO = f"""
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
    bound.bind(("0.0.0.0", {HIGH}))
    while True:
        bound.sendto(*bound.recvfrom(16))
"""
ASK = f"""
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
    asking.settimeout(0.7)
    asking.sendto(b"echo", (sys.argv[1], {HIGH}))
    try:
        print(asking.recv(16).decode())
    except OSError:
        print("nothing")
"""
STOCK = (
    "sha256sum $(find /etc/ufw /etc/default -type f | sort); ufw status verbose; ls -A /var/lib/trainyard/ 2>&1 || :"
)


@pytest.fixture
def inventory(lab: Lab, tmp_path: Path) -> Any:
    """Write an inventory of these hosts, with additional variables for single hosts."""

    def write(names: list[str], **variables: dict[str, Any]) -> Path:
        return inventory_with(lab, tmp_path, {name: variables.get(name, {}) for name in names})

    return write


@pytest.fixture(autouse=True)
def stock(lab: Lab, hosts: list[Host], tmp_path: Path) -> Iterator[dict[str, str]]:
    """Start and end with the firewalls of stock hosts."""
    reset_firewall(lab, hosts, tmp_path)
    lab.inside(hosts[0], "mkdir -p /var/lib/trainyard")
    before = {host.name: lab.inside(host, STOCK) for host in hosts}
    yield before
    for host in hosts:
        lab.inside(
            host, "ufw --force disable; systemctl stop test-listener trainyard-firewall-rollback.timer", check=False
        )
    reset_firewall(lab, hosts, tmp_path)


def reset_firewall(lab: Lab, hosts: list[Host], folder: Path) -> None:
    """Remove what this test or a previous one has left."""
    if any("before.json" in lab.inside(host, "ls /var/lib/trainyard/firewall 2>&1 || :") for host in hosts):
        assert remove_role("firewall", lab.inventory, folder).rc == 0


def firewall(inventory: Path, *arguments: str) -> Played:
    return run_playbook("site.yml", inventory, {}, "--tags", "firewall", *arguments)


def listen(lab: Lab, host: Host) -> list[str]:
    """Open the ports of a run and of Ollama on a host; return all ports on which a process listens."""
    ports = (11434, 29500, HIGH, 8080)
    code = "import signal, socket; s = [socket.create_server(('::', p), family=socket.AF_INET6, dualstack_ipv6=True)"
    code += f" for p in {ports}]; signal.pause()"
    lab.inside(host, f'systemd-run --quiet --collect --unit=test-listener /usr/bin/python3 -c "{code}"')
    ask = "ss --no-header --listening --tcp --numeric | awk '{print $4}' | sed 's/.*://' | sort -un"
    lab.wait(
        lambda: {str(port) for port in ports} <= set(lab.inside(host, ask).split()), "the listener does not listen"
    )
    return lab.inside(host, ask).split()


def reach(lab: Lab, source: str, target: str, ports: list[str], host: Host | None = None) -> set[int]:
    """Return the ports of `target` that accept a connection from `source`: an address of `host`, or of a host outside the cluster."""
    if host is None:
        output = lab.in_lab("python3", "-c", CONNECT, source, target, *ports)
    else:
        output = lab.inside(host, f"python3 - {source} {target} {' '.join(ports)} <<'PYTHON'{CONNECT}PYTHON")
    return {int(port) for port in output.split()}


def reach_as_controller(host: Host, ports: list[str]) -> set[int]:
    """Return the ports of a host that accept a connection from this machine, the controller."""
    controller = f"10.231.{host.net}.254"
    argv = [sys.executable, "-c", CONNECT, controller, host.address, *ports]
    return {int(port) for port in subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()}


def test_peers_reach_all_ports_and_other_hosts_only_ssh(
    lab: Lab, hosts: list[Host], inventory: Any, stock: dict[str, str], tmp_path: Path
) -> None:
    one, two, three = hosts
    six = {host.name: f"fd79::{host.index}" for host in hosts}
    for host in hosts:
        lab.inside(host, f"ip address replace {six[host.name]}/64 dev {host.nic} nodad")
    lab.in_lab("ip", "address", "replace", "fd79::ff/64", "dev", "br0", "nodad")
    outsider = f"10.231.{one.net}.1"
    lab.inside(one, f"ufw allow 8080/tcp comment mine; ufw allow proto tcp from {two.address} comment 'mine too'")
    stock["node1"] = lab.inside(one, STOCK)
    ports = listen(lab, one)
    assert reach(lab, outsider, one.address, ports) >= {22, 11434, 29500, HIGH, 8080}

    # Peers use an IPv6 address for node2 and an IPv4 address for node3.
    names = [host.name for host in hosts]
    complete = inventory(names, node2={"cluster_address": six["node2"]})
    shown = firewall(complete, "--check", "--diff")
    assert shown.rc == 0, shown.stdout
    assert f"+allow 11434/tcp from 10.231.{one.net}.254  # trainyard: controller" in shown.stdout
    assert "+allow any tcp from fd79::2 (v6)  # trainyard: peer node2" in shown.stdout
    assert lab.inside(two, STOCK) == stock["node2"]
    for changed in (3, 0):
        played = firewall(complete)
        assert played.rc == 0, played.stdout
        assert played.count("changed") == changed, played.stdout

    assert reach(lab, outsider, one.address, ports) == {22, 8080}  # the rule for 8080 is not trainyard's
    assert reach_as_controller(one, ports) == {22, 8080, 11434}
    assert reach(lab, "fd79::ff", six["node1"], ports) == {22, 8080}
    assert reach(lab, outsider, two.address, listen(lab, two)) == {22}
    assert reach(lab, three.address, one.address, ports, three) >= {22, 11434, 29500, HIGH}
    assert reach(lab, six["node2"], six["node1"], ports, two) >= {22, 11434, 29500, HIGH}
    assert HIGH not in reach(lab, six["node3"], six["node1"], ports, three)

    # node3 leaves the cluster, and node2 gets another address.
    smaller = inventory(names[:2])
    assert firewall(smaller).rc == 0
    assert reach(lab, three.address, one.address, ports, three) == {22, 8080}
    assert HIGH in reach(lab, two.address, one.address, ports, two)
    assert "fd79" not in lab.inside(one, "ufw show added")

    # The role restores a rule that is missing, for example after a kill.
    lab.inside(two, f"ufw delete allow proto tcp from {one.address}; ufw --force disable")
    assert firewall(smaller).count("changed") == 1
    assert HIGH in reach(lab, one.address, two.address, [str(HIGH)], one)

    for changed in (3, 0):
        assert remove_role("firewall", lab.inventory, tmp_path).count("changed") == changed
    lab.inside(two, "rmdir /var/lib/trainyard")
    assert {host.name: lab.inside(host, STOCK) for host in hosts[:2]} == {n: stock[n] for n in names[:2]}
    lab.inside(one, f"ufw delete allow 8080/tcp; ufw delete allow proto tcp from {two.address}")


@pytest.mark.long
def test_permissive_firewalls_are_closed_and_the_controller_still_discovers_the_hosts(
    lab: Lab, hosts: list[Host], inventory: Any, tmp_path: Path
) -> None:
    """ufw was active with a default policy that allows everything (node1), or another program flushed its rules (node2)."""
    one, two, three = hosts
    outsider, names = f"10.231.{one.net}.1", [host.name for host in hosts]
    lab.in_lab("ip", "address", "replace", "fd79::ff/64", "dev", "br0", "nodad")
    for host in hosts:
        lab.inside(host, f"ip address replace fd79::{host.index}/64 dev {host.nic} nodad")
    lab.inside(one, "ufw allow 22/tcp; ufw default allow incoming; ufw --force enable")
    try:
        assert firewall(inventory(names[1:])).rc == 0
        lab.inside(one, f"systemd-run -q --collect --unit=test-echo /usr/bin/python3 -c '{ECHO}'")
        lab.wait(lambda: lab.in_lab("python3", "-c", ASK, one.address) == "echo\n", "no datagram is answered")
        lab.inside(two, "nft flush ruleset; iptables -P INPUT ACCEPT; ip6tables -P INPUT ACCEPT")
        ports = {host.name: listen(lab, host) for host in (one, two)}
        for host in (one, two):
            for source, target in ((outsider, host.address), ("fd79::ff", f"fd79::{host.index}")):
                assert reach(lab, source, target, ports[host.name]) >= {22, 29500, HIGH}
        played = firewall(inventory(names))
        assert played.rc == 0, played.stdout
        for host in (one, two):
            for source, target in ((outsider, host.address), ("fd79::ff", f"fd79::{host.index}")):
                assert reach(lab, source, target, ports[host.name]) == {22}, (source, target)
            assert reach(lab, three.address, host.address, ports[host.name], three) >= {22, 11434, 29500, HIGH}
            assert reach_as_controller(host, ports[host.name]) == {22, 11434}
        assert lab.in_lab("python3", "-c", ASK, one.address) == "nothing\n"
        assert firewall(inventory(names)).count("changed") == 0

        lab.inside(one, "systemctl stop test-listener")
        serve = (
            "systemd-run -q --collect --unit=test-ollama -E OLLAMA_HOST=0.0.0.0:11434 /usr/bin/python3 /run/server.py"
        )
        lab.inside(one, f"cat > /run/server.py <<'P'\n{OLLAMA}P\n{serve}")
        discovery = tmp_path / "ollama.yml"
        discovery.write_text(f"plugin: ollama\nnetworks: []\nthis_machine: false\nhosts: [{one.address}]\n")
        found = discovered(discovery)
        assert one.address in found, found

        assert remove_role("firewall", lab.inventory, tmp_path).rc == 0
        assert "Default: allow (incoming)" in lab.inside(one, "ufw status verbose")
    finally:
        lab.inside(
            one,
            "systemctl stop test-ollama test-echo || :; ufw default deny incoming; ufw delete allow 22/tcp; ufw --force disable",
        )


def discovered(source: Path) -> str:
    """Return what ansible-inventory prints for a configuration of the inventory plugin."""
    argv = [Path(sys.executable).with_name("ansible-inventory"), "-i", source, "--list"]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(REPO / "ansible.cfg")}
    return subprocess.run(argv, cwd=REPO, env=environment, capture_output=True, text=True, timeout=60).stdout


def test_firewall_that_blocks_ssh_is_rolled_back(lab: Lab, hosts: list[Host], inventory: Any) -> None:
    host = hosts[1]
    drop = "-I ufw-before-input 1 -p tcp --dport 22 -m conntrack --ctstate NEW -j DROP"
    lab.inside(host, f"cp -a /etc/ufw/before.rules /root/; sed -i '/^COMMIT/i {drop}' /etc/ufw/before.rules")
    try:
        played = firewall(inventory([host.name for host in hosts], node2={"firewall_rollback_timeout": 15}))
        assert played.rc != 0
        assert "error: node2 does not answer" in played.stdout, played.stdout
        assert played.stats["ok"]["node3"] > played.stats["ok"]["node2"]
        lab.wait(lambda: "inactive" in lab.inside(host, "ufw status"), "the rollback timer did not disable ufw", 60)
        lab.wait(lambda: lab._accepts_login(host), "node2 is locked out")
    finally:
        lab.inside(host, "cp -a /root/before.rules /etc/ufw/; rm /root/before.rules")


def test_invalid_settings_are_reported_before_any_change(lab: Lab, hosts: list[Host], inventory: Any) -> None:
    invalid = {"firewall_allow": [{"port": "99999"}], "cluster_address": "box"}
    played = firewall(inventory([host.name for host in hosts], node2=invalid))
    assert played.rc != 0
    assert played.count("changed") == 0
    assert "cluster_address of node2 is 'box', expected the IP address at which its peers reach it" in played.stdout
    assert "firewall_allow: port is '99999': expected a number from 1 to 65535 or a range" in played.stdout


@pytest.mark.long
def test_next_play_after_a_kill_cancels_the_rollback_timer(lab: Lab, hosts: list[Host], inventory: Any) -> None:
    """Killed after it enabled ufw and before it reconnected: the next play cancels the rollback timer."""
    all_of_them = inventory([host.name for host in hosts])
    assert firewall(all_of_them).rc == 0
    timer = "trainyard-firewall-rollback.timer"
    lab.inside(hosts[1], f"systemd-run --quiet --collect --unit={timer[:-6]} --on-active=600 ufw disable")
    assert lab.inside(hosts[1], f"systemctl is-active {timer}") == "active\n"
    again = firewall(all_of_them)
    assert again.rc == 0 and again.count("changed") == 0, again.stdout
    assert lab.inside(hosts[1], f"systemctl is-active {timer} || :") == "inactive\n"
