"""Time and memory of site.yml, preflight.yml and train.yml on many lab hosts; see benchmarks/scale.py."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from fault_trial import questions
from lab_hosts import VENV, Lab, inventory_with
from queued_runs import COUNTING, install_counting
from testbed.root import DATA_DIR

from trainer.supervise.processes import descendants

TOP = Path(__file__).resolve().parents[1]


@dataclass
class Usage:
    """The resources that a command of the controller used, including ssh and workers of Ansible. `mib`: largest sum of
    its processes' PSS."""

    seconds: float
    cpu: float
    mib: float
    output: str

    def __str__(self) -> str:
        return f"{self.seconds:.1f} ({self.cpu:.1f}), {self.mib:.0f} MiB"


def tree_mib(pid: int) -> float:
    """Return the memory of a process and its descendants, shared pages counted once."""
    total = 0
    for each in (pid, *descendants(pid)):
        with contextlib.suppress(OSError):  # it has ended
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
            total += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return total / 1024


def play(inventory: Path, *words: str) -> Usage:
    """Run ansible-playbook and watch its memory. Exits if it fails."""
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(inventory), *words]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(TOP / "ansible.cfg"), "HF_HUB_OFFLINE": "1"}
    before, began, peak = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), 0.0
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=TOP, env=environment, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            peak = max(peak, tree_mib(process.pid))
            time.sleep(0.5)
        seconds = time.monotonic() - began
        log.seek(0)
        output = log.read()
    if process.returncode:
        raise SystemExit(output)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Usage(seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, peak, output)


def lab_row(count: int) -> str:
    """Measure on `count` lab hosts whose ranks count steps instead of training; return a row of the table."""
    lab = Lab(f"scale-{os.getpid()}")
    try:
        lab.up(hosts=count, venv=VENV, persistent=False)
        with tempfile.TemporaryDirectory() as work:
            inventory = inventory_with(lab, Path(work), cluster_python=COUNTING)
            install_counting(lab)
            used = [
                play(inventory, "site.yml"),
                play(inventory, "site.yml"),
                play(inventory, "playbooks/preflight.yml"),
            ]
            run = {"run": "scale", "model": "tiny", "dataset": questions(Path(work)), "max_steps": 100, "epochs": 1000}
            run |= {"seq_length": 32, "total_batch_size": count, "loggers": "none", "isolate": "never"}
            used.append(play(inventory, "train.yml", *(word for n, v in run.items() for word in ("-e", f"{n}={v}"))))
            node = f"cat {DATA_DIR}/runs/scale/state/node.json"
            starts = [json.loads(lab.inside(host, node))["started"] for host in lab.hosts]
        return " | ".join([f"| {count}", *map(str, used), f"{max(starts) - min(starts):.2f}"]) + " |"
    finally:
        lab.down()
