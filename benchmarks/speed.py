"""The trainer beside TRL's SFTTrainer: tokens a second and peak memory on the same model, data, batch and LoRA.

    make bench [ARGS='--rounds 5 --model DIR --dataset FILE']

The sides take turns, so that what else the machine does hits them alike. Ends with 1 if a claim does not hold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from inputs import made

ONE = Path(__file__).with_name("speed_one.py")
# TRL's defaults compute in bfloat16, which many CPUs only emulate, and again in the backward pass: others do without.
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "trainyard, defaults (packing)": ("trainyard", {}),
    "trainyard, packing=false": ("trainyard", {"packing": False}),
    "TRL, defaults": ("trl", {"use_cpu": True}),
    "TRL, packing": ("trl", {"use_cpu": True, "packing": True}),
    "TRL, no checkpointing, packing": ("trl", {"use_cpu": True, "gradient_checkpointing": False, "packing": True}),
    "TRL, 32 bits": ("trl", {"bf16": False}),
    "TRL, 32 bits, packing": ("trl", {"bf16": False, "packing": True}),
    "TRL, 32 bits, no checkpointing": ("trl", {"bf16": False, "gradient_checkpointing": False}),
    "TRL, 32 bits, no checkpointing, packing": (
        "trl",
        {"bf16": False, "gradient_checkpointing": False, "packing": True},
    ),
}
SHOWN = ("tokens_per_second", "tokens_per_cpu_second", "peak_mib")
OURS, THEIRS = "trainyard, defaults (packing)", "TRL, defaults"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", required=True, help="a Python that has TRL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--model", default="", help="a model's folder (default: the tiny one)")
    parser.add_argument("--dataset", default="", help="a JSONL file (default: the embedded dataset)")
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--total-batch-size", type=int, default=16)
    a = parser.parse_args()
    model, dataset = made()
    about = {"model": a.model or str(model), "dataset": a.dataset or str(dataset), "steps": a.steps}
    ours = {"seq_length": a.seq_length, "batch_size": a.batch_size, "total_batch_size": a.total_batch_size}
    theirs = {
        "max_length": a.seq_length,
        "per_device_train_batch_size": a.batch_size,
        "gradient_accumulation_steps": a.total_batch_size // a.batch_size,
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    for _ in range(a.rounds):
        for name, (side, fields) in SIDES.items():
            python = sys.executable if side == "trainyard" else a.trl
            whole = about | {"fields": (ours if side == "trainyard" else theirs) | fields}
            done = subprocess.run(
                [python, str(ONE), side, json.dumps([whole])], capture_output=True, text=True, check=False
            )
            if done.returncode:
                print(f"{name}:\n{done.stderr[-3000:]}", file=sys.stderr)
                return 1
            found[name] += json.loads(done.stdout.strip().splitlines()[-1])
    middle = {name: {key: statistics.median(run[key] for run in runs) for key in SHOWN} for name, runs in found.items()}
    base = middle[THEIRS]
    print("| | tokens/s | a CPU second | beside TRL's defaults | peak MiB |\n| --- | --- | --- | --- | --- |")
    for name, run in middle.items():
        print(
            f"| {name} | {run['tokens_per_second']:.0f} | {run['tokens_per_cpu_second']:.0f} | "
            f"{run['tokens_per_second'] / base['tokens_per_second']:.2f} x | {run['peak_mib']:.0f} |"
        )
    best = max(run["tokens_per_second"] for name, run in middle.items() if name.startswith("TRL"))
    mine = middle[OURS]["tokens_per_second"]
    claims = {
        f"1.5 x TRL's defaults: {mine / base['tokens_per_second']:.2f} x": mine >= 1.5 * base["tokens_per_second"],
        f"not below TRL's best: {mine / best:.2f} x": mine >= best,
    }
    for claim, holds in claims.items():
        print(f"{'holds' if holds else 'FAILS'}: {claim}")
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
