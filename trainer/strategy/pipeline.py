"""Pipeline parallelism: every rank holds some of the decoder layers, and micro-batches pass through the ranks in turn.

Only activations and their gradients travel between neighbouring ranks. The gradients are those of the whole batch.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import UserError
from trainer.planner.alternatives import ROUNDED, Alternatives, switch
from trainer.planner.cost import (
    Layout,
    Memory,
    State,
    activation_bytes,
    autocast_bytes,
    forward_products,
    full_state,
    micro_batches,
)
from trainer.strategy.base import Batch, Rows, Strategy, Update, Writing, check_norm
from trainer.strategy.lazy import LazyModule
from trainer.strategy.pipeline_split import (
    PIPELINE_KINDS,
    LayerCosts,
    RankFacts,
    divide_layers,
    in_flight,
    parse_layers,
)
from trainer.strategy.plan import StrategyPlan, every, reject_generation, reject_unshardable

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn

    from trainer.config import RunSpec
    from trainer.distributed.pipeline_stage import StageLoss
    from trainer.distributed.world import World
    from trainer.model import TokenLoss
    from trainer.planner.cost import Rows as MeanRows
    from trainer.planner.model_shape import Shape
else:
    torch, dist, nn = LazyModule("torch"), LazyModule("torch.distributed"), LazyModule("torch.nn")


def layer_costs(spec: RunSpec, shape: Shape, rows: MeanRows, bytes_per_weight: int, *, cuda: bool) -> LayerCosts:
    """Return what a layer, the embedding and the head need on a rank that holds them."""
    state = full_state(spec, shape, bytes_per_weight)
    layer = stage_state(spec, shape, state, 1, first=False, last=False)
    stored, logits = activation_bytes(spec, shape, rows, cuda=cuda)
    matrices, head, attention = forward_products(shape, rows)
    none = stage_state(spec, shape, state, 0, first=False, last=False).held
    return LayerCosts(
        head=head * shape.layers / (matrices + attention),
        layer=layer.held + autocast_bytes(spec, shape) / shape.layers,
        saved=stored / shape.layers,
        received=boundary_bytes(spec, shape, rows) * 2,
        first=stage_state(spec, shape, state, 0, first=True, last=False).held - none,
        last=stage_state(spec, shape, state, 0, first=False, last=True).held - none + logits,
    )


def stage_state(spec: RunSpec, shape: Shape, state: State, layers: int, *, first: bool, last: bool) -> State:
    """Return the part of the state of the whole model that belongs to a rank with `layers` layers.

    `first`, `last`: whether it also holds the embedding, and the final norm and the head.
    """
    ends = shape.head_parameters * (first + last) + shape.other * last
    if first and last and shape.tied:
        ends -= shape.head_parameters
    parameters = layers * shape.layer_parameters + ends
    if spec.lora_r:
        head = spec.lora_r * (shape.hidden + shape.vocabulary) if shape.head_target(spec) else 0
        trained = (shape.trained(spec) - head) // shape.layers * layers + head * last
    else:
        trained = parameters
    whole = max(1, shape.trained(spec))
    return State(
        base=state.base * parameters // shape.parameters,
        adapters=state.adapters * trained // whole,
        gradients=state.gradients * trained // whole,
        optimizer=state.optimizer * trained // whole,
    )


def boundary_bytes(spec: RunSpec, shape: Shape, rows: MeanRows) -> float:
    """Return the bytes of the hidden states of one micro-batch in transit between two ranks."""
    half = spec.pipeline_comm_dtype == "bf16" or (spec.lora_r > 0 and spec.precision == "bf16-mixed")
    return spec.batch_size * rows.places * shape.hidden * (2 if half else 4)


class PipelinePlan(StrategyPlan):
    """The plan of pipeline parallelism. Costs assume equally fast ranks; a run divides the layers by measured speed."""

    summary = "every rank holds some of the layers"
    auto = "exact"
    gain = 1.1
    cost = "ranks wait while the pipeline fills and drains; a lost host stops the run until its layers are back"

    def strategy_class(self, spec: RunSpec) -> type[Pipeline]:
        return Pipeline

    def validate(self, spec: RunSpec) -> None:
        reject_unshardable(spec, "strategy")
        reject_generation(spec, "strategy")
        parse_layers(spec.pipeline_layers)
        if spec.teacher:
            raise ValueError("teacher: a pipeline cannot hold a teacher: set strategy=ddp, or remove teacher")

    def sharded_weights(self, spec: RunSpec) -> bool:
        return True

    def supports_fast_kernels(self, spec: RunSpec) -> bool:
        return False

    def load_module(self, spec: RunSpec, world: World) -> TokenLoss:
        from trainer.distributed.pipeline_measure import divide_model
        from trainer.distributed.pipeline_stage import load_stage
        from trainer.planner.cost import Rows as MeanRows
        from trainer.planner.model_shape import shape_of

        cuda = world.device.type == "cuda"
        costs = layer_costs(spec, shape_of(spec), MeanRows.full(spec), self.bytes_per_weight(spec), cuda=cuda)
        division = divide_model(spec, world, costs)
        if world.rank == 0:
            print(f"pipeline: layers of {division.describe()}")
        return load_stage(spec, division, world.device)

    # Costs --------------------------------------------------------------------------------------------------------------

    def alternatives(self, spec: RunSpec) -> list[Alternatives]:
        cost = "activations and their gradients are rounded to bfloat16 in transit"
        half = spec.lora_r > 0 and spec.precision == "bf16-mixed"  # they travel in bfloat16 in any case
        comm = [] if half else [switch(spec, "pipeline_comm_dtype", "bf16", cost, ROUNDED)]
        return [*super().alternatives(spec), *comm]

    def runs_on(self, spec: RunSpec, shape: Shape, layout: Layout) -> bool:
        return 1 < layout.world <= shape.layers and shape.kind in PIPELINE_KINDS

    def layers(self, spec: RunSpec, shape: Shape, layout: Layout, rows: MeanRows, *, cuda: bool) -> list[int]:
        """Return the layers of equally fast ranks with enough memory; at most one rank per layer counts.

        If the ranks together have too little memory, the layers are divided as if they had enough.
        """
        ranks = min(layout.world, shape.layers)
        given = parse_layers(spec.pipeline_layers)
        if len(given) == ranks and sum(given) == shape.layers:
            return given
        costs = layer_costs(spec, shape, rows, self.bytes_per_weight(spec), cuda=cuda)
        rooms = layout.rooms[:ranks] or (None,) * ranks
        micro = micro_batches(spec, 1)
        try:
            return divide_layers(shape.layers, [RankFacts(1.0, room) for room in rooms], costs, micro)
        except UserError:
            return divide_layers(shape.layers, [RankFacts(1.0)] * ranks, costs, micro)

    def memory(self, spec: RunSpec, shape: Shape, layout: Layout, rows: MeanRows, *, cuda: bool = False) -> Memory:
        """Return the peak memory of the rank that needs most."""
        return max(self.stages(spec, shape, layout, rows, cuda=cuda), key=lambda each: each.total)

    def stages(self, spec: RunSpec, shape: Shape, layout: Layout, rows: MeanRows, *, cuda: bool) -> list[Memory]:
        """Return the peak memory of every rank."""
        counts = self.layers(spec, shape, layout, rows, cuda=cuda)
        return [self._stage(spec, shape, counts, rank, rows, cuda) for rank in range(len(counts))]

    def fits(
        self, spec: RunSpec, shape: Shape, layout: Layout, rows: MeanRows, memory: Memory, *, cuda: bool
    ) -> bool | None:
        stages = self.stages(spec, shape, layout, rows, cuda=cuda)
        return every(
            [None if room is None else stage.total <= room for stage, room in zip(stages, layout.rooms, strict=False)]
        )

    def _stage(self, spec: RunSpec, shape: Shape, counts: list[int], rank: int, rows: MeanRows, cuda: bool) -> Memory:
        last = rank == len(counts) - 1
        state = full_state(spec, shape, self.bytes_per_weight(spec))
        state = stage_state(spec, shape, state, counts[rank], first=rank == 0, last=last)
        stored, logits = activation_bytes(spec, shape, rows, cuda=cuda)
        if not last:
            # Without a head, only the layer that is recomputed remains.
            whole = activation_bytes(spec.model_copy(update={"gradient_checkpointing": False}), shape, rows, cuda=cuda)
            logits = whole[0] / shape.layers if spec.gradient_checkpointing else 0.0
        flying = in_flight(rank, len(counts), micro_batches(spec, 1))
        return Memory(
            weights=state.weights + round(autocast_bytes(spec, shape) * counts[rank] / shape.layers),
            gradients=state.gradients,
            optimizer=state.optimizer,
            activations=round(stored * counts[rank] / shape.layers * flying),
            logits=round(logits),
            buffers=round(boundary_bytes(spec, shape, rows) * 2 * flying) if len(counts) > 1 else 0,
            library=0,
            # At the end the first rank of a host assembles the full trained weights.
            outside_step=0 if cuda else state.held + shape.trained(spec) * 4,
        )

    def comm_bytes(self, spec: RunSpec, shape: Shape, layout: Layout, *, gloo: bool) -> float:
        from trainer.planner.cost import Rows as MeanRows

        # A rank in the middle sends activations to the next rank and their gradients to the one before.
        directions = min(2, layout.world - 1)
        return directions * micro_batches(spec, 1) * boundary_bytes(spec, shape, MeanRows.full(spec))

    def step_seconds(
        self,
        spec: RunSpec,
        shape: Shape,
        layout: Layout,
        rows: MeanRows,
        part: float,
        optimizer: float,
        communication: float,
    ) -> tuple[float, float]:
        """Return the seconds of a step: every rank once, while the pipeline fills and drains, and the slowest for all further micro-batches."""
        counts, micro = self.layers(spec, shape, layout, rows, cuda=False), micro_batches(spec, 1)
        head = layer_costs(spec, shape, rows, 4, cuda=False).head
        shares = [count / (shape.layers + head) for count in counts]
        shares[-1] += head / (shape.layers + head)
        slowest = max(shares) * part
        compute = part + (micro - 1) * slowest + optimizer * max(counts) / shape.layers
        if len(counts) == 1:
            return compute, 0.0
        hop = communication / micro / min(2, len(counts) - 1)
        # The first micro-batch crosses every link twice. Further ones travel while ranks compute.
        exposed = 2 * (len(counts) - 1) * hop + (micro - 1) * max(0.0, communication / micro - slowest)
        return compute, exposed


class Pipeline(Strategy):
    """Pipeline parallel training, one stage per rank."""

    lockstep = True

    def __init__(self, spec: RunSpec, world: World, module: TokenLoss) -> None:
        from trainer.distributed.pipeline_schedule import Neighbours
        from trainer.model import base_dtype
        from trainer.optim import make_optimizer

        super().__init__(spec, world, module)
        self.stage: StageLoss = module  # type: ignore[assignment]
        native = base_dtype(spec)
        half = spec.pipeline_comm_dtype == "bf16"
        self.neighbours = Neighbours(world, native, torch.bfloat16 if half else native, spec.collective_timeout)
        self.trained = self.stage.held
        # A rank without a layer that has adapters trains nothing.
        self.optimizer = make_optimizer(spec, self.trained.values()) if self.trained else None
        self.sharded_checkpoint = not spec.lora_r
        self._waiting: list[tuple[Batch, int]] = []
        weights = self.stage.trained_weights
        shared = [name for name, weight in weights.items() if len(weight.holders) > 1]
        self._shared = {name: self.trained[name] for name in shared if name in self.trained}
        self._ends = world.subgroup([[0, world.size - 1]], spec.collective_timeout).group if shared else None

    def divide(self, rows: Rows) -> Update:
        # All rows pass through every rank; the last one, which has the loss, counts them.
        return Update(rows, rows if self.stage.division.last else [], rows)

    def backward(self, batch: Batch, tokens: int, last: bool) -> torch.Tensor:
        """Collect the micro-batches of a step; with the last one, run their passes as the schedule orders them."""
        self._waiting.append((batch, torch.initial_seed()))
        zero = torch.zeros((), device=self.world.device)
        if not last:
            return zero
        batches, self._waiting = self._waiting, []
        inputs: dict[int, torch.Tensor | None] = {}
        outputs: dict[int, torch.Tensor] = {}
        losses: list[torch.Tensor] = []

        def forward(number: int, hidden: torch.Tensor | None) -> torch.Tensor:
            part, seed = batches[number]
            torch.manual_seed(seed)  # dropout draws the same numbers in any order of the passes
            inputs[number] = None if hidden is None else hidden.requires_grad_()
            with self.autocast():
                output = self.stage.run_stage(hidden, part)
            if self.stage.division.last:
                losses.append(output.detach())
                output = output / max(1, tokens)
            outputs[number] = output
            return output

        def backpropagate(number: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
            output, hidden = outputs.pop(number), inputs.pop(number)
            if output.requires_grad:
                torch.autograd.backward(output, None if gradient is None else gradient.to(output.dtype))
            return None if hidden is None else hidden.grad

        self.neighbours.run([self._shape(part) for part, _ in batches], forward, backpropagate)
        return torch.stack(losses).sum() if losses else zero

    def _shape(self, batch: Batch) -> tuple[int, int, int]:
        rows, places = batch.ids.shape
        return rows, places, self.stage.hidden_size

    def step(self, lr: float) -> float:
        for parameter in self._shared.values():  # the embedding and the tied head: both ranks get the sum
            dist.all_reduce(parameter.grad, group=self._ends)
        parameters = list(self.trained.values())
        weights = self.stage.trained_weights
        own = [
            p.grad for name, p in self.trained.items() if weights[name].owner == self.world.rank and p.grad is not None
        ]
        local = float(nn.utils.get_total_norm(own)) if own else 0.0
        norm = check_norm(math.sqrt(self.world.sum([local * local])[0]))
        if self.optimizer:
            limit = self.spec.max_grad_norm or float("inf")
            total = torch.tensor(norm, dtype=torch.float32, device=self.world.device)
            nn.utils.clip_grads_with_norm_(parameters, limit, total)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.optimizer.zero_grad()
        return norm

    def loss(self, batch: Batch) -> torch.Tensor:
        with torch.no_grad(), self.autocast():
            output = self.neighbours.forward(self._shape(batch), lambda hidden: self.stage.run_stage(hidden, batch))
        return output if self.stage.division.last else torch.zeros((), device=self.world.device)

    def weights(self) -> dict[str, torch.Tensor]:
        from trainer.strategy.pipeline_state import gather

        return gather(self.stage, self.world, {name: p.detach() for name, p in self.trained.items()})

    def model_to_save(self) -> nn.Module:
        from trainer.distributed.pipeline_stage import whole_model

        return whole_model(self.spec)

    def save(self, folder: Path) -> Writing | None:
        from trainer.strategy.pipeline_state import save_full, save_stage

        save = save_stage if self.sharded_checkpoint else save_full
        return save(folder, self.stage, self.world, self.optimizer)

    def load(self, folder: Path) -> None:
        from trainer.strategy.pipeline_state import load_full, load_stages

        load = load_stages if self.sharded_checkpoint else load_full
        load(folder, self.stage, self.world, self.optimizer)
