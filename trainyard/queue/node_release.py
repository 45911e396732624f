"""Prolog, Epilog and health check of a host in the queue: no process of a run outlives the lease of its job. Runs as root.

    python node_release.py prolog|epilog|health NODE

Every process of a leased run has the file of its lease in its environment, so no record is needed that could be
missing. The Epilog kills the remaining processes of its job, and Slurm releases the host only when this program has
ended. The Prolog kills the remaining processes of jobs whose lease has ended without an Epilog, as on a host that was
unreachable while its job was started elsewhere. The exit code is not 0 if a process does not end: Slurm then drains the
host.

The health check returns a host to the queue that Slurm drained although nothing is wrong with it, or because of a process that has
since ended, and lets Slurm count the GPUs of an idle host anew if it regards some as used.

A user may set the variable as they like; only processes of the job's user are concerned. The role queue installs this file.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from trainer.supervise.processes import LEASE_VARIABLE, all_pids, descendants, environ, is_running, send_signal
from trainer.supervise.run_files import is_locked

LIMIT = 25.0  # s for killed processes to end
POLL = 0.02
ANSWER_LIMIT = 20.0  # s for Slurm to answer
# slurmd ended while it started a job, and slurmctld asked it to start the job a second time.
HARMLESS = ("Duplicate jobid",)
# A process of a job did not end in time, such as while the host shut down: harmless when it has ended.
PROCESS_LEFT = ("Kill task failed", "Epilog error", "Prolog error")

# What lease_step.py creates: as root, this program opens no other path that a process names.
_LEASE = re.compile(r"/(?:.*/)?leases/[0-9]+")
_USED_GPU = re.compile(r"gpu:(?:[^:,(]+:)?[1-9]")


def main() -> int:
    """Kill the remaining processes; return the exit code."""
    phase = sys.argv[1]
    if phase == "health":
        resume(sys.argv[2])
        count_gpus(sys.argv[2])
        return 0
    job = os.environ["SLURM_JOB_ID"]
    deadline = time.monotonic() + LIMIT
    while left := leftovers(job, int(os.environ["SLURM_JOB_UID"])) if phase == "epilog" else stale(job):
        if time.monotonic() > deadline:
            print(f"processes {sorted(left)} do not end", file=sys.stderr)
            return 1
        for pid in left:
            send_signal(pid, signal.SIGKILL)
        time.sleep(POLL)
    return 0


def resume(node: str) -> None:
    """Return a host to the queue that is drained for a harmless reason."""
    words = ["sinfo", "--noheader", "--states=drain", f"--nodes={node}", "--format=%E"]
    found = subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_LIMIT, check=False)
    reasons = set(found.stdout.split("\n"))
    if reasons & set(HARMLESS) or (reasons & set(PROCESS_LEFT) and not stale("")):
        words = ["scontrol", "update", f"NodeName={node}", "State=RESUME"]
        subprocess.run(words, capture_output=True, timeout=ANSWER_LIMIT, check=False)


def count_gpus(node: str) -> None:
    """Let slurmctld read its configuration again if it regards GPUs of an idle host as used.

    Slurm 22.05 may do so after slurmctld was killed while a job returned to the queue ("gres count underflow" in its log): no run
    that wants these GPUs would ever start.
    """
    words = ["scontrol", "--oneliner", "--details", "show", "node", node]
    found = subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_LIMIT, check=False)
    fields = dict(word.partition("=")[::2] for word in found.stdout.split())
    if fields.get("State") == "IDLE" and fields.get("CPUAlloc") == "0" and _USED_GPU.search(fields.get("GresUsed", "")):
        subprocess.run(["scontrol", "reconfigure"], capture_output=True, timeout=ANSWER_LIMIT, check=False)


def leased() -> dict[int, Path]:
    """Return the file of the lease of every process that has one, except for processes of containers, which have other
    files. Any process can name a path."""
    found = {pid: environ(pid).get(LEASE_VARIABLE, "") for pid in all_pids()}
    here = namespace("self")
    return {
        pid: Path(text)
        for pid, text in found.items()
        if _LEASE.fullmatch(text) and namespace(pid) == here and is_running(pid)
    }


def namespace(pid: int | str) -> str:
    """Return the PID namespace of a process; empty if it has ended."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def leftovers(job: str, uid: int) -> set[int]:
    """Return the processes of a job's run, and those below them."""
    found = {pid for pid, lease in leased().items() if lease.name == job and owner(pid) == uid}
    return found | {below for pid in found for below in descendants(pid)}


def stale(job: str) -> set[int]:
    """Return the processes of runs whose lease is not held, except those of `job`."""
    found = set()
    for pid, lease in leased().items():
        try:
            held = is_locked(lease)
        except OSError:
            held = False
        if not held and lease.name != job:
            found.add(pid)
    return found


def owner(pid: int) -> int:
    """Return the user of a process; -1 if it has ended."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return -1


if __name__ == "__main__":
    sys.exit(main())
