"""Runs on this machine whose supervisor keeps a standby process, which needs no torch here."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from typing import Any

from run_hosts import FAKE_RANK, Bed, free_port, until

from trainer.supervise.link_free import link_free
from trainer.supervise.processes import waiting_processes
from trainyard.wire.trainer_archive import zip_packages

WAIT = 30.0
LAUNCHER = [sys.executable, "-m", "trainer.launch.torchrun"]


def ask(bed: Bed, verb: str, run: str = "r", **request: Any) -> dict[str, Any]:
    run_dir = bed.run_dir(0, run)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trainer.supervise", verb],
        env={**os.environ, "PYTHONPATH": f"{run_dir}/trainer.zip"},
        input=json.dumps({"run_dir": str(run_dir)} | request),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return json.loads(done.stdout) if done.stdout else {"error": done.stderr}


def prepare(bed: Bed, environment: str = "", run: str = "r") -> None:
    """Create a run folder whose trainer has a standby process without torch. All runs of a test have the same trainer."""
    bed.make_run(1, run, environment=f"FAKE_RANK={FAKE_RANK}\n{environment}")
    archive_path, first = bed.run_dir(0, run) / "trainer.zip", bed.folder / "trainer.zip"
    if not first.exists():
        with zipfile.ZipFile(archive_path, "a") as archive:
            archive.writestr("trainer/launch/__init__.py", "")
            for name in ("standby_process", "torchrun"):
                archive.write(FAKE_RANK.with_name("fake_standby.py"), f"trainer/launch/{name}.py")
        shutil.copy(archive_path, first)
    shutil.copy(first, archive_path)


def stage_trainer(bed: Bed, run: str = "r", **more: Any) -> None:
    """Create a run folder with the real trainer, a dataset and a spec; `more`: further fields of the spec."""
    import trainer

    bed.make_run(1, run, environment="GLOO_SOCKET_IFNAME=lo\nOMP_NUM_THREADS=1\n")
    run_dir = bed.run_dir(0, run)
    with (run_dir / "env").open("a") as file:
        file.write(f"PYTHONPATH={run_dir}/trainer.zip\n")
    (run_dir / "trainer.zip").write_bytes(zip_packages(trainer))
    spec = {"model": "tiny", "seq_length": 64, "total_batch_size": 6, "max_steps": 100000, "epochs": 10000}
    spec |= {"eval_interval": 0, "checkpoint_interval": 5, "loggers": "none", "run": run}
    rows = [{"instruction": f"What follows {n}?", "output": f"After {n} comes {n + 1}."} for n in range(60)]
    (run_dir / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run_dir / "spec.yml").write_text(json.dumps(spec | {"dataset": str(run_dir / "data.jsonl")} | more))


def train_command(bed: Bed, run: str = "r") -> list[str]:
    """Return the command of torchrun for a run of `stage_trainer`."""
    run_dir = bed.run_dir(0, run)
    words = [
        "--nnodes=1",
        "--node-rank=0",
        "--master-addr=127.0.0.1",
        f"--master-port={free_port()}",
        "--nproc-per-node=1",
    ]
    places = [f"--run-dir={run_dir}", f"--data-dir={run_dir.parents[1]}"]
    return [*LAUNCHER, *words, "-m", "trainer", "train", f"{run_dir}/spec.yml", *places]


def start(bed: Bed, steps: int = 1000, standby: float = WAIT, run: str = "r", **more: Any) -> dict[str, Any]:
    command = [*LAUNCHER, str(steps), "0.02"]
    return ask(bed, "start", run, command=command, backend="process", standby=standby, **more)


def log(bed: Bed, run: str = "r") -> str:
    return (bed.run_dir(0, run) / "logs/torchrun.0.log").read_text()


def waiting(bed: Bed, run: str = "r") -> list[int]:
    return waiting_processes(link_free(bed.run_dir(0, run)))


def fail(bed: Bed, run: str = "r") -> tuple[int, int]:
    """Kill the rank; return the pids of the supervisor and of the standby process that then wait."""
    os.kill(bed.at_step(0, 1, run=run)["pid"], signal.SIGKILL)
    supervisor, standby = until(lambda: waiting(bed, run), 10, what="the wait for the next start")
    return supervisor, standby
