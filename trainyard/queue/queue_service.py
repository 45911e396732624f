"""The service `trainyard-queue` on the queue host: it runs the driver of every run whose job has its hosts.

    python service.py FOLDER PYTHON PROGRAMS

FOLDER is <cluster_data_dir>/queue, with a folder for each run. PYTHON runs the drivers, whose programs are unpacked below PROGRAMS.

A waiting run costs only a line in Slurm's answer. A driver that crashed is started again, and monitors the ranks, which do not
depend on it. So does this service after a reboot. It runs as the user of the hosts; the role queue installs this file for root,
and the Python of the distribution runs it: standard library only. The run contains its driver, `program.zip`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from trainer.supervise.link_free import link_free
from trainer.supervise.run_files import read_json, write_json
from trainyard.queue.lease_step import FAILED
from trainyard.remote.queue_phases import LIVE, NEW, PROGRAM

POLL = 0.5  # s between two queries to Slurm while there are runs
IDLE_POLL = 10.0  # s between them while all runs have ended: Slurm may have started the job of one again
REFUSED_PAUSE = 5.0  # s after a run whose driver cannot be started
PROGRAM_LIMIT = 1 << 30  # bytes of an archive
ATTEMPTS = 3  # to start a driver whose program or interpreter cannot be used
DELAY_LIMIT = 30.0  # s between two starts of a driver that crashes
ANSWER_LIMIT = 20.0  # s for Slurm to answer
WAITING = ("PENDING", "REQUEUED", "CONFIGURING")
# Reasons for which Slurm, and not a user, holds a job: a host failed while it started the job.
_HELD_BY_SLURM = re.compile(r"requeued[ _]held|JobHoldMaxRequeue")
_HELD = re.compile(r"requeued[ _](in[ _])?held|JobHoldMaxRequeue|JobHeld")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class JobState(NamedTuple):
    """A job in Slurm: its state, such as PENDING, its comment, the run that is its name, and the reason for its
    state."""

    state: str
    comment: str = ""
    run: str = ""
    reason: str = ""

    def is_held(self, live: bool) -> bool:
        """Return whether the job is held, but not by a user.

        If its run has ended (not `live`), Slurm has forgotten the end of the job: it has to end again for runs `after` it.
        """
        if self.state != "PENDING" or not _HELD.search(self.reason):
            return False
        return not live or self.comment == NEW or bool(_HELD_BY_SLURM.search(self.reason))


GONE = JobState("gone")


class Service:
    """The drivers of all runs in one folder."""

    def __init__(self, folder: Path, python: str, programs: Path) -> None:
        """Take the arguments of the module."""
        self.folder, self.python, self.programs = folder, python, programs
        self.reported: dict[str, str] = {}
        self.drivers: dict[str, subprocess.Popen[bytes]] = {}
        self.failures: dict[str, int] = {}
        self.not_before: dict[str, float] = {}
        self.asked = float("-inf")

    def run(self) -> None:
        """Start drivers indefinitely."""
        while True:
            self.start_due()
            time.sleep(POLL)

    def start_due(self) -> None:
        """Start the drivers that are due, and release the jobs that no user holds."""
        self.reap()
        runs = self.runs()
        pause = 0.0 if any(live for _, live in runs.values()) else IDLE_POLL
        if not runs or time.monotonic() < self.asked + pause or (jobs := job_states()) is None:
            return
        self.asked = time.monotonic()
        for run, (job, live) in runs.items():
            found = jobs.get(job, GONE)
            if found.run != run:  # Slurm has forgotten the job, and given its number to another one
                found = GONE
            if found.is_held(live):
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    words = ["scontrol", "release", str(job)]
                    subprocess.run(words, capture_output=True, timeout=ANSWER_LIMIT, check=False)
            elif found.state not in WAITING if live else found.state == "RUNNING":
                self.start(run)

    def runs(self) -> dict[str, tuple[int, bool]]:
        """Return the job of every run, and whether the run has not ended."""
        found = {}
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.folder):
                if _RUN.fullmatch(entry.name) and (state := read_json(Path(entry.path, "state.json"))):
                    job = state.get("job")
                    if isinstance(job, int):
                        found[entry.name] = (job, state.get("phase") in LIVE)
        return found

    def reap(self) -> None:
        """Forget drivers that have ended; delay the next start of one that crashed."""
        for run, process in list(self.drivers.items()):
            if (code := process.poll()) is not None:
                del self.drivers[run]
                self.failures[run] = self.failures.get(run, 0) + 1 if code else 0
                delay = min(DELAY_LIMIT, 2.0 ** (self.failures[run] - 1)) if code else 0.0
                self.not_before[run] = time.monotonic() + delay

    def start(self, run: str) -> None:
        """Start the driver of a run, unless it runs."""
        if run in self.drivers or time.monotonic() < self.not_before.get(run, 0.0):
            return
        folder = self.folder / run
        try:
            program = self.program(run)
            with (folder / "driver.log").open("ab") as log:
                words = [self.python, "-P", "-s", "-m", "trainyard.queue.driver", str(folder)]
                streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
                env = {**os.environ, "PYTHONPATH": str(program), "PYTHONUNBUFFERED": "1"}
                self.drivers[run] = subprocess.Popen(words, cwd=folder, env=env, **streams)
        except (OSError, zipfile.BadZipFile) as error:
            self.report(run, why := f"cannot start its driver: {error}")
            self.not_before[run] = time.monotonic() + DELAY_LIMIT
            self.failures[run] = self.failures.get(run, 0) + 1
            if self.failures[run] >= ATTEMPTS:  # it would hold its hosts
                self.refuse(run, f"{why}: correct cluster_python of the queue host, and add the run again")

    def report(self, run: str, line: str) -> None:
        """Write a line about a run to the journal, once."""
        if self.reported.get(run) != line:
            print(f"error: run {run}: {line}", file=sys.stderr, flush=True)
        self.reported[run] = line

    def refuse(self, run: str, why: str) -> None:
        """End a run without a driver. Its leases end with its job, and its ranks with them. Raises nothing."""
        state = read_json(self.folder / run / "state.json") or {}
        self.not_before[run] = time.monotonic() + REFUSED_PAUSE
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if state.get("phase") in LIVE:
                ended = {"phase": "failed", "exit": {"code": FAILED, "reason": why}}
                write_json(self.folder / run / "state.json", state | ended)
            # Slurm may have given the number to another run.
            words = ["scancel", f"--name={run}", str(state.get("job"))]
            subprocess.run(words, capture_output=True, timeout=ANSWER_LIMIT, check=False)

    def program(self, run: str) -> Path:
        """Return the folder with the unpacked program of a run; runs with the same program share it. Raises OSError and BadZipFile."""
        content = link_free(self.folder / run / PROGRAM).read(PROGRAM_LIMIT)
        tree = self.programs / hashlib.sha256(content).hexdigest()
        if not tree.exists():
            temporary = tree.with_suffix(".tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                archive.extractall(temporary)
            temporary.rename(tree)
        return tree


def job_states() -> dict[int, JobState] | None:
    """Return the state of every job of this user; None while Slurm does not answer."""
    words = ["squeue", "--noheader", "--me", "--states=all", "--format=%A|%T|%k|%j|%r"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = [line.split("|", 4) for line in done.stdout.splitlines()]
    return {int(row[0]): JobState(*row[1:]) for row in rows if len(row) == 5} if done.returncode == 0 else None


if __name__ == "__main__":
    Service(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])).run()
