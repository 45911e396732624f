"""The trainer against TRL's SFTTrainer: tokens per second and peak memory on the same model, data, batch and LoRA.

    make bench NAME=speed [ARGS='--rounds 5 --model DIR --dataset FILE']

The two sides alternate, so that other load of the machine affects both equally. trainyard runs with the allocator that train.yml
loads on hosts that train on the CPU, if this machine has it. TRL runs in a separate environment, which the first call installs.
Exits with 1 if a claim fails. Takes about 15 minutes with the defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.inputs import build_inputs
from trainyard.remote.host_facts import allocator

ONE = Path(__file__).with_name("speed_one.py")
# TRL's defaults compute in bfloat16, which many CPUs emulate, with gradient checkpointing: other variants disable both.
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
TRAINYARD_DEFAULTS, TRL_DEFAULTS = "trainyard, defaults (packing)", "TRL, defaults"


def main() -> int:
    """Print the table and the claims; return 1 if a claim fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", required=True, help="Python interpreter of an environment with TRL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--model", default="", help="model folder (default: the tiny model)")
    parser.add_argument("--dataset", default="", help="JSONL file (default: one of invented words)")
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--total-batch-size", type=int, default=16)
    a = parser.parse_args()
    model, dataset = build_inputs()
    about = {"model": a.model or str(model), "dataset": a.dataset or str(dataset), "steps": a.steps}
    trainyard_fields = {"seq_length": a.seq_length, "batch_size": a.batch_size, "total_batch_size": a.total_batch_size}
    trl_fields = {
        "max_length": a.seq_length,
        "per_device_train_batch_size": a.batch_size,
        "gradient_accumulation_steps": a.total_batch_size // a.batch_size,
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    for _ in range(a.rounds):
        for name, (side, fields) in SIDES.items():
            python = sys.executable if side == "trainyard" else a.trl
            request = about | {"fields": (trainyard_fields if side == "trainyard" else trl_fields) | fields}
            on_cpu = side == "trainyard" and not Path("/dev/nvidiactl").exists()
            preload = {"LD_PRELOAD": allocator()} if on_cpu else {}
            done = subprocess.run(
                [python, str(ONE), side, json.dumps([request])],
                capture_output=True,
                text=True,
                check=False,
                env=os.environ | preload,
            )
            if done.returncode:
                print(f"{name}:\n{done.stderr[-3000:]}", file=sys.stderr)
                return 1
            found[name] += json.loads(done.stdout.strip().splitlines()[-1])
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in SHOWN} for name, runs in found.items()
    }
    base = medians[TRL_DEFAULTS]
    print(
        "| | tokens/s | tokens per CPU second | relative to TRL's defaults | peak MiB |\n| --- | --- | --- | --- | --- |"
    )
    for name, run in medians.items():
        print(
            f"| {name} | {run['tokens_per_second']:.0f} | {run['tokens_per_cpu_second']:.0f} | "
            f"{run['tokens_per_second'] / base['tokens_per_second']:.2f} x | {run['peak_mib']:.0f} |"
        )
    best = max(run["tokens_per_second"] for name, run in medians.items() if name.startswith("TRL"))
    trainyard_speed = medians[TRAINYARD_DEFAULTS]["tokens_per_second"]
    claims = {
        f"1.5 x TRL's defaults: {trainyard_speed / base['tokens_per_second']:.2f} x": trainyard_speed
        >= 1.5 * base["tokens_per_second"],
        f"not below TRL's best: {trainyard_speed / best:.2f} x": trainyard_speed >= best,
    }
    for claim, holds in claims.items():
        print(f"{'holds' if holds else 'FAILS'}: {claim}")
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
