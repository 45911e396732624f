"""Runs in the queue of lab hosts: add one as a controller does, and inspect it from the queue host."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import tarfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fake_nvidia_smi import write_nvidia_smi
from lab_hosts import VENV, Host, Lab, inventory_with, run_playbook
from run_hosts import questions
from testbed.root import DATA_DIR, USER

from trainer.spec import make_spec
from trainer.supervise.processes import RUN_VARIABLE
from trainyard.ansible_adapter import Inventory
from trainyard.queue.request import Request, slurm_options
from trainyard.queue.run_folder import QueuedStart, program_archive
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.prepare.spec_files import prepare

COUNTING = "/usr/local/bin/counting-python"
SHARED = "/srv/shared"  # on a host, open to the runs
SUBMIT = (
    "import sys; from pathlib import Path; from trainyard.remote.queue_job import submit; "
    "print(submit(Path(sys.argv[1]), sys.argv[2:]))"
)
# Processes of a run, on a host where none may be left.
LEFT = f"grep -lsaz ^{RUN_VARIABLE}= /proc/[0-9]*/environ || :"


@dataclass
class QueuedRun:
    """A run in the queue. `head`: the queue host. `job`: its job."""

    lab: Lab
    head: Host
    name: str
    job: int

    @property
    def folder(self) -> str:
        return f"{DATA_DIR}/queue/{self.name}"

    @property
    def run_dir(self) -> str:
        return f"{DATA_DIR}/runs/{self.name}"

    def state(self) -> dict[str, Any]:
        """Return `state.json`."""
        return json.loads(self.lab.inside(self.head, f"cat {self.folder}/state.json"))

    def log(self) -> str:
        """Return the log of the driver; empty if there is none yet."""
        return self.lab.inside(self.head, f"cat {self.folder}/driver.log 2>/dev/null || :")

    def on(self) -> list[Host]:
        """Return the hosts of the newest attempt."""
        attempts = self.state()["attempts"]
        return [self.lab.host(name) for name in attempts[-1]["hosts"]] if attempts else []

    def step(self, host: Host, rank: int = 0) -> int:
        """Return the step of a rank on a host; -1 if it has not reported one."""
        text = self.lab.inside(host, f"cat {self.run_dir}/state/rank{rank}.json 2>/dev/null || :")
        return int((json.loads(text) if text else {}).get("step") or -1)

    def result(self, host: Host) -> dict[str, Any]:
        """Return `result.json` of a host."""
        return json.loads(self.lab.inside(host, f"cat {self.run_dir}/result.json"))

    def wait(self, condition: Callable[[dict[str, Any]], bool], what: str, seconds: float = 120) -> None:
        """Wait until a condition of `state.json` holds. If it no longer can, the error contains the log of the driver."""
        deadline = time.monotonic() + seconds
        while not condition(state := self.state()):
            if time.monotonic() > deadline or state["phase"] in ("finished", "failed", "stopped", "cancelled"):
                raise AssertionError(f"{self.name}: not {what}\n{state}\n{self.log()[-4000:]}")
            time.sleep(0.1)

    def wait_phase(self, phase: str, seconds: float = 120) -> None:
        """Wait for a phase of the run."""
        self.wait(lambda state: state["phase"] == phase, phase, seconds)

    def wait_step(self, step: int, seconds: float = 120) -> Host:
        """Wait until rank 0 has done a step; return its host."""

        def reached(state: dict[str, Any]) -> bool:
            if state["phase"] != "running" or not state["attempts"]:
                return False
            return self.step(self.lab.host(next(iter(state["attempts"][-1]["hosts"])))) >= step

        self.wait(reached, f"at step {step}", seconds)
        return self.on()[0]


@dataclass(frozen=True)
class QueueLab:
    """Lab hosts with the queue, their inventory, and a folder for created files."""

    lab: Lab
    inventory: Path
    folder: Path

    @classmethod
    def start(cls, name: str, folder: Path, gpus: Mapping[str, int]) -> QueueLab:
        """Start three hosts with the queue, in which low runs may be preempted.

        Their interpreter runs counting_rank.py in the place of torchrun, if a run asks for it.

        Args:
            gpus: number of stand-in GPUs by host.
        """
        lab = Lab(name)
        lab.up(hosts=3, venv=VENV, persistent=False)
        rank = Path(__file__).with_name("counting_rank.py").read_text()
        python = (
            f'#!/bin/sh\ncase " $* " in *" trainer.launch.torchrun "*) exec {VENV}/bin/python {COUNTING}.py "$@";; '
            f'*) exec {VENV}/bin/python "$@";; esac'
        )
        for host_name, count in gpus.items():
            # Hosts with the same GPUs are one machine.
            write_nvidia_smi(folder, count, f"GPU-{host_name}-")
            program = (folder / "nvidia-smi").read_text()
            put = f"cat >/usr/local/bin/nvidia-smi <<'P'\n{program}\nP\nchmod 755 /usr/local/bin/nvidia-smi"
            put += f"\ncat >{COUNTING}.py <<'_END_'\n{rank}\n_END_\ncat >{COUNTING} <<'_END_'\n{python}\n_END_"
            lab.inside(lab.host(host_name), f"{put}\nchmod 755 {COUNTING}; install -d -o tester {SHARED}")
        queue = cls(lab, inventory_with(lab, folder, queue_state="present", queue_preempt=["low"]), folder)
        played = run_playbook("site.yml", queue.inventory, {}, timeout=900)
        assert played.rc == 0, played.stdout
        return queue

    def add(self, run: str, steps: int, **asked: Any) -> QueuedRun:
        """Add a run of the model `tiny` with one thread per rank; see `add_run`."""
        spec = tiny_spec(run, questions(self.folder, 600), steps)
        options = {"run_env": {"OMP_NUM_THREADS": "1", "SHARED": SHARED}}
        return add_run(self.lab, self.inventory, self.folder, spec, options=options, **asked)


def tiny_spec(run: str, dataset: Path, steps: int, batch: int = 2) -> dict[str, Any]:
    """Return the spec of a run of the model `tiny`."""
    return {
        "run": run, "model": "tiny", "dataset": str(dataset), "seq_length": 32, "total_batch_size": batch, "batch_size": 2,
        "max_steps": steps, "epochs": 1000, "lr": 2e-4, "checkpoint_interval": 5, "eval_interval": 0, "loggers": ["none"],
    }  # fmt: skip


def add_run(lab: Lab, inventory: Path, work: Path, spec: dict[str, Any], **asked: Any) -> QueuedRun:
    """Add a run to the queue of node1.

    Args:
        work: folder on this machine for created files.
        spec: fields of the run spec, `run` among them.
        asked: fields of the request; `options`, launch options; `counting`, to count steps instead of training.
    """
    counting = asked.pop("counting", False)
    options = LaunchOptions(**asked.pop("options", {}))
    request = Request(run=spec["run"], max_restarts=options.max_restarts, **asked)
    prepared = prepare(make_spec(spec, "the test"), work, lambda line: None)
    hosts = Inventory([str(inventory)]).hosts
    if counting:
        hosts = [replace(host, python=COUNTING) for host in hosts]
    excluded = [host.name for host in hosts if request.hosts and host.name not in request.hosts]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:

        def write(name: str, content: bytes) -> None:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o600
            archive.addfile(entry, io.BytesIO(content))

        files = []
        for number, file in enumerate(prepared.files):
            if file.src:
                archive.add(file.src, arcname=f"files/{number}")
            files.append(replace(file, src=file.src and f"files/{number}"))
        write("request.json", request.model_dump_json().encode())
        write("session.json", QueuedStart(hosts, options, replace(prepared, files=files)).as_json())
        write("program.zip", program_archive())
    head = lab.hosts[0]
    folder = f"{DATA_DIR}/queue/{request.run}"
    (work / f"{request.run}.tar").write_bytes(buffer.getvalue())
    make = f"rm -rf {folder}; mkdir -p -m 700 {folder} && tar -C {folder} -x"
    _copy(lab, head, work / f"{request.run}.tar", make)
    words = ["env", f"PYTHONPATH={folder}/program.zip", "/usr/bin/python3", "-c", SUBMIT, folder]
    job = lab.inside(head, f"cd /; runuser -u {USER} -- {shlex.join([*words, *slurm_options(request, excluded)])}")
    return QueuedRun(lab, head, request.run, int(job))


def _copy(lab: Lab, host: Host, source: Path, command: str) -> None:
    """Run a command as the user of a host, with a file of this machine on its standard input."""
    with source.open("rb") as file:
        subprocess.run([*map(str, lab.ssh(host)), command], stdin=file, check=True, capture_output=True)
