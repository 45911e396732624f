"""Who am I among the ranks: joining the process group, the few collectives that the loop needs, and leaving without a crash."""

import datetime
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from trainer.distributed.replica import NO_MEMBER, Member

T = TypeVar("T")

_LOOK = 0.002  # seconds between two looks at a collective that is waited for with patience
_PATIENCE = datetime.timedelta(days=30)


@dataclass(frozen=True)
class World:
    """This process among all, or among the ranks of a part of all (see `part`), whose collectives are its own.

    `rank` counts over all hosts, or over the part; `local_rank` on this host (as torchrun sets it).
    """

    rank: int
    size: int
    local_rank: int
    node_rank: int
    device: torch.device
    members: tuple[int, ...] = ()  # of a part: its ranks, as they count over all hosts
    group: Any = None
    patient: Any = None  # a group of the same ranks whose collectives may take as long as they like
    store: Any = None
    member: Member = NO_MEMBER  # the replica that all these ranks are, if it is a torchrun of its own

    @classmethod
    def join(cls, timeout: float, member: Member = NO_MEMBER) -> "World":
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
        store = next(iter(dist.rendezvous("env://", timeout=wait)))[0] if size > 1 else dist.HashStore()
        where: Any = {"device_id": device} if cuda and size > 1 else {}
        dist.init_process_group(
            backend, store=store, rank=rank if size > 1 else 0, world_size=size, timeout=wait, **where
        )
        return cls(rank, size, local_rank, int(os.environ.get("GROUP_RANK", "0")), device, store=store, member=member)

    def part(self, parts: Sequence[Sequence[int]], timeout: float) -> "World":
        """Return the world of that one of `parts` (lists of ranks) which this rank is in. Every rank calls it.

        Ranks that are in none get a world of their own. `timeout`: seconds until one of its collectives fails.
        """
        found = next((tuple(sorted(ranks)) for ranks in parts if self.rank in ranks), (self.rank,))
        wait = datetime.timedelta(seconds=timeout)
        group, _ = dist.new_subgroups_by_enumeration([sorted(ranks) for ranks in parts], timeout=wait)
        return replace(self, rank=found.index(self.rank), size=len(found), members=found, group=group)

    def with_patience(self) -> "World":
        """Return this world with `sum_patiently`. Every rank calls it."""
        return replace(self, patient=dist.new_group(backend="gloo", timeout=_PATIENCE)) if self.size > 1 else self

    @property
    def global_rank(self) -> int:
        """This process's rank over all hosts."""
        return self.member.first_rank + (self.members[self.rank] if self.members else self.rank)

    @property
    def first_here(self) -> bool:
        """Whether this rank does what has to be done once on every host (checkpoints, result)."""
        return self.local_rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Return `values` summed over all ranks, in float64: one small all-reduce."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor.tolist()

    def sum_patiently(self, values: list[float], waiting: Callable[[], object]) -> list[float]:
        """Return what `sum` does, however long the slowest rank takes to come; `waiting` is called meanwhile.

        A peer that dies is noticed at once: its connection breaks.
        """
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            work = dist.all_reduce(tensor, group=self.patient, async_op=True)
            while not work.is_completed():
                waiting()
                time.sleep(_LOOK)
            work.wait()
        return tensor.tolist()

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value`, in rank order (pickled between ranks of one run only)."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.size > 1:
            dist.barrier(group=self.group)

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
