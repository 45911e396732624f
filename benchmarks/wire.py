"""Two hosts (network namespaces, one core each): bytes a step and speed beside one host, strategy by strategy, link by link.

    sudo make bench-wire [ARGS='--models 26m --seq 512 --share 45 --mbit 1000 --ways ddp ddp:gradient_comm_dtype=bf16']

A way is a strategy, with fields of the run spec after colons. One host has one core, too; with --share, each host has so many
percent of one and the same core (see two_hosts.run). Needs root (ip netns, tc, cgroups).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys

from inputs import SIZES, made, model_of
from two_hosts import run, two_hosts

from trainer.config import make_spec
from trainer.planner.model_shape import shape_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny"], choices=["tiny", *SIZES])
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--rows", type=int, default=16, help="of a step, over all hosts")
    parser.add_argument("--mbit", type=int, nargs="+", default=[0, 1000, 100], help="0: not shaped")
    parser.add_argument("--ways", nargs="+", default=["ddp", "ddp:gradient_comm_dtype=bf16"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1, help="in turns; speeds are medians over them")
    parser.add_argument("--share", type=int, default=0, help="percent of a core that a host has; 0: a core of its own")
    a = parser.parse_args()
    if os.geteuid():
        print("error: two hosts need root here (network namespaces)", file=sys.stderr)
        return 2
    _, dataset = made()
    print("| model | link | way | wire MB/step | of 4 B x adapter parameters | tokens/s | beside one host | loss |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for size in a.models:
        model = model_of(size)
        base = {"seq_length": a.seq, "total_batch_size": a.rows, "lr": 3e-3}
        about = {"model": str(model), "dataset": str(dataset), "steps": a.steps}
        spec = make_spec({"model": str(model)} | base, "the benchmark")
        adapters = 4 * shape_of(spec).trained(spec)
        said = {way: dict(field.split("=", 1) for field in way.split(":")[1:]) for way in a.ways}
        for mbit in a.mbit:
            alone: list[float] = []
            found: dict[str, list[dict[str, float]]] = {way: [] for way in a.ways}
            with two_hosts(mbit) as names:
                for _ in range(a.rounds):
                    (one,) = run(names[:1], [about | {"fields": base}], share=a.share)
                    alone.append(one["tokens_per_second"])
                    for way, fields in said.items():
                        fields = base | {"strategy": way.split(":")[0]} | fields
                        found[way] += run(names, [about | {"fields": fields}], share=a.share)
            for way, answers in found.items():
                speeds = [answer["tokens_per_second"] for answer in answers]
                ratios = [speed / one for speed, one in zip(speeds, alone, strict=True)]
                wire = answers[-1]["wire_bytes"]
                print(
                    f"| {size} | {mbit or 'unshaped'} | {way} | {wire / 1e6:.3f} | {wire / adapters:.3f} | "
                    f"{statistics.median(speeds):.0f} | {statistics.median(ratios):.2f} x | {answers[-1]['loss']:.4f} |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
