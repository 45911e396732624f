"""Gathering and scattering for FSDP where ranks talk over gloo and have a host each: every pair straight to each other.

gloo's own all-gather sends a part in two halves round a ring, and word that the second may come waits behind the first one's
bytes on the same connection: over a thin link it gets 70 % of it (benchmarks/plan.py). Its reduce-scatter is an
all-reduce, which sends twice as much. Here all that is to come is announced before anything is sent.
Where ranks share hosts, a ring crosses each link once and pairs would cross it for every two ranks: gloo's own are for that.

https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html (set_custom_all_gather, set_custom_reduce_scatter)
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp


class _Comm:
    """What FSDP asks of both: memory for what comes and goes."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Comm):
    """Parts of n numbers become N x n, in rank order: n x (N-1) numbers sent by each."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` (N x n), in which `input_tensor` (n) may lie; done when it returns."""
        rank, ranks = group.rank(), group.size()
        parts = output_tensor.view(ranks, -1)
        others = [(rank + away) % ranks for away in range(1, ranks)]
        coming = [dist.irecv(parts[other], group=group, group_src=other) for other in reversed(others)]
        going = [dist.isend(input_tensor, group=group, group_dst=other) for other in others]
        parts[rank].copy_(input_tensor)
        for work in (*coming, *going):
            work.wait()


class ReduceScatter(_Comm):
    """N x n numbers become the sum or mean over ranks of this rank's n: n x (N-1) numbers sent by each."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Fill `output_tensor` (n) from `input_tensor` (N x n); done when it returns. Raises ValueError for other `op`."""
        if op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ValueError(f"takes SUM or AVG, got {op}")
        rank, ranks = group.rank(), group.size()
        parts = input_tensor.view(ranks, -1)
        # Added up in 32 bits, whatever goes over the wire.
        total = parts[rank].float() if input_tensor.dtype.itemsize < 4 else parts[rank].clone()
        # One after the other: there is memory for one part that comes.
        part = torch.empty_like(parts[rank])
        for away in range(1, ranks):
            coming = dist.irecv(part, group=group, group_src=(rank - away) % ranks)
            going = dist.isend(parts[(rank + away) % ranks], group=group, group_dst=(rank + away) % ranks)
            coming.wait()
            total += part
            going.wait()
        output_tensor.copy_(total / ranks if op == ReduceOp.AVG else total)
