"""The ranks of a run: joining the process group, the collectives that the loop needs, and a clean process exit."""

import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from trainer.common.errors import UserError
from trainer.distributed import SHARED_GPUS
from trainer.distributed.store import launcher_store
from trainer.supervise.interface import interface_to

if TYPE_CHECKING:
    from trainer.distributed.meeting import Meeting

T = TypeVar("T")

_POLL_INTERVAL = 0.002  # seconds between polls of a collective without a timeout
_FEW_RANKS = 4  # up to which an all-gather of a few values has fewer messages than an all-reduce
_NO_TIMEOUT = datetime.timedelta(days=30)  # a process group needs a timeout; this one is longer than any run


@dataclass(frozen=True)
class World:
    """This process among all ranks, or among the ranks of a subgroup (see `subgroup`), whose collectives it runs.

    `rank` and `size` count the ranks of all hosts, or those of the subgroup; `local_rank` counts those of this host, as
    torchrun sets it. `ranks`: the ranks of a subgroup, numbered over all hosts. `untimed_group`: a process group of the
    same ranks whose collectives have no timeout.
    """

    rank: int
    size: int
    local_rank: int
    node_rank: int
    device: torch.device
    ranks: tuple[int, ...] = ()
    group: Any = None
    untimed_group: Any = None
    store: Any = None

    @classmethod
    def join(cls, timeout: float, meeting: "Meeting | None" = None) -> "World":
        """Join the process group that the environment of torchrun defines, or create one with a single rank.

        It uses NCCL with CUDA and gloo otherwise. Ranks that share GPUs use gloo, too, because NCCL refuses them: ranks
        of one host, or of one machine that is several hosts (SHARED_GPUS). `timeout`: seconds after which a collective
        fails. `meeting`: the workers of a galaxy, whose ranks are one process group. Raises UserError: the ranks of a
        host share GPUs, but the run has several hosts.
        """
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        limit = datetime.timedelta(seconds=timeout)
        cuda = torch.cuda.is_available()
        gpus, local_size = torch.cuda.device_count() if cuda else 0, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        crowded = cuda and local_size > gpus
        shared = crowded or (cuda and os.environ.get(SHARED_GPUS) == "1")
        if crowded and local_size < size and not meeting:
            raise UserError(
                f"{local_size} ranks cannot share the GPUs of this host ({gpus}) in a run of several hosts: "
                f"set cluster_processes={gpus} for it"
            )
        device = torch.device("cuda", local_rank % gpus) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        if meeting:
            shared = not meeting.nccl
            store: Any = dist.PrefixStore("group", meeting.keys)
        else:
            if local_size < size and (interface := interface_to(os.environ.get("MASTER_ADDR", "localhost"))):
                for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # each host chooses by its own routes
                    os.environ.setdefault(name, interface)
            store = launcher_store(rank, size, limit) if size > 1 else dist.HashStore()
        options: dict[str, Any] = {"device_id": device} if cuda and not shared and size > 1 else {}
        dist.init_process_group(
            "nccl" if cuda and not shared else "gloo",
            store=store,
            rank=rank if size > 1 else 0,
            world_size=size,
            timeout=limit,
            **options,
        )
        node_rank = int(os.environ.get("GROUP_RANK", "0"))
        return cls(rank, size, local_rank, node_rank, device, store=store)

    def subgroup(self, groups: Sequence[Sequence[int]], timeout: float) -> "World":
        """Return the world of the group in `groups` (lists of ranks) that contains this rank. Every rank calls it.

        A rank that is in none of them gets a world with only itself. `timeout`: seconds after which a collective of the
        group fails.
        """
        limit = datetime.timedelta(seconds=timeout)
        found = next((tuple(sorted(ranks)) for ranks in groups if self.rank in ranks), (self.rank,))
        lists = [sorted(ranks) for ranks in groups]
        group, _ = dist.new_subgroups_by_enumeration(lists, timeout=limit)
        rank, size = found.index(self.rank), len(found)
        return replace(self, rank=rank, size=size, ranks=found, group=group)

    def with_untimed_group(self) -> "World":
        """Return this world with a group for `sum_without_timeout`. Every rank calls it."""
        if self.size == 1:
            return self
        group = dist.new_group(backend="gloo", timeout=_NO_TIMEOUT)
        return replace(self, untimed_group=group)

    def require_own_gpus(self, strategy: str) -> None:
        """Raise UserError if ranks share GPUs, and so use gloo, whose gathers of CUDA tensors end the process (torch 2.11, SIGSEGV)."""
        if self.size > 1 and self.device.type == "cuda" and dist.get_backend(self.group) == "gloo":
            raise UserError(
                f"strategy: {strategy} cannot run with ranks that share a GPU: set cluster_processes to the number of GPUs "
                "of the host, or set strategy to ddp or pipeline"
            )

    @property
    def global_rank(self) -> int:
        return self.ranks[self.rank] if self.ranks else self.rank

    @property
    def is_host_leader(self) -> bool:
        """Whether this rank does the work that is done once per host (checkpoints, result)."""
        return self.local_rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Return `values` summed over all ranks in float64: one small collective. Every rank calls it."""
        summed, _ = _start_sum(torch.tensor(values, dtype=torch.float64, device=self.device), self.size, self.group)
        return summed()

    def sum_without_timeout(self, values: list[float], waiting: Callable[[], object]) -> list[float]:
        """Return the result of `sum`, without a timeout for the slowest rank; call `waiting` at intervals until then.

        The failure of a peer raises an error immediately, because its connection closes.
        """
        summed, work = _start_sum(torch.tensor(values, dtype=torch.float64), self.size, self.untimed_group)
        if work:
            wait_for(work, waiting)
        return summed()

    def gather(self, value: T) -> list[T]:
        """Return the `value` of every rank, in rank order. Every rank calls it.

        The value is JSON data: lists, numbers, text, and dicts with text as keys. A pickle would let whoever reaches the
        connections between ranks run code.
        """
        return [json.loads(text) for text in self.gather_bytes(json.dumps(value).encode())]

    def gather_bytes(self, value: bytes) -> list[bytes]:
        """Return the bytes of every rank, in rank order. Every rank calls it."""
        if self.size == 1:
            return [value]
        length = torch.tensor([len(value)], device=self.device)
        lengths = [torch.empty_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length, group=self.group)
        sizes = [int(each) for each in lengths]
        padded = torch.frombuffer(bytearray(value.ljust(max(1, *sizes), b"\0")), dtype=torch.uint8).to(self.device)
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self.group)
        return [part[:size].cpu().numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)

    def once_per_host(self, work: Callable[[], T]) -> T:
        """Run `work` on the first rank of every host, then on the other ranks, which find its files on disk."""
        result = work() if self.is_host_leader else None
        self.barrier()
        return result if result is not None else work()


def _start_sum(values: torch.Tensor, size: int, group: Any) -> tuple[Callable[[], list[float]], Any]:
    """Start to sum `values` over the ranks of a group; return what waits for the sum and returns it, and the collective."""
    parts, work = [values], None
    if size > _FEW_RANKS:
        work = dist.all_reduce(values, group=group, async_op=True)
    elif size > 1:
        parts = [torch.empty_like(values) for _ in range(size)]
        work = dist.all_gather(parts, values, group=group, async_op=True)

    def summed() -> list[float]:
        if work:
            work.wait()
        total: list[float] = torch.stack(parts).sum(0).tolist()
        return total

    return summed, work


def wait_for(work: Any, waiting: Callable[[], object]) -> None:
    """Wait for a collective in progress, and call `waiting` at intervals until then. Raises the error of the collective."""
    while not work.is_completed():
        waiting()
        time.sleep(_POLL_INTERVAL)
    work.wait()


def leave(code: int) -> NoReturn:
    """Exit the process without the abort that gloo's threads occasionally cause at interpreter exit.

    After a failure the process group is not destroyed: that could wait for peers that hang.
    """
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
