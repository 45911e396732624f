"""Pipeline parallelism: every rank holds some of the decoder layers, and micro-batches pass through the ranks in turn.

Only activations and their gradients travel between neighbouring ranks. The gradients are those of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.common.errors import UserError
from trainer.common.lazy import LazyModule
from trainer.costs.cost import Layout, Memory, RowStats, activation_bytes, autocast_bytes, exported_bytes, micro_batches
from trainer.model_files.model_shape import shape_of
from trainer.strategy.base import Batch, Rows, Strategy, Update, Writing, check_norm
from trainer.strategy.loss_scale import LossScale
from trainer.strategy.pipeline_costs import boundary_bytes, layer_costs, one_pipeline, speeds_of, stage_state
from trainer.strategy.pipeline_split import PIPELINE_KINDS, RankFacts, divide_layers, in_flight, parse_layers
from trainer.strategy.plan import StrategyPlan, reject_unshardable

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn

    from trainer.config import RunSpec
    from trainer.distributed.world import World
    from trainer.method.module_with_loss import ModelWithLoss
    from trainer.model_files.model_shape import Shape
    from trainer.strategy.pipeline_stage import StageLoss
else:
    torch, dist, nn = LazyModule("torch"), LazyModule("torch.distributed"), LazyModule("torch.nn")

# Assumed parts of a row, and of its tokens with loss.
_ROWS = ((1.0, 1.0), (1.0, 0.5), (1.0, 0.2), (0.5, 0.2), (0.01, 0.01))


def check_stages(spec: RunSpec, field: str) -> None:
    """Check what every pipeline requires. Raises ValueError. `field`: the field that is `pipeline`."""
    parse_layers(spec.pipeline_layers)
    if spec.teacher:
        raise ValueError(f"teacher: a pipeline cannot hold a teacher: set {field}=ddp, or remove teacher")


class PipelinePlan(StrategyPlan):
    """The plan of pipeline parallelism. Costs use the speeds of the layout; a run divides the layers by measured speed."""

    auto = "exact"
    concessions = 1

    def strategy_class(self, spec: RunSpec) -> type[Pipeline]:
        return Pipeline

    def validate(self, spec: RunSpec) -> None:
        reject_unshardable(spec, "strategy", possible=("quantize", "precision"))
        check_stages(spec, "strategy")

    def sharded_weights(self, spec: RunSpec) -> bool:
        return True

    def pipeline_hosts(self, spec: RunSpec) -> int:
        return 0

    def supports_fast_kernels(self, spec: RunSpec) -> bool:
        return False

    def load_module(self, spec: RunSpec, world: World) -> ModelWithLoss:
        from trainer.distributed.pipelines import Pipelines
        from trainer.strategy.pipeline_measure import divide_model
        from trainer.strategy.pipeline_stage import load_stage

        cuda = world.device.type == "cuda"
        pipelines = Pipelines.find(self.pipeline_hosts(spec), world, spec.collective_timeout)
        size, full = self.bytes_per_weight(spec), spec.seq_length
        rows = [RowStats(full * part, full * part, trained) for part, trained in _ROWS]
        costs = [layer_costs(spec, shape_of(spec), each, size, cuda=cuda) for each in rows]
        division = divide_model(spec, pipelines, costs)
        if world.rank == 0:
            times = f"{len(pipelines.ranks)} times " if len(pipelines.ranks) > 1 else ""
            print(f"pipeline: {times}layers of {division.describe()}")
        stage = load_stage(spec, division, world)
        stage.pipelines = pipelines
        return stage

    # Costs --------------------------------------------------------------------------------------------------------------

    def runs_on(self, spec: RunSpec, shape: Shape, layout: Layout) -> bool:
        sizes = set(layout.group_sizes(self.pipeline_hosts(spec) or len(layout.processes)))
        stages = max(sizes)
        if len(sizes) > 1:
            return False
        given = parse_layers(spec.pipeline_layers)
        if given and (len(given) != stages or sum(given) != shape.layers):
            return False
        return 1 < stages <= shape.layers and shape.kind in PIPELINE_KINDS and not shape.wrapped

    def layers(self, spec: RunSpec, shape: Shape, layout: Layout, rows: RowStats, *, cuda: bool) -> list[int]:
        """Return the layers of ranks with enough memory, by their speed; at most one rank per layer counts.

        If the ranks together have too little memory, the layers are divided as if they had enough.
        """
        layout, count = one_pipeline(self.pipeline_hosts(spec), layout)
        ranks = min(layout.world, shape.layers)
        given = parse_layers(spec.pipeline_layers)
        if len(given) == ranks and sum(given) == shape.layers:
            return given
        costs = layer_costs(spec, shape, rows, self.bytes_per_weight(spec), cuda=cuda)
        rooms = layout.rooms[:ranks] or (None,) * ranks
        micro = micro_batches(spec, count)
        facts = [RankFacts(1 / speed, room) for speed, room in zip(speeds_of(layout, ranks), rooms, strict=True)]
        try:
            return divide_layers(shape.layers, facts, costs, micro)
        except UserError:
            return divide_layers(shape.layers, [replace(fact, room=None) for fact in facts], costs, micro)

    def memory(self, spec: RunSpec, shape: Shape, layout: Layout, rows: RowStats, *, cuda: bool = False) -> Memory:
        return max(self.memories(spec, shape, layout, rows, cuda=cuda), key=lambda each: each.total)

    def memories(self, spec: RunSpec, shape: Shape, layout: Layout, rows: RowStats, *, cuda: bool) -> list[Memory]:
        counts = self.layers(spec, shape, layout, rows, cuda=cuda)
        micro = micro_batches(spec, one_pipeline(self.pipeline_hosts(spec), layout)[1])
        return [self._stage(spec, shape, counts, rank, rows, micro, cuda) for rank in range(len(counts))]

    def rooms(self, spec: RunSpec, layout: Layout) -> tuple[float | None, ...]:
        return one_pipeline(self.pipeline_hosts(spec), layout)[0].rooms

    def _stage(
        self, spec: RunSpec, shape: Shape, counts: list[int], rank: int, rows: RowStats, micro: int, cuda: bool
    ) -> Memory:
        last = rank == len(counts) - 1
        state = stage_state(spec, shape, self.bytes_per_weight(spec), counts[rank], first=rank == 0, last=last)
        stored, logits = activation_bytes(spec, shape, rows, cuda=cuda)
        if not last:
            # Without a head, only the layer that is recomputed remains.
            whole = activation_bytes(spec.model_copy(update={"gradient_checkpointing": False}), shape, rows, cuda=cuda)
            logits = whole[0] / shape.layers if spec.gradient_checkpointing else 0.0
        flying = in_flight(rank, len(counts), micro)
        copies = autocast_bytes(spec, shape, self.bytes_per_weight(spec)) * counts[rank] / shape.layers
        return Memory(
            weights=state.weights + round(copies * (1 if spec.gradient_checkpointing else flying)),  # see layer_costs
            gradients=state.gradients,
            optimizer=state.optimizer,
            activations=round(stored * counts[rank] / shape.layers * flying),
            logits=round(logits),
            buffers=round(boundary_bytes(spec, shape, rows) * 2 * flying) if len(counts) > 1 else 0,
            library=0,
            # At the end the first rank of a host assembles the trained weights in parts.
            outside_step=0 if cuda else state.held + exported_bytes(spec, shape),
        )

    def comm_bytes(self, spec: RunSpec, shape: Shape, layout: Layout, *, gloo: bool) -> float:
        """Return the bytes that a rank sends to its neighbours: activations to the next, their gradients to the one before."""
        return min(2, layout.world - 1) * micro_batches(spec, 1) * boundary_bytes(spec, shape, RowStats.full(spec))

    def replica_comm_bytes(self, spec: RunSpec, shape: Shape, layout: Layout, micro: int, *, gloo: bool) -> float:
        """Return the bytes that a process sends in a step within a replica of `layout`, of which every rank had `micro` micro-batches."""
        directions = min(2, layout.world - 1)
        return directions * micro * layout.world * boundary_bytes(spec, shape, RowStats.full(spec))

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
        """Every rank counts once, while the pipeline fills and drains, and the slowest for all further micro-batches.

        `communication`: seconds in which a rank passes the hidden states and gradients of all micro-batches to its neighbours.
        """
        counts = self.layers(spec, shape, layout, rows, cuda=False)
        pipeline, count = one_pipeline(self.pipeline_hosts(spec), layout)
        micro = micro_batches(spec, count)
        head = layer_costs(spec, shape, rows, 4, cuda=False).head
        speeds = speeds_of(pipeline, len(counts))
        shares = [held / (shape.layers + head) for held in counts]
        shares[-1] += head / (shape.layers + head)
        seconds = [share * part / speed for share, speed in zip(shares, speeds, strict=True)]
        slowest = max(seconds)
        steps = max(held / speed for held, speed in zip(counts, speeds, strict=True))
        compute = sum(seconds) + (micro - 1) * slowest + optimizer * steps / shape.layers
        if len(counts) == 1:
            return compute, 0.0
        crossing = communication / micro  # seconds of one micro-batch in both directions
        hop = crossing / min(2, len(counts) - 1)
        # The first micro-batch crosses every link twice. Further ones travel while ranks compute.
        return compute, 2 * (len(counts) - 1) * hop + (micro - 1) * max(0.0, crossing - slowest)


PLAN = PipelinePlan()


class Pipeline(Strategy):
    lockstep = staged = True

    def __init__(self, spec: RunSpec, world: World, module: ModelWithLoss, replica_group: World | None = None) -> None:
        """`replica_group`: the ranks of this pipeline, if it is a replica whose gradients are its own."""
        from trainer.models.optim import make_optimizer
        from trainer.strategy.pipeline_copies import StageCopies
        from trainer.strategy.pipeline_schedule import Neighbours
        from trainer.strategy.pipeline_stage import hidden_dtype

        super().__init__(spec, world, module)
        self.stage: StageLoss = module  # type: ignore[assignment]
        native = hidden_dtype(spec)
        half = spec.comm_dtype == "bf16"
        limit = spec.collective_timeout
        assert self.stage.pipelines
        self.pipelines = self.stage.pipelines
        self.neighbours = Neighbours(self.pipelines, native, torch.bfloat16 if half else native, limit)
        self.trained = self.stage.held
        self.scale = LossScale(enabled=spec.precision == "fp16-mixed")
        # A rank without a layer that has adapters trains nothing.
        self.optimizer = make_optimizer(spec, self.trained.values()) if self.trained else None
        self.sharded_checkpoint = not spec.lora_r and replica_group is None
        self._copies = StageCopies(self.world) if self.sharded_checkpoint else None
        self._waiting: list[tuple[Batch, int]] = []
        weights = self.stage.trained_weights
        shared = [name for name, weight in weights.items() if len(weight.holders) > 1]
        self._shared = {name: self.trained[name] for name in shared if name in self.trained}
        last = self.pipelines.stages.size - 1
        self._ends = self.pipelines.group_of((0, last), limit).group if shared else None

    def divide(self, rows: Rows) -> Update:
        return self.divide_among(rows, self.world)

    def divide_among(self, rows: Rows, group: World) -> Update:
        # The rows of a pipeline pass through all of its ranks; the last one, which has the loss, counts them.
        return Update(rows, rows if self.stage.division.last else [], rows)

    def rounds(self, rows: int) -> int:
        return 1  # `divide` gives all ranks of a pipeline the same rows

    def backward(self, batch: Batch, total: float, last: bool) -> torch.Tensor:
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
                output = output * (self.scale.value / max(1, total))
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
        if self.scale.enabled and (scaled := [p.grad for p in parameters if p.grad is not None]):
            torch._foreach_mul_(scaled, 1 / self.scale.value)
        weights, stages = self.stage.trained_weights, self.pipelines.stages
        own = [p.grad for name, p in self.trained.items() if weights[name].owner == stages.rank and p.grad is not None]
        local = float(nn.utils.get_total_norm(own)) if own else 0.0
        norm = math.sqrt(stages.sum([local * local])[0])
        if not self.scale.update(norm):
            if self.optimizer:
                self.optimizer.zero_grad()
            return check_norm(norm) if self.scale.exhausted else norm
        check_norm(norm)
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

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        from trainer.strategy.pipeline_state import gather

        return gather(self.stage, self.pipelines.stages, {name: p.detach() for name, p in self.trained.items()})

    def full_params(self) -> dict[str, torch.Tensor]:
        """Return the full trained weights by name on the first rank of every host. Every rank calls it."""
        return dict(self.weights())

    def set_params(self, values: Mapping[str, torch.Tensor] | None, host: World) -> None:
        """Set the trained weights to those of the first rank of every host. `host`: the ranks of this host."""
        for name, weight in self.stage.trained_weights.items():
            value = values[name].detach().to(self.world.device) if values else None
            if host.size > 1:
                value = torch.empty(weight.shape, device=self.world.device) if value is None else value
                dist.broadcast(value, group=host.group, group_src=0)
            if name in self.trained and value is not None:
                with torch.no_grad():
                    self.trained[name].copy_(value)

    def model_to_save(self) -> nn.Module:
        from trainer.strategy.pipeline_stage import whole_model

        return whole_model(self.spec)

    def save(self, folder: Path) -> Writing | None:
        from trainer.strategy.pipeline_state import save_full, save_stage

        if self.world.is_host_leader:
            self.scale.save(folder)
        if self.sharded_checkpoint:
            assert self._copies
            return save_stage(folder, self.stage, self.world, self.optimizer, self._copies)
        save_full(folder, self.stage, self.pipelines.stages, self.optimizer)
        return None

    def load(self, folder: Path) -> None:
        from trainer.strategy.pipeline_state import load_full, load_stages

        self.scale.load(folder)
        load = load_stages if self.sharded_checkpoint else load_full
        load(folder, self.stage, self.pipelines.stages, self.optimizer)
