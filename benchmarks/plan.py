"""Speed and memory that the planner predicts against measured runs, by strategy and link.

    sudo make bench NAME=plan [ARGS='--models 26m --seq 512 --rows 8 --mbit 1000 100 --share 45 --rounds 3']
    sudo make bench NAME=plan ARGS='--models 26m --seq 512 --rows 16 --hosts 2 --share 60 30 --strategies pipeline --within 15 15'

Uses hosts as network namespaces; with several shares of a core they are unlike, and the plan gets their speeds. Plan and run
alternate with the same share of a core, and are compared within a round. Memory is the largest resident set of a process; the
predicted value is the plan's, plus Python and its libraries. Exits with 1 if a speed or the memory differs by more than --within
(25 and 10 %). Requires root. Takes about 20 minutes with the defaults.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.inputs import build_inputs, model_of
from benchmarks.linked_hosts import linked_hosts, parse, planned, run, shares_of
from trainer.costs.host_memory import BASE

STRATEGIES = ("alone", "ddp", "fsdp", "deepspeed", "diloco", "averaging", "pipeline")


def hosts_file(folder: str, count: int, share: list[int]) -> Path:
    """Write the value of the plan's --hosts: one process per host, with the speed of its share relative to the first."""
    shares = shares_of(share, count)
    path = Path(folder) / "hosts.json"
    path.write_text(json.dumps([{"processes": 1, "speed": each / shares[0] if each else 1} for each in shares]))
    return path


def main() -> int:
    """Print one row per strategy and link; return 1 if a prediction is outside its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, nargs="+", default=[1000, 100])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--steps", type=int, default=30, help="steps of a run")
    parser.add_argument("--warm", type=int, default=10, help="first steps, which do not count")
    parser.add_argument("--fields", nargs="*", default=[], help="run spec fields, for example lora_r=0")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--within",
        type=int,
        nargs=2,
        default=[25, 10],
        metavar=("SPEED", "MEMORY"),
        help="largest differences in percent",
    )
    a = parse(parser)
    _, dataset = build_inputs()
    print(
        "| model | Mbit/s | strategy | tokens/s planned | tokens/s measured | measured / planned | relative to one host ",
        end="",
    )
    print("| MiB planned | MiB measured | measured / planned |\n" + "| --- " * 10 + "|")
    speeds, sizes = [], []
    for size in a.models:
        base = {"seq_length": a.seq, "total_batch_size": a.rows, "lr": 3e-3, "local_steps": 10}
        base |= dict(field.split("=", 1) for field in a.fields)
        about: dict[str, Any] = {
            "model": str(model_of(size)),
            "dataset": str(dataset),
            "steps": a.steps,
            "warm": a.warm,
        }
        flags = [f"{name}={value}" for name, value in {**base, "model": about["model"], "dataset": dataset}.items()]
        for mbit in a.mbit:
            found: dict[str, list[tuple[float, ...]]] = {strategy: [] for strategy in a.strategies}
            with linked_hosts(mbit, a.hosts) as names, tempfile.TemporaryDirectory() as folder:
                about_hosts = ["--hosts", str(hosts_file(folder, a.hosts, a.share)), "--link-mbit", str(mbit)]
                for _ in range(a.rounds):
                    for strategy in a.strategies:
                        plan_output = planned(names[0], [*flags, *about_hosts], a.share)
                        option = next(option for option in plan_output["options"] if option["strategy"] == strategy)
                        fields = base if strategy == "alone" else base | {"strategy": strategy}
                        hosts = names[:1] if strategy == "alone" else names
                        (answer,) = run(hosts, [about | {"fields": fields}], share=a.share)
                        parts = len(hosts) if strategy == "averaging" else 1  # averaging records one replica
                        of_both = (option["tokens_per_second"], parts * answer["tokens_per_second"])
                        found[strategy].append((*of_both, option["memory_bytes"] / 2**20 + BASE, answer["peak_mib"]))
            alone = statistics.median(row[1] for row in found.get("alone", [(0.0, 1.0)]))
            for strategy, rows in found.items():
                plan, speed, memory, peak = (statistics.median(row[side] for row in rows) for side in range(4))
                ratios = [statistics.median(row[side + 1] / row[side] for row in rows) for side in (0, 2)]
                speeds.append(max(ratios[0], 1 / ratios[0]))
                sizes.append(max(ratios[1], 1 / ratios[1]))
                beside = f"{speed / alone:.2f} x" if "alone" in found else "-"
                print(
                    f"| {size} | {mbit} | {strategy} | {plan:.0f} | {speed:.0f} | {ratios[0]:.2f} | {beside} ", end=""
                )
                print(f"| {memory:.0f} | {peak:.0f} | {ratios[1]:.2f} |", flush=True)
    good = True
    for what, limit, worst in zip(("speed", "memory"), a.within, (max(speeds), max(sizes)), strict=True):
        holds = worst <= 1 + limit / 100
        good &= holds
        print(
            f"{'holds' if holds else 'FAILS'}: the planned {what} is within {limit} % of the measured (largest ratio: {worst:.2f})"
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
