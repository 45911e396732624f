"""Run your own PyTorch program on all hosts: this file starts itself as the worker of every rank.

python examples/distributed/custom_worker.py [INVENTORY]

Without an inventory, this machine is a cluster of two hosts. docs/your-code.md says what a worker finds and may write.
"""

import json
import os
import sys
from pathlib import Path


def work() -> None:
    """Add up the numbers of the ranks: what torchrun starts on the hosts."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for step in range(1, 4):
        total = torch.tensor([float(step * dist.get_rank())])
        dist.all_reduce(total)
        if os.environ["LOCAL_RANK"] == "0":
            with Path("metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "steps": 3, "loss": total.item()}) + "\n")
    if os.environ["LOCAL_RANK"] == "0":
        result = {"sum": total.item(), "ranks": dist.get_world_size()}
        Path(os.environ["TRAINYARD_RESULT"]).write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    from trainyard import Cluster

    cluster = Cluster(sys.argv[1]) if len(sys.argv) > 1 else Cluster.local()
    run = cluster.train(script=Path(__file__))
    for event in run.follow():
        print(event.text)
    values = run.wait().values
    print(f"sum {values['sum']} over {values['ranks']} ranks; {len(run.metrics())} steps")


if __name__ == "__main__":
    if "TRAINYARD_RUN_DIR" in os.environ:
        work()
    else:
        main()
