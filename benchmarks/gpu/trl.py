"""TRL's SFTTrainer on the model and the data of the case `large`, with its defaults and with its fastest settings."""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

from benchmarks.gpu.bench import TOP, Bench, Outcome

FASTEST = {"packing": True, "gradient_checkpointing": False}
# Fields of SFTConfig, and the data type of the frozen weights.
SIDES: dict[str, tuple[dict[str, Any], str]] = {
    "TRL, defaults": ({}, "float32"),
    "TRL, packing, no checkpointing, bf16 weights": (FASTEST, "bfloat16"),
    "TRL, packing, no checkpointing, bf16 weights, liger": (FASTEST | {"use_liger_kernel": True}, "bfloat16"),
}


def requests(bench: Bench) -> dict[str, dict[str, Any]]:
    """Return the requests for benchmarks/speed_one.py, by their names."""
    scale = bench.scale
    common = {
        "max_length": scale.seq_length,
        "per_device_train_batch_size": scale.batch_size,
        "gradient_accumulation_steps": scale.rows // scale.batch_size,
    } | ({"use_cpu": True} if scale.cpu else {})
    names = list(SIDES)[:2] if scale.cpu else list(SIDES)
    if not importlib.util.find_spec("liger_kernel"):
        names = [name for name in names if "liger" not in name]
    base = {"model": str(bench.folder / "large"), "dataset": str(bench.folder / "dataset.jsonl"), "steps": scale.steps}
    return {name: base | {"fields": common | SIDES[name][0], "dtype": SIDES[name][1]} for name in names}


def trl(bench: Bench) -> Outcome:
    """Train with every request, one process each; return the outcomes by name."""
    if missing := [package for package in ("trl", "datasets") if not importlib.util.find_spec(package)]:
        return Outcome("skipped", reason=f"{', '.join(missing)} is not installed")
    total = Outcome("ok")
    program = str(TOP / "benchmarks" / "speed_one.py")
    for name, request in requests(bench).items():
        log = f"trl-{len(total.values)}"
        outcome, text = bench.start(log, [sys.executable, program, "trl", json.dumps([request])], 120)
        total.seconds += outcome.seconds
        if outcome.status == "ok":
            total.values[name] = json.loads(text.strip().splitlines()[-1])[0]
        else:
            total.values[name] = {"error": outcome.reason}
    if all("error" in value for value in total.values.values()):
        return Outcome("failed", total.seconds, next(iter(total.values.values()))["error"])
    return total
