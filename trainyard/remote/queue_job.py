"""The job of a queued run: a lease of hosts. Runs on the queue host; standard library only.

The job does no work: on each host a step holds the lease (trainyard/queue/lease_step.py) until the driver of the run ends it.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.supervise.run_files import SupervisorError, read_json, write_json
from trainyard.remote.queue_phases import NEW, RELEASED

PROGRAMS = "/usr/local/lib/trainyard/queue"  # of the role queue
WARNING = 30  # s between the checkpoint request and the time limit of a run
NOT_INSTALLED = "Slurm is not installed"
COMMAND_LIMIT = 60.0  # s for an answer of Slurm

# Every step ends with the same code, which is not 0: --kill-on-bad-exit would kill those of the other hosts when the first one ends,
# and srun would return their SIGKILL. Any other end of the steps than an order of the driver returns the job to the queue: RequeueExit=75 in slurm.conf.
_SCRIPT = """\
#!/bin/sh
cd /
PYTHONPATH={programs} srun --kill-on-bad-exit=0 --wait=20 --mem=0 --input=none --output=none --error=none \\
    /usr/bin/python3 -S -m trainyard.queue.lease_step {run} {data_dirs}
case $? in
10) exit 0 ;;
11) exit 1 ;;
*) exit 75 ;;
esac
"""


def submit(folder: Path, arguments: Sequence[str]) -> int:
    """Submit the job of the run in a folder with these arguments of sbatch, and write its `state.json`; return the job's id.

    Raises SupervisorError: Slurm refuses the job.
    """
    session = read_json(folder / "session.json") or {}
    data_dirs = {host["name"]: host["data_dir"] for host in session.get("hosts", [])}
    run, folders = shlex.quote(folder.name), shlex.quote(json.dumps(data_dirs))
    script = _SCRIPT.format(programs=PROGRAMS, run=run, data_dirs=folders)
    # Held until `state.json` names it, so that no job runs without a driver. slurmctld saves its state every 6 s: after a crash it
    # may have forgotten the release, and service.py releases a job that still has the first comment.
    words = ["sbatch", "--parsable", "--hold", f"--comment={NEW}", *arguments, "--requeue", f"--signal=TERM@{WARNING}"]
    words.append("--kill-on-invalid-dep=yes")
    answer = command([*words, "--chdir=/", "--output=/dev/null", "--input=/dev/null"], script).strip()
    if not (found := re.fullmatch(r"(\d{1,10})(;\w+)?", answer)):
        raise SupervisorError(f"sbatch: unexpected answer {answer[:80]!r}")
    job = int(found[1])
    try:
        state = {"job": job, "phase": "waiting", "attempts": [], "exit": None}
        again = {"arguments": list(arguments), "submitted": time.time()}  # for a job that slurmctld forgets
        write_json(folder / "state.json", state | again)
        command(["scontrol", "release", str(job)])
    except (OSError, SupervisorError):
        command(["scancel", str(job)])
        raise
    with contextlib.suppress(SupervisorError):  # the job is released
        command(["scontrol", "update", f"JobId={job}", f"Comment={RELEASED}"])
    return job


def command(words: Sequence[str], stdin: str = "") -> str:
    """Return the output of a program of Slurm. Raises SupervisorError with its last line."""
    how: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "timeout": COMMAND_LIMIT}
    try:
        done = subprocess.run(words, input=stdin, check=False, **how)
    except FileNotFoundError:
        remedy = "set queue_state: present for the group cluster in the inventory, and run site.yml"
        raise SupervisorError(f"{NOT_INSTALLED}: {remedy}") from None
    except subprocess.TimeoutExpired:
        raise SupervisorError(f"{words[0]} did not answer within {COMMAND_LIMIT:.0f} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise SupervisorError(f"{words[0]}: {said[-1].removeprefix(f'{words[0]}: ').removeprefix('error: ')[:500]}")
    return done.stdout
