"""Random faults during one run: time to notice, time to train again, and whether the result is the same.

    sudo make bench NAME=faults [ARGS='--faults 30 --seed 1']

Starts a lab of three hosts. Kills ranks, launchers and supervisors, disconnects hosts, cuts their power, and fills disks while one
run trains. Then compares its samples, metrics and loss with an undisturbed run. Requires root on Debian or Ubuntu. Takes about 20
minutes for 30 faults.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from fault_trial import CRASHES, LOSSES, Trial, questions, run_variables
from lab_hosts import run_playbook
from testbed.lab import Lab


def main() -> None:
    """Run both trainings, and print one line per result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    a = parser.parse_args()
    lab = Lab(f"bench-{os.getpid()}")
    try:
        with tempfile.TemporaryDirectory() as work:
            dataset, steps = questions(Path(work)), 25 * a.faults + 25
            lab.up(hosts=3, venv=Path(sys.prefix), persistent=False)
            run_playbook("site.yml", lab.inventory, {}, "--tags", "storage")
            straight = Trial(lab, lab.inventory, run_variables("straight", dataset, steps))
            straight.start()
            assert straight.end(3600) == 0, straight.output()
            trial = Trial(lab, lab.inventory, run_variables("faulty", dataset, steps))
            began = time.time()
            trial.start()
            done = trial.inject_randomly(a.faults, a.seed)
            assert trial.end(3600) == 0, trial.output()
            for name, kinds, limit in (
                ("crash", CRASHES, 5),
                ("unreachable host", LOSSES, 15),
                ("full disk", ("fill",), 60),
            ):
                times = sorted(fault.stopped for fault in done if fault.kind in kinds)
                if times:
                    print(
                        f"{name}: all ranks stopped after {times[0]:.1f} to {times[-1]:.1f} s (limit {limit}), {len(times)} faults"
                    )
            resumed = sorted(fault.resumed for fault in done)
            print(
                f"training resumed after {resumed[0]:.1f} to {resumed[-1]:.1f} s, median {resumed[len(resumed) // 2]:.1f} (limit 60)"
            )
            print(f"left on the hosts: {trial.leftovers() or 'no process, no port'}")
            wrong = trial.wrong_samples()
            print(
                f"samples: {wrong[:3] or 'each sample once, in its step'}; metrics complete: {trial.metrics_steps() == list(range(1, steps + 1))}"
            )
            final_loss, reference_loss = trial.result()["loss_last"], straight.result()["loss_last"]
            print(
                f"final loss {final_loss:.6f}, undisturbed {reference_loss:.6f}, difference {abs(final_loss - reference_loss):.1e} (limit 1e-3)"
            )
            print(f"{len(done)} faults, seed {a.seed}, {time.time() - began:.0f} s, load {os.getloadavg()[0]:.1f}")
    finally:
        lab.down()


if __name__ == "__main__":
    main()
