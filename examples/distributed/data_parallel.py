"""Train one model on all hosts of a cluster, and show how it goes.

python examples/distributed/data_parallel.py [INVENTORY]

Without an inventory, this machine is a cluster of two hosts.
"""

import sys

from trainyard import Cluster


def main() -> None:
    cluster = Cluster(sys.argv[1]) if len(sys.argv) > 1 else Cluster.local()
    for host in cluster.hosts():
        print(f"{host.name}: {host.cores} cores, {len(host.gpus)} GPUs")
    run = cluster.train(
        model="tiny",
        seq_length=64,
        total_batch_size=8,
        max_steps=20,
        max_retries=3,
        retry_backoff=5.0,
        max_checkpoints=2,
    )
    for event in run.follow():
        print(f"{event.step or 0:>4}  {event.text}")
    result = run.wait()
    print(f"{run.name}: {result.loss_first:.3f} -> {result.loss_last:.3f} on {result.world_size} ranks")
    print(f"best step: {min(run.metrics(), key=lambda metric: metric.loss or 0.0).step}")


if __name__ == "__main__":
    main()
