"""False alarms of a lost host while the machines are busy, and the time to notice a real loss then.

    sudo make bench NAME=alarms [ARGS='--minutes 60 --load 10']

Starts a lab of three hosts, and processes that compute without a pause beside the run's ranks. No host fails in the given minutes,
so every failure that the session reports is a false alarm. Then a host is disconnected. Requires root on Debian or Ubuntu.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fault_trial import Trial, questions, run_variables
from lab_hosts import run_playbook
from testbed.lab import Lab

STEPS = 100_000  # more than the run can train in the time
LOSSES = 3  # disconnected hosts at the end
REPORT = 300.0  # s between two lines of progress
SPIN = "while True: pass"


def main() -> None:
    """Run under load, and print the failures that were reported and the times to notice the real ones."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--load", type=int, default=10, help="computing processes beside the run")
    a = parser.parse_args()
    lab, busy = Lab(f"bench-{os.getpid()}"), []
    try:
        with tempfile.TemporaryDirectory() as work:
            lab.up(hosts=3, venv=Path(sys.prefix), persistent=False)
            run_playbook("site.yml", lab.inventory, {}, "--tags", "storage")
            trial = Trial(lab, lab.inventory, run_variables("busy", questions(Path(work)), STEPS))
            trial.start()
            trial.wait_line(r"step \d+/", 0.0)
            busy = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(a.load)]
            loads = watch(trial, a.minutes * 60)
            failures = [line for _, line in trial.lines if line.startswith("failed: ")]
            print(
                f"{a.minutes:g} minutes, load average {loads[0]:.1f} to {loads[-1]:.1f}, median {loads[len(loads) // 2]:.1f}"
            )
            print(f"failures reported without a fault: {len(failures)} {failures[:3] or ''}")
            for fault in trial.inject_randomly(LOSSES, 1, ("cut",) * LOSSES):
                print(f"disconnected host noticed, and all ranks stopped, after {fault.stopped:.1f} s")
            trial.clean()
    finally:
        for process in busy:
            process.kill()
        lab.down()


def watch(trial: Trial, seconds: float) -> list[float]:
    """Return the load averages of this machine over `seconds`, sorted; report the run's progress meanwhile."""
    loads, began, reported = [], time.monotonic(), 0.0
    while (past := time.monotonic() - began) < seconds and trial.process and trial.process.poll() is None:
        time.sleep(10)
        if past > min(60.0, seconds / 4):  # the average of the last minute
            loads.append(os.getloadavg()[0])
        if past - reported > REPORT:
            reported = past
            print(f"{past / 60:.0f} min, load {os.getloadavg()[0]:.1f}: {trial.lines[-1][1]}", flush=True)
    assert trial.process and trial.process.poll() is None, trial.output()[-6000:]
    return sorted(loads)


if __name__ == "__main__":
    main()
