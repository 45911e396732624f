"""DiLoCo: replicas run `local_steps` inner steps (AdamW), then one outer step (Nesterov) on the sum of their changes.

https://arxiv.org/abs/2311.08105. A replica is a host, or consecutive hosts, with DDP or FSDP inside. The pseudo-gradient of
the outer optimizer is the mean change of the replicas, weighted by the tokens that each trained on. Only that is
sent over the network, once every `local_steps` steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.shares import share
from trainer.errors import NonFiniteError
from trainer.planner.alternatives import (
    CHANGED,
    Alternative,
    Alternatives,
    optimizer_alternatives,
    quantize_alternatives,
    switch,
)
from trainer.planner.cost import Layout, State, micro_batches
from trainer.strategy import four_bits
from trainer.strategy.base import Batch, Rows, Strategy, Update
from trainer.strategy.ddp import DDP, DDPPlan, gradient_copies
from trainer.strategy.fsdp import FSDP, FSDPPlan, sharded_state
from trainer.strategy.full_state_dict import MOMENTS
from trainer.strategy.lazy import LazyModule
from trainer.strategy.plan import StrategyPlan, reject_generation, reject_unshardable
from trainer.strategy.replicas import Replicas, by_speed, deal

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn

    from trainer.config import RunSpec
    from trainer.distributed.world import World
    from trainer.model import TokenLoss
    from trainer.planner.model_shape import Shape
else:
    torch, dist, nn = LazyModule("torch"), LazyModule("torch.distributed"), LazyModule("torch.nn")

CHUNK = 16 << 20  # numbers of one all-reduce between replicas
_LONG_ROUND = 20  # minimum steps of a round for the full outer momentum
# Steps of a round that the planner tries, and how many times faster the run must be to justify them.
_ROUNDS = {20: 1.05, 50: 1.1, 100: 1.2, 200: 1.3, 500: 1.5}
_NEWEST = 0.5  # weight of the last round in the moving average of a replica's speed

# Values of `replica_strategy`.
_INNER: dict[str, type[DDP] | type[FSDP]] = {"ddp": DDP, "fsdp": FSDP}
_INNER_PLANS: dict[str, DDPPlan | FSDPPlan] = {"ddp": DDPPlan(), "fsdp": FSDPPlan()}


class DiLoCoPlan(StrategyPlan):
    """The plan of DiLoCo, with fixed replicas or with torchft."""

    summary = "hosts train independently and synchronize every local_steps steps"
    auto = "low_communication"
    gain = CHANGED
    cost = "another result: replicas hold different weights between synchronizations"
    has_replicas = True

    def strategy_class(self, spec: RunSpec) -> type[DiLoCo]:
        if not self.separate_launchers(spec):
            return DiLoCo
        from trainer.strategy.diloco_torchft import DiLoCoTorchFT  # requires the torchft extra

        return DiLoCoTorchFT

    def validate(self, spec: RunSpec) -> None:
        if self.separate_launchers(spec) and spec.diloco_comm_dtype == "int4":
            raise ValueError(
                "diloco_comm_dtype: int4 requires diloco_membership fixed, got torchft: set diloco_comm_dtype=bf16"
            )
        if not self.sharded_weights(spec):
            return
        reject_unshardable(spec, "replica_strategy")
        reject_generation(spec, "replica_strategy")
        if self.separate_launchers(spec):
            raise ValueError(
                f"diloco_membership: torchft requires replica_strategy ddp, got replica_strategy {spec.replica_strategy}"
            )

    def needs_packages(self, spec: RunSpec) -> dict[str, str]:
        return {"torchft": "diloco_membership=torchft"} if self.separate_launchers(spec) else {}

    def separate_launchers(self, spec: RunSpec) -> bool:
        return spec.diloco_membership == "torchft"

    def sharded_weights(self, spec: RunSpec) -> bool:
        return spec.replica_strategy == "fsdp"

    def alternatives(self, spec: RunSpec) -> list[Alternatives]:
        rounds = [Alternative()]
        for steps, gain in _ROUNDS.items():
            if steps > spec.local_steps:
                cost = "replicas differ more between synchronizations"
                rounds.append(Alternative({"local_steps": steps}, cost, gain / _ROUNDS.get(spec.local_steps, 1.0)))
        shards = switch(spec, "replica_strategy", "fsdp", "every pass within a replica sends the weights of all layers")
        return [*super().alternatives(spec), quantize_alternatives(spec), *optimizer_alternatives(spec), shards, rounds]

    def runs_on(self, spec: RunSpec, shape: Shape, layout: Layout) -> bool:
        return -(-len(layout.processes) // spec.replica_hosts) <= spec.rows_per_step

    def state(self, spec: RunSpec, shape: Shape, layout: Layout, *, cuda: bool) -> State:
        state = super().state(spec, shape, layout, cuda=cuda)
        if self.sharded_weights(spec):
            shards = min(layout.processes) * spec.replica_hosts
            state = sharded_state(spec, state, shape, shards, self.bytes_per_weight(spec))
        else:
            ranks = sum(layout.processes[: spec.replica_hosts])
            state = replace(state, gradients=state.gradients * gradient_copies(spec, ranks, layout.world))
        # The outer optimizer's copy of the weights, its momentum and the residual of 4-bit values are in host memory.
        outer = 0 if cuda else shape.trained(spec) * (12 if spec.diloco_comm_dtype == "int4" else 8)
        return replace(state, optimizer=state.optimizer + outer)

    def outside_step(self, spec: RunSpec, shape: Shape, layout: Layout, state: State) -> int:
        trained = shape.trained(spec) * 4
        # The pseudo-gradient, and a chunk of it in transit.
        return state.held + trained + 2 * min(trained, 4 * CHUNK)

    def comm_bytes(self, spec: RunSpec, shape: Shape, layout: Layout, *, gloo: bool) -> float:
        if layout.world == 1:
            return 0.0
        replicas = -(-len(layout.processes) // spec.replica_hosts)
        if spec.diloco_comm_dtype == "int4":  # an all-gather
            outer = (replicas - 1) * shape.trained(spec) * four_bits.BYTES_PER_VALUE / spec.local_steps
        else:
            number = 2 if spec.diloco_comm_dtype == "bf16" else 4
            outer = 2 * (replicas - 1) / replicas * shape.trained(spec) * number / spec.local_steps
        inside = Layout(layout.processes[: spec.replica_hosts])
        if len(inside.processes) == 1:
            return outer
        micro = micro_batches(spec, layout.world)
        inner = _INNER_PLANS[spec.replica_strategy]
        return outer + inner.replica_comm_bytes(spec, shape, inside, micro, gloo=gloo)

    def notes(self, spec: RunSpec, shape: Shape) -> list[str]:
        if not self.separate_launchers(spec):
            return []
        mib = 16 * shape.trained(spec) / 2**20  # weights, AdamW's two moments, outer momentum
        return [
            f"diloco_membership=torchft: while a replica rejoins, it and the replica that sends its state each need "
            f"{mib:,.0f} MiB more host memory; the state is sent once"
        ]


class DiLoCo(Strategy):
    """Replicas with an inner and an outer optimizer. Every host keeps the state of the outer one in host memory."""

    # Every replica has its own inner optimizer. A host that lost its state continues with that of another replica.
    per_host_files = ("optimizer.pt", four_bits.RESIDUAL_FILE, *(f"{moment}.safetensors" for moment in MOMENTS))

    def __init__(self, spec: RunSpec, world: World, module: TokenLoss) -> None:
        super().__init__(spec, world.with_untimed_group(), module)
        groups = self.find_replicas(spec, world)
        timeout = spec.collective_timeout
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
        self._step = self._steps = 0  # the current step, and the number of steps of the run
        # This replica's tokens, seconds and inner steps in this round, and the seconds per inner step of every replica.
        self.tokens, self.seconds, self.inner_steps = 0, 0.0, 0
        self.costs = [0.0] * len(self.sizes)
        # The full trained weights, on the first rank of every host during a synchronization.
        self.local_params: dict[str, torch.Tensor] = {}
        initial = self.inside.full_params()
        if world.is_host_leader:
            self.outer = {name: nn.Parameter(value.cpu().clone()) for name, value in initial.items()}
            self.outer_optimizer = torch.optim.SGD(
                self.outer.values(), lr=spec.outer_lr, momentum=spec.outer_momentum, nesterov=spec.outer_momentum > 0
            )
            # What rounding to 4 bits lost, in the order of `outer`.
            numbers = sum(value.numel() for value in initial.values()) if spec.diloco_comm_dtype == "int4" else 0
            self.residual = torch.zeros(numbers)

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

    def find_replicas(self, spec: RunSpec, world: World) -> list[list[int]]:
        """Set the index of this replica (`mine`) and the number of ranks of all (`sizes`); return the ranks of all replicas.

        Only the replicas of this torchrun are returned.
        """
        replicas = Replicas.find(spec, world)
        self.sizes, self.mine = [float(len(ranks)) for ranks in replicas.ranks], replicas.mine
        return replicas.ranks

    def updates(self, step: int, rows: Rows) -> list[Update]:
        """Split the rows of the step into equal portions, and return those of this replica, one inner step each."""
        self._step = step
        count, place = len(self.sizes), step % self.spec.local_steps
        if place == 0 or not self.owners:
            self.owners = self.assign(count * self.spec.local_steps)
        self._began = time.perf_counter()
        assigned = []
        for number in range(count):
            portion = rows[share(len(rows), [1] * count, number)]
            if portion and self.owners[place * count + number] == self.mine:
                group = self.replica_group
                assigned.append(Update(portion, portion[share(len(portion), [1] * group.size, group.rank)]))
        return assigned

    def assign(self, turns: int) -> list[int]:
        """Return the replica of each of the `turns` portions of a round."""
        return deal(turns, self._speeds(self.sizes, self.costs))

    def backward(self, batch: Batch, tokens: int, last: bool) -> torch.Tensor:
        self.tokens += tokens if last else 0
        return self.inside.backward(batch, tokens, last)

    def comm_seconds(self) -> float | None:
        return self.inside.comm_seconds()

    def loss(self, batch: Batch) -> torch.Tensor:
        return self.inside.loss(batch)

    def rounds(self, rows: int) -> int:
        return self.inside.rounds(rows)

    def weights(self) -> dict[str, torch.Tensor] | None:
        return self.inside.weights()

    def _speeds(self, even: list[float], costs: list[float]) -> list[float]:
        """Return the relative speed of the replicas: `even` by their ranks, or measured if that shortens a round."""
        return by_speed(even, costs) if self.spec.balance == "auto" else even

    def step(self, lr: float) -> float:
        norm = self.inside.step(lr)
        now = time.perf_counter()
        self.seconds, self.inner_steps, self._began = self.seconds + now - self._began, self.inner_steps + 1, now
        return norm

    def is_sync_step(self, step: int) -> bool:
        return step % self.spec.local_steps == 0

    def sync(self, waiting: Callable[[], bool], flags: list[float]) -> None:
        """Run the outer step, bit-equal on every host.

        Raises:
            NonFiniteError: the weights of a rank are not finite; all ranks raise it.
        """
        count, mine = len(self.sizes), self.mine
        numbers = [0.0] * (2 * count)
        numbers[mine], numbers[count + mine] = (value / self.replica_group.size for value in self.round_counts())
        numbers.append(float(not self.weights_finite()))
        *numbers, not_finite = self.world.sum_without_timeout(numbers, waiting)
        self.reject_not_finite(not_finite)
        tokens = numbers[:count]
        self.end_round(numbers[count:])
        self.local_params = self.inside.full_params()
        if self.world.is_host_leader:
            weight, begin = tokens[mine] / max(1.0, sum(tokens)), 0
            for names in self.chunks(CHUNK):
                if self.spec.diloco_comm_dtype == "int4":
                    gradient = self._sum_in_four_bits(names, weight, begin)
                    begin += len(gradient)
                else:
                    gradient = self.pseudo_gradient(names, weight, self.world.device)
                    if self.replica_leaders.size > 1:
                        dist.all_reduce(gradient, group=self.replica_leaders.group)
                self.broadcast_gradient(names, gradient)
        self.outer_step()

    def reject_not_finite(self, ranks: float) -> None:
        """Raise NonFiniteError if the weights of any of the `ranks` are not finite: the outer step would pass them on to all."""
        if ranks:
            raise NonFiniteError("weights are not finite", self._step + 1, self.spec.lr)

    def round_counts(self) -> tuple[float, float]:
        """Return the tokens of this round, and the seconds per inner step on this rank."""
        return self.tokens, self.seconds / max(1, self.inner_steps)

    def end_round(self, costs: list[float]) -> None:
        """Update the seconds per inner step of all replicas, and start a new round. 0: the replica ran no step."""
        known = [(old or now, now or old) for old, now in zip(self.costs, costs, strict=True)]
        self.costs = [old + _NEWEST * (now - old) for old, now in known]
        self.tokens, self.seconds, self.inner_steps = 0, 0.0, 0

    def pseudo_gradient(self, names: list[str], weight: float, device: torch.device) -> torch.Tensor:
        """Return the change of this replica's weights times `weight`, flat and in the data type of communication."""
        with torch.no_grad():
            change = [(self.outer[n].to(device) - self.local_params[n].to(device)).flatten() for n in names]
            gradient = torch.cat(change) * weight
            return gradient.to(torch.bfloat16 if self.spec.diloco_comm_dtype == "bf16" else torch.float32)

    def _sum_in_four_bits(self, names: list[str], weight: float, begin: int) -> torch.Tensor:
        """Return the sum of the replicas' pseudo-gradients, each rounded to 4 bits. `begin`: their place in the residual.

        Values are rounded and summed on the CPU, in the order of the replicas, so that the sum is bit-equal on all hosts.
        """
        group, device = self.replica_leaders, self.world.device
        values = self.pseudo_gradient(names, weight, torch.device("cpu"))
        packed = four_bits.pack_with_feedback(values, self.residual[begin : begin + len(values)]).to(device)
        parts = [packed]
        if group.size > 1:
            parts = [torch.empty_like(packed) for _ in range(group.size)]
            dist.all_gather(parts, packed, group=group.group)
        total = torch.zeros_like(values)
        for part in parts:
            total += four_bits.unpack(part.cpu(), len(values))
        return total.to(device)

    def broadcast_gradient(self, names: list[str], gradient: torch.Tensor) -> None:
        """Set the sum of the replicas' pseudo-gradients on all hosts of this replica."""
        with torch.no_grad():
            if self.host_leaders.size > 1:
                dist.broadcast(gradient, group=self.host_leaders.group, group_src=0)
            self.set_gradient(names, gradient)

    def set_gradient(self, names: list[str], gradient: torch.Tensor) -> None:
        """Set the gradient of the outer optimizer on this host."""
        parts = gradient.float().cpu().split([self.outer[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            self.outer[name].grad = part.view_as(self.outer[name])

    def outer_step(self) -> None:
        """Run the outer optimizer, and set the weights on all ranks of this replica."""
        self.local_params = {}
        if self.world.is_host_leader:
            for group in self.outer_optimizer.param_groups:
                group["momentum"] = self._momentum()
            self.outer_optimizer.step()
            self.outer_optimizer.zero_grad()
        self.inside.set_params(self.outer if self.world.is_host_leader else None, self.host)

    def _momentum(self) -> float:
        """Return the outer momentum of this step. It is reduced in proportion to the learning rate, and for short rounds.

        With a momentum of 0.9 the weights move up to seven times as far as the replicas did. The paper's rounds have
        hundreds of steps, after which the replicas' changes point in different directions. After ten steps the changes are
        similar, and full momentum overshoots. At the end of the schedule it would still apply changes made at a high
        learning rate (docs/benchmarks.md).
        """
        from trainer.optim import learning_rate

        rate = learning_rate(self.spec, self._step, self._steps) / self.spec.lr
        return self.spec.outer_momentum * rate * min(1.0, self.spec.local_steps / _LONG_ROUND)

    def chunks(self, most: int) -> Iterator[list[str]]:
        """Yield all names in groups of at most `most` numbers, or one tensor."""
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
            if len(self.residual):
                four_bits.write_residual(folder, self.residual, self.mine, len(self.sizes))

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
            if len(self.residual):
                four_bits.read_residual(folder, self.residual, self.mine, len(self.sizes))
