"""DiLoCo: replicas take `local_steps` steps of their own (AdamW), then an outer step (Nesterov) on how far they came.

https://arxiv.org/abs/2311.08105. A replica is a host, or neighbouring hosts, with DDP inside. The sum of the replicas'
ways, weighed by the tokens that each trained on, is the pseudo-gradient of the outer optimizer; only that goes over the
network, once in `local_steps` steps.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from trainer.config import RunSpec
from trainer.model import TokenLoss
from trainer.order import share
from trainer.strategy.base import Batch, Rows, Update
from trainer.strategy.ddp import DDP
from trainer.strategy.replicas import Replicas, by_speed, deal
from trainer.world import World

_CHUNK = 16 << 20  # numbers in one all-reduce: the memory that it takes besides
_NEWEST = 0.5  # share of the newest round in what is known of a replica's speed


class DiLoCo(DDP):
    """Replicas with an inner and an outer optimizer. The outer one's state is kept in the host's memory, once a host."""

    # The inner optimizer's state is a replica's own; a host that lost it goes on with another replica's.
    own = ("optimizer.pt",)

    def __init__(self, spec: RunSpec, world: World, module: TokenLoss) -> None:
        self.replicas = Replicas.find(spec, world)
        crew = world.part(self.replicas.ranks, spec.collective_timeout)
        super().__init__(spec, world, module, crew)
        self.world = world.with_patience()
        firsts = [rank for rank, first in enumerate(world.gather(world.first_here)) if first]
        # Who speaks for a replica, who keeps its outer state on each of its hosts, and who is beside the one that does.
        self.across = world.part([[ranks[0] for ranks in self.replicas.ranks]], spec.collective_timeout)
        self.keepers = world.part(
            [[rank for rank in ranks if rank in firsts] for ranks in self.replicas.ranks], spec.collective_timeout
        )
        nodes = world.gather(world.node_rank)
        self.host = world.part(
            [[rank for rank, node in enumerate(nodes) if node == number] for number in sorted(set(nodes))],
            spec.collective_timeout,
        )
        self.owners: list[int] = []
        # Of this round: tokens, seconds and inner steps of this replica. Of all rounds: seconds of an inner step, by replica.
        self.tokens, self.seconds, self.taken = 0, 0.0, 0
        self.costs = [0.0] * len(self.replicas)
        if world.first_here:
            self.outer = {name: nn.Parameter(p.detach().cpu().clone()) for name, p in self.trained.items()}
            self.outer_optimizer = torch.optim.SGD(
                self.outer.values(), lr=spec.outer_lr, momentum=spec.outer_momentum, nesterov=spec.outer_momentum > 0
            )

    def updates(self, step: int, rows: Rows) -> list[Update]:
        """Deal the step's rows to the replicas in portions of equal size, each an inner step for whoever gets it."""
        count, place = len(self.replicas), step % self.spec.local_steps
        if place == 0 or not self.owners:
            self.owners = deal(count * self.spec.local_steps, self._speeds())
        self._began = time.perf_counter()
        dealt = []
        for number in range(count):
            portion = rows[share(len(rows), [1] * count, number)]
            if portion and self.owners[place * count + number] == self.replicas.mine:
                dealt.append(Update(portion, portion[share(len(portion), [1] * self.crew.size, self.crew.rank)]))
        return dealt

    def backward(self, batch: Batch, tokens: int, last: bool) -> torch.Tensor:
        self.tokens += tokens if last else 0
        return super().backward(batch, tokens, last)

    def _speeds(self) -> list[float]:
        """Return how many portions replicas take, one against another: by their ranks, or by measured speed if that pays."""
        even = [float(len(ranks)) for ranks in self.replicas.ranks]
        return by_speed(even, self.costs) if self.spec.balance == "auto" else even

    def step(self, lr: float) -> float:
        norm = super().step(lr)
        now = time.perf_counter()
        self.seconds, self.taken, self._began = self.seconds + now - self._began, self.taken + 1, now
        return norm

    def meets(self, step: int) -> bool:
        return step % self.spec.local_steps == 0

    @torch.no_grad()
    def meet(self, waiting: Callable[[], None]) -> None:
        """Take the outer step: the same on every host, to the bit."""
        count, mine = len(self.replicas), self.replicas.mine
        told = [0.0] * (2 * count)
        told[mine] = self.tokens / self.crew.size
        told[count + mine] = self.seconds / max(1, self.taken) / self.crew.size
        told = self.world.sum_patiently(told, waiting)
        tokens, costs = told[:count], told[count:]
        # A replica that has taken no step is as fast as it was.
        known = [(old or now, now or old) for old, now in zip(self.costs, costs, strict=True)]
        self.costs = [old + _NEWEST * (now - old) for old, now in known]
        self.tokens, self.seconds, self.taken = 0, 0.0, 0
        weight = tokens[mine] / max(1.0, sum(tokens))
        if self.world.first_here:
            wire = torch.bfloat16 if self.spec.diloco_wire == "bf16" else torch.float32
            for names in self._chunks():
                way = torch.cat([(self.outer[n].to(self.world.device) - self.trained[n]).flatten() for n in names])
                way = (way * weight).to(wire)
                if self.across.size > 1:
                    dist.all_reduce(way, group=self.across.group)
                if self.keepers.size > 1:
                    dist.broadcast(way, group=self.keepers.group, group_src=0)
                parts = way.float().cpu().split([self.outer[name].numel() for name in names])
                for name, part in zip(names, parts, strict=True):
                    self.outer[name].grad = part.view_as(self.outer[name])
            self.outer_optimizer.step()
            self.outer_optimizer.zero_grad()
            for name, parameter in self.outer.items():
                self.trained[name].copy_(parameter)
        if self.host.size > 1:
            for parameter in self.trained.values():
                dist.broadcast(parameter.data, group=self.host.group, group_src=0)

    def _chunks(self) -> Iterator[list[str]]:
        names: list[str] = []
        for name, parameter in self.outer.items():
            if names and sum(self.outer[n].numel() for n in names) + parameter.numel() > _CHUNK:
                yield names
                names = []
            names.append(name)
        yield names

    def save(self, folder: Path) -> None:
        super().save(folder)
        outer = {"optimizer": self.outer_optimizer.state_dict(), "costs": self.costs}
        torch.save(outer, folder / "outer.pt")

    def load(self, folder: Path) -> None:
        super().load(folder)
        outer = torch.load(folder / "outer.pt", weights_only=True)
        if len(outer["costs"]) == len(self.costs):
            self.costs = outer["costs"]
        if self.world.first_here:
            with torch.no_grad():
                for name, parameter in self.outer.items():
                    parameter.copy_(self.trained[name])
            self.outer_optimizer.load_state_dict(outer["optimizer"])
