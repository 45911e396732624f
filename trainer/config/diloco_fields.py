"""Declarations of fields of the run spec for DiLoCo: its rounds, its outer optimizer, its exchanges and its fragments."""

from trainer.config.fields import MAX_NUMBER, declare

OUTER_LR = declare(
    0.7,
    "diloco: learning rate of the outer optimizer",
    gt=0,
    le=MAX_NUMBER,
    aliases=["hv.outer_lr", "outer_learning_rate"],
)
FRAGMENTS = declare(
    1,
    "diloco: parts of the model that replicas exchange one after the other while they train; 1: the whole model at the end of a round",
    ge=1,
    le=10_000,
)
DELAY = declare(
    1,
    "diloco_fragments: inner steps from the start of the exchange of a fragment until its result is applied; 0: wait for it",
    ge=0,
    le=10_000,
    unit="steps",
)
MIXING = declare(
    0.5,
    "diloco_fragments: part of its own weights that a replica keeps when it applies the result of a fragment",
    ge=0,
    lt=1,
)
LOCAL_STEPS = declare(
    10,
    "diloco: inner steps between two synchronizations of the replicas",
    ge=1,
    le=100_000,
    unit="steps",
    aliases=["hv.local_steps", "inner_steps", "sync_every"],
)
COMM_DTYPE = declare(
    "bf16",
    "diloco: data type of the pseudo-gradients that replicas exchange; int4 keeps what rounding lost for the next exchange",
    deprecated_names=["diloco_wire"],
    aliases=["hv.hivemind_compression", "hivemind_compression"],
)
MEMBERSHIP = declare(
    "fixed",
    "diloco: fixed: the same replicas for the duration of a start; torchft: replicas may leave and rejoin (requires the torchft extra)",
    mutable=True,
    deprecated_names=["diloco_members"],
    aliases=["fault_tolerance", "hv.fail_rank_drop", "hv.all_reduce_strategy"],
)
