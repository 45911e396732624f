"""site.yml on hosts under qemu, and its result after a reboot. Takes minutes without KVM."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from lab_hosts import NEEDS_LAB, Host, Lab, inventory_with, run_playbook
from testbed import faults

pytestmark = [*NEEDS_LAB, pytest.mark.slow, pytest.mark.long]

DATASETS = "/home/tester/trainyard/datasets"
OUTSIDER = """
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), 3).close()
        print(port)
    except OSError:
        pass
"""


@dataclasses.dataclass(frozen=True)
class Moved(Host):
    """A host whose address a playbook changed."""

    @property
    def address(self) -> str:
        return f"10.231.{self.net}.{108 + self.index}"


def moved(lab: Lab) -> tuple[Host, Moved]:
    """Return the head, and the other host with its new address."""
    server, client = lab.hosts
    return server, Moved(client.index, client.net)


def inventory(lab: Lab, folder: Path) -> Path:
    """Write an inventory in which node2 gets a new address, without cluster_address, with the system's Python."""
    client = moved(lab)[1]
    hosts: dict[str, dict[str, Any]] = {host.name: {"cluster_address": None} for host in lab.hosts}
    hosts[client.name]["netplan_address"] = f"{client.address}/24"
    # Timeouts are long, because emulated hosts answer slowly.
    values = {"python_env": "as-is", "cluster_python": "/usr/bin/python3", "netplan_timeout": 120, "firewall_fuse": 300}
    return inventory_with(lab, folder, hosts, nfs_dataset_delivery="nfs", **values)


def check_network(lab: Lab) -> None:
    """Check addresses and firewalls, and that only SSH is open to hosts outside the cluster."""
    server, client = moved(lab)
    links = json.loads(lab.inside(client, f"ip -json -4 address show dev {client.nic}"))
    assert [address["local"] for link in links for address in link["addr_info"]] == [client.address]
    for host in (server, client):
        assert "Status: active" in lab.inside(host, "ufw status")
        # NFS on the head listens on 2049; a run listens on 29500 and a high port.
        lab.inside(
            host,
            "systemctl is-active --quiet listens || systemd-run --quiet --unit=listens /usr/bin/python3 -c '"
            'import signal, socket; s = [socket.create_server(("", p)) for p in (29500, 40123)]; signal.pause()\'',
        )
        lab.wait(lambda host=host: ":40123" in lab.inside(host, "ss -Htln"), "no process listens on port 40123", 60)
        open_to_all = lab.in_lab("python3", "-c", OUTSIDER, host.address, "22", "2049", "29500", "40123").split()
        assert open_to_all == ["22"]
    ask = f"python3 - {server.address} 22 2049 29500 40123 <<'P'{OUTSIDER}P"
    assert lab.inside(client, ask).split() == ["22", "2049", "29500", "40123"]


def test_site_on_hosts_under_qemu(metal: Lab, tmp_path: Path) -> None:
    written = inventory(metal, tmp_path)
    played = run_playbook("site.yml", written, timeout=2400)
    assert played.rc == 0, played.stdout
    again = run_playbook("site.yml", written, timeout=2400)
    assert again.rc == 0 and again.count("changed") == 0, again.stdout
    server, client = moved(metal)
    check_network(metal)
    metal.inside(server, f"echo real > {DATASETS}/file")
    assert metal.inside(client, f"cat {DATASETS}/file; findmnt -n -o FSTYPE {DATASETS}").split() == [
        *("real", "autofs", "nfs4")
    ]
    assert "1" not in metal.inside(client, f"touch {DATASETS}/more 2>/dev/null && echo 1 || true")
    exported = metal.inside(server, "exportfs -s")
    assert client.address in exported and "root_squash" in exported and "*" not in exported
    # NFS version 4 only: no process listens on the port of rpcbind.
    assert ":111 " not in metal.inside(server, "ss -Htuln") + metal.inside(client, "ss -Htuln")
    # The clock of the client follows the clock of the head.
    assert server.address in metal.inside(client, "chronyc -n sources")


def test_address_firewall_and_mounts_persist_over_a_reboot(metal: Lab) -> None:
    server, client = moved(metal)
    for host in (server, client):
        metal.reboot(host)
    check_network(metal)
    # After the reboot autofs mounts on first access.
    assert metal.inside(client, f"findmnt -n -o FSTYPE {DATASETS}").split() == ["autofs"]
    # The grace period of the server after its start may delay the first answer.
    metal.wait(lambda: metal.inside(client, f"cat {DATASETS}/file", check=False) == "real\n", "no datasets", 180)


def test_unreachable_head_blocks_no_reader(metal: Lab) -> None:
    server, client = moved(metal)
    faults.inject(metal, server, "cut")
    # The limit allows for an emulated host; without the mount option `soft` the read would never return.
    for state in ("mounted", "let go"):
        output = metal.inside(client, f"timeout 200 cat {DATASETS}/other 2>&1 || echo $?", check=False)
        assert output.split()[-1] == "1", f"{state}: {output}"
        metal.inside(client, f"systemctl stop $(systemd-escape --path --suffix=mount {DATASETS})", check=False)
    faults.undo(metal, server, "cut")
    metal.wait(lambda: "real" in metal.inside(client, f"cat {DATASETS}/file", check=False), "no datasets", 120)
