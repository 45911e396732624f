"""All-gather and reduce-scatter for FSDP over gloo with one rank per host: each pair of ranks exchanges data directly.

gloo's all-gather sends a shard in two halves around a ring, and the receiver's confirmation of the second half queues behind
the data of the first one. A slow link reaches 70 % of its rate. gloo's reduce-scatter is an all-reduce,
which sends twice the bytes. Here every rank posts all receives before it sends.
If ranks share hosts, gloo's own collectives are faster: a ring crosses each link once, and pairs cross it several times.

https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html (set_custom_all_gather, set_custom_reduce_scatter)
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp


class _Comm:
    """Allocates the buffers of both collectives."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Comm):
    """Gathers shards of n numbers into N x n, in rank order. Every rank sends n x (N-1) numbers."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` (N x n). `input_tensor` (n) may be a view of it. Blocks until done."""
        rank, ranks = group.rank(), group.size()
        parts = output_tensor.view(ranks, -1)
        peers = [(rank + offset) % ranks for offset in range(1, ranks)]
        receives = [dist.irecv(parts[peer], group=group, group_src=peer) for peer in reversed(peers)]
        sends = [dist.isend(input_tensor, group=group, group_dst=peer) for peer in peers]
        parts[rank].copy_(input_tensor)
        for work in (*receives, *sends):
            work.wait()


class ReduceScatter(_Comm):
    """Reduces N x n numbers to the sum or mean over ranks of this rank's n. Every rank sends n x (N-1) numbers."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup,
        op: ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Fill `output_tensor` (n) from `input_tensor` (N x n). Blocks until done.

        Raises:
            ValueError: `op` is neither SUM nor AVG.
        """
        if op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ValueError(f"expected SUM or AVG, got {op}")
        rank, ranks = group.rank(), group.size()
        parts = input_tensor.view(ranks, -1)
        # The sum is float32, regardless of the data type in transit.
        total = parts[rank].float() if input_tensor.dtype.itemsize < 4 else parts[rank].clone()
        # One peer at a time, so that one receive buffer is enough.
        part = torch.empty_like(parts[rank])
        for offset in range(1, ranks):
            receive = dist.irecv(part, group=group, group_src=(rank - offset) % ranks)
            send = dist.isend(parts[(rank + offset) % ranks], group=group, group_dst=(rank + offset) % ranks)
            receive.wait()
            total += part
            send.wait()
        output_tensor.copy_(total / ranks if op == ReduceOp.AVG else total)
