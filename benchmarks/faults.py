"""Random faults over one run, and what became of it.

python benchmarks/faults.py [--faults 30] [--seed 1]          root, Debian or Ubuntu: it boots a lab of its own
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TOP), str(TOP / "tests"), str(TOP / "molecule/resources")]
os.environ["HF_HUB_OFFLINE"] = "1"

from fault_trial import CRASHES, LOSSES, Trial, questions, words_for  # noqa: E402  found by the line above
from lab_hosts import run_playbook  # noqa: E402
from testbed.lab import Lab  # noqa: E402


def main() -> None:
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
            straight = Trial(lab, lab.inventory, words_for("straight", dataset, steps))
            straight.start()
            assert straight.end(3600) == 0, straight.output()
            trial = Trial(lab, lab.inventory, words_for("faulty", dataset, steps))
            began = time.time()
            trial.start()
            done = trial.torment(a.faults, a.seed)
            assert trial.end(3600) == 0, trial.output()
            for name, kinds, limit in (("crash", CRASHES, 5), ("lost host", LOSSES, 15), ("full disk", ("fill",), 60)):
                times = sorted(fault.stopped for fault in done if fault.kind in kinds)
                if times:
                    print(
                        f"{name}: noticed and all stopped after {times[0]:.1f} to {times[-1]:.1f} s (limit {limit}), {len(times)} times"
                    )
            again = sorted(fault.again for fault in done)
            print(
                f"training again after {again[0]:.1f} to {again[-1]:.1f} s, median {again[len(again) // 2]:.1f} (limit 60)"
            )
            print(f"left: {trial.left() or 'no process, no port'}")
            wrong = trial.wrong_samples()
            print(
                f"samples: {wrong[:3] or 'every one once, in its step'}; metrics whole: {trial.metrics_steps() == list(range(1, steps + 1))}"
            )
            mine, theirs = trial.result()["loss_last"], straight.result()["loss_last"]
            print(f"final loss {mine:.6f}, undisturbed {theirs:.6f}, difference {abs(mine - theirs):.1e} (limit 1e-3)")
            print(f"{len(done)} faults, seed {a.seed}, {time.time() - began:.0f} s, load {os.getloadavg()[0]:.1f}")
    finally:
        lab.down()


if __name__ == "__main__":
    main()
