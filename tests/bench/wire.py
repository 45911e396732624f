"""Two hosts (network namespaces, one core each): bytes a step and speed beside one host, strategy by strategy, link by link.

    sudo make bench-wire [ARGS='--mbit 1000 100 --ways ddp ddp:gradient_wire=bf16']

A way is a strategy, with fields of the run spec after colons. Needs root (ip netns, tc).
"""

from __future__ import annotations

import argparse
import os
import sys

from inputs import made
from two_hosts import run, two_hosts

from trainer.config import make_spec
from trainer.shape import shape_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, nargs="+", default=[0, 1000, 100], help="0: not shaped")
    parser.add_argument("--ways", nargs="+", default=["ddp", "ddp:gradient_wire=bf16"])
    parser.add_argument("--steps", type=int, default=12)
    a = parser.parse_args()
    if os.geteuid():
        print("error: two hosts need root here (network namespaces)", file=sys.stderr)
        return 2
    model, dataset = made()
    base = {"seq_length": 256, "total_batch_size": 16, "lr": 3e-3}
    about = {"model": str(model), "dataset": str(dataset), "steps": a.steps}
    spec = make_spec({"model": str(model)} | base, "the benchmark")
    adapters = 4 * shape_of(spec).trained(spec)
    print("| link | way | wire MB/step | of 4 B x adapter parameters | tokens/s | beside one host | loss |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for mbit in a.mbit:
        with two_hosts(mbit) as names:
            (alone,) = run(names[:1], [about | {"fields": base}])
            for way in a.ways:
                strategy, *fields = way.split(":")
                said = dict(field.split("=", 1) for field in fields)
                (made_,) = run(names, [about | {"fields": base | {"strategy": strategy} | said}])
                print(
                    f"| {mbit or 'unshaped'} | {way} | {made_['wire_bytes'] / 1e6:.3f} | {made_['wire_bytes'] / adapters:.3f} | "
                    f"{made_['tokens_per_second']:.0f} | {made_['tokens_per_second'] / alone['tokens_per_second']:.2f} x | "
                    f"{made_['loss']:.4f} |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
