"""Who am I among the ranks: joining the process group, the few collectives that the loop needs, and leaving without a crash."""

import datetime
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process among all. `rank` counts over all hosts, `local_rank` on this one (as torchrun sets them)."""

    rank: int
    size: int
    local_rank: int
    node_rank: int
    device: torch.device

    @classmethod
    def join(cls, timeout: float) -> "World":
        """Join the process group that torchrun's environment names, or one of our own if there is none.

        NCCL where CUDA is, gloo elsewhere. `timeout`: seconds until a collective fails.
        """
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        wait = datetime.timedelta(seconds=timeout)
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        backend = "nccl" if cuda else "gloo"
        if size > 1:
            dist.init_process_group(backend, timeout=wait, device_id=device if cuda else None)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=wait)
        return cls(rank, size, local_rank, int(os.environ.get("GROUP_RANK", "0")), device)

    @property
    def first_here(self) -> bool:
        """Whether this rank does what has to be done once on every host (checkpoints, result)."""
        return self.local_rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Return `values` summed over all ranks, in float64: one small all-reduce."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor.tolist()

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value`, in rank order (pickled between ranks of one run only)."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier()

    def once_here(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank of every host, then on the others, which find what it left on disk."""
        result = work() if self.first_here else None
        self.barrier()
        return result if result is not None else work()


def leave(code: int) -> NoReturn:
    """End this process, well or not, without the abort that gloo's threads now and then cause at interpreter exit.

    After a failure the peers may be hanging: the group is left as it is then, because destroying it can wait for them.
    """
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
