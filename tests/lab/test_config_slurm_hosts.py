"""`trainer config slurm` on a real Slurm of two lab hosts, as an ordinary user whose folder both hosts share."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_hosts import NEEDS_LAB, VENV, Lab, inventory_with, run_playbook
from run_hosts import questions
from testbed.root import USER

from trainer.__main__ import main
from trainyard.wire.trainer_archive import trainer_archive

pytestmark = [*NEEDS_LAB, pytest.mark.long]

OWNER = "researcher"  # has no sudo
SHARED = "/shared"
# A file system of one block device, which both hosts mount, is one file system for their common kernel.
MOUNT = "mknod /root/shared b 7 {number} && mkdir -p {shared} && mount /root/shared {shared}"
ADD_USER = f"""
useradd --create-home --uid 2000 --shell /bin/bash {OWNER}
install -d -m 700 -o {OWNER} -g {OWNER} /home/{OWNER}/.ssh
install -m 600 -o {OWNER} -g {OWNER} /home/{USER}/.ssh/authorized_keys /home/{OWNER}/.ssh/authorized_keys
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Two hosts with Slurm and a folder that both share."""
    lab, folder = Lab(f"slurm-{os.getpid()}"), tmp_path_factory.mktemp("slurm")
    image, device = folder / "shared.img", ""
    try:
        lab.up(hosts=2, venv=VENV, persistent=False)
        played = run_playbook("site.yml", inventory_with(lab, folder / "site", queue_state="present"), {}, timeout=900)
        assert played.rc == 0, played.stdout
        with image.open("wb") as file:
            file.truncate(1 << 30)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        device = subprocess.run(
            ["losetup", "--find", "--show", image], capture_output=True, text=True, check=True
        ).stdout.strip()
        for host in lab.hosts:
            lab.inside(host, MOUNT.format(number=device.removeprefix("/dev/loop"), shared=SHARED))
            lab.inside(host, ADD_USER)
        lab.inside(lab.hosts[0], f"chown {OWNER}: {SHARED}")
        yield lab
    finally:
        lab.down()
        if device:
            subprocess.run(["losetup", "--detach", device], check=True)


def test_sbatch_runs_the_script_of_config(cluster: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`trainer config slurm` on two nodes, from a folder that they share, without trainyard."""
    lab, head, folder = cluster, cluster.hosts[0], f"{SHARED}/config"
    data = questions(tmp_path, 600)
    flags = ["--model=tiny", f"--dataset={data.name}", "--run=r", "--max-steps=2", "--loggers=none", "--seq-length=64"]
    flags += ["--total-batch-size=4", "--batch-size=2", "--time=10", "--env=GLOO_LOG_LEVEL=INFO"]
    assert main(["config", "slurm", "--hosts=2", "--no-gpu", *flags]) == 0
    files = {"it.sbatch": capsys.readouterr().out.encode(), data.name: data.read_bytes()}
    files["trainer.zip"] = trainer_archive(tmp_path).read_bytes()
    lab.inside(head, f"install -d -o {OWNER} {folder}")
    for name, content in files.items():
        subprocess.run([*lab.ssh(head), f"sudo tee {folder}/{name} > /dev/null"], input=content, check=True)
    start = f"cd {folder} && export PATH={VENV}/bin:$PATH PYTHONPATH={folder}/trainer.zip"
    submit = "sbatch --test-only it.sbatch && sbatch --wait it.sbatch || cat *.out"
    said = lab.inside(head, f"su {OWNER} -c '{start}; {submit}' 2>&1")
    paths = [f"{folder}/{place}runs/r/result.json" for place in ("", "runs/r/nodes/1/")]
    results = [json.loads(lab.inside(head, f"cat {path} || echo {{}}")) for path in paths]
    assert [each.get("step") for each in results] == [2, 2], said
    assert results[0]["adapter_sha256"] == results[1]["adapter_sha256"]


def test_slurm_accepts_the_script_that_a_play_renders(cluster: Lab, tmp_path: Path) -> None:
    given = {"run": "slurm", "model": "tiny", "dataset": str(questions(tmp_path, 600)), "max_steps": 2}
    given |= {"total_batch_size": 4, "render_only": True, "render_to": str(tmp_path / "out")}
    played = run_playbook("train.yml", cluster.inventory, given)
    assert played.rc == 0, played.stdout
    script = (tmp_path / "out/slurm.sbatch").read_text()
    tested = cluster.inside(
        cluster.hosts[0], f"cat >/tmp/it.sbatch <<'_END_'\n{script}_END_\nsbatch --test-only /tmp/it.sbatch 2>&1"
    )
    assert "to start at" in tested and "node[1-2]" in tested, tested
