"""The order of the passes of a pipeline, and the exchange of activations and their gradients between neighbouring ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.common.lazy import LazyModule
from trainer.strategy.pipeline_split import warmup

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from trainer.distributed.pipelines import Pipelines
else:
    torch, dist = LazyModule("torch"), LazyModule("torch.distributed")

_AHEAD = 2  # operations for which a rank posts receives in advance


class Operation(NamedTuple):
    """One pass of a rank: forward or backward of micro-batch number `micro`."""

    forward: bool
    micro: int


def operations(rank: int, ranks: int, micro: int) -> list[Operation]:
    """Return the passes of `rank` in a step of `micro` micro-batches: one forward, one backward after the warm-up.

    Both kinds are in the order of the micro-batches, so gradients are summed in the order of a single process.
    """
    ahead = min(micro, warmup(rank, ranks))
    order = [Operation(True, number) for number in range(ahead)]
    for number in range(micro - ahead):
        order += [Operation(True, ahead + number), Operation(False, number)]
    return order + [Operation(False, number) for number in range(micro - ahead, micro)]


class StageLink:
    """One direction between this rank and a neighbour: tensors arrive in the order in which they are sent."""

    def __init__(self, peer: int, group: Any, device: torch.device, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        """`peer`: rank of the neighbour in the group. `dtypes`: of the model's tensors, in memory and in transit.

        `group`: process group of this direction; each direction has its own, so that NCCL cannot block one by the other.
        """
        self._peer, self._group, self._device = peer, group, device
        self._native, self._transit = dtypes
        # gloo sends from host memory only.
        self._buffers = torch.device("cpu") if dist.get_backend(group) == "gloo" else device
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._posted: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, value: torch.Tensor, pending: int) -> None:
        """Send a tensor without waiting, unless more than `pending` tensors are on their way."""
        buffer = value.detach().to(self._buffers, self._transit).contiguous()
        self._sent.append((dist.isend(buffer, group=self._group, group_dst=self._peer), buffer))
        self.flush(pending)

    def flush(self, pending: int = 0) -> None:
        """Wait until at most `pending` sent tensors are on their way."""
        while len(self._sent) > pending:
            self._sent.popleft()[0].wait()

    def post(self, shape: Sequence[int]) -> None:
        """Prepare to receive the next tensor."""
        buffer = torch.empty(*shape, dtype=self._transit, device=self._buffers)
        self._posted.append((dist.irecv(buffer, group=self._group, group_src=self._peer), buffer))

    def receive(self) -> torch.Tensor:
        """Return the next tensor of those that `post` prepared, once it has arrived."""
        work, buffer = self._posted.popleft()
        work.wait()
        return buffer.to(self._device, self._native)


class Neighbours:
    """The links of this rank to the ranks before and after it in the pipeline."""

    def __init__(self, pipelines: Pipelines, native: torch.dtype, transit: torch.dtype, timeout: float) -> None:
        """Every rank calls it. `native`, `transit`: data types in the model, and between ranks. `timeout`: seconds for an operation."""
        world = pipelines.stages
        self._rank, self._ranks = world.rank, world.size
        self.first, self.last = world.rank == 0, world.rank == world.size - 1
        self._links: dict[str, StageLink] = {}
        if world.size == 1:
            return
        forward, backward = pipelines.own(timeout).group, pipelines.own(timeout).group
        dtypes, device = (native, transit), world.device
        for side, peer in (("previous", world.rank - 1), ("next", world.rank + 1)):
            if 0 <= peer < world.size:
                self._links[f"{side} activations"] = StageLink(peer, forward, device, dtypes)
                self._links[f"{side} gradients"] = StageLink(peer, backward, device, dtypes)

    def forward(
        self, shape: Sequence[int], compute: Callable[[torch.Tensor | None], torch.Tensor], *, posted: bool = False
    ) -> torch.Tensor:
        """Receive the input of a forward pass, compute, send the output unless this rank is the last, and return it.

        `shape`: shape of the hidden states, [rows, T, hidden]. `compute`: takes the received hidden states, or None on
        the first rank. `posted`: the receive is already posted.
        """
        value = None
        if not self.first:
            link = self._links["previous activations"]
            if not posted:
                link.post(shape)
            value = link.receive()
        output = compute(value)
        if not self.last:
            self._links["next activations"].send(output, pending=warmup(self._rank, self._ranks) + 1)
        return output

    def run(
        self,
        shapes: Sequence[Sequence[int]],
        forward: Callable[[int, torch.Tensor | None], torch.Tensor],
        backward: Callable[[int, torch.Tensor | None], torch.Tensor | None],
    ) -> None:
        """Run all passes of a step. Every rank calls it with the same shapes.

        Args:
            shapes: shapes of the hidden states of every micro-batch, [rows, T, hidden].
            forward: computes a micro-batch from the hidden states of the rank before (None on the first rank).
            backward: takes the gradient of its output (None on the last rank) and returns that of its input.
        """
        order = operations(self._rank, self._ranks, len(shapes))
        posted = 0
        for place, (is_forward, number) in enumerate(order):
            for operation in order[posted : place + _AHEAD + 1]:
                posted += 1
                if operation.forward and not self.first:
                    self._links["previous activations"].post(shapes[operation.micro])
                elif not operation.forward and not self.last:
                    self._links["next gradients"].post(shapes[operation.micro])
            if is_forward:
                self.forward(shapes[number], lambda value, number=number: forward(number, value), posted=True)  # type: ignore[misc]
                continue
            gradient = backward(number, None if self.last else self._links["next gradients"].receive())
            if not self.first:
                assert gradient is not None
                self._links["previous gradients"].send(gradient, pending=warmup(0, self._ranks) + 1)
        self.flush()

    def flush(self) -> None:
        """Wait until everything that this rank sent has arrived."""
        for link in self._links.values():
            link.flush()
