"""DiLoCo: replicas take `local_steps` steps of their own (AdamW), then an outer step (Nesterov) on how far they came.

https://arxiv.org/abs/2311.08105. A replica is a host, or neighbouring hosts, with DDP or FSDP inside. The sum of the replicas'
ways, weighed by the tokens that each trained on, is the pseudo-gradient of the outer optimizer; only that goes over the
network, once in `local_steps` steps.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.config.run_spec import RunSpec
from trainer.data.order import share
from trainer.distributed.world import World
from trainer.model import TokenLoss
from trainer.optim import learning_rate
from trainer.planner.cost import CHUNK
from trainer.strategy.base import Batch, Rows, Strategy, Update
from trainer.strategy.ddp import DDP
from trainer.strategy.full_state_dict import MOMENTS
from trainer.strategy.replicas import Replicas, by_speed, deal

if TYPE_CHECKING:
    from trainer.strategy.fsdp import FSDP

_LONG = 20  # steps of a round from which on the outer momentum is full
_NEWEST = 0.5  # share of the newest round in what is known of a replica's speed


def _inside(spec: RunSpec, world: World, module: TokenLoss, crew: World) -> "DDP | FSDP":
    if spec.replica_strategy == "fsdp":
        from trainer.strategy.fsdp import FSDP  # torch.distributed.checkpoint takes its time

        return FSDP(spec, world, module, crew)
    return DDP(spec, world, module, crew)


class DiLoCo(Strategy):
    """Replicas with an inner and an outer optimizer. The outer one's state is kept in the host's memory, once a host."""

    # The inner optimizer's state is a replica's own; a host that lost it goes on with another replica's.
    per_host_files = ("optimizer.pt", *(f"{moment}.safetensors" for moment in MOMENTS))

    def __init__(self, spec: RunSpec, world: World, module: TokenLoss) -> None:
        super().__init__(spec, world.with_untimed_group(), module)
        parts = self.find(spec, world)
        self.crew = world.subgroup(parts, spec.collective_timeout)
        self.inside = _inside(spec, world, module, self.crew)
        self.lockstep = self.inside.lockstep
        firsts = [rank for rank, first in enumerate(world.gather(world.is_host_leader)) if first]
        # Who speaks for a replica, who keeps its outer state on each of its hosts, and who is beside the one that does.
        self.across = world.subgroup([[ranks[0] for ranks in parts]], spec.collective_timeout)
        self.keepers = world.subgroup(
            [[rank for rank in ranks if rank in firsts] for ranks in parts], spec.collective_timeout
        )
        nodes = world.gather(world.node_rank)
        self.host = world.subgroup(
            [[rank for rank, node in enumerate(nodes) if node == number] for number in sorted(set(nodes))],
            spec.collective_timeout,
        )
        self.owners: list[int] = []
        self._step = self._steps = 0  # that which is taken, and those of the run
        # Of this round: tokens, seconds and inner steps of this replica. Of all rounds: seconds of an inner step, by replica.
        self.tokens, self.seconds, self.taken = 0, 0.0, 0
        self.costs = [0.0] * len(self.sizes)
        # What is trained, whole: on the first rank of every host while replicas meet.
        self.come: dict[str, torch.Tensor] = {}
        began = self.inside.whole()
        if world.is_host_leader:
            self.outer = {name: nn.Parameter(value.cpu().clone()) for name, value in began.items()}
            self.outer_optimizer = torch.optim.SGD(
                self.outer.values(), lr=spec.outer_lr, momentum=spec.outer_momentum, nesterov=spec.outer_momentum > 0
            )

    def join(
        self,
        start: str,
        steps: int,
        run_dir: Path,
        checkpoint_state: Callable[[], dict[str, Any]],
        waiting: Callable[[], bool],
    ) -> bool:
        self._steps = steps
        return False

    def find(self, spec: RunSpec, world: World) -> list[list[int]]:
        """Find out which replica this is, `mine`, and the `sizes` of all, in ranks; return the replicas of this torchrun."""
        replicas = Replicas.find(spec, world)
        self.sizes, self.mine = [float(len(ranks)) for ranks in replicas.ranks], replicas.mine
        return replicas.ranks

    def updates(self, step: int, rows: Rows) -> list[Update]:
        """Deal the step's rows to the replicas in portions of equal size, each an inner step for whoever gets it."""
        self._step = step
        count, place = len(self.sizes), step % self.spec.local_steps
        if place == 0 or not self.owners:
            self.owners = self.deal(count * self.spec.local_steps)
        self._began = time.perf_counter()
        dealt = []
        for number in range(count):
            portion = rows[share(len(rows), [1] * count, number)]
            if portion and self.owners[place * count + number] == self.mine:
                dealt.append(Update(portion, portion[share(len(portion), [1] * self.crew.size, self.crew.rank)]))
        return dealt

    def deal(self, turns: int) -> list[int]:
        """Return which replica takes each of a round's portions."""
        return deal(turns, self._speeds(self.sizes, self.costs))

    def backward(self, batch: Batch, tokens: int, last: bool) -> torch.Tensor:
        self.tokens += tokens if last else 0
        return self.inside.backward(batch, tokens, last)

    def loss(self, batch: Batch) -> torch.Tensor:
        return self.inside.loss(batch)

    def rounds(self, rows: int) -> int:
        return self.inside.rounds(rows)

    def weights(self) -> dict[str, torch.Tensor] | None:
        return self.inside.weights()

    def _speeds(self, even: list[float], costs: list[float]) -> list[float]:
        """Return how many portions replicas take, one against another: by their ranks, or by measured speed if that pays."""
        return by_speed(even, costs) if self.spec.balance == "auto" else even

    def step(self, lr: float) -> float:
        norm = self.inside.step(lr)
        now = time.perf_counter()
        self.seconds, self.taken, self._began = self.seconds + now - self._began, self.taken + 1, now
        return norm

    def is_sync_step(self, step: int) -> bool:
        return step % self.spec.local_steps == 0

    def sync(self, waiting: Callable[[], bool], flags: list[float]) -> None:
        """Take the outer step: the same on every host, to the bit."""
        count, mine = len(self.sizes), self.mine
        numbers = [0.0] * (2 * count)
        numbers[mine], numbers[count + mine] = (value / self.crew.size for value in self.round())
        numbers = self.world.sum_without_timeout(numbers, waiting)
        tokens = numbers[:count]
        self.learned(numbers[count:])
        self.come = self.inside.whole()
        if self.world.is_host_leader:
            for names in self.chunks(CHUNK):
                way = self.way(names, tokens[mine] / max(1.0, sum(tokens)), self.world.device)
                if self.across.size > 1:
                    dist.all_reduce(way, group=self.across.group)
                self.take(names, way)
        self.outer_step()

    def round(self) -> tuple[float, float]:
        """Return the tokens of this round and the seconds of one of its inner steps, on this rank."""
        return self.tokens, self.seconds / max(1, self.taken)

    def learned(self, costs: list[float]) -> None:
        """Take up what an inner step took each replica, and begin a new round. One that took no step is as fast as it was."""
        known = [(old or now, now or old) for old, now in zip(self.costs, costs, strict=True)]
        self.costs = [old + _NEWEST * (now - old) for old, now in known]
        self.tokens, self.seconds, self.taken = 0, 0.0, 0

    @torch.no_grad()
    def way(self, names: list[str], weight: float, device: torch.device) -> torch.Tensor:
        """Return how far this replica has come, times its weight, as it goes over the wire."""
        way = torch.cat([(self.outer[n].to(device) - self.come[n].to(device)).flatten() for n in names])
        return (way * weight).to(torch.bfloat16 if self.spec.diloco_wire == "bf16" else torch.float32)

    @torch.no_grad()
    def take(self, names: list[str], way: torch.Tensor) -> None:
        """Take the sum of the replicas' ways for the pseudo-gradient, on all hosts of this replica."""
        if self.keepers.size > 1:
            dist.broadcast(way, group=self.keepers.group, group_src=0)
        self.set(names, way)

    def set(self, names: list[str], way: torch.Tensor) -> None:
        """Take it on this host."""
        parts = way.float().cpu().split([self.outer[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            self.outer[name].grad = part.view_as(self.outer[name])

    @torch.no_grad()
    def outer_step(self) -> None:
        """Go where the pseudo-gradients lead, on all ranks of this replica."""
        self.come = {}
        if self.world.is_host_leader:
            for group in self.outer_optimizer.param_groups:
                group["momentum"] = self._momentum()
            self.outer_optimizer.step()
            self.outer_optimizer.zero_grad()
        self.inside.put(self.outer if self.world.is_host_leader else None, self.host)

    def _momentum(self) -> float:
        """Return the outer momentum of this meeting: in proportion to the learning rate, and to short rounds.

        A full one goes in all seven times as far as replicas went. After the hundreds of steps of the paper's rounds they
        have gone in unlike directions; after ten they agree, and would be thrown beyond where they meant to go, at the end
        of the schedule still by what they did when the rate was high (docs/benchmarks.md).
        """
        rate = learning_rate(self.spec, self._step, self._steps) / self.spec.lr
        return self.spec.outer_momentum * rate * min(1.0, self.spec.local_steps / _LONG)

    def chunks(self, most: int) -> Iterator[list[str]]:
        """Yield all names in groups of at most so many numbers, or one tensor."""
        names: list[str] = []
        for name, parameter in self.outer.items():
            if names and sum(self.outer[n].numel() for n in names) + parameter.numel() > most:
                yield names
                names = []
            names.append(name)
        yield names

    def save(self, folder: Path) -> None:
        self.inside.save(folder)
        if self.world.is_host_leader:
            outer = {"optimizer": self.outer_optimizer.state_dict(), "costs": self.costs}
            torch.save(outer, folder / "outer.pt")

    def load(self, folder: Path) -> None:
        self.inside.load(folder)
        began = self.inside.whole()
        outer = torch.load(folder / "outer.pt", weights_only=True)
        if len(outer["costs"]) == len(self.costs):
            self.costs = outer["costs"]
        if self.world.is_host_leader:
            with torch.no_grad():
                for name, parameter in self.outer.items():
                    parameter.copy_(began[name])
            self.outer_optimizer.load_state_dict(outer["optimizer"])
