"""The cost arithmetic that all strategies share: memory of weights and activations, floating point operations. No torch.

Sizes are bytes unless a name says otherwise. tests/unit/trainer/test_plan.py compares them with measured peaks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config import RunSpec
    from trainer.model_files.model_shape import Shape


@dataclass(frozen=True)
class Layout:
    """The placement of ranks on hosts.

    Attributes:
        rooms: bytes that every rank has for tensors, in rank order; None: unknown. Empty: unknown for all.
    """

    processes: tuple[int, ...]  # number of ranks of every host, in rank order
    rooms: tuple[float | None, ...] = ()
    host_rooms: tuple[float | None, ...] = ()  # the same for host memory, for ranks on GPUs
    speeds: tuple[float, ...] = ()  # speed of every rank in relation to others, in rank order. Empty: 1 for all.

    @property
    def world(self) -> int:
        return sum(self.processes)

    def group_sizes(self, hosts: int) -> list[int]:
        """Return the number of ranks of every group of `hosts` neighboring hosts; the last group may have fewer hosts."""
        return [sum(self.processes[first : first + hosts]) for first in range(0, len(self.processes), hosts)]


@dataclass(frozen=True)
class RowStats:
    """Mean properties of the rows of a dataset.

    `places`: length of a row including padding; `tokens`: its tokens; `trained`: fraction of places with loss.
    """

    places: float
    tokens: float
    trained: float

    @classmethod
    def full(cls, spec: RunSpec) -> RowStats:
        """Return the upper bound, for use when the data is not available."""
        return cls(spec.seq_length, spec.seq_length, 1.0)


@dataclass(frozen=True)
class Memory:
    """Peak memory of one process in bytes, above that of Python and the libraries that every strategy loads.

    All fields but `outside_step` are in memory when a backward pass starts. `library`: libraries that only this strategy loads.
    `teacher`: what learning from a teacher's probabilities needs.
    `outside_step`: the maximum at other times: while the model is loaded, a checkpoint is written, or
    replicas synchronize.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int
    library: int
    outside_step: int
    teacher: int = 0

    @property
    def step(self) -> dict[str, int]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "outside_step"}

    @property
    def total(self) -> int:
        return max(sum(self.step.values()), self.outside_step)


@dataclass(frozen=True)
class State:
    """Bytes of model and optimizer on one process.

    `base`: weights of the model; `adapters`: LoRA weights; `gathered`: full weights that a sharded strategy assembles for
    a while; `buffers`: communication buffers.
    """

    base: int
    adapters: int
    gradients: int
    optimizer: int
    gathered: int = 0
    buffers: int = 0

    @property
    def weights(self) -> int:
        return self.base + self.adapters

    @property
    def held(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def sharded(self, shards: int, gathered: int) -> State:
        """Return the state of one of `shards` equal shards, which assembles `gathered` bytes of weights."""
        return replace(
            self,
            base=self.base // shards,
            adapters=self.adapters // shards,
            gradients=self.gradients // shards,
            optimizer=self.optimizer // shards,
            gathered=gathered,
        )


def full_state(spec: RunSpec, shape: Shape, bytes_per_weight: int) -> State:
    trained = shape.trained(spec)
    return State(
        base=shape.layers * layer_bytes(spec, shape, bytes_per_weight) + root_bytes(shape, bytes_per_weight),
        adapters=trained * 4 if spec.lora_r else 0,
        gradients=trained * 4,
        optimizer=trained * (8 if spec.optimizer == "adamw" else 2),
    )


def layer_bytes(spec: RunSpec, shape: Shape, bytes_per_weight: int) -> int:
    """Return the bytes of the weights of one layer, without adapters."""
    if spec.quantize == "nf4":
        packed = sum(matrix.into * matrix.out for matrix in shape.linear)
        return packed // 2 + scale_bytes(spec, shape) + bytes_per_weight * (shape.layer_parameters - packed)
    return shape.layer_parameters * bytes_per_weight


def scale_bytes(spec: RunSpec, shape: Shape) -> int:
    """Return the bytes of the scales of one layer in 4 bits: 8 bits for a block of 64 weights, and 32 for 256 of those; else 0."""
    packed = sum(matrix.into * matrix.out for matrix in shape.linear)
    return round(packed * (1 / 64 + 4 / 64 / 256)) if spec.quantize == "nf4" else 0


def half_hidden(spec: RunSpec, shape: Shape) -> bool:
    """Return whether hidden states between layers have 16 bits: those of a frozen model in bfloat16."""
    # Layers in 4 bits return the data type of their input, which GPT-2's norms make float32 on a GPU.
    wide = spec.quantize == "nf4" and shape.kind == "gpt2"
    return spec.lora_r > 0 and spec.precision == "bf16-mixed" and not wide


def autocast_bytes(spec: RunSpec, shape: Shape, bytes_per_weight: int) -> int:
    """Return the bytes of the 16-bit copies of float32 weights that autocast keeps for the duration of a forward pass."""
    if spec.precision == "32-true" or bytes_per_weight == 2:
        return 0
    # Matrices in 4 bits are unpacked where they are used.
    matrices = 0 if spec.quantize == "nf4" else sum(matrix.into * matrix.out for matrix in shape.linear)
    return 2 * (shape.layers * matrices + shape.head_parameters)


def activation_bytes(spec: RunSpec, shape: Shape, rows: RowStats, *, cuda: bool) -> tuple[float, float]:
    """Return the bytes of stored activations, and of the logits at the start of the backward pass."""
    tokens = spec.batch_size * rows.places
    layer, edge = _saved_per_token(spec, shape, cuda)
    logits = _loss_bytes(spec, shape, tokens * rows.trained)
    stored = tokens * shape.layers * (edge if spec.gradient_checkpointing else layer)
    if spec.gradient_checkpointing:
        logits = max(logits, tokens * layer)  # a layer is recomputed after the logits are freed
    return stored, logits


def _loss_bytes(spec: RunSpec, shape: Shape, places: float) -> float:
    """Return the bytes of logits, log-probabilities and gradient, all in float32, for a number of places with loss."""
    chunk = max(LOSS_CHUNK, shape.vocabulary)
    whole = places * shape.vocabulary
    if whole <= chunk or spec.distill_alpha:
        return whole * 4 * 3
    # The gradient of a trained head is summed over chunks, beside that of the newest one.
    return chunk * 4 * 3 + (0 if spec.lora_r else shape.head_parameters * 4 * 2)


def _saved_per_token(spec: RunSpec, shape: Shape, cuda: bool) -> tuple[float, float]:
    """Return the bytes per token that a layer stores for the backward pass: without, and with gradient checkpointing."""
    number = 4 if spec.precision == "32-true" else 2
    half = half_hidden(spec, shape)
    query, value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    gate = sum(matrix.out for matrix in shape.linear if matrix.reads == "mlp")
    product = next(matrix.into for matrix in shape.linear if matrix.reads == "gated")
    # A trained matrix needs its input in the backward pass; a frozen one does not.
    readers = shape.targets(spec) if spec.lora_r else shape.linear
    if (spec.lora_r and spec.lora_dropout) or (number == 2 and not half):
        read = [matrix.into for matrix in readers]  # peft applies dropout, or autocast casts, once per matrix
    else:
        read = list({matrix.reads: matrix.into for matrix in readers}.values())
    # The dropout mask: float32 on a CPU, bool in the CUDA kernel.
    dropped = sum(read) * (1 if cuda else 4) if spec.lora_r and spec.lora_dropout else 0
    adapters = len(shape.targets(spec)) * spec.lora_r
    # Norms store their input (float32), attention its queries, keys, values and output, the MLP both factors.
    floats = query * 2 + 2 * (query if spec.packing else value) + gate + product + sum(read) + adapters
    norms = shape.hidden * 4 * (2 if spec.lora_r else 4)  # a trained weight also needs the normalized input
    wider = (gate + product) * (4 - number) if spec.quantize == "nf4" and not half else 0
    return floats * number + dropped + norms + wider, shape.hidden * (2 if half else 4)


def root_bytes(shape: Shape, bytes_per_weight: int) -> int:
    """Return the bytes of the parameters outside of the layers: embedding, head, final norm."""
    return (shape.parameters - shape.layers * shape.layer_parameters) * bytes_per_weight


def micro_batches(spec: RunSpec, ranks: int) -> int:
    """Return the number of micro-batches in a step of the rank that has the most."""
    return -(-spec.rows_per_step // (ranks * spec.batch_size))


LOSS_CHUNK = 2**24  # numbers of a chunk of logits: the loss is computed chunk by chunk
PCI_EXPRESS = 12e9  # bytes per second between a GPU and its host: 16 lanes of version 3
_HOST_MEMORY = 10e9  # bytes per second of AdamW on a CPU, which reads and writes 28 bytes of every weight


def offloaded_step(weights: float) -> float:
    """Return the seconds of an optimizer step in host memory: gradients travel there, and updated weights back."""
    return weights * 8 / PCI_EXPRESS + weights * 28 / _HOST_MEMORY


EXPORT_PART = 2 << 30  # bytes of weights in one file of a model that is written from shards


def exported_bytes(spec: RunSpec, shape: Shape) -> int:
    """Return the bytes of the trained weights that are in memory while they are written from shards: a part of full weights."""
    trained = shape.trained(spec) * 4
    return trained if spec.lora_r else min(trained, EXPORT_PART + 4 * shape.head_parameters)


def gradient_bytes_per_number(spec: RunSpec) -> int:
    """Return the bytes of one number of a gradient in transit."""
    return 2 if spec.comm_dtype == "bf16" else 4


def ring_fraction(ranks: int) -> float:
    """Return the fraction of a tensor that every rank sends in a ring all-gather or reduce-scatter."""
    return (ranks - 1) / ranks


def forward_products(shape: Shape, rows: RowStats) -> tuple[float, float, float]:
    """Return the multiplications of one place in a forward pass: with the layers' matrices, with the head, and of attention."""
    matrices = shape.layers * sum(matrix.into * matrix.out for matrix in shape.linear)
    attention = 2 * shape.layers * shape.heads * shape.head_dim * rows.places
    return matrices, shape.head_parameters * rows.trained, attention


# Time of a pass with 4-bit weights, which are unpacked first, relative to one without them. On a GPU it is an assumption; on a
# CPU, one core and bitsandbytes 0.50 need 1.1 to 1.5 times the time for matrices of 3 and 12 million numbers.
_UNPACKING = {True: 1.4, False: 1.3}


def unpacking_factor(spec: RunSpec, *, cuda: bool) -> float:
    """Return how many times longer a pass takes because the weights are quantized; 1 if they are not."""
    return _UNPACKING[cuda] if spec.quantize == "nf4" else 1.0


def row_flops(spec: RunSpec, shape: Shape, rows: RowStats) -> float:
    """Return the floating point operations of one row, forward and backward (a multiply-add counts as two)."""
    matrices, head, attention = forward_products(shape, rows)
    adapters = shape.trained(spec) if spec.lora_r else 0
    # The backward pass multiplies with every matrix once, and once more with those that are trained.
    passes = 2 if spec.lora_r else 3
    recomputed = 1 if spec.gradient_checkpointing else 0
    per_place = 2 * ((matrices + head) * passes + matrices * recomputed + adapters * 3)
    per_place += 2 * attention * (3 + recomputed)
    return per_place * rows.places
