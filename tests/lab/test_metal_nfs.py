"""NFS of the kernel between two virtual machines: shared data directories, and datasets that lie on the export."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_hosts import NEEDS_LAB, VENV, Host, Lab, Played, inventory_with, run_playbook
from testbed.root import DATA_DIR, USER

from trainer.data.samples import read_samples
from trainer.data.tiny import make_tiny

pytestmark = [*NEEDS_LAB, pytest.mark.slow, pytest.mark.long]

HOME = f"/home/{USER}"
DATASETS = f"{DATA_DIR}/datasets"
# 200 records of a megabyte.
DATASET = """
import json
for n in range(200):
    print(json.dumps({"text": f"{n} and {n + 1}", "blob": str(n % 10) * 1_000_000}))
"""
SLOW = "does not answer"  # what preflight says of an emulated host that has too little CPU time


@pytest.fixture(scope="module")
def machines() -> Iterator[Lab]:
    """Two stock virtual machines with the Python environment of the tests, without firewall."""
    new = Lab(f"metal-nfs-{os.getpid()}")
    new.up(hosts=2, kind="metal", venv=VENV, persistent=False)
    yield new
    new.down()


def preflight(lab: Lab, **variables: str) -> Played:
    """Run preflight until both hosts answer in time."""
    done: list[Played] = []

    def answered() -> bool:
        done[:] = [run_playbook("playbooks/preflight.yml", lab.inventory, variables)]
        return SLOW not in done[0].stdout

    lab.wait(answered, "a host does not answer preflight in time", 900)
    return done[0]


def export_home(lab: Lab, clients: list[Host], mount: str) -> None:
    """Export the home of the first host and mount it on `clients`, as for a cluster with homes on NFS."""
    server = lab.hosts[0]
    options = " ".join(f"{host.address}(rw,sync,no_subtree_check)" for host in clients)
    lab.inside(
        server,
        f"""mkdir -p /etc/exports.d
        echo '{HOME} {options}' > /etc/exports.d/homes.exports
        systemctl start nfs-server
        exportfs -ra""",
    )
    for client in clients:
        lab.inside(client, f"cd /; mkdir -p {mount}; mount -t nfs -o vers=4.2 {server.address}:{HOME} {mount}")
        assert lab.inside(client, f"findmnt -n -o FSTYPE {mount}").strip() == "nfs4"


@pytest.mark.parametrize("mount, clients", [(HOME, [1]), ("/srv/home", [0, 1])], ids=["server and client", "clients"])
def test_a_data_directory_on_nfs_is_found(machines: Lab, mount: str, clients: list[int]) -> None:
    folder = f"{mount}/trainyard"
    mounted = [machines.hosts[place] for place in clients]
    try:
        export_home(machines, mounted, mount)
        for host in machines.hosts:  # both have listed the folder: their caches hold it
            machines.inside(host, f"runuser -u {USER} -- sh -c 'mkdir -p {folder}/runs; ls -la {folder}/runs'")
        played = preflight(machines, cluster_data_dir=folder)
        assert played.rc != 0
        expected = (
            f"error: node1: shares its data directory {folder} with node2: set cluster_data_dir to a folder on a local "
            "disk of each host, for example /srv/trainyard"
        )
        assert expected in played.stdout.splitlines(), played.stdout
        assert machines.inside(machines.hosts[0], f"find {HOME}/trainyard -type f") == ""
    finally:
        for host in mounted:
            machines.inside(host, f"cd /; umount -l {mount}")
        machines.inside(machines.hosts[0], f"rm -rf /etc/exports.d/homes.exports {HOME}/trainyard; exportfs -ra")


def test_a_dataset_on_the_export_does_not_leave_the_controller(machines: Lab, tmp_path: Path) -> None:
    server, client = machines.hosts
    began = time.monotonic()
    inventory = inventory_with(machines, tmp_path, nfs_dataset_delivery="nfs", python_env="as-is")
    site = run_playbook("site.yml", inventory, {}, "--tags", "nfs", timeout=2400)
    assert site.rc == 0, site.stdout
    print(f"site.yml --tags nfs: {time.monotonic() - began:.0f} s")
    (tmp_path / "few.jsonl").write_text("".join(json.dumps({"text": f"{n} and {n + 1}"}) + "\n" for n in range(50)))
    make_tiny(read_samples(tmp_path / "few.jsonl"), tmp_path / "small", 1)
    model = subprocess.run(["tar", "-C", tmp_path, "-c", "small"], capture_output=True, check=True).stdout
    machines.inside(server, f"python3 -c '{DATASET}' > {DATASETS}/big.jsonl")
    subprocess.run([*machines.ssh(server), f"cd {DATASETS} && tar -x && chmod -R a+rX small"], input=model, check=True)
    size = int(machines.inside(server, f"stat -c %s {DATASETS}/big.jsonl"))
    assert size > 200_000_000
    assert machines.inside(client, f"ls {DATASETS}; findmnt -n -t nfs4 -o FSTYPE {DATASETS}").split()[-1] == "nfs4"

    sent = Path(f"/sys/class/net/trainyard{machines.running.net}/statistics/tx_bytes")
    received = f"cat /sys/class/net/{client.nic}/statistics/rx_bytes"
    variables = {"dataset": f"host:{DATASETS}/big.jsonl", "model": f"host:{DATASETS}/small", "max_steps": 2}
    variables |= {"seq_length": 64, "total_batch_size": 6, "eval_interval": 0, "strategy": "ddp", "run": "exported"}
    began, before, before_client = time.monotonic(), int(sent.read_text()), int(machines.inside(client, received))
    staged = run_playbook("train.yml", inventory, variables, "--tags", "preflight,stage", timeout=2400)
    used = int(sent.read_text()) - before
    read = int(machines.inside(client, received)) - before_client
    assert staged.rc == 0, staged.stdout
    print(f"staged in {time.monotonic() - began:.0f} s: {used} bytes left the controller, node2 received {read}")
    assert used < 5_000_000 and read > size
    # On both hosts the store has a link to the export, and the run reads the same bytes.
    for host in (server, client):
        link = machines.inside(host, f"readlink -f {DATA_DIR}/store/datasets/*").split()
        assert link == [f"{DATASETS}/big.jsonl"]
    assert "shares its data directory" not in staged.stdout
