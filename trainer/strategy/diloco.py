"""DiLoCo: replicas run `local_steps` inner steps (AdamW), then one outer step (Nesterov) on the sum of their changes.

https://arxiv.org/abs/2311.08105. A replica is a host, or consecutive hosts, with DDP or FSDP inside. The pseudo-gradient of
the outer optimizer is the mean change of the replicas, weighted by the tokens that each trained on. Only that is
sent over the network, once every `local_steps` steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.common.errors import NonFiniteError
from trainer.common.lazy import LazyModule
from trainer.costs.cost import Layout, Memory, State, micro_batches
from trainer.data.shares import share
from trainer.strategy.base import Batch, Rows, Strategy, Update
from trainer.strategy.ddp import DDP, DDPPlan, gradient_copies
from trainer.strategy.fsdp import FSDP, FSDPPlan, sharded_state
from trainer.strategy.full_state_dict import MOMENTS
from trainer.strategy.pipeline import Pipeline, PipelinePlan, check_stages
from trainer.strategy.plan import StrategyPlan, reject_unshardable
from trainer.strategy.replicas import CHUNK, Replicas, apportion, by_speed

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn

    from trainer.config import RunSpec
    from trainer.costs.cost import RowStats
    from trainer.distributed.world import World
    from trainer.method.module_with_loss import ModelWithLoss
    from trainer.model_files.model_shape import Shape
else:
    torch, dist, nn = LazyModule("torch"), LazyModule("torch.distributed"), LazyModule("torch.nn")

_LONG_ROUND = 20  # minimum steps of a round for the full outer momentum
_NEWEST = 0.5  # weight of the last round in the moving average of a replica's speed

# Values of `replica_strategy`.
_INNER: dict[str, type[DDP] | type[FSDP] | type[Pipeline]] = {"ddp": DDP, "fsdp": FSDP, "pipeline": Pipeline}


class _ReplicaPipelinePlan(PipelinePlan):
    def pipeline_hosts(self, spec: RunSpec) -> int:
        return spec.replica_hosts


_PIPELINE = _ReplicaPipelinePlan()
_INNER_PLANS: dict[str, DDPPlan | FSDPPlan | PipelinePlan] = {
    "ddp": DDPPlan(),
    "fsdp": FSDPPlan(),
    "pipeline": _PIPELINE,
}


def _outer_bytes(spec: RunSpec, shape: Shape) -> int:
    """Return the bytes of the outer optimizer: a copy of the weights and its momentum."""
    return shape.trained(spec) * 8


def _comm_parts(spec: RunSpec, shape: Shape, layout: Layout, *, gloo: bool) -> tuple[float, float]:
    """Return the bytes that a process sends in a step within its replica, and to other replicas (mean over steps)."""
    if layout.world == 1:
        return 0.0, 0.0
    replicas = -(-len(layout.processes) // spec.replica_hosts)
    number = 2 if spec.comm_dtype != "32" else 4
    outer = 2 * (replicas - 1) / replicas * shape.trained(spec) * number / spec.local_steps
    inside = Layout(layout.processes[: spec.replica_hosts])
    if len(inside.processes) == 1:
        return 0.0, outer
    micro = micro_batches(spec, layout.world)
    return _INNER_PLANS[spec.replica_strategy].replica_comm_bytes(spec, shape, inside, micro, gloo=gloo), outer


class DiLoCoPlan(StrategyPlan):
    auto = "low_communication"
    concessions = 1
    shares_steps_by_speed = True

    def strategy_class(self, spec: RunSpec) -> type[DiLoCo]:
        return DiLoCo

    def validate(self, spec: RunSpec) -> None:
        if not self.sharded_weights(spec):
            return
        reject_unshardable(spec, "replica_strategy", possible=("quantize",))
        if self._staged(spec) and not spec.lora_r:
            raise ValueError(
                "replica_strategy: pipeline requires LoRA, got lora_r 0: the outer optimizer of every host holds all trained "
                "weights, set lora_r=16, or strategy=pipeline"
            )
        if self._staged(spec):
            check_stages(spec, "replica_strategy")

    def needs_own_gpus(self, spec: RunSpec) -> bool:
        return _INNER_PLANS[spec.replica_strategy].needs_own_gpus(spec)

    def sharded_weights(self, spec: RunSpec) -> bool:
        return spec.replica_strategy != "ddp"

    def pipeline_hosts(self, spec: RunSpec) -> int | None:
        return spec.replica_hosts if self._staged(spec) else None

    def _staged(self, spec: RunSpec) -> bool:
        return spec.replica_strategy == "pipeline"

    def supports_fast_kernels(self, spec: RunSpec) -> bool:
        return not self._staged(spec)

    def load_module(self, spec: RunSpec, world: World) -> ModelWithLoss:
        return _INNER_PLANS[spec.replica_strategy].load_module(spec, world)

    def runs_on(self, spec: RunSpec, shape: Shape, layout: Layout) -> bool:
        if self._staged(spec):
            if spec.replica_hosts >= len(layout.processes):  # one replica
                return False
            if not _PIPELINE.runs_on(spec, shape, layout):
                return False
        return -(-len(layout.processes) // spec.replica_hosts) <= spec.rows_per_step

    def autocast_copies(self, spec: RunSpec, shape: Shape) -> int:
        return _INNER_PLANS[spec.replica_strategy].autocast_copies(spec, shape)

    def state(self, spec: RunSpec, shape: Shape, layout: Layout, *, cuda: bool) -> State:
        state = super().state(spec, shape, layout, cuda=cuda)
        if self.sharded_weights(spec):
            shards = min(layout.group_sizes(spec.replica_hosts))
            state = sharded_state(spec, state, shape, shards, self.bytes_per_weight(spec))
        else:
            ranks = sum(layout.processes[: spec.replica_hosts])
            state = replace(state, gradients=state.gradients * gradient_copies(spec, ranks, layout.world))
        outer = 0 if cuda else _outer_bytes(spec, shape)  # in host memory
        return replace(state, optimizer=state.optimizer + outer)

    def memory(self, spec: RunSpec, shape: Shape, layout: Layout, rows: RowStats, *, cuda: bool = False) -> Memory:
        if not self._staged(spec):
            return super().memory(spec, shape, layout, rows, cuda=cuda)
        return max(self.memories(spec, shape, layout, rows, cuda=cuda), key=lambda each: each.total)

    def memories(self, spec: RunSpec, shape: Shape, layout: Layout, rows: RowStats, *, cuda: bool) -> list[Memory]:
        if not self._staged(spec):
            return super().memories(spec, shape, layout, rows, cuda=cuda)
        stages = _PIPELINE.memories(spec, shape, layout, rows, cuda=cuda)
        if cuda:
            return stages
        outer, trained = _outer_bytes(spec, shape), shape.trained(spec) * 4
        outside = outer + trained + 2 * min(trained, 4 * CHUNK)
        return [
            replace(stage, optimizer=stage.optimizer + outer, outside_step=stage.outside_step + outside)
            for stage in stages
        ]

    def rooms(self, spec: RunSpec, layout: Layout) -> tuple[float | None, ...]:
        return _PIPELINE.rooms(spec, layout) if self._staged(spec) else super().rooms(spec, layout)

    def step_seconds(
        self,
        spec: RunSpec,
        shape: Shape,
        layout: Layout,
        rows: RowStats,
        part: float,
        optimizer: float,
        communication: float,
    ) -> tuple[float, float]:
        if self._staged(spec):
            inside, outer = _comm_parts(spec, shape, layout, gloo=True)
            passing = communication * inside / ((inside + outer) or 1.0)
            compute, exposed = _PIPELINE.step_seconds(spec, shape, layout, rows, part, optimizer, passing)
            return compute, exposed + communication - passing
        return super().step_seconds(spec, shape, layout, rows, part, optimizer, communication)

    def outside_step(self, spec: RunSpec, shape: Shape, layout: Layout, state: State) -> int:
        trained = shape.trained(spec) * 4
        return state.held + trained + 2 * min(trained, 4 * CHUNK)  # the pseudo-gradient, and a chunk of it in transit

    def comm_bytes(self, spec: RunSpec, shape: Shape, layout: Layout, *, gloo: bool) -> float:
        return sum(_comm_parts(spec, shape, layout, gloo=gloo))


PLAN = DiLoCoPlan()


class DiLoCo(Strategy):
    """Replicas with an inner and an outer optimizer. Every host keeps the state of the outer one in host memory."""

    # Every replica has its own inner optimizer. A host that lost its state continues with that of another replica.
    per_host_files = ("optimizer.pt", *(f"{moment}.safetensors" for moment in MOMENTS))

    def __init__(self, spec: RunSpec, world: World, module: ModelWithLoss) -> None:
        super().__init__(spec, world.with_untimed_group(), module)
        replicas, timeout = Replicas.find(spec, world), spec.collective_timeout
        groups, self.mine = replicas.ranks, replicas.mine
        self.sizes = [float(len(ranks)) for ranks in groups]
        self.replica_group = world.subgroup(groups, timeout)
        self.inside = _INNER[spec.replica_strategy](spec, world, module, self.replica_group)
        self.lockstep = self.inside.lockstep
        leaders = [rank for rank, first in enumerate(world.gather(world.is_host_leader)) if first]
        # The first ranks of all replicas; the first ranks of all hosts of this replica; all ranks of this host.
        self.replica_leaders = world.subgroup([[ranks[0] for ranks in groups]], timeout)
        self.host_leaders = world.subgroup([[rank for rank in ranks if rank in leaders] for ranks in groups], timeout)
        nodes = world.gather(world.node_rank)
        self.host = world.subgroup(
            [[rank for rank, node in enumerate(nodes) if node == number] for number in sorted(set(nodes))], timeout
        )
        self.owners: list[int] = []
        self._step = 0
        # This replica's tokens, seconds and inner steps in this round, and the seconds per inner step of every replica.
        self.tokens, self.seconds, self.inner_steps = 0.0, 0.0, 0
        self.costs = [0.0] * len(self.sizes)
        initial = self.inside.full_params()
        if world.is_host_leader:
            self.outer = {name: nn.Parameter(value.cpu().clone()) for name, value in initial.items()}
            self.outer_optimizer = torch.optim.SGD(
                self.outer.values(), lr=spec.outer_lr, momentum=spec.outer_momentum, nesterov=spec.outer_momentum > 0
            )

    def updates(self, step: int, rows: Rows) -> list[Update]:
        """Split the rows of the step into equal portions, and return those of this replica, one inner step each."""
        self._step, count, place = step, len(self.sizes), step % self.spec.local_steps
        if place == 0 or not self.owners:
            # By the ranks of the replicas, or by measured speed if that shortens a round.
            speeds = by_speed(self.sizes, self.costs) if self.spec.balance == "auto" else self.sizes
            self.owners = apportion(count * self.spec.local_steps, speeds)
        self._began = time.perf_counter()
        owners = self.owners[place * count : (place + 1) * count]
        portions = [
            rows[share(len(rows), [1] * count, number)] for number, owner in enumerate(owners) if owner == self.mine
        ]
        return [self.inside.divide_among(portion, self.replica_group) for portion in portions if portion]

    def divide(self, rows: Rows) -> Update:
        if not self.inside.staged:
            return super().divide(rows)
        own = rows[share(len(rows), [1] * len(self.sizes), self.mine)]
        return self.inside.divide_among(own, self.replica_group)

    def backward(self, batch: Batch, total: float, last: bool) -> torch.Tensor:
        self.tokens += total if last else 0
        return self.inside.backward(batch, total, last)

    @property
    def update_group(self) -> World:
        return self.replica_group

    def comm_seconds(self) -> float | None:
        return self.inside.comm_seconds()

    def loss(self, batch: Batch) -> torch.Tensor:
        return self.inside.loss(batch)

    def rounds(self, rows: int) -> int:
        return self.inside.rounds(rows)

    def weights(self) -> Iterable[tuple[str, torch.Tensor]] | None:
        return self.inside.weights()

    def model_to_save(self) -> nn.Module:
        return self.inside.model_to_save()

    def step(self, lr: float) -> float:
        norm = self.inside.step(lr)
        now = time.perf_counter()
        self.seconds, self.inner_steps, self._began = self.seconds + now - self._began, self.inner_steps + 1, now
        return norm

    def is_sync_step(self, step: int) -> bool:
        return step % self.spec.local_steps == 0

    def sync(self, waiting: Callable[[], bool]) -> None:
        """Run the outer step, bit-equal on every host. Raises NonFiniteError: the weights of a rank are not finite; all ranks raise it."""
        count, mine = len(self.sizes), self.mine
        numbers = [0.0] * (2 * count)  # the tokens of every replica in this round, and its seconds per inner step
        numbers[mine] = self.tokens / self.replica_group.size
        numbers[count + mine] = self.seconds / max(1, self.inner_steps) / self.replica_group.size
        *numbers, not_finite = self.world.sum_without_timeout([*numbers, float(not self.weights_finite())], waiting)
        if not_finite:  # the outer step would pass them on to all
            raise NonFiniteError("weights are not finite", self._step + 1, self.spec.lr)
        known = [(old or now, now or old) for old, now in zip(self.costs, numbers[count:], strict=True)]  # 0: no step
        self.costs = [old + _NEWEST * (now - old) for old, now in known]
        self.tokens, self.seconds, self.inner_steps = 0.0, 0.0, 0
        weights = self.inside.full_params()  # on the first rank of every host
        if self.world.is_host_leader:
            self._set_gradients(weights, numbers[mine] / max(1.0, sum(numbers[:count])))
        del weights
        if self.world.is_host_leader:
            for group in self.outer_optimizer.param_groups:
                group["momentum"] = self._momentum()
            self.outer_optimizer.step()
            self.outer_optimizer.zero_grad()
        self.inside.set_params(self.outer if self.world.is_host_leader else None, self.host)

    def _set_gradients(self, weights: dict[str, torch.Tensor], weight: float) -> None:
        """Set the gradients of the outer optimizer: the change of this replica's weights times `weight`, summed over replicas."""
        dtype, device = torch.bfloat16 if self.spec.comm_dtype != "32" else torch.float32, self.world.device
        with torch.no_grad():
            for names in self._chunks():
                change = [(self.outer[name].to(device) - weights[name].to(device)).flatten() for name in names]
                gradient = (torch.cat(change) * weight).to(dtype)
                if self.replica_leaders.size > 1:
                    dist.all_reduce(gradient, group=self.replica_leaders.group)
                if self.host_leaders.size > 1:
                    dist.broadcast(gradient, group=self.host_leaders.group, group_src=0)
                parts = gradient.float().cpu().split([self.outer[name].numel() for name in names])
                for name, part in zip(names, parts, strict=True):
                    self.outer[name].grad = part.view_as(self.outer[name])

    def _momentum(self) -> float:
        """Return the outer momentum of this step. It is reduced in proportion to the learning rate, and for short rounds.

        With a momentum of 0.9 the weights move up to seven times as far as the replicas did. The paper's rounds have
        hundreds of steps, after which the replicas' changes point in different directions. After ten steps the changes are
        similar, and full momentum overshoots. At the end of the schedule it would still apply changes made at a high
        learning rate (docs/internals/benchmarks.md).
        """
        from trainer.models.optim import learning_rate

        rate = learning_rate(self.spec, self._step, self.steps) / self.spec.lr
        return self.spec.outer_momentum * rate * min(1.0, self.spec.local_steps / _LONG_ROUND)

    def _chunks(self) -> Iterator[list[str]]:
        """Yield the names of the weights in groups of at most CHUNK numbers, or one tensor."""
        names: list[str] = []
        for name in self.outer:
            if names and sum(self.outer[n].numel() for n in [*names, name]) > CHUNK:
                yield names
                names = []
            names.append(name)
        yield names

    def save(self, folder: Path) -> None:
        self.inside.save(folder)
        if self.world.is_host_leader:
            torch.save({"optimizer": self.outer_optimizer.state_dict(), "costs": self.costs}, folder / "outer.pt")

    def load(self, folder: Path) -> None:
        self.inside.load(folder)
        params = self.inside.full_params()
        outer = torch.load(folder / "outer.pt", weights_only=True)
        if len(outer["costs"]) == len(self.costs):
            self.costs = outer["costs"]
        if self.world.is_host_leader:
            with torch.no_grad():
                for name, parameter in self.outer.items():
                    parameter.copy_(params[name])
            self.outer_optimizer.load_state_dict(outer["optimizer"])
