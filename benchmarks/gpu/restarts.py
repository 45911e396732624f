"""A run whose rank is killed, started as the controller starts it but without SSH: whether the ranks are forked, and how long it takes.

    python -m benchmarks.gpu.restarts FOLDER

FOLDER has `small` and `dataset.jsonl`. Prints JSON.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from trainer.spec import make_spec
from trainer.supervise.run_files import read_json
from trainyard.run.follow.manage_runs import manage_runs
from trainyard.run.launch_options import LaunchOptions, make_options
from trainyard.run.session import RunSession
from trainyard.wire.connection import Host, HostConnection
from trainyard.wire.openssh import LocalTransport

CRASHES = 3
RUN = "restarts"
LIMIT = 60.0  # s for each wait
FIELDS = {
    "run": RUN,
    "seq_length": 256,
    "total_batch_size": 4,
    "max_steps": 100_000,
    "epochs": 100_000,
    "checkpoint_interval": 10,
    "eval_split": 0,
    "loggers": "none",
    "precision": "bf16-mixed",
}


def trained(run_dir: Path, steps: int, after: int = 0) -> dict[str, Any]:
    """Wait until rank 0 has trained this many steps, in another process than `after`; return its heartbeat. Raises TimeoutError."""
    deadline = time.monotonic() + LIMIT
    found: dict[str, Any] = {}
    while time.monotonic() < deadline:
        found = read_json(run_dir / "state" / "rank0.json") or {}
        if found.get("status") == "training" and found.get("pid") != after and found.get("step", 0) >= steps:
            return found
        time.sleep(0.02)
    raise TimeoutError(f"step {steps} was not reached within {LIMIT:g} s: {found}")


def was_forked(pid: int) -> bool:
    """Return whether a rank's program is that of the standby process."""
    return b"trainer.launch.standby_process" in Path(f"/proc/{pid}/cmdline").read_bytes()


def main(folder: Path) -> None:
    """Start the run, kill its rank several times, and stop it."""
    host = Host(
        "here",
        "127.0.0.1",
        str(folder / "host"),
        sys.executable,
        backend="process",
        processes=1,
        env={"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "HF_HUB_OFFLINE": "1"},
    )
    spec = make_spec(FIELDS | {"model": str(folder / "small"), "dataset": str(folder / "dataset.jsonl")}, "the check")

    def connect(host: Host) -> HostConnection:
        return HostConnection(host, LocalTransport())

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    options = make_options({"max_restarts": 10, "restart_delay": 0.1})
    session = RunSession([host], connect, options, spec=spec, home=folder, report=report)
    for step in (session.prepare, session.plan, session.stage):
        step()
    began = time.time()
    session.launch()
    follower = threading.Thread(target=session.follow, daemon=True)
    follower.start()
    run_dir = folder / "host" / "runs" / RUN
    state = trained(run_dir, 1)
    cold, starts, forked, seconds = time.time() - began, 1, int(was_forked(state["pid"])), []
    for _ in range(CRASHES):
        trained(run_dir, state["step"] + 15)  # at least one checkpoint
        killed = time.time()
        os.kill(state["pid"], signal.SIGKILL)
        state = trained(run_dir, 1, after=state["pid"])
        seconds.append(time.time() - killed)
        starts, forked = starts + 1, forked + was_forked(state["pid"])
    manage_runs("stopped", RUN, [host], connect, LaunchOptions(), report)
    follower.join(LIMIT)
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = {
        "starts": starts,
        "forked": forked,
        "cold_seconds": cold,
        "restart_seconds": statistics.median(seconds),
        "consecutive": steps == list(range(1, len(steps) + 1)) and len(steps) > CRASHES * 10,
        "nvml": "NVML" not in (run_dir / "logs" / "rank0.log").read_text(),  # torch warns if it cannot be initialized
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
