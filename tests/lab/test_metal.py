"""Hosts under qemu: a separate kernel, real reboots, and NFS. Takes minutes without KVM."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_hosts import NEEDS_LAB, Lab
from testbed import faults

# They test the lab itself, whose hosts under qemu only nightly tests use.
pytestmark = [*NEEDS_LAB, pytest.mark.slow, pytest.mark.long]


def test_hosts_have_their_own_kernel(metal: Lab) -> None:
    boots = {metal.inside(host, "cat /proc/sys/kernel/random/boot_id") for host in metal.hosts}
    assert len(boots) == 2
    assert Path("/proc/sys/kernel/random/boot_id").read_text() not in boots
    for host in metal.hosts:
        assert metal.inside(host, "systemd-detect-virt --container || true").strip() == "none"
        assert f"{host.address}/24" in metal.inside(host, f"ip -4 -brief address show {host.nic}")
        assert metal.inside(host, "ufw status").strip() == "Status: inactive"


def test_address_firewall_and_disk_persist_over_a_reboot(metal: Lab) -> None:
    host = metal.host("node2")
    metal.inside(
        host, "ufw allow 22/tcp >/dev/null; ufw --force enable >/dev/null; echo kept > /var/lib/kept; touch /run/gone"
    )
    metal.reboot(host)
    assert metal.inside(host, "cat /var/lib/kept; ls /run/gone 2>/dev/null || true") == "kept\n"
    assert "Status: active" in metal.inside(host, "ufw status")
    metal.inside(host, "ufw --force disable >/dev/null")


def test_nfs_between_hosts(metal: Lab) -> None:
    server, client = metal.hosts
    metal.inside(
        server,
        f"""mkdir -p /srv/data /etc/exports.d
        echo real > /srv/data/file
        echo '/srv/data {client.address}(ro,sync,no_subtree_check)' > /etc/exports.d/lab.exports
        systemctl start nfs-server""",
    )
    metal.inside(client, f"mount -t nfs -o ro {server.address}:/srv/data /mnt")
    assert metal.inside(client, "cat /mnt/file; findmnt -n -o FSTYPE /mnt") == "real\nnfs4\n"
    assert "1" not in metal.inside(client, "touch /mnt/more 2>/dev/null && echo 1 || true")
    metal.inside(client, "umount /mnt")


def test_faults_under_qemu(metal: Lab) -> None:
    here, host = metal.hosts
    ping = f"ping -c 1 -W 1 {host.address}"
    for name in ("cut", "pause"):
        faults.inject(metal, host, name)
        assert "0 received" in metal.inside(here, ping, check=False)
        faults.undo(metal, host, name)
        metal.wait(lambda: "1 received" in metal.inside(here, ping, check=False), "node2 does not answer")
