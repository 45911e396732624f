"""`launcher=slurm` on a real Slurm of two lab hosts, as an ordinary user whose folder both hosts share."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fault_trial import questions
from lab_hosts import NEEDS_LAB, VENV, Lab, Played, inventory_with, run_playbook
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
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, Path]]:
    """Two hosts with Slurm, and the inventory of a user who may only log in to the first one."""
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
        yield lab, login_inventory(lab, folder)
    finally:
        lab.down()
        if device:
            subprocess.run(["losetup", "--detach", device], check=True)


def login_inventory(lab: Lab, folder: Path, data_dir: str = f"{SHARED}/trainyard") -> Path:
    """Write the inventory of the login host, which is the only host of the group cluster."""
    document = yaml.safe_load(lab.inventory.read_text())
    both = document["all"]["children"]["cluster"]
    login = {"ansible_host": lab.hosts[0].address, "cluster_address": lab.hosts[0].address}
    variables = both["vars"] | {
        "ansible_user": OWNER,
        "cluster_data_dir": data_dir,
        "launcher": "slurm",
        "slurm_nodes": 2,
        "slurm_cpus": 1,
    }
    file = folder / f"login-{data_dir.replace('/', '-')}.yml"
    file.write_text(yaml.safe_dump({"cluster": {"hosts": {"login1": login}, "vars": variables}}))
    return file


def variables(run: str, folder: Path, steps: int = 40) -> dict[str, Any]:
    return {
        "run": run, "model": "tiny", "dataset": str(questions(folder)), "seq_length": 64, "total_batch_size": 32,
        "batch_size": 4, "max_steps": steps, "epochs": 1000, "lr": 2e-4, "checkpoint_interval": 5, "eval_interval": 0,
        "loggers": "none", "progress_interval": 0.5, "balance": "even",  # shares by speed add up in another order
    }  # fmt: skip


def read(lab: Lab, run: str, name: str) -> dict[str, Any]:
    text = lab.inside(lab.hosts[0], f"cat {SHARED}/trainyard/runs/{run}/{name} 2>/dev/null || :")
    return json.loads(text) if text else {}


def job_of(lab: Lab, run: str) -> str:
    """Return what Slurm says of the job of a run."""
    return lab.inside(lab.hosts[0], f"scontrol show job {read(lab, run, 'state/node.json')['job']}")


def wait_step(lab: Lab, run: str, step: int, restart: int = 0) -> int:
    """Wait until rank 1 of a start has done a step; return the number of the job.

    Raises AssertionError with the job and its logs after 400 s, or as soon as the job has ended without it.
    """
    deadline = time.monotonic() + 400
    while True:
        mark = read(lab, run, "state/job.json")
        if mark.get("restart") == restart and int(read(lab, run, "state/rank1.json").get("step") or 0) >= step:
            return int(read(lab, run, "state/node.json")["job"])
        ended = "code" in mark and not mark["again"]
        if ended or time.monotonic() > deadline:
            logs = lab.inside(lab.hosts[0], f"tail -n 30 {SHARED}/trainyard/runs/{run}/logs/* 2>&1 || :")
            why = "it has ended" if ended else "timeout"
            raise AssertionError(f"{run}: no step {step} of restart {restart}: {why}\n{job_of(lab, run)}\n{logs}")
        time.sleep(0.5)


def train(inventory: Path, said: dict[str, Any]) -> Played:
    return run_playbook("train.yml", inventory, {name: str(value) for name, value in said.items()})


def test_a_run_resumes_exactly_after_requeues(cluster: tuple[Lab, Path], tmp_path: Path) -> None:
    """One run is undisturbed. The other receives a request for a checkpoint as at the end of its time limit, and is
    then requeued."""
    lab, inventory = cluster
    head = lab.hosts[0]
    straight = train(inventory, variables("straight", tmp_path) | {"collect_to": str(tmp_path / "out")})
    assert straight.rc == 0, straight.stdout
    assert "job of Slurm, submitted on login1: --nodes=2 --cpus-per-task=1" in straight.stdout
    assert (tmp_path / "out/straight/adapter/adapter_config.json").exists()
    assert "ExitCode=0:0" in job_of(lab, "straight") and "UserId=researcher(2000)" in job_of(lab, "straight")

    left = train(inventory, variables("moved", tmp_path) | {"follow": "false"})
    assert left.rc == 0 and "run moved continues" in left.stdout, left.stdout
    job = wait_step(lab, "moved", 7)
    lab.inside(head, f"scancel --signal=TERM {job}")
    wait_step(lab, "moved", 15, restart=1)
    log = lab.inside(head, f"cat {SHARED}/trainyard/runs/moved/logs/rank0.log")
    resumed = [int(line.split()[3]) for line in log.splitlines() if line.startswith("resuming from step")]
    assert len(resumed) == 1 and resumed[0] >= 7, log
    lab.inside(head, f"scontrol requeue {job}")
    followed = train(inventory, variables("moved", tmp_path))
    assert followed.rc == 0, followed.stdout
    assert "run moved is already running: following it" in followed.stdout
    assert "waits for its begin" in followed.stdout and "40 of 40 steps" in followed.stdout
    assert "Restarts=2" in job_of(lab, "moved")
    there, here = read(lab, "straight", "result.json"), read(lab, "moved", "result.json")
    assert here["loss_last"] == there["loss_last"] and here["eval_loss"] == there["eval_loss"]
    assert read(lab, "moved", "nodes/1/result.json")["adapter_sha256"] == here["adapter_sha256"]


def test_stop_cancels_after_a_checkpoint(cluster: tuple[Lab, Path], tmp_path: Path) -> None:
    lab, inventory = cluster
    assert train(inventory, variables("stopped", tmp_path, 5000) | {"follow": "false"}).rc == 0
    wait_step(lab, "stopped", 3)
    both_cores = variables("second", tmp_path, 5000) | {
        "slurm_cpus": 2,
        "follow": "false",
    }  # of which the first run has one
    assert train(inventory, both_cores).rc == 0
    listed = run_playbook("playbooks/status.yml", inventory, {"run": "second"})
    waits = int(read(lab, "second", "state/node.json")["job"])
    assert listed.rc == 0 and f"run second: job {waits} waits for " in listed.stdout, listed.stdout
    assert "second login1 - waiting" in " ".join(listed.stdout.split()), listed.stdout
    stopped = run_playbook("playbooks/stop.yml", inventory, {"run": "stopped"})
    assert stopped.rc == 0 and "login1 stopped" in stopped.stdout, stopped.stdout
    assert lab.inside(lab.hosts[0], f"ls {SHARED}/trainyard/runs/stopped/checkpoints | grep -c step-").strip() != "0"
    assert "JobState=COMPLETED" in job_of(lab, "stopped") and "Restarts=0" in job_of(lab, "stopped")
    stopped = run_playbook("playbooks/stop.yml", inventory, {"run": "second"})
    assert stopped.rc == 0, stopped.stdout
    assert lab.inside(lab.hosts[0], "squeue --noheader").strip() == ""


def test_what_the_cluster_would_not_run_is_refused(cluster: tuple[Lab, Path], tmp_path: Path) -> None:
    lab, inventory = cluster
    apart = login_inventory(lab, tmp_path, f"/home/{OWNER}/trainyard")
    for used, said, why in (
        (
            inventory,
            {"slurm_partition": "huge"},
            "there is no partition huge: choose one of critical, high, low, normal",
        ),
        (inventory, {"slurm_nodes": 9}, "login1: Slurm refuses the job: sbatch: "),
        (apart, {}, f"node node2 does not share /home/{OWNER}/trainyard with login1"),
        (inventory, {"cluster_python": "/usr/bin/python3"}, "login1: /usr/bin/python3 has no torch"),
    ):
        refused = train(used, variables("refused", tmp_path) | said)
        assert refused.rc != 0 and why in " ".join(refused.stdout.split()), refused.stdout
    assert "refused" not in lab.inside(lab.hosts[0], f"squeue --states=all --noheader; ls {SHARED}/trainyard/runs")


def test_sbatch_runs_the_script_of_config(
    cluster: tuple[Lab, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`trainer config slurm` on two nodes, from a folder that they share, without trainyard."""
    lab, head, folder = cluster[0], cluster[0].hosts[0], f"{SHARED}/config"
    data = questions(tmp_path)
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
