"""Correctness and bandwidth of the collectives of a run on the ranks of torchrun; rank 0 prints JSON.

    torchrun --nproc-per-node=1 -m benchmarks.gpu.collectives MIB

MIB: size of the float32 tensor of the all-reduce.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist

from trainer.distributed.world import World, leave

ROUNDS = 10


def main(mib: int) -> None:
    """Join the ranks as a run does, and use every collective."""
    world = World.join(60)
    numbers = torch.ones(mib * 2**18, device=world.device)
    half = torch.ones(2**18, device=world.device, dtype=torch.bfloat16)
    dist.all_reduce(numbers)
    dist.all_reduce(half)
    dist.broadcast(numbers, 0)
    parts = [torch.empty_like(half) for _ in range(world.size)]
    dist.all_gather(parts, half)
    shard = torch.empty(2**18 // world.size, device=world.device)
    dist.reduce_scatter_tensor(shard, numbers[: 2**18].clone())
    right = bool((numbers == world.size).all() and (half == world.size).all() and (parts[0] == half).all())
    right = right and bool((shard == world.size**2).all())
    _wait(world)
    began = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(numbers)
    _wait(world)
    seconds = (time.perf_counter() - began) / ROUNDS
    found = {"backend": dist.get_backend(), "right": right, "ranks": world.size, "gathered": world.gather(world.rank)}
    if world.rank == 0:
        print(json.dumps(found | {"gb_per_second": numbers.numel() * 4 / seconds / 1e9}), flush=True)
    leave(0)


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


if __name__ == "__main__":
    main(int(sys.argv[1]))
