"""The step of a queue's job on each of its hosts: it holds the lease while the run may use the host.

    python lease_step.py RUN '{"node1": "/srv/trainyard"}'      run by srun; the data directories by host

The lease is the file `<data directory>/leases/<job>`, which this process keeps locked; docs/internals/queue.md describes it. The driver of the
run, on the queue host, ends the lease with a file beside it. On SIGTERM the step asks the ranks of this host for a checkpoint and
ends when they have ended. The role queue installs this file; it needs only the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from trainer.supervise.link_free import LinkFreePath
from trainer.supervise.run_files import holds_lock, read_json, write_json

FINISHED, FAILED, AGAIN = 10, 11, 75  # exit codes of a lease; srun itself may return 0 when a host is lost
POLL = 0.1  # s between two checks of the files
AWAITED = {signal.SIGTERM, signal.SIGINT}
_GPUS = re.compile(r"\d{1,3}(,\d{1,3})*")


def main() -> int:
    """Hold the lease; return how it ended."""
    run, data_dirs = sys.argv[1], json.loads(sys.argv[2])
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    data_dir = Path(data_dirs[os.environ["SLURMD_NODENAME"]])
    os.umask(0o077)
    folder = data_dir / "leases"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / os.environ["SLURM_JOB_ID"]
    granted = os.environ.get("CUDA_VISIBLE_DEVICES", "")  # in the order of gres.conf
    gpus = granted.split(",") if _GPUS.fullmatch(granted) else []
    lease = {"run": run, "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0), "gpus": gpus}
    path.unlink(missing_ok=True)  # a rank of a former job of this number may hold a lock of the former file
    with path.open("xb") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)  # unlike flock, only with a file that is open for writing
        # The locked file stays the same; only its contents are replaced.
        describe(path, lease)
        return hold(path, lease, LinkFreePath(data_dir / "runs", run))


def describe(path: Path, lease: dict[str, Any]) -> None:
    """Write the data of the lease that the driver needs."""
    write_json(path.with_name(f"{path.name}.json"), lease | {"time": time.time()})


def hold(path: Path, lease: dict[str, Any], run_dir: LinkFreePath) -> int:
    """Wait for the end of the lease: the driver's order, or SIGTERM and the end of the ranks; return the exit code."""
    ending = False
    while True:
        order = read_json(path.with_name(f"{path.name}.end")) or {}
        # After a crash, Slurm may give the number of a job, which is the name of the file, to another one.
        same = (order.get("run", lease["run"]), order.get("restart")) == (lease["run"], lease["restart"])
        if same and order.get("code") in (FINISHED, FAILED, AGAIN):
            return int(order["code"])
        if ending and not holds_lock(run_dir):
            return AGAIN
        if signal.sigtimedwait(AWAITED, POLL) and not ending:
            ending = True
            if holds_lock(run_dir):
                with contextlib.suppress(OSError):  # code of a rank has the name: the ranks end at the job's limit
                    (run_dir / "stop").make_file()
            describe(path, lease | {"ending": True})


if __name__ == "__main__":
    sys.exit(main())
