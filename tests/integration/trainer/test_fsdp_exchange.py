"""The all-gather and reduce-scatter of the fsdp strategy, compared with torch's: three ranks over gloo."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from trainer.strategy.fsdp_exchange import AllGather, ReduceScatter

RANKS = 3


def compare(rank: int, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    both = dist.new_group([0, 2])  # group ranks differ from global ranks
    for group in [dist.group.WORLD, *([both] if rank != 1 else [])]:
        assert group is not None
        ranks, place = group.size(), group.rank()
        for size, dtype in ((1, torch.float32), (1000, torch.bfloat16), (300_001, torch.float32)):
            torch.manual_seed(rank)
            full = torch.randn(ranks * size).to(dtype)
            expected, found = (torch.empty(ranks * size, dtype=dtype) for _ in range(2))
            part = found.view(ranks, -1)[place]  # FSDP passes an input that is a view of the output
            part.copy_(full[:size])
            dist.all_gather_single(expected, full[:size], group=group)
            AllGather()(found, part, group)
            assert torch.equal(found, expected)
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                total = full.to(torch.float32, copy=True)
                dist.all_reduce(total, group=group)
                reduced = torch.empty(size, dtype=dtype)
                ReduceScatter()(reduced, full.clone(), group, op)
                wanted = total.view(ranks, -1)[place] / (ranks if op == dist.ReduceOp.AVG else 1)
                torch.testing.assert_close(reduced, wanted.to(dtype))
    with pytest.raises(ValueError, match="expected SUM or AVG"):
        ReduceScatter()(torch.empty(1), torch.empty(RANKS), dist.group.WORLD, dist.ReduceOp.MAX)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_results_equal_those_of_torch(tmp_path: Path) -> None:
    multiprocessing.spawn(compare, args=(str(tmp_path / "store"),), nprocs=RANKS)
