"""The hosts of the lab are stock servers with network access to each other and to package registries."""

from __future__ import annotations

import pytest
import ranks_site
from lab_hosts import NEEDS_LAB, VENV, Lab, inventory_with, run_playbook

pytestmark = [*NEEDS_LAB, pytest.mark.long]  # they test the lab


@pytest.fixture(scope="module")
def lab(bare: Lab) -> Lab:
    """Stock hosts: other tests change the hosts of the session."""
    return bare


def as_user(lab: Lab, name: str, command: str) -> str:
    """Return the output of a command that the user of the hosts runs over SSH."""
    return ranks_site.as_user(lab, lab.host(name), command)


@pytest.mark.parametrize("name", ["node1", "node2", "node3"])
def test_host_is_a_stock_server(lab: Lab, name: str) -> None:
    host = lab.host(name)
    assert as_user(lab, name, "hostname") == name
    assert f"127.0.1.1 {name}" in as_user(lab, name, "cat /etc/hosts")
    assert as_user(lab, name, "cat /proc/1/comm") == "systemd"
    assert as_user(lab, name, "systemctl is-system-running") == "running"
    assert "uid=1000" in as_user(lab, name, "id")
    assert as_user(lab, name, "sudo -n id -u") == "0"
    assert "passwordauthentication no" in as_user(lab, name, "sudo sshd -T")
    assert as_user(lab, name, "sudo ufw status") == "Status: inactive"
    assert as_user(lab, name, "ls /var/lib/systemd/linger 2>/dev/null || true") == ""
    assert f"{host.address}/24" in as_user(lab, name, f"ip -4 -brief address show {host.nic}")
    installed = as_user(lab, name, "dpkg-query --show --showformat='${Package}\\n'").split()
    assert not {"nfs-common", "nfs-kernel-server", "chrony", "slurmd", "docker.io"} & set(installed)


def test_hosts_have_their_own_identity(lab: Lab) -> None:
    for command in ("cat /etc/machine-id", "cat /etc/ssh/ssh_host_ed25519_key.pub", "readlink /proc/self/ns/net"):
        assert len({as_user(lab, host.name, command) for host in lab.hosts}) == 3, command


def test_hosts_reach_only_each_other(lab: Lab) -> None:
    for host in lab.hosts:
        for peer in lab.hosts:
            as_user(lab, host.name, f"ping -c 1 -W 2 {peer.address}")
    # The gateway of the hosts, 10.231.x.1, forwards only to package registries and name servers: it rejects any other
    # port, so this packet never leaves the lab.
    refused = as_user(lab, "node1", "timeout 5 bash -c '</dev/tcp/10.231.255.255/9' 2>&1 || echo refused")
    assert "refused" in refused
    assert "No route to host" in refused


def test_host_cannot_change_global_settings(lab: Lab) -> None:
    for command in ("date --set=2020-01-01", "sysctl -w kernel.pid_max=40000", "mknod /tmp/disk b 254 0"):
        assert "refused" in as_user(lab, "node1", f"sudo {command} >/dev/null 2>&1 || echo refused"), command
    assert as_user(lab, "node1", "sudo sysctl -w net.ipv4.tcp_fin_timeout=61").strip().endswith("61")


def test_apt_and_pip_install(lab: Lab) -> None:
    as_user(
        lab, "node1", "sudo apt-get update -qq && sudo apt-get install -y -qq --no-install-recommends tree >/dev/null"
    )
    assert "tree v" in as_user(lab, "node1", "tree --version")
    as_user(lab, "node1", f"{VENV}/bin/python -m pip install --quiet --timeout 60 --target /tmp/six six")
    assert "six.py" in as_user(lab, "node1", "ls /tmp/six")


def test_ansible_reaches_the_hosts_in_inventory_order(lab: Lab, tmp_path) -> None:
    (tmp_path / "play.yml").write_text(
        """
- hosts: cluster
  gather_facts: false
  tasks:
    - ansible.builtin.debug: {msg: "{{ ansible_play_hosts_all.index(inventory_hostname) }} {{ groups.head }}"}
    - ansible.builtin.command: "true"
      become: true
"""
    )
    played = run_playbook(str(tmp_path / "play.yml"), inventory_with(lab, tmp_path, some_variable=1))
    assert played.rc == 0, played.stdout
    assert played.stats["changed"] == {"node1": 1, "node2": 1, "node3": 1}
    assert played.count("failures") == played.count("dark") == 0
    output = {
        event["event_data"]["host"]: event["event_data"]["res"]["msg"]
        for event in played.events
        if event["event"] == "runner_on_ok" and event["event_data"]["task_action"].endswith("debug")
    }
    assert output == {f"node{n + 1}": f"{n} ['node1']" for n in range(3)}
