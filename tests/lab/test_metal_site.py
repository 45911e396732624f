"""What site.yml does to whole machines: NFS by its role, and a reboot. Minutes, where no KVM runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from lab_hosts import NEEDS_LAB, Lab, run_playbook
from yard import faults

pytestmark = [*NEEDS_LAB, pytest.mark.slow, pytest.mark.long]

DATASETS = "/home/yard/trainyard/datasets"


@pytest.fixture(scope="module")
def metal() -> Iterator[Lab]:
    one = Lab(f"metal-{os.getpid()}")
    one.up(hosts=2, kind="metal", stay=False)
    yield one
    one.down()


def test_datasets_are_exported_and_mounted(metal: Lab) -> None:
    server, client = metal.hosts
    played = run_playbook("site.yml", metal.inventory, {"nfs_dataset_delivery": "nfs"}, "--tags nfs", timeout=1200)
    assert played.rc == 0, played.stdout
    metal.inside(server, f"echo real > {DATASETS}/file")
    assert metal.inside(client, f"cat {DATASETS}/file; findmnt -n -o FSTYPE {DATASETS}").split() == [
        *("real", "autofs", "nfs4"),
    ]
    assert "1" not in metal.inside(client, f"touch {DATASETS}/more 2>/dev/null && echo 1 || true")
    exported = metal.inside(server, "exportfs -s")
    assert client.address in exported and "root_squash" in exported and "*" not in exported
    # Version 4 alone: nobody listens on rpcbind's port.
    assert ":111 " not in metal.inside(server, "ss -Htuln") + metal.inside(client, "ss -Htuln")


def test_mounts_are_there_after_a_reboot_and_a_dead_head_hangs_nobody(metal: Lab) -> None:
    """After the reboot nothing is mounted until somebody looks."""
    server, client = metal.hosts
    metal.reboot(client)
    assert metal.inside(client, f"findmnt -n -o FSTYPE {DATASETS}").split() == ["autofs"]
    # The server's grace period after its own start may hold the first answer back.
    assert metal.inside(client, f"cat {DATASETS}/file") == "real\n"
    faults.inject(metal, server, "cut")
    # As many seconds as an emulated machine may take; without `soft` it would be for ever.
    for state in ("mounted", "let go"):
        said = metal.inside(client, f"timeout 200 cat {DATASETS}/other 2>&1; echo $?", check=False)
        assert said.split()[-1] == "1", f"{state}: {said}"
        metal.inside(client, f"systemctl stop $(systemd-escape --path --suffix=mount {DATASETS})", check=False)
    faults.undo(metal, server, "cut")
    metal.wait(lambda: "real" in metal.inside(client, f"cat {DATASETS}/file", check=False), "no datasets", 120)
