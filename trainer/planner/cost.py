"""What a run costs: bytes of memory a process, bytes on the wire a step, floating point operations. Pure arithmetic, no torch.

Held against measured peaks in tests/unit/trainer/test_plan.py.
"""

from dataclasses import asdict, dataclass

from trainer.config.run_spec import RunSpec
from trainer.planner.model_shape import Shape

CHUNK = 16 << 20  # numbers that diloco's replicas send each other at once
_BUCKET = 8_000_000  # numbers that DeepSpeed sends at once; its own 500 M are laid out in full, and take 2 GB
_DEEPSPEED = 20 << 20  # bytes of its code, and of what its engine keeps (measured in benchmarks/memory.py)
_REUSED = 1e9  # stage3_max_reuse_distance: numbers between two uses, below which it is not given back in between
_BUCKETS = (2**20, 25 * 2**20)  # bytes of gradients in DDP's first bucket, and in every further one (bucket_cap_mb)
_SMALL = 1e5  # numbers in a parameter, below which stage 3 leaves it whole


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
    """Bytes of one process at its peak, above what Python and the libraries of every strategy take.

    `library` is what only this strategy loads.
    What a backward pass begins with, and, `between`, the most that is held at another time: while the model is read, a
    checkpoint is written, or replicas meet.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    wire: int
    library: int
    between: int

    @property
    def step(self) -> dict[str, int]:
        """What a backward pass begins with, by name."""
        return {name: size for name, size in asdict(self).items() if name != "between"}

    @property
    def total(self) -> int:
        """The most at any time."""
        return max(sum(self.step.values()), self.between)


def _weight_bytes(spec: RunSpec, shape: Shape) -> int:
    """Return the bytes of the model's weights, adapters not counted."""
    if spec.quantize == "nf4":
        # Half a byte a number, scales of blocks of 64 in 8 bits, theirs of 256; the rest is made float32.
        packed = shape.layers * sum(matrix.into * matrix.out for matrix in shape.linear)
        return round(packed * (0.5 + 1 / 64 + 4 / 64 / 256)) + 4 * (shape.parameters - packed)
    return shape.parameters * _stored(spec)


def _stored(spec: RunSpec) -> int:
    """Return the bytes of a number of the base as load_model has it."""
    return 2 if spec.lora_r and spec.precision == "bf16-mixed" and spec.strategy != "deepspeed" else 4


def bucket(trained: int) -> int:
    """Return how many numbers DeepSpeed sends at once, which it lays out in full: no more than are trained."""
    return min(_BUCKET, max(1, trained))


def prefetched(parameters: int) -> int:
    """Return how many numbers DeepSpeed's stage 3 may fetch ahead: its own default, or what goes with a small model."""
    return min(50_000_000, parameters // 10)


def _persistent(spec: RunSpec, shape: Shape) -> tuple[int, int]:
    """Return how many numbers DeepSpeed's stage 3 keeps whole on every rank, of the base and of what is trained.

    stage3_param_persistence_threshold in https://www.deepspeed.ai/docs/config-json/
    """
    small = [matrix.into * matrix.out for matrix in shape.linear if matrix.into * matrix.out < _SMALL]
    base = shape.layers * (sum(small) + shape.other_per_layer) + shape.other
    adapters = [spec.lora_r * side for matrix in shape.targets(spec) for side in (matrix.into, matrix.out)]
    trained = shape.layers * sum(number for number in adapters if number < _SMALL)
    return base, trained if spec.lora_r else base


def _saved(spec: RunSpec, shape: Shape, cuda: bool) -> tuple[float, float]:
    """Return the bytes that one layer keeps for the backward pass: of a token, and of a token under checkpointing."""
    number = 4 if spec.precision == "32-true" else 2
    query, value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    gate = sum(matrix.out for matrix in shape.linear if matrix.reads == "mlp")
    product = next(matrix.into for matrix in shape.linear if matrix.reads == "gated")
    # What is trained needs what it was given; a frozen matrix does not.
    readers = shape.targets(spec) if spec.lora_r else shape.linear
    if spec.lora_r and (spec.lora_dropout or number == 2):
        read = [matrix.into for matrix in readers]  # peft drops, or casts, for each adapter anew
    else:
        read = list({matrix.reads: matrix.into for matrix in readers}.values())
    # What was dropped: a float32 each on a CPU, a bool in CUDA's own kernel.
    dropped = sum(read) * (1 if cuda else 4) if spec.lora_r and spec.lora_dropout else 0
    adapters = len(shape.targets(spec)) * spec.lora_r
    # The norms keep what they were given (in float32), attention its queries, keys, values and mix, the MLP both factors.
    floats = query * 2 + 2 * (query if spec.packing else value) + gate + product + sum(read) + adapters
    norms = shape.hidden * 4 * (2 if spec.lora_r else 4)  # their weight, if it is trained, needs what it scaled
    return floats * number + dropped + norms, shape.hidden * number


def memory(spec: RunSpec, shape: Shape, layout: Layout, rows: Rows, *, cuda: bool = False) -> Memory:
    """Return what a process of the run needs at its peak.

    `cuda`: on a GPU, where what DeepSpeed offloads and diloco's outer state are in the host's memory.
    """
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
    if spec.strategy == "deepspeed":
        optimizer += trained * 4  # its own copy of what is trained
    if spec.weights_in_parts:
        whole = weights
        if spec.strategy == "deepspeed":
            # What it keeps from forward to backward, and what it fetches ahead: as sent, and put together.
            gathered = min(whole, int(_REUSED) * _stored(spec)) + 2 * prefetched(shape.parameters) * _stored(spec)
        else:
            gathered = _root_bytes(spec, shape)  # given back when the backward pass is through with it
            # The layer at work, and the one that is fetched: as sent, and put together.
            gathered += 3 * (whole - gathered) // shape.layers
        weights, frozen, gradients, optimizer = (n // parts for n in (weights, frozen, gradients, optimizer))
    elif spec.strategy == "deepspeed":
        optimizer //= parts
        gradients //= parts if spec.deepspeed_stage >= 2 else 1
    if spec.strategy == "deepspeed" and cuda:
        optimizer *= spec.deepspeed_offload == "none"
        weights *= spec.deepspeed_offload != "all"
    if spec.strategy == "diloco" and not cuda:
        optimizer += trained * 8  # the outer optimiser's copy and momentum
    tokens = spec.batch_size * rows.places
    layer, edge = _saved(spec, shape, cuda)
    # Logits in float32, their log-probabilities and the gradient: at once, where the backward pass begins.
    head = tokens * rows.trained * shape.vocabulary * 4 * 3
    kept = tokens * shape.layers * (edge if spec.gradient_checkpointing else layer)
    if spec.gradient_checkpointing:
        head = max(head, tokens * layer)  # a layer is computed again when the logits are gone
    wire = trained * 2 if spec.gradient_wire == "bf16" and world > 1 and spec.strategy == "ddp" else 0
    if not spec.lora_r and spec.precision != "32-true":
        # autocast's copies of the weights live as long as the forward pass.
        weights += 2 * (shape.layers * sum(matrix.into * matrix.out for matrix in shape.linear) + shape.head_parameters)
    if _by_ddp(spec, layout) and _micro_batches(spec, world) > 1:
        # In the second step DDP lays its buckets out anew, while passes that are not its last gather gradients beside them.
        gradients *= 2
    between = library = 0
    if spec.strategy == "deepspeed" and spec.deepspeed_stage < 3:
        wire = 4 * bucket(trained)
    if not cuda:
        library = _DEEPSPEED if spec.strategy == "deepspeed" else 0
        between = _between(spec, shape, parts, weights + frozen, gradients, optimizer, gathered)
        if spec.strategy == "deepspeed" and spec.deepspeed_stage < 3:
            # For its optimizer it lays a rank's part of them out anew, once or twice, each in one piece. About a fifth of
            # what activations and logits gave back fits (measured in benchmarks/memory.py).
            laid = spec.deepspeed_stage * trained * 4 // parts
            gradients += max(0, laid - round((kept + head) / 5))
    return Memory(weights + frozen + gathered, gradients, optimizer, round(kept), round(head), wire, library, between)


def _by_ddp(spec: RunSpec, layout: Layout) -> bool:
    """Tell whether DDP shares gradients among ranks: all of them, or those of a replica."""
    if spec.strategy == "diloco":
        return spec.replica_strategy == "ddp" and sum(layout.processes[: spec.replica_hosts]) > 1
    return spec.strategy == "ddp" and layout.world > 1


def _between(
    spec: RunSpec, shape: Shape, parts: int, weights: int, gradients: int, optimizer: int, gathered: int
) -> int:
    """Return the most bytes that a process on a CPU holds apart from its backward passes, if that may be more.

    The model's files, which are mapped, are not counted: the kernel takes their pages back where memory is short.
    `parts`: over how many ranks weights are shared out. The others are a rank's own, as in `Memory`.
    """
    stored, trained = shape.parameters * _stored(spec), shape.trained(spec) * 4
    held = weights + gradients + optimizer
    if spec.strategy == "deepspeed" and spec.deepspeed_stage == 3:
        # Every rank reads the whole model and takes its part. Then, what was gathered and given back is of unlike sizes:
        # malloc keeps about as much as this (measured in benchmarks/memory.py).
        return max(stored + stored // parts, held + gathered + gradients + round(0.7 * stored))
    if spec.strategy == "diloco":
        # The pseudo-gradient, and a chunk of it on its way.
        return held + trained + 2 * min(trained, 4 * CHUNK)
    if spec.strategy == "fsdp" and not spec.lora_r:
        # A checkpoint is written from a copy; at the end the first rank of a host puts the whole model together.
        return held + gathered + max(weights + optimizer, trained)
    return 0


def _root_bytes(spec: RunSpec, shape: Shape) -> int:
    """Return the bytes of what is outside of the layers: embedding, head, last norm."""
    return (shape.parameters - shape.layers * shape.layer_parameters) * _stored(spec)


def _micro_batches(spec: RunSpec, ranks: int) -> int:
    """Return how many micro-batches of a step the rank with the most takes."""
    return -(-spec.rows_per_step // (ranks * spec.batch_size))


def wire_bytes(spec: RunSpec, shape: Shape, layout: Layout, *, gloo: bool) -> float:
    """Return the bytes that a process sends in one optimiser step (mean over steps); between hosts a link carries as many."""
    ranks, hosts = layout.world, len(layout.processes)
    if ranks == 1 or spec.strategy == "averaging":
        return 0.0
    micro = _micro_batches(spec, ranks)
    if spec.strategy != "diloco":
        return _shared_bytes(spec, shape, layout, micro, gloo)
    # Replicas of `replica_hosts` each, and what these do among themselves.
    replicas, number = -(-hosts // spec.replica_hosts), 2 if spec.diloco_wire == "bf16" else 4
    met = 2 * (replicas - 1) / replicas * shape.trained(spec) * number / spec.local_steps
    inside = Layout(layout.processes[: spec.replica_hosts])
    if len(inside.processes) == 1:
        return met
    return met + _shared_bytes(spec.model_copy(update={"strategy": spec.replica_strategy}), shape, inside, micro, gloo)


def _shared_bytes(spec: RunSpec, shape: Shape, layout: Layout, micro: int, gloo: bool) -> float:
    """Return the bytes of a step whose ranks share gradients; `micro` is how many micro-batches each takes."""
    ring = (layout.world - 1) / layout.world
    trained, number = shape.trained(spec), 2 if spec.gradient_wire == "bf16" else 4
    # gloo has no reduce-scatter of its own: it sends what an all-reduce sends. FSDP has one where ranks have a host each.
    ours = spec.strategy == "fsdp" and max(layout.processes) == 1
    scattered = (2 if gloo and not ours else 1) * ring * trained * number
    if spec.strategy == "fsdp":
        if spec.fsdp_shard == "host":  # between hosts go the sums of the parts alone
            hosts = len(layout.processes)
            return 2 * (hosts - 1) / hosts * trained * number
        half = spec.precision == "bf16-mixed"
        layers = shape.layers * shape.layer_parameters * (2 if half else 4)
        layers += trained * (2 if half else 4) if spec.lora_r else 0
        # Forward and backward gather the layers; what is outside of them stays in between.
        gathered = ring * (2 * layers + _root_bytes(spec, shape)) * micro
        return gathered + scattered * (1 if spec.lora_r else micro)
    if spec.strategy == "deepspeed":
        return _zero_gathered(spec, shape, ring, micro) + scattered * (micro if spec.deepspeed_stage > 1 else 1)
    return 2 * ring * trained * number


def _zero_gathered(spec: RunSpec, shape: Shape, ring: float, micro: int) -> float:
    """Return the bytes of a step that DeepSpeed's ranks gather: what was updated; in stage 3, weights when it is their turn."""
    trained = shape.trained(spec)
    if spec.deepspeed_stage < 3:
        return ring * trained * 4
    base, small = _persistent(spec, shape)
    every = shape.parameters + (trained if spec.lora_r else 0)
    large = (every - base - (small if spec.lora_r else 0)) * _stored(spec)
    # What is used again within so many numbers stays in between: in a small model, all from forward to backward.
    again = max(0.0, 1 - _REUSED / 2 / every)
    return ring * (large * (1 + again) * micro + small * 4)


def zero_seconds(spec: RunSpec, shape: Shape, layout: Layout, link: float) -> tuple[float, float]:
    """Return the seconds of a step that DeepSpeed on CPUs takes beyond arithmetic, and beyond its bytes; `link`: bytes a second.

    Both were measured, in benchmarks/plan.py. Stage 3's hooks take 1.5 ms a module and micro-batch. gloo's gathers, which
    DeepSpeed takes, get 70 % of a link; stage 3 fetches ahead, which hides as much.
    """
    if spec.strategy != "deepspeed":
        return 0.0, 0.0
    micro = _micro_batches(spec, layout.world)
    if spec.deepspeed_stage < 3:
        gathered = _zero_gathered(spec, shape, (layout.world - 1) / layout.world, micro)
        return 0.0, gathered / link * (1 / 0.7 - 1)
    # A matrix with an adapter is four: itself, its two factors and what holds them.
    adapted = len(shape.targets(spec)) if spec.lora_r else 0
    return 1.5e-3 * shape.layers * (len(shape.linear) + 3 * adapted + 6) * micro, 0.0


def not_hidden(spec: RunSpec, shape: Shape, wire: float, part: float) -> float:
    """Return the seconds of a step in which ranks do nothing but communicate.

    DDP sends a bucket of gradients while the backward pass goes on with the next; nothing else here is hidden so.

    Args:
        wire: seconds of all communication of the step.
        part: seconds of the step's last micro-batch, forward and backward.
    """
    if spec.strategy != "ddp":
        return wire
    passes = 3 - bool(spec.lora_r) + spec.gradient_checkpointing
    backward = part * (passes - 1) / passes
    gradients = shape.trained(spec) * 4
    come, sent = 0, 0.0  # bytes that there are, and the second at which they have been sent
    while come < gradients:
        size = min(_BUCKETS[come > 0], gradients - come)
        come += size
        sent = max(sent, backward * come / gradients) + wire * size / gradients
    return max(0.0, sent - backward)


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
