"""Train several models at once, each on one host of a cluster, and compare them.

python examples/distributed/multi_model.py [INVENTORY]

Without an inventory, this machine is a cluster of two hosts.
"""

import sys

from trainyard import Cluster


def main() -> None:
    cluster = Cluster(sys.argv[1]) if len(sys.argv) > 1 else Cluster.local()
    runs = [
        cluster.train(limit=host.name, model="tiny", lora_r=rank, seq_length=64, total_batch_size=4, max_steps=10)
        for host, rank in zip(cluster.hosts(), (4, 16), strict=False)
    ]
    for run in runs:
        result = run.wait()
        print(f"{run.name}: held-out loss {result.eval_loss:.3f}, {result.tokens_per_second:.0f} tokens/s")


if __name__ == "__main__":
    main()
