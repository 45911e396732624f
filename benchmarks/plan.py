"""The plan beside what is then measured, strategy by strategy and link by link: tokens a second, and memory.

    sudo make bench-plan [ARGS='--models 26m --seq 512 --rows 8 --mbit 1000 100 --share 45 --rounds 3']

Two hosts as network namespaces, as in bench-wire. Plan and run take turns, with the same share of a core, and are compared
within a round. It shows the strategies side by side, too. Memory is a process's resident set at its largest; the plan's, what it
says and what Python and its libraries take. Ends with 1 if a speed is not within 25 %, or memory not within 10 %.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from typing import Any

from inputs import SIZES, made, model_of
from two_hosts import planned, run, two_hosts

from trainer.planner.hosts import BASE

WAYS = ("alone", "ddp", "fsdp", "deepspeed", "diloco", "averaging")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny"], choices=["tiny", *SIZES])
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--rows", type=int, default=16, help="of a step, over all hosts")
    parser.add_argument("--mbit", type=int, nargs="+", default=[1000, 100])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--steps", type=int, default=30, help="counted from the tenth on")
    parser.add_argument("--fields", nargs="*", default=[], help="of the run spec, like lora_r=0")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", type=int, default=0, help="percent of a core that a host has; 0: a core of its own")
    a = parser.parse_args()
    if os.geteuid():
        print("error: two hosts need root here (network namespaces)", file=sys.stderr)
        return 2
    _, dataset = made()
    print("| model | Mbit/s | strategy | tokens/s: planned | measured | of the plan | beside one host ", end="")
    print("| MiB: planned | measured | of the plan |\n" + "| --- " * 10 + "|")
    speeds, sizes = [], []
    for size in a.models:
        base = {"seq_length": a.seq, "total_batch_size": a.rows, "lr": 3e-3, "local_steps": 10}
        base |= dict(field.split("=", 1) for field in a.fields)
        about: dict[str, Any] = {"model": str(model_of(size)), "dataset": str(dataset), "steps": a.steps, "warm": 10}
        flags = [f"{name}={value}" for name, value in {**base, "model": about["model"], "dataset": dataset}.items()]
        for mbit in a.mbit:
            found: dict[str, list[tuple[float, ...]]] = {way: [] for way in a.ways}
            with two_hosts(mbit) as names:
                for _ in range(a.rounds):
                    for way in a.ways:
                        said = planned(names[0], [*flags, "--hosts", "2", "--link-mbit", str(mbit)], a.share)
                        option = next(option for option in said["options"] if option["strategy"] == way)
                        fields = base if way == "alone" else base | {"strategy": way}
                        hosts = names[:1] if way == "alone" else names
                        (answer,) = run(hosts, [about | {"fields": fields}], share=a.share)
                        parts = len(hosts) if way == "averaging" else 1  # its records are those of one part
                        of_both = (option["tokens_per_second"], parts * answer["tokens_per_second"])
                        found[way].append((*of_both, option["memory_bytes"] / 2**20 + BASE, answer["peak_mib"]))
            alone = statistics.median(row[1] for row in found.get("alone", [(0.0, 1.0)]))
            for way, rows in found.items():
                plan, speed, memory, peak = (statistics.median(row[side] for row in rows) for side in range(4))
                ratios = [statistics.median(row[side + 1] / row[side] for row in rows) for side in (0, 2)]
                speeds.append(max(ratios[0], 1 / ratios[0]))
                sizes.append(max(ratios[1], 1 / ratios[1]))
                beside = f"{speed / alone:.2f} x" if "alone" in found else "-"
                print(f"| {size} | {mbit} | {way} | {plan:.0f} | {speed:.0f} | {ratios[0]:.2f} | {beside} ", end="")
                print(f"| {memory:.0f} | {peak:.0f} | {ratios[1]:.2f} |", flush=True)
    good = True
    for what, limit, worst in (("speed", 25, max(speeds)), ("memory", 10, max(sizes))):
        holds = worst <= 1 + limit / 100
        good &= holds
        print(
            f"{'holds' if holds else 'FAILS'}: the plan's {what} within {limit} % of what is measured (furthest: {worst:.2f} x)"
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
