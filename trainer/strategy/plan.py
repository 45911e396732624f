"""The properties of a strategy before a run starts: validation, requirements and costs. Importable without torch."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trainer.common.errors import UserError
from trainer.costs.cost import Memory, State, activation_bytes, autocast_bytes, full_state
from trainer.costs.teacher_cost import teacher_memory, teacher_weights
from trainer.method import method_of

if TYPE_CHECKING:
    from trainer.config import RunSpec
    from trainer.costs.cost import Layout, RowStats
    from trainer.distributed.world import World
    from trainer.method.module_with_loss import ModelWithLoss
    from trainer.model_files.model_shape import Shape
    from trainer.strategy.base import Strategy

# Values that need the full model on every rank.
UNSHARDABLE: dict[str, Any] = {
    "backend": "unsloth",
    "quantize": "nf4",
    "optimizer": "adamw8bit",
    "precision": "fp16-mixed",
    "torch_compile": True,
}


class StrategyPlan:
    """The properties and the cost model of one strategy.

    A new strategy is one file with a subclass of this class, which is its `PLAN`, and a subclass of `Strategy`; and one line
    in `trainer.config.strategies.STRATEGIES`. The defaults describe a strategy that holds the full model on every rank and
    communicates nothing.
    """

    # Whether `strategy=auto` may choose it: as a strategy with the result of a single process ("exact"), or as the one for
    # slow links, with a different result ("low_communication"). None: the planner lists it, but never chooses it.
    auto: ClassVar[Literal["exact", "low_communication"] | None] = None
    # Number of things that the strategy gives up beside speed, such as the result of a single process.
    concessions: ClassVar[int] = 0
    shares_rows_by_speed: ClassVar[bool] = False  # the field `balance` distributes the rows of a step over all ranks
    shares_steps_by_speed: ClassVar[bool] = False  # the field `balance` gives fast replicas more inner steps
    uniform_dtype: ClassVar[bool] = False  # all weights must have the same data type
    library_bytes: ClassVar[int] = 0  # libraries that only this strategy loads

    def strategy_class(self, spec: RunSpec) -> type[Strategy]:
        """Return the class that runs this strategy. Raises UserError if a package is missing."""
        raise NotImplementedError

    # Validation and requirements ----------------------------------------------------------------------------------------

    def validate(self, spec: RunSpec) -> None:
        """Check that the fields of the spec can be combined. Raises ValueError with one line."""

    def needs_packages(self, spec: RunSpec) -> dict[str, str]:
        """Return {Python package: the setting that needs it} beyond the packages of every run."""
        return {}

    def needs_own_gpus(self, spec: RunSpec) -> bool:
        """Return whether ranks on GPUs must not share one: it gathers CUDA tensors, which gloo cannot (see World.require_own_gpus)."""
        return False

    def sharded_weights(self, spec: RunSpec) -> bool:
        """Return whether no rank holds the full model on its device, or reads more than its shard of the model's files."""
        return False

    def pipeline_hosts(self, spec: RunSpec) -> int | None:
        """Return the number of hosts of one pipeline, 0 for all; None if ranks form no pipeline."""
        return None

    def supports_fast_kernels(self, spec: RunSpec) -> bool:
        """Return whether Liger kernels and FlashAttention may be used."""
        return True

    def load_module(self, spec: RunSpec, world: World) -> ModelWithLoss:
        """Load the model, or the part of it that this rank holds. Every rank calls it. Raises UserError."""
        from trainer.method.module_with_loss import ModelWithLoss
        from trainer.models.model import base_dtype, fast_kernels, load_model
        from trainer.models.unsloth_model import load_unsloth

        dtype = base_dtype(spec, uniform=self.uniform_dtype)
        if spec.backend == "unsloth":
            model = load_unsloth(spec, dtype)
        else:
            model = load_model(
                spec,
                world.device,
                dtype=dtype,
                sharded=self.sharded_weights(spec),
                kernels=fast_kernels(spec, world.device) if self.supports_fast_kernels(spec) else (),
            )
        return ModelWithLoss(model, compiled=spec.torch_compile, method=method_of(spec).create(spec))

    # Costs --------------------------------------------------------------------------------------------------------------

    def runs_on(self, spec: RunSpec, shape: Shape, layout: Layout) -> bool:
        return True

    def memories(self, spec: RunSpec, shape: Shape, layout: Layout, rows: RowStats, *, cuda: bool) -> list[Memory]:
        """Return the peak memory of every rank; one value if all ranks need the same."""
        return [self.memory(spec, shape, layout, rows, cuda=cuda)]

    def rooms(self, spec: RunSpec, layout: Layout) -> tuple[float | None, ...]:
        """Return the bytes that the ranks of `memories` have, or None where that is unknown."""
        return layout.rooms

    def free(
        self, spec: RunSpec, shape: Shape, layout: Layout, memories: Sequence[Memory], *, cuda: bool
    ) -> list[float | None]:
        """Return the fraction of its memory that the plan leaves to every rank, also of host memory that it uses.

        A negative fraction is missing memory; None is unknown. `memories`: the result of the method `memories`.
        """
        rooms = self.rooms(spec, layout)
        needed = [memory.total for memory in memories] * (len(rooms) if len(memories) == 1 else 1)
        left = [_free_part(need, room) for need, room in zip(needed, rooms, strict=False)]
        if cuda and (host := self.host_memory(spec, shape, layout)):
            left += [_free_part(host, room) for room in layout.host_rooms or [None]]
        return left

    def host_memory(self, spec: RunSpec, shape: Shape, layout: Layout) -> int:
        """Return the bytes of host memory that a rank on a GPU needs for the data that it keeps or loads there."""
        return 0

    def offload_seconds(self, spec: RunSpec, shape: Shape, layout: Layout) -> float:
        """Return the extra seconds of a step on a GPU for what is kept in host memory."""
        return 0.0

    def bytes_per_weight(self, spec: RunSpec) -> int:
        return 2 if spec.lora_r and spec.precision == "bf16-mixed" and not self.uniform_dtype else 4

    def autocast_copies(self, spec: RunSpec, shape: Shape) -> int:
        """Return the bytes of 16-bit copies of weights on one process during a forward pass."""
        return autocast_bytes(spec, shape, self.bytes_per_weight(spec))

    def state(self, spec: RunSpec, shape: Shape, layout: Layout, *, cuda: bool) -> State:
        return full_state(spec, shape, self.bytes_per_weight(spec))

    def outside_step(self, spec: RunSpec, shape: Shape, layout: Layout, state: State) -> int:
        """Return the peak in bytes of a process on a CPU outside of its steps, or 0 if a step needs more.

        Memory-mapped model files do not count: the kernel reclaims their pages when memory is short.
        """
        return 0

    def memory(self, spec: RunSpec, shape: Shape, layout: Layout, rows: RowStats, *, cuda: bool = False) -> Memory:
        """Return the peak memory of one process.

        `cuda`: count the memory of a GPU. State that the strategy keeps in host memory does not count then.
        """
        state = self.state(spec, shape, layout, cuda=cuda)
        state = replace(state, base=state.base + self.autocast_copies(spec, shape))
        activations, logits = activation_bytes(spec, shape, rows, cuda=cuda)
        outside = 0 if cuda else self.outside_step(spec, shape, layout, state)
        return Memory(
            weights=state.weights + state.gathered,
            gradients=state.gradients,
            optimizer=state.optimizer,
            activations=round(activations),
            logits=round(logits),
            buffers=state.buffers,
            library=0 if cuda else self.library_bytes,
            outside_step=outside + teacher_weights(spec) if outside else 0,
            teacher=teacher_memory(spec, shape.vocabulary, rows),
        )

    def comm_bytes(self, spec: RunSpec, shape: Shape, layout: Layout, *, gloo: bool) -> float:
        """Return the bytes that one process sends in an optimizer step (mean over steps).

        The link of a host with one process carries the same number. `gloo`: the backend of CPUs, instead of NCCL.
        """
        return 0.0

    def overhead_seconds(self, spec: RunSpec, shape: Shape, layout: Layout, link: float) -> tuple[float, float]:
        """Return extra seconds of a step on CPUs: of computation, and of communication beyond its bytes.

        `link`: bytes per second.
        """
        return 0.0, 0.0

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
        """Return the seconds of a step in computation, and in communication that computation does not hide.

        `part`: seconds of a full micro-batch through the whole model on one process, forward and backward. `optimizer`:
        seconds of an optimizer step of the whole model. `communication`: seconds of all communication of the step.
        """
        # The rank with the most rows for its speed determines the time of a step.
        most, speed = self._slowest(spec, layout)
        last = (most % spec.batch_size or spec.batch_size) / spec.batch_size * part / speed
        compute = (most / spec.batch_size * part + optimizer) / speed
        return compute, self.exposed_seconds(spec, shape, communication, last)

    def _slowest(self, spec: RunSpec, layout: Layout) -> tuple[int, float]:
        """Return the rows per step and the relative speed of the rank that takes longest."""
        speeds = layout.speeds or (1.0,) * layout.world
        even = [math.ceil(spec.rows_per_step / layout.world)] * layout.world
        if (self.shares_rows_by_speed or self.shares_steps_by_speed) and spec.balance == "auto":
            even = [math.ceil(spec.rows_per_step * speed / sum(speeds)) for speed in speeds]
        return max(zip(even, speeds, strict=True), key=lambda rank: rank[0] / rank[1])

    def exposed_seconds(self, spec: RunSpec, shape: Shape, communication: float, micro_batch: float) -> float:
        """Return the seconds of communication in a step that computation does not hide.

        `communication`: seconds of all communication of the step. `micro_batch`: seconds of the step's last
        micro-batch, forward and backward.
        """
        return communication

    def accelerate_config(self, spec: RunSpec, processes: Sequence[int]) -> dict[str, Any]:
        """Return the options of accelerate's configuration file that the strategy sets; None removes one.

        `processes`: number of processes of every host. Raises UserError: accelerate has no such strategy.
        """
        raise UserError(
            f"config accelerate: accelerate has no strategy {spec.strategy}: set strategy=ddp, fsdp or deepspeed, or use "
            "config launcher"
        )


def _free_part(needed: float, room: float | None) -> float | None:
    """Return the fraction of `room` bytes that `needed` bytes leave; negative: too little, None: unknown."""
    if room is None:
        return None
    return (room - needed) / room if room > 0 else -1.0


def reject_unshardable(spec: RunSpec, field: str, possible: Collection[str] = ()) -> None:
    """Check that the spec needs the full model on no rank.

    `field`: the field whose value shards the model. `possible`: fields that may have their value in `UNSHARDABLE` all
    the same. Raises ValueError: another field has one of the values in `UNSHARDABLE`.
    """
    for name, value in UNSHARDABLE.items():
        if getattr(spec, name) == value and name not in possible:
            shown = str(value).lower() if value is True else value
            raise ValueError(f"{name}: {shown} requires {field} ddp, got {field} {getattr(spec, field)}")


def even_micro_batches(spec: RunSpec, world: int) -> int:
    """Return the micro-batches per step of every rank.

    Raises UserError: the rows of a step do not divide evenly, which other tools require.
    """
    parts, rest = divmod(spec.rows_per_step, spec.batch_size * world)
    if rest or not parts:
        raise UserError(
            f"total_batch_size: {spec.rows_per_step} rows are not a multiple of batch_size {spec.batch_size} x "
            f"{world} processes, which other tools require: set total_batch_size={max(1, parts) * spec.batch_size * world}"
        )
    return parts
