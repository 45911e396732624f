"""The plan of DiLoCo: its requirements and its costs. `diloco_fixed` describes the algorithm and runs it. Importable without torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainer.costs.cost import Layout, Memory, State, micro_batches
from trainer.strategy.ddp import DDPPlan, gradient_copies
from trainer.strategy.fsdp import FSDPPlan, sharded_state
from trainer.strategy.pipeline import PipelinePlan, check_stages
from trainer.strategy.plan import StrategyPlan, reject_unshardable
from trainer.strategy.replicas import CHUNK

if TYPE_CHECKING:
    from trainer.config import RunSpec
    from trainer.costs.cost import RowStats
    from trainer.distributed.world import World
    from trainer.method.module_with_loss import ModelWithLoss
    from trainer.model_files.model_shape import Shape
    from trainer.strategy.diloco_fixed import DiLoCo


class _ReplicaPipelinePlan(PipelinePlan):
    """The plan of a pipeline that is a replica."""

    def pipeline_hosts(self, spec: RunSpec) -> int:
        return spec.replica_hosts


_PIPELINE = _ReplicaPipelinePlan()
_INNER_PLANS: dict[str, DDPPlan | FSDPPlan | PipelinePlan] = {
    "ddp": DDPPlan(),
    "fsdp": FSDPPlan(),
    "pipeline": _PIPELINE,
}  # values of `replica_strategy`


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
    """The plan of DiLoCo, with fixed replicas or with torchft."""

    auto = "low_communication"
    concessions = 1
    shares_steps_by_speed = True

    def strategy_class(self, spec: RunSpec) -> type[DiLoCo]:
        if not self.separate_launchers(spec):
            from trainer.strategy.diloco_fixed import DiLoCo

            return DiLoCo
        from trainer.strategy.diloco_torchft import DiLoCoTorchFT  # requires the torchft extra

        return DiLoCoTorchFT

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
        if self.separate_launchers(spec):
            raise ValueError(
                f"diloco_membership: torchft requires replica_strategy ddp, got replica_strategy {spec.replica_strategy}"
            )

    def needs_packages(self, spec: RunSpec) -> dict[str, str]:
        return {"torchft": "diloco_membership=torchft"} if self.separate_launchers(spec) else {}

    def needs_own_gpus(self, spec: RunSpec) -> bool:
        return _INNER_PLANS[spec.replica_strategy].needs_own_gpus(spec)

    def field_prefixes(self, spec: RunSpec) -> set[str]:
        return {spec.strategy, spec.replica_strategy, "replica"}

    def separate_launchers(self, spec: RunSpec) -> bool:
        return spec.diloco_membership == "torchft"

    def sharded_weights(self, spec: RunSpec) -> bool:
        return spec.replica_strategy != "ddp"

    def pipeline_hosts(self, spec: RunSpec) -> int | None:
        return spec.replica_hosts if self._staged(spec) else None

    def _staged(self, spec: RunSpec) -> bool:
        """Return whether every replica is a pipeline."""
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
            compute, exposed = _PIPELINE.passing_seconds(spec, shape, layout, rows, part, optimizer, passing)
            return compute, exposed + communication - passing
        return super().step_seconds(spec, shape, layout, rows, part, optimizer, communication)

    def outside_step(self, spec: RunSpec, shape: Shape, layout: Layout, state: State) -> int:
        trained = shape.trained(spec) * 4
        return state.held + trained + 2 * min(trained, 4 * CHUNK)  # the pseudo-gradient, and a chunk of it in transit

    def comm_bytes(self, spec: RunSpec, shape: Shape, layout: Layout, *, gloo: bool) -> float:
        return sum(_comm_parts(spec, shape, layout, gloo=gloo))

    def notes(self, spec: RunSpec, shape: Shape) -> list[str]:
        if not self.separate_launchers(spec):
            return []
        mib = 16 * shape.trained(spec) / 2**20  # weights, AdamW's two moments, outer momentum
        return [
            f"diloco_membership=torchft: while a replica rejoins, it and the replica that sends its state each need "
            f"{mib:,.0f} MiB more host memory; the state is sent once"
        ]


PLAN = DiLoCoPlan()
