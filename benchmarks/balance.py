"""Balanced against even shares on two hosts, one at half speed: tokens per second.

    sudo make bench NAME=balance [ARGS='--rounds 3 --steps 24']

Balanced shares are worth 3 times the slow host, even shares 2 times: the limit of the ratio is 1.5. Two virtual cores are often two
threads of one core and slow each other down, which two hosts do not. Therefore both hosts run on one core, and the lab fault `cpu`
gives one 60 % and the other 30 % of it. The two kinds of runs alternate, and the second half of the steps of each run counts.
Requires root on Debian or Ubuntu. Takes about ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import Any

from lab_hosts import VENV, Lab, run_playbook
from testbed import faults, machine, root

from benchmarks.linked_hosts import prioritize

SHARES = (60, 30)  # percent of one core


def tokens_per_second(lab: Lab, run: str, **fields: Any) -> tuple[float, list[int]]:
    """Train; return the median tokens per second of the second half, and the rows per rank of the last step."""
    variables = {"run": run, "model": "tiny", "eval_split": 0, "loggers": "none", **fields}
    # Every status query uses CPU time of the share of a host.
    variables |= {"unit_properties": ["CPUAffinity=0"], "progress_interval": 10}
    played = run_playbook("train.yml", lab.inventory, variables)
    if played.rc:
        raise SystemExit(played.stdout)
    text = lab.inside(lab.hosts[0], f"cat {root.DATA_DIR}/runs/{run}/metrics.jsonl")
    steps = [json.loads(line) for line in text.splitlines()]
    return statistics.median(step["tokens_per_second"] for step in steps[len(steps) // 2 :]), steps[-1]["rows"]


def main() -> None:
    """Run the rounds, and print the speeds and their ratio."""
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
        prioritize(top / f"trainyard-{lab.name}", unified)
        for host, share in zip(lab.hosts, SHARES, strict=True):
            faults.inject(lab, host, "cpu", str(share))
        speeds: dict[str, list[float]] = {"even": [], "auto": []}
        for number in range(a.rounds):
            for balance, kept in speeds.items():
                speed, rows = tokens_per_second(
                    lab, f"{balance}{number}", balance=balance, max_steps=a.steps, total_batch_size=24, batch_size=4
                )
                kept.append(speed)
                print(f"balance={balance}: {speed:.0f} tokens/s, rows per rank in the last step: {rows}", flush=True)
        ratios = [auto / even for auto, even in zip(speeds["auto"], speeds["even"], strict=True)]
        print(f"auto / even: {statistics.median(ratios):.2f} (each round: {', '.join(f'{r:.2f}' for r in ratios)})")
    finally:
        lab.down()


if __name__ == "__main__":
    main()
