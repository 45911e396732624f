"""Two hosts, one at half speed: tokens/s with rows shared by speed against rows shared equally. Root on Debian or Ubuntu.

    make bench-balance

Equal shares are worth 2 x the slow host, shares by speed 3 x: 1.5 is the limit. What a virtual machine calls two cores are often
two threads of one, and slow each other down, which real hosts do not: so both hosts run on one core, in turns, and the
lab's fault `cpu` gives the one 60 and the other 30 percent of it. Runs take turns, and of each the second half of its steps
counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(place) for place in Path(__file__).resolve().parents[1:3]]

from lab_hosts import VENV, Lab, run_playbook  # noqa: E402  found by the line above
from testbed import faults, machine  # noqa: E402
from two_hosts import come_first  # noqa: E402

SHARES = (60, 30)  # percent of one core


def tokens_per_second(lab: Lab, run: str, **fields: Any) -> tuple[float, list[int]]:
    """Train, and return the median speed of the run's second half and how its last step was shared."""
    said = {"run": run, "model": "tiny", "eval_split": 0, "loggers": "none", **fields}
    # Every question to a host is paid out of its share.
    said |= {"unit_properties": ["CPUAffinity=0"], "progress_interval": 10}
    played = run_playbook("train.yml", lab.inventory, said)
    if played.rc:
        raise SystemExit(played.stdout)
    text = lab.inside(lab.hosts[0], f"cat /home/tester/trainyard/runs/{run}/metrics.jsonl")
    steps = [json.loads(line) for line in text.splitlines()]
    return statistics.median(step["tokens_per_second"] for step in steps[len(steps) // 2 :]), steps[-1]["rows"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    a = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    lab = Lab(f"balance-{os.getpid()}")
    lab.up(hosts=2, venv=VENV, persistent=False)
    try:
        made = run_playbook("site.yml", lab.inventory, None, "--tags storage")
        if made.rc:
            raise SystemExit(made.stdout)
        top, unified = machine.cgroup_of("cpu")
        come_first(top / f"trainyard-{lab.name}", unified)
        for host, share in zip(lab.hosts, SHARES, strict=True):
            faults.inject(lab, host, "cpu", str(share))
        speeds: dict[str, list[float]] = {"even": [], "auto": []}
        for number in range(a.rounds):
            for balance, kept in speeds.items():
                speed, rows = tokens_per_second(
                    lab, f"{balance}{number}", balance=balance, max_steps=a.steps, total_batch_size=24, batch_size=4
                )
                kept.append(speed)
                print(f"balance={balance}: {speed:.0f} tokens/s, last step shared {rows}", flush=True)
        ratios = [auto / even for auto, even in zip(speeds["auto"], speeds["even"], strict=True)]
        print(f"auto / even: {statistics.median(ratios):.2f} (each round: {', '.join(f'{r:.2f}' for r in ratios)})")
    finally:
        lab.down()


if __name__ == "__main__":
    main()
