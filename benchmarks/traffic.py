"""Bytes per step and speed of two or more hosts relative to one host, by strategy and link.

    sudo make bench NAME=traffic [ARGS='--models 26m --seq 512 --share 45 --mbit 1000 --variants ddp ddp:comm_dtype=bf16']

A variant is a strategy, followed by run spec fields after colons. The hosts are network namespaces with one core each; with --share,
each host has that percentage of the same core (see linked_hosts.run), or with two numbers a percentage of its own. The column "of
computation alone" divides the speed by that of the same computation over a link that takes no time, by the measured speed of one host;
it is empty for unlike hosts. Requires root (ip netns, tc, cgroups). Takes about five minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from benchmarks.inputs import build_inputs, model_of
from benchmarks.linked_hosts import linked_hosts, parse, run
from trainer.config import RunSpec
from trainer.costs.cost import Layout, RowStats, micro_batches
from trainer.model_files.model_shape import shape_of
from trainer.spec import make_spec
from trainer.strategy import plan_of


def computation_alone(spec: RunSpec, hosts: int) -> float:
    """Return the speedup of equal hosts over one host if communication takes no time."""
    parts = micro_batches(spec, 1)
    layout, rows = Layout((1,) * hosts), RowStats.full(spec)
    seconds, _ = plan_of(spec).step_seconds(spec, shape_of(spec), layout, rows, 1.0, 0.0, 0.0)
    return parts / seconds


def main() -> int:
    """Print one row per variant and link."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, nargs="+", default=[0, 1000, 100], help="0: not shaped")
    parser.add_argument("--variants", nargs="+", default=["ddp", "ddp:comm_dtype=bf16"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--fields", nargs="*", default=[], help="run spec fields of every run, for example batch_size=1"
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1, help="alternating rounds; speeds are their medians")
    a = parse(parser)
    _, dataset = build_inputs()
    print(
        "| model | Mbit/s | variant | MB sent per step | relative to 4 B x trained parameters | tokens/s | relative to one host | of computation alone | loss |"
    )
    print("| --- " * 9 + "|")
    for size in a.models:
        model = model_of(size)
        base: dict[str, Any] = {"seq_length": a.seq, "total_batch_size": a.rows, "lr": 3e-3}
        base |= dict(field.split("=", 1) for field in a.fields)
        about = {"model": str(model), "dataset": str(dataset), "steps": a.steps}
        spec = make_spec({"model": str(model)} | base, "the benchmark")
        adapters = 4 * shape_of(spec).trained(spec)
        variants = {variant: dict(field.split("=", 1) for field in variant.split(":")[1:]) for variant in a.variants}
        for mbit in a.mbit:
            alone: list[float] = []
            found: dict[str, list[dict[str, float]]] = {variant: [] for variant in a.variants}
            with linked_hosts(mbit, a.hosts) as names:
                for _ in range(a.rounds):
                    (one,) = run(names[:1], [about | {"fields": base}], share=a.share)
                    alone.append(one["tokens_per_second"])
                    for variant, fields in variants.items():
                        fields = base | {"strategy": variant.split(":")[0]} | fields
                        found[variant] += run(names, [about | {"fields": fields}], share=a.share)
            for variant, answers in found.items():
                speeds = [answer["tokens_per_second"] for answer in answers]
                ratios = [speed / one for speed, one in zip(speeds, alone, strict=True)]
                sent = answers[-1]["wire_bytes"]
                fields = base | {"model": str(model), "strategy": variant.split(":")[0]} | variants[variant]
                possible = computation_alone(make_spec(fields, "the benchmark"), a.hosts)
                alone_text = f"{statistics.median(ratios) / possible:.2f}" if len(set(a.share)) == 1 else "-"
                print(
                    f"| {size} | {mbit or 'unshaped'} | {variant} | {sent / 1e6:.3f} | {sent / adapters:.3f} | "
                    f"{statistics.median(speeds):.0f} | {statistics.median(ratios):.2f} x | {alone_text} | {answers[-1]['loss']:.4f} |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
