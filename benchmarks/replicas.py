"""diloco and averaging beside DDP on two hosts with a core each: bytes, speed over a slow link, loss on the same tokens.

    python benchmarks/replicas.py [--rounds 3] [--mbit 100] [--parts bytes,speed,loss] [--steps 60]

Hosts are network namespaces of this machine (root). Speeds are taken in turns and compared within a round, because the
machine may be shared; what counts is the ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from two_hosts import run, two_hosts

from trainer.config import make_spec
from trainer.data.samples import read_samples
from trainer.data.tiny import make_tiny
from trainer.model import load_model
from trainyard.docs_dataset import write_dataset

KINDS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, bf16": {"gradient_comm_dtype": "bf16"},
    "diloco": {"strategy": "diloco", "local_steps": 10},
    "diloco, 32 bits": {"strategy": "diloco", "local_steps": 10, "diloco_comm_dtype": "32"},
    "averaging": {"strategy": "averaging"},
}
# As model=tiny has them, with the model made once for all runs.
TINY = {"seq_length": 256, "lr": 3e-3, "total_batch_size": 16}


def runs(base: dict[str, Any], kinds: list[str], steps: int, **fields: Any) -> list[dict[str, Any]]:
    """Return what speed_one.py is to run: counted from step 10 on, at which diloco's replicas have met for the first time."""
    return [base | {"steps": steps, "warm": 10, "fields": TINY | fields | KINDS[kind]} for kind in kinds]


def main() -> None:
    """Measure, and print a line for each figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--loss-steps", type=int, default=0, help="0: one epoch")
    parser.add_argument("--parts", default="bytes,speed,loss")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        dataset = Path(work) / "ansible-docs.jsonl"
        write_dataset(str(Path(sys.executable).with_name("ansible-doc")), dataset)
        model = Path(work) / "tiny"
        make_tiny(read_samples(dataset), model, 1)
        base = {"model": str(model), "dataset": str(dataset)}
        adapted = load_model(make_spec(base | TINY, "the benchmark"), torch.device("cpu"))
        adapters = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        parts = a.parts.split(",")
        if "bytes" in parts:
            kinds = list(KINDS)
            with two_hosts() as names:
                for kind, answer in zip(kinds, run(names, runs(base, kinds, 30)), strict=True):
                    sent = answer["wire_bytes"]
                    print(
                        f"{kind}: {sent:,.0f} bytes a step and host, {sent / (4 * adapters):.4f} of 4 B x {adapters:,}"
                    )
        if "speed" in parts:
            kinds = ["diloco", "ddp"]
            ratios: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(a.rounds):
                speeds = {}
                for mbit in (0, a.mbit):
                    with two_hosts(mbit) as names:
                        speeds[mbit] = run(names, runs(base, kinds, a.steps))
                for place, kind in enumerate(kinds):
                    free, slow = (speeds[mbit][place]["tokens_per_second"] for mbit in (0, a.mbit))
                    ratios[kind].append(slow / free)
                    print(f"{kind}: {free:.0f} tokens/s unshaped, {slow:.0f} at {a.mbit} Mbit/s: {slow / free:.3f}")
            for kind in kinds:
                print(f"{kind}: median {statistics.median(ratios[kind]):.3f} of its unshaped speed")
        if "loss" in parts:
            kinds = ["ddp", "diloco", "averaging"]
            several = runs(base, kinds, a.loss_steps, epochs=1, eval_split=0.05)
            with two_hosts() as names:
                answers = run(names, several)
            for kind, answer in zip(kinds, answers, strict=True):
                shown = {name: round(answer[name] / answers[0][name], 4) for name in ("loss", "eval_loss")}
                print(f"{kind}: {json.dumps({name: round(answer[name], 4) for name in shown})}, of DDP's {shown}")


if __name__ == "__main__":
    main()
