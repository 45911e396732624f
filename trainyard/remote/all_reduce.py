"""Measures an all-reduce over all hosts with gloo. Needs the cluster's Python environment, for it imports torch."""

from __future__ import annotations

import datetime
import os
import time
from typing import Any

SIZE = 4 << 20  # bytes of the large tensor
REPEATS = 10


def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Take part in an all-reduce as one rank, and return what it cost.

    Args:
        request: `rank`, `world` (the number of ranks), `master` and `port` (the rendezvous), `device` (the network
            interface to use), `limit` (seconds for a collective operation).

    Returns:
        `mbit`, the bandwidth in Mbit/s that each host sends and receives in a ring; `latency_ms`, the time of an
        all-reduce of one number; `torch`, its version.

    Raises:
        RuntimeError: the rendezvous or the all-reduce failed, or the sum is wrong.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = request["device"]
    import torch
    import torch.distributed as dist

    world = request["world"]
    address = f"[{request['master']}]" if ":" in request["master"] else request["master"]
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:{request['port']}",
        rank=request["rank"],
        world_size=world,
        timeout=datetime.timedelta(seconds=request["limit"]),
    )
    one, large = torch.ones(1), torch.ones(SIZE // 4)
    dist.all_reduce(large)
    if large[-1].item() != world:
        raise RuntimeError(f"the sum over {world} ranks is {large[-1].item():g}; it must be {world}")
    start = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(one)
    latency = (time.perf_counter() - start) / REPEATS
    start = time.perf_counter()
    dist.all_reduce(large)
    seconds = time.perf_counter() - start
    dist.barrier()
    dist.destroy_process_group()
    # In a ring every rank sends and receives 2 (n-1)/n of the tensor.
    bits = 2 * (world - 1) / world * SIZE * 8
    return {
        "mbit": round(bits / seconds / 1e6, 1),
        "latency_ms": round(latency * 1e3, 3),
        "torch": torch.__version__,
    }
