"""Start the trainer and programs of the checks, one process each, and keep their outcomes. Standard library only."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import CASES, CPU, Case, Scale

TOP = Path(__file__).resolve().parents[2]
WARM = 3  # steps that do not count for speed
_GRACE = 10.0  # seconds between SIGTERM and SIGKILL
_PORTS = iter(range(29_600, 29_900))


@dataclass
class Outcome:
    """The result of a run or a program: figures by name in `values`, or the reason for their absence.

    `status`: ok, failed, or skipped (it cannot run here, or no time was left).
    """

    status: str
    seconds: float = 0.0
    reason: str = ""
    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class Bench:
    """The place, the device and the deadlines of all runs. `outcomes`: those of finished runs, by name."""

    folder: Path
    device: str
    deadline: float  # of time.monotonic()
    check_deadline: float = math.inf  # of the runs of the check that is made
    scale: Scale = CPU
    machine: dict[str, Any] = field(default_factory=dict)
    planned: dict[str, dict[str, Any]] = field(default_factory=dict)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    threads: int = 1  # of each process: with more of them than cores, runs beside each other take many times as long

    def environment(self) -> dict[str, str]:
        """Return the environment of every process: one GPU, no network."""
        path = os.pathsep.join(filter(None, [str(TOP), os.environ.get("PYTHONPATH", "")]))
        found = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        found |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "HF_HOME": str(self.folder / "hf")}
        found["OMP_NUM_THREADS"] = str(self.threads)
        if self.device == "cpu":
            return found | {"CUDA_VISIBLE_DEVICES": ""}
        return found | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}

    def _until(self) -> float:
        return min(self.deadline, self.check_deadline)

    def start(self, name: str, command: Sequence[str], seconds: float) -> tuple[Outcome, str]:
        """Run a command to its end; return its outcome, and what it wrote to stdout."""
        seconds = min(seconds, self._until() - time.monotonic())
        if seconds < 5:
            return Outcome("skipped", reason="no time was left"), ""
        log = self.folder / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        began, output = time.monotonic(), log.with_suffix(".out")
        with log.open("w") as errors, output.open("w") as out:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.environment(), stdout=out, stderr=errors, start_new_session=True
            )
            # The deadline moves to the past when the driver is interrupted.
            code, memory = _wait(process, lambda: min(began + seconds, self._until()))
        took = time.monotonic() - began
        text = output.read_text(errors="replace")
        if code == 0:
            return Outcome("ok", took, values={"resident_mib": memory}), text
        why = (
            f"no result within {seconds:.0f} s" if code is None else _last_error(log.read_text(errors="replace") + text)
        )
        return Outcome("failed", took, why), text

    def program(self, name: str, module: str, *arguments: str, seconds: float = 120, ranks: int = 0) -> Outcome:
        """Run a module of this project that prints JSON on its last line; `ranks`: under torchrun."""
        outcome, text = self.start(name, [*self._launcher(ranks), "-m", module, *arguments], seconds)
        if outcome.status == "ok":
            try:
                outcome.values |= json.loads(text.strip().splitlines()[-1])
            except (ValueError, IndexError, TypeError):
                return Outcome("failed", outcome.seconds, f"{module} printed no result")
        return outcome

    def train(self, name: str, case: Case, **fields: Any) -> Outcome:
        """Train a case as a user does; return losses, speed and memory. The run folder remains."""
        if missing := [package for package in case.packages if not importlib.util.find_spec(package)]:
            return Outcome("skipped", reason=f"{', '.join(missing)} is not installed")
        if case.fields.get("torch_compile") and not any(map(shutil.which, ("cc", "gcc", "clang"))):
            return Outcome("skipped", reason="no C compiler (gcc) is installed, which torch.compile needs")
        flags = self.scale.fields(case) | case.fields | fields
        flags |= {"run": name, "model": str(self.folder / case.size), "dataset": str(self.folder / "dataset.jsonl")}
        arguments = [f"{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in flags.items()]
        command = [*self._launcher(case.ranks), "-m", "trainer", *arguments, f"--data-dir={self.folder}"]
        outcome, _ = self.start(name, command, case.seconds)
        run = self.folder / "runs" / name
        if outcome.status == "ok":
            records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            outcome.values |= figures(records) | {"result": json.loads((run / "result.json").read_text())}
        return outcome

    def run_case(self, name: str) -> None:
        """Train a case, keep its outcome, and remove its run folder, which may have gigabytes."""
        run = self.folder / "runs" / name
        shutil.rmtree(run, ignore_errors=True)
        self.outcomes[name] = self.train(name, CASES[name])
        shutil.rmtree(run, ignore_errors=True)

    def _launcher(self, ranks: int) -> list[str]:
        if not ranks:
            return [sys.executable]
        flags = [f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1", f"--master-port={_free_port()}"]
        return [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", *flags]


def figures(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the losses, the median speed without the first steps, and the peak memory of CUDA tensors of a run."""
    counted = records[WARM:] or records[-1:]
    peaks = [gpu["memory_peak_gb"] * 1e9 / 2**20 for record in records for gpu in record.get("gpus", []) if gpu]
    return {
        "losses": [record["loss"] for record in records],
        "tokens_per_second": statistics.median(record["tokens_per_second"] for record in counted),
        "cuda_mib": max(peaks, default=None),
    }


def _free_port() -> int:
    for port in _PORTS:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise RuntimeError("no free port from 29600 to 29899")


def _wait(process: subprocess.Popen[bytes], limit: Callable[[], float]) -> tuple[int | None, float]:
    """Return the exit code (None: it was ended at the deadline), and the largest resident set in MiB."""
    ended = 0.0
    try:
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                return None if ended else process.returncode, usage.ru_maxrss / 1024
            if ended and time.monotonic() > ended + _GRACE:
                _signal(process, signal.SIGKILL)
            elif not ended and time.monotonic() > limit():
                # torchrun ends its ranks, which have process groups of their own, after SIGTERM only.
                _signal(process, signal.SIGTERM)
                ended = time.monotonic()
            time.sleep(0.05)
    finally:
        if process.returncode is None:
            _signal(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
            if process.returncode is None:
                _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _last_error(text: str) -> str:
    """Return the line of a log that says what failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ") or "Error: " in line or "Error(" in line]
    return (errors or lines or ["it wrote nothing"])[-1][:300]
