"""What DiLoCo sends, and what its outer optimizer holds. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.costs.cost import Layout, micro_batches
from trainer.strategy import four_bits

if TYPE_CHECKING:
    from trainer.config import RunSpec
    from trainer.costs.model_shape import Shape
    from trainer.strategy.ddp import DDPPlan
    from trainer.strategy.fsdp import FSDPPlan
    from trainer.strategy.pipeline import PipelinePlan


CHUNK = 16 << 20  # numbers of one all-reduce between replicas


def outer_bytes(spec: RunSpec, shape: Shape) -> int:
    """Return the bytes of the outer optimizer: a copy of the weights, its momentum and the residual of 4-bit values."""
    return shape.trained(spec) * (12 if spec.diloco_comm_dtype == "int4" else 8)


def comm_parts(
    spec: RunSpec, shape: Shape, layout: Layout, inner: DDPPlan | FSDPPlan | PipelinePlan, *, gloo: bool
) -> tuple[float, float]:
    """Return the bytes that a process sends in a step within its replica, and to other replicas (mean over steps).

    `inner`: the plan of the strategy within a replica.
    """
    if layout.world == 1:
        return 0.0, 0.0
    replicas = -(-len(layout.processes) // spec.replica_hosts)
    if spec.diloco_comm_dtype == "int4":  # to every other replica
        outer = (replicas - 1) * shape.trained(spec) * four_bits.BYTES_PER_VALUE / spec.local_steps
    else:
        number = 2 if spec.diloco_comm_dtype == "bf16" else 4
        outer = 2 * (replicas - 1) / replicas * shape.trained(spec) * number / spec.local_steps
    inside = Layout(layout.processes[: spec.replica_hosts])
    if len(inside.processes) == 1:
        return 0.0, outer
    micro = micro_batches(spec, layout.world)
    return inner.replica_comm_bytes(spec, shape, inside, micro, gloo=gloo), outer
