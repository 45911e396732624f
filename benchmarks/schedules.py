"""Schedules of a pipeline: trainyard's Eager-1F1B and those of torch.distributed.pipelining, by link; time of a step.

    sudo make bench NAME=schedules [ARGS='--hosts 3 --micro 12 --share 30 --mbit 0 1000 100 --lora 0 8']

All schedules run the same model, rows and stages (with two chunks per rank where the schedule requires it), and the benchmark ends with an
error if losses or gradients differ. A perfect pipeline of N equal hosts takes 1/N of the time of one host; "of perfect" divides by that.
The schedules alternate in every round. The hosts are network namespaces with `--share` percent of the same core (see linked_hosts).
The layers must be divisible by twice the number of hosts. Requires root (ip netns, tc, cgroups). Takes about ten minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.inputs import model_of
from benchmarks.linked_hosts import linked_hosts, parse, run_script

ONE = Path(__file__).with_name("schedule_one.py")
SCHEDULES = (
    "trainyard",
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
)
TOLERANCE = 1e-6  # relative: the order of sums differs


def check(answers: dict[str, dict[str, float]], one: dict[str, float]) -> None:
    """Raise SystemExit if a schedule has another loss or gradient than one host."""
    for name, answer in answers.items():
        for field in ("loss", "norm"):
            if abs(answer[field] - one[field]) > TOLERANCE * abs(one[field]):
                raise SystemExit(f"{name}: {field} {answer[field]}, on one host {one[field]}")


def main() -> int:
    """Print one row per link, kind of training and schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, nargs="+", default=[0, 1000, 100], help="0: not shaped")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--micro", type=int, nargs="+", default=[8], help="micro-batches per step")
    parser.add_argument("--lora", type=int, nargs="+", default=[0, 8], help="rank of the adapters; 0: full weights")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="rounds; times are their medians")
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    a = parse(parser)
    print("| model | training | micro-batches | Mbit/s | schedule | s per step | of perfect | relative to trainyard |")
    print("| --- " * 8 + "|")
    for size, lora, micro, mbit in [
        (size, lora, micro, mbit) for size in a.models for lora in a.lora for micro in a.micro for mbit in a.mbit
    ]:
        ask: dict[str, Any] = {"model": str(model_of(size)), "seq": a.seq, "batch": 1, "lora_r": lora, "micro": micro}
        ask |= {"steps": a.steps}
        alone: list[float] = []
        found: dict[str, list[float]] = {name: [] for name in a.schedules}
        with linked_hosts(mbit, a.hosts) as names:
            for turn in range(a.rounds):
                first = turn % len(a.schedules)
                order = [*a.schedules[first:], *a.schedules[:first]]
                one = run_script(names[:1], ONE, [json.dumps(ask)], share=a.share)["one host"]
                answers = run_script(names, ONE, [json.dumps(ask | {"schedules": order})], share=a.share)
                check(answers, one)
                alone.append(one["seconds"])
                for name, answer in answers.items():
                    found[name].append(answer["seconds"])
        own = found.get("trainyard", [])
        for name, seconds in found.items():
            perfect = statistics.median(host / a.hosts / each for host, each in zip(alone, seconds, strict=True))
            speed = f"{statistics.median(o / s for o, s in zip(own, seconds, strict=True)):.2f}" if own else "-"
            print(
                f"| {size} | {f'LoRA {lora}' if lora else 'full weights'} | {micro} | {mbit or 'unshaped'} | {name} | "
                f"{statistics.median(seconds):.2f} | {perfect:.2f} | {speed} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
