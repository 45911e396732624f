"""What a run costs: bytes of memory a process, bytes on the wire a step, floating point operations. Pure arithmetic, no torch.

Held against measured peaks in tests/trainer/test_plan.py.
"""

from dataclasses import asdict, dataclass

from trainer.config import RunSpec
from trainer.shape import Shape


@dataclass(frozen=True)
class Layout:
    """How ranks lie on hosts. `processes`: on every host, in rank order."""

    processes: tuple[int, ...]

    @property
    def world(self) -> int:
        """Number of ranks."""
        return sum(self.processes)


@dataclass(frozen=True)
class Rows:
    """What the rows of the data are like: places in a row (padding too), tokens in it, and the share of places with loss."""

    places: float
    tokens: float
    trained: float

    @classmethod
    def full(cls, spec: RunSpec) -> "Rows":
        """Return the most that rows can be, where the data is not at hand."""
        return cls(spec.seq_length, spec.seq_length, 1.0)


@dataclass(frozen=True)
class Memory:
    """Bytes of one process at its peak, above what Python and its libraries take."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    wire: int

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(asdict(self).values())


def _weight_bytes(spec: RunSpec, shape: Shape) -> int:
    """Return the bytes of the model's weights, adapters not counted."""
    if spec.quantize == "nf4":
        # Half a byte a number, scales of blocks of 64 in 8 bits, theirs of 256; the rest is made float32.
        packed = shape.layers * sum(matrix.into * matrix.out for matrix in shape.linear)
        return round(packed * (0.5 + 1 / 64 + 4 / 64 / 256)) + 4 * (shape.parameters - packed)
    return shape.parameters * (2 if spec.lora_r and spec.precision == "bf16-mixed" else 4)


def _saved(spec: RunSpec, shape: Shape) -> tuple[float, float]:
    """Return the bytes that one layer keeps for the backward pass: of a token, and of a token under checkpointing."""
    number = 4 if spec.precision == "32-true" else 2
    query, value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    gate = sum(matrix.out for matrix in shape.linear if matrix.reads == "mlp")
    product = next(matrix.into for matrix in shape.linear if matrix.reads == "gated")
    read: dict[str, int] = {}
    for matrix in shape.targets(spec) if spec.lora_r else shape.linear:
        # What is trained needs what it was given; a frozen matrix does not.
        read[matrix.reads] = matrix.into
    adapters = len(shape.targets(spec)) * spec.lora_r
    # The norms keep what they were given (in float32), attention its queries, keys, values and mix, the MLP both factors.
    floats = query * 2 + 2 * (query if spec.packing else value) + gate + product + sum(read.values()) + adapters
    norms = shape.hidden * 4 * (2 if spec.lora_r else 4)  # their weight, if it is trained, needs what it scaled
    return floats * number + norms, shape.hidden * number


def memory(spec: RunSpec, shape: Shape, layout: Layout, rows: Rows) -> Memory:
    """Return what a process of the run needs at its peak, which is where the backward pass begins."""
    trained, world = shape.trained(spec), layout.world
    weights, frozen = _weight_bytes(spec, shape), 0
    if spec.lora_r:
        frozen = trained * 4  # the adapters beside the base
    gradients = trained * 4
    optimizer = trained * (8 if spec.optimizer == "adamw" else 2)
    # Sharded by the whole world, or by the processes of a host alone.
    parts = min(layout.processes) if spec.fsdp_shard == "host" else world
    gathered = 0
    if spec.strategy == "diloco":
        parts = min(layout.processes) * spec.replica_hosts
    if spec.weights_in_parts:
        layer = _weight_bytes(spec, shape) / shape.layers
        gathered = round(2 * layer)  # the layer at work and the one that is fetched
        weights, frozen, gradients, optimizer = (n // parts for n in (weights, frozen, gradients, optimizer))
    elif spec.strategy == "deepspeed":
        optimizer //= parts
        gradients //= parts if spec.deepspeed_stage >= 2 else 1
    if spec.strategy == "diloco":
        optimizer += trained * 8  # the outer optimiser's copy and momentum
    tokens = spec.batch_size * rows.places
    layer, edge = _saved(spec, shape)
    # Logits in float32, their log-probabilities and the gradient: at once, where the backward pass begins.
    head = tokens * rows.trained * shape.vocabulary * 4 * 3
    kept = tokens * shape.layers * (edge if spec.gradient_checkpointing else layer)
    if spec.gradient_checkpointing:
        head = max(head, tokens * layer)  # a layer is computed again when the logits are gone
    wire = trained * 2 if spec.gradient_wire == "bf16" and world > 1 and spec.strategy == "ddp" else 0
    return Memory(weights + frozen + gathered, gradients, optimizer, round(kept), round(head), wire)


def wire_bytes(spec: RunSpec, shape: Shape, layout: Layout, *, gloo: bool) -> float:
    """Return the bytes that a process sends in one optimiser step (mean over steps); between hosts a link carries as many."""
    ranks = layout.world
    if ranks == 1:
        return 0.0
    ring = (ranks - 1) / ranks
    trained, weights = shape.trained(spec), _weight_bytes(spec, shape)
    micro = -(-spec.rows_per_step // (ranks * spec.batch_size))
    # gloo has no reduce-scatter of its own: it sends what an all-reduce sends.
    scattered = (2 if gloo else 1) * ring * trained * 4
    if spec.strategy == "fsdp":
        return 2 * ring * weights * micro + scattered
    if spec.strategy == "deepspeed":
        stage = spec.deepspeed_stage
        return 2 * ring * weights * micro + scattered if stage == 3 else scattered + ring * trained * 4
    if spec.strategy == "diloco":
        hosts = len(layout.processes)
        number = 2 if spec.diloco_wire == "bf16" else 4
        return 2 * (hosts - 1) / hosts * trained * number / spec.local_steps
    if spec.strategy == "averaging":
        return 0.0
    return 2 * ring * trained * (2 if spec.gradient_wire == "bf16" else 4)


def row_flops(spec: RunSpec, shape: Shape, rows: Rows) -> float:
    """Return the floating point operations of one row, forward and backward (a product and a sum are two)."""
    matrices = shape.layers * sum(matrix.into * matrix.out for matrix in shape.linear)
    adapters = shape.trained(spec) if spec.lora_r else 0
    head = shape.head_parameters * rows.trained
    attention = 2 * shape.layers * shape.heads * shape.head_dim * rows.places
    # Backward: through every matrix once, and once more for those that are trained.
    frozen = 2 if spec.lora_r else 3
    again = 1 if spec.gradient_checkpointing else 0
    per_place = 2 * ((matrices + head) * frozen + matrices * again + adapters * 3) + 2 * attention * (3 + again)
    return per_place * rows.places
