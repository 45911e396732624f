"""diloco and averaging against DDP on two hosts: bytes per step, speed over a slow link, and loss on the same tokens.

    sudo make bench NAME=replicas [ARGS='--rounds 3 --mbit 100 --parts bytes,speed,loss --steps 60']
    sudo make bench NAME=replicas ARGS='--mbit 10 --kinds "diloco, int4" "diloco, fragments" ddp --fields lora_r=128'

The hosts are network namespaces with one core each. Runs alternate and speeds are compared within a round, because the machine may
be shared. Requires root. Takes about 15 minutes with the defaults.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from benchmarks.inputs import SIZES, build_inputs, model_of
from benchmarks.linked_hosts import linked_hosts, run
from trainer.config import make_spec
from trainer.planner.model_shape import shape_of

DILOCO = {"strategy": "diloco", "local_steps": 10}
INT4 = DILOCO | {"diloco_comm_dtype": "int4"}
KINDS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, bf16": {"gradient_comm_dtype": "bf16"},
    "diloco": DILOCO,
    "diloco, 32 bits": DILOCO | {"diloco_comm_dtype": "32"},
    "diloco, int4": INT4,
    "diloco, fragments": INT4 | {"diloco_fragments": 5, "diloco_delay": 2},
    "averaging": {"strategy": "averaging"},
}
# The kinds of each part, unless --kinds names others.
PARTS = {"bytes": list(KINDS), "speed": ["diloco", "ddp"], "loss": ["ddp", "diloco", "averaging"]}
# The settings of model=tiny; the model is created once for all runs.
TINY = {"seq_length": 256, "lr": 3e-3, "total_batch_size": 16}


def runs(base: dict[str, Any], kinds: list[str], steps: int, **fields: Any) -> list[dict[str, Any]]:
    """Return the runs for speed_one.py. Steps count from 10 on, after the first sync of diloco."""
    about = base | {"steps": steps, "warm": 10}
    return [about | {"fields": base["fields"] | fields | KINDS[kind]} for kind in kinds]


def measure_bytes(base: dict[str, Any], kinds: list[str], trained: int) -> None:
    """Print the bytes per step and host, relative to the float32 gradients of `trained` weights."""
    with linked_hosts() as names:
        for kind, answer in zip(kinds, run(names, runs(base, kinds, 30)), strict=True):
            sent = answer["wire_bytes"]
            print(f"{kind}: {sent:,.0f} bytes per step and host, {sent / (4 * trained):.4f} of 4 B x {trained:,}")


def measure_speed(base: dict[str, Any], kinds: list[str], options: argparse.Namespace) -> None:
    """Print the speed over the shaped link relative to the unshaped one. The last round of a run does not count."""
    ratios: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        speeds = {}
        for mbit in (0, options.mbit):
            with linked_hosts(mbit) as names:
                speeds[mbit] = run(names, [one | {"end": 10} for one in runs(base, kinds, options.steps)])
        for place, kind in enumerate(kinds):
            free, slow = (speeds[mbit][place]["tokens_per_second"] for mbit in (0, options.mbit))
            ratios[kind].append(slow / free)
            print(f"{kind}: {free:.0f} tokens/s unshaped, {slow:.0f} at {options.mbit} Mbit/s: {slow / free:.3f}")
    for kind in kinds:
        print(f"{kind}: median {statistics.median(ratios[kind]):.3f} of the unshaped speed")


def measure_loss(base: dict[str, Any], kinds: list[str], options: argparse.Namespace) -> None:
    """Print the loss of the last step and on the evaluation samples, relative to the first kind."""
    several = runs(base, kinds, options.loss_steps, epochs=options.epochs, eval_split=0.05)
    with linked_hosts() as names:
        answers = run(names, several)
    for kind, answer in zip(kinds, answers, strict=True):
        shown = {name: round(answer[name] / answers[0][name], 4) for name in ("loss", "eval_loss")}
        found = json.dumps({name: round(answer[name], 4) for name in shown})
        print(f"{kind}: {found}, relative to {kinds[0]}: {shown}")


def main() -> None:
    """Measure, and print one line per figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--loss-steps", type=int, default=0, help="0: all steps of the epochs")
    parser.add_argument("--epochs", type=int, default=1, help="of the runs whose loss is compared")
    parser.add_argument("--parts", default="bytes,speed,loss")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="default: those of the documentation")
    parser.add_argument("--model", default="tiny", choices=["tiny", *SIZES])
    parser.add_argument("--fields", nargs="*", default=[], metavar="NAME=VALUE", help="run spec fields of all runs")
    a = parser.parse_args()
    _, dataset = build_inputs()
    base: dict[str, Any] = {"model": str(model_of(a.model)), "dataset": str(dataset)}
    base["fields"] = TINY | dict(field.split("=", 1) for field in a.fields)
    parts = {part: a.kinds or PARTS[part] for part in a.parts.split(",")}
    if "bytes" in parts:
        spec = make_spec({"model": base["model"]} | base["fields"], "the benchmark")
        measure_bytes(base, parts["bytes"], shape_of(spec).trained(spec))
    if "speed" in parts:
        measure_speed(base, parts["speed"], a)
    if "loss" in parts:
        measure_loss(base, parts["loss"], a)


if __name__ == "__main__":
    main()
