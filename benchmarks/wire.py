"""Bytes per step and speed of two hosts relative to one host, by strategy and link.

    sudo make bench NAME=wire [ARGS='--models 26m --seq 512 --share 45 --mbit 1000 --variants ddp ddp:gradient_comm_dtype=bf16']

A variant is a strategy, followed by run spec fields after colons. The hosts are network namespaces with one core each; with --share,
each host has that percentage of the same core (see two_hosts.run). Requires root (ip netns, tc, cgroups). Takes about five minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from benchmarks.inputs import build_inputs, model_of
from benchmarks.two_hosts import parse, run, two_hosts
from trainer.config import make_spec
from trainer.planner.model_shape import shape_of


def main() -> int:
    """Print one row per variant and link."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, nargs="+", default=[0, 1000, 100], help="0: not shaped")
    parser.add_argument("--variants", nargs="+", default=["ddp", "ddp:gradient_comm_dtype=bf16"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1, help="alternating rounds; speeds are their medians")
    a = parse(parser)
    _, dataset = build_inputs()
    print(
        "| model | Mbit/s | variant | MB sent per step | relative to 4 B x trained parameters | tokens/s | relative to one host | loss |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for size in a.models:
        model = model_of(size)
        base = {"seq_length": a.seq, "total_batch_size": a.rows, "lr": 3e-3}
        about = {"model": str(model), "dataset": str(dataset), "steps": a.steps}
        spec = make_spec({"model": str(model)} | base, "the benchmark")
        adapters = 4 * shape_of(spec).trained(spec)
        variants = {variant: dict(field.split("=", 1) for field in variant.split(":")[1:]) for variant in a.variants}
        for mbit in a.mbit:
            alone: list[float] = []
            found: dict[str, list[dict[str, float]]] = {variant: [] for variant in a.variants}
            with two_hosts(mbit) as names:
                for _ in range(a.rounds):
                    (one,) = run(names[:1], [about | {"fields": base}], share=a.share)
                    alone.append(one["tokens_per_second"])
                    for variant, fields in variants.items():
                        fields = base | {"strategy": variant.split(":")[0]} | fields
                        found[variant] += run(names, [about | {"fields": fields}], share=a.share)
            for variant, answers in found.items():
                speeds = [answer["tokens_per_second"] for answer in answers]
                ratios = [speed / one for speed, one in zip(speeds, alone, strict=True)]
                wire = answers[-1]["wire_bytes"]
                print(
                    f"| {size} | {mbit or 'unshaped'} | {variant} | {wire / 1e6:.3f} | {wire / adapters:.3f} | "
                    f"{statistics.median(speeds):.0f} | {statistics.median(ratios):.2f} x | {answers[-1]['loss']:.4f} |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
