"""A run that resumes from a checkpoint against the same run without a break, bit by bit. Standard library only."""

from __future__ import annotations

import shutil
from typing import Any

from benchmarks.gpu.bench import Bench, Outcome
from benchmarks.gpu.cases import FP32, Case

CASE = Case("small", FP32)


def resumed(bench: Bench) -> Outcome:
    """Train once to the end, once more, and once from the checkpoint in the middle; compare adapters and losses."""
    middle = bench.scale.steps // 2
    runs: dict[str, dict[str, Any]] = {}
    seconds = 0.0
    try:
        for name in ("straight", "repeated", "resumed"):
            if name == "resumed":
                source = bench.folder / "runs" / "straight" / "checkpoints" / f"step-{middle:08d}"
                shutil.copytree(source, bench.folder / "runs" / name / "checkpoints" / source.name)
            outcome = bench.train(name, CASE, checkpoint_interval=middle, checkpoint_keep=10)
            seconds += outcome.seconds
            if outcome.status != "ok":
                return Outcome(outcome.status, seconds, f"{name}: {outcome.reason}")
            runs[name] = outcome.values
    except OSError as error:
        return Outcome("failed", seconds, f"resume: {error}")
    finally:
        for name in ("straight", "repeated", "resumed"):
            shutil.rmtree(bench.folder / "runs" / name, ignore_errors=True)
    straight, steps = runs["straight"], len(runs["resumed"]["losses"])
    digests = {name: values["result"]["adapter_sha256"] for name, values in runs.items()}
    return Outcome(
        "ok",
        seconds,
        values={
            "resumed_steps": steps,
            "expected_steps": bench.scale.steps - middle,
            "repeated_equal": digests["repeated"] == digests["straight"],
            "resumed_equal": digests["resumed"] == digests["straight"],
            "loss_difference": max(
                abs(one - other)
                for one, other in zip(straight["losses"][-steps:], runs["resumed"]["losses"], strict=True)
            ),
        },
    )
