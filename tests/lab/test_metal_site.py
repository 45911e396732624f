"""What site.yml makes of whole machines, and what of it outlives a reboot. Minutes, where no KVM runs them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml
from lab_hosts import NEEDS_LAB, Host, Lab, run_playbook
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
    """A host that a playbook gave another address."""

    @property
    def address(self) -> str:
        return f"10.231.{self.net}.{108 + self.index}"


def moved(lab: Lab) -> tuple[Host, Moved]:
    """The head, and the other machine at its new address."""
    server, client = lab.hosts
    return server, Moved(client.index, client.net)


def inventory(lab: Lab, folder: Path) -> Path:
    """The lab's inventory, where node2 is to move; nobody says their cluster_address, and the environment is the system's."""
    client = moved(lab)[1]
    document = yaml.safe_load(lab.inventory.read_text())
    cluster = document["all"]["children"]["cluster"]
    for host in cluster["hosts"].values():
        del host["cluster_address"]
    cluster["hosts"][client.name]["netplan_address"] = f"{client.address}/24"
    # An emulated machine is slow to answer: its own clock decides, not the bound of a person's patience.
    cluster["vars"] |= {"python_env": "as-is", "cluster_python": "/usr/bin/python3", "netplan_timeout": 120}
    cluster["vars"] |= {"firewall_fuse": 300, "nfs_dataset_delivery": "nfs"}
    (folder / "inventory.yml").write_text(yaml.safe_dump(document, sort_keys=False))
    return folder / "inventory.yml"


def check_network(lab: Lab) -> None:
    """See that address and firewall are what site.yml said, and that only SSH answers to outsiders."""
    server, client = moved(lab)
    links = json.loads(lab.inside(client, f"ip -json -4 address show dev {client.nic}"))
    assert [address["local"] for link in links for address in link["addr_info"]] == [client.address]
    for host in (server, client):
        assert "Status: active" in lab.inside(host, "ufw status")
        # 2049 is what the head's NFS listens on; 29500 and a high port, what a run does.
        lab.inside(
            host,
            "systemctl is-active --quiet listens || systemd-run --quiet --unit=listens /usr/bin/python3 -c '"
            'import signal, socket; s = [socket.create_server(("", p)) for p in (29500, 40123)]; signal.pause()\'',
        )
        lab.wait(lambda host=host: ":40123" in lab.inside(host, "ss -Htln"), "nobody listens", 60)
        open_to_all = lab.in_lab("python3", "-c", OUTSIDER, host.address, "22", "2049", "29500", "40123").split()
        assert open_to_all == ["22"]
    ask = f"python3 - {server.address} 22 2049 29500 40123 <<'P'{OUTSIDER}P"
    assert lab.inside(client, ask).split() == ["22", "2049", "29500", "40123"]


def test_whole_machines_become_a_cluster(metal: Lab, tmp_path: Path) -> None:
    written = inventory(metal, tmp_path)
    played = run_playbook("site.yml", written, timeout=2400)
    assert played.rc == 0, played.stdout
    again = run_playbook("site.yml", written, timeout=2400)
    assert again.rc == 0 and again.count("changed") == 0, again.stdout
    server, client = moved(metal)
    check_network(metal)
    metal.inside(server, f"echo real > {DATASETS}/file")
    assert metal.inside(client, f"cat {DATASETS}/file; findmnt -n -o FSTYPE {DATASETS}").split() == [
        *("real", "autofs", "nfs4"),
    ]
    assert "1" not in metal.inside(client, f"touch {DATASETS}/more 2>/dev/null && echo 1 || true")
    exported = metal.inside(server, "exportfs -s")
    assert client.address in exported and "root_squash" in exported and "*" not in exported
    # Version 4 alone: nobody listens on rpcbind's port.
    assert ":111 " not in metal.inside(server, "ss -Htuln") + metal.inside(client, "ss -Htuln")
    # A clock of its own follows the head's.
    assert server.address in metal.inside(client, "chronyc -n sources")


def test_address_firewall_and_mounts_are_there_after_a_reboot(metal: Lab) -> None:
    server, client = moved(metal)
    for host in (server, client):
        metal.reboot(host)
    check_network(metal)
    # After the reboot nothing is mounted until somebody looks.
    assert metal.inside(client, f"findmnt -n -o FSTYPE {DATASETS}").split() == ["autofs"]
    # The server's grace period after its own start may hold the first answer back.
    metal.wait(lambda: metal.inside(client, f"cat {DATASETS}/file", check=False) == "real\n", "no datasets", 180)


def test_a_dead_head_hangs_nobody(metal: Lab) -> None:
    server, client = moved(metal)
    faults.inject(metal, server, "cut")
    # As many seconds as an emulated machine may take; without `soft` it would be for ever.
    for state in ("mounted", "let go"):
        said = metal.inside(client, f"timeout 200 cat {DATASETS}/other 2>&1 || echo $?", check=False)
        assert said.split()[-1] == "1", f"{state}: {said}"
        metal.inside(client, f"systemctl stop $(systemd-escape --path --suffix=mount {DATASETS})", check=False)
    faults.undo(metal, server, "cut")
    metal.wait(lambda: "real" in metal.inside(client, f"cat {DATASETS}/file", check=False), "no datasets", 120)
