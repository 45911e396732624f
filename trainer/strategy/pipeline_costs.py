"""What a stage of a pipeline holds, computes and sends. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.costs.cost import (
    Layout,
    State,
    activation_bytes,
    autocast_bytes,
    forward_products,
    full_state,
    half_hidden,
    layer_bytes,
)
from trainer.strategy.pipeline_split import LayerCosts

if TYPE_CHECKING:
    from trainer.config import RunSpec
    from trainer.costs.cost import RowStats
    from trainer.model_files.model_shape import Shape


def layer_costs(spec: RunSpec, shape: Shape, rows: RowStats, bytes_per_weight: int, *, cuda: bool) -> LayerCosts:
    """Return the needs of a layer, the embedding and the head on a rank that holds them."""
    layer = stage_state(spec, shape, bytes_per_weight, 1, first=False, last=False)
    stored, logits = activation_bytes(spec, shape, rows, cuda=cuda)
    copies = autocast_bytes(spec, shape, bytes_per_weight)
    matrices, head, attention = forward_products(shape, rows)
    none = stage_state(spec, shape, bytes_per_weight, 0, first=False, last=False).held
    # As in `row_flops`: only layers are computed again in the backward pass.
    passes, again = 2 if spec.lora_r else 3, int(spec.gradient_checkpointing)
    return LayerCosts(
        head=head * passes * shape.layers / (matrices * (passes + again) + attention * (3 + again)),
        layer=layer.held + copies * again / shape.layers,
        # Every micro-batch in flight keeps its own copies of the weights, unless layers are computed again.
        saved=(stored + copies * (1 - again)) / shape.layers,
        received=boundary_bytes(spec, shape, rows) * 2,
        first=stage_state(spec, shape, bytes_per_weight, 0, first=True, last=False).held - none,
        last=stage_state(spec, shape, bytes_per_weight, 0, first=False, last=True).held - none + logits,
    )


def stage_state(spec: RunSpec, shape: Shape, bytes_per_weight: int, layers: int, *, first: bool, last: bool) -> State:
    """Return the part of the state of the whole model that belongs to a rank with `layers` layers.

    `first`, `last`: whether it also holds the embedding, and the final norm and the head.
    """
    ends = shape.head_parameters * (first + last) + shape.other * last
    if first and last and shape.tied:
        ends -= shape.head_parameters
    if spec.lora_r:
        head = spec.lora_r * (shape.hidden + shape.vocabulary) if shape.head_target(spec) else 0
        trained = (shape.trained(spec) - head) // shape.layers * layers + head * last
    else:
        trained = layers * shape.layer_parameters + ends
    state, whole = full_state(spec, shape, bytes_per_weight), max(1, shape.trained(spec))
    return State(
        base=layers * layer_bytes(spec, shape, bytes_per_weight) + ends * bytes_per_weight,
        adapters=state.adapters * trained // whole,
        gradients=state.gradients * trained // whole,
        optimizer=state.optimizer * trained // whole,
    )


def boundary_bytes(spec: RunSpec, shape: Shape, rows: RowStats) -> float:
    """Return the bytes of the hidden states of one micro-batch in transit between two ranks."""
    half = spec.comm_dtype == "bf16" or half_hidden(spec, shape)
    return spec.batch_size * rows.places * shape.hidden * (2 if half else 4)


def one_pipeline(hosts: int, layout: Layout) -> tuple[Layout, int]:
    """Return the layout of one pipeline of `hosts` hosts (0: all), and the number of pipelines.

    Its ranks have the memory of the smallest, and the speed of the slowest rank of their stage.
    """
    hosts = hosts or len(layout.processes)
    count = max(1, len(layout.processes) // hosts)
    if count == 1:
        return layout, 1
    processes = layout.processes[:hosts]
    stages = sum(processes)
    rooms = []
    for stage in range(stages if layout.rooms else 0):
        known = layout.rooms[stage : stages * count : stages]
        rooms.append(None if None in known else min(room for room in known if room is not None))
    speeds = tuple(
        min(layout.speeds[stage : stages * count : stages]) for stage in range(stages if layout.speeds else 0)
    )
    return Layout(processes, tuple(rooms), speeds=speeds), count


def speeds_of(layout: Layout, ranks: int) -> tuple[float, ...]:
    return layout.speeds[:ranks] or (1.0,) * ranks
