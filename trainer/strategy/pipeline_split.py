"""The division of a model's decoder layers over the ranks of a pipeline, by speed and memory. No torch: the planner uses it."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from trainer.common.errors import UserError

# Model types of transformers that a pipeline supports; trainer.strategy.pipeline_stage names their parts.
PIPELINE_KINDS: tuple[str, ...] = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3")
PIPELINE_KINDS += ("olmo2", "smollm3", "gpt2")


@dataclass(frozen=True)
class RankFacts:
    """The capacity of one rank. `layer_seconds`: of one decoder layer, in any unit; `room`: bytes for tensors, None if
    unknown."""

    layer_seconds: float
    room: float | None = None


@dataclass(frozen=True)
class LayerCosts:
    """The requirements of the parts of a model. Sizes are bytes."""

    head: float  # time of the output head in layers
    layer: float  # weights, gradients and moments of one decoder layer
    saved: float  # activations that one layer stores for one micro-batch
    received: float  # input of a stage for one micro-batch
    first: float  # what only the first rank holds: the embedding
    last: float  # what only the last rank holds: the final norm, the head and its logits

    def needed(self, layers: int, rank: int, ranks: int, micro: int) -> float:
        """Return the bytes of `rank` with `layers` layers for a step of `micro` micro-batches."""
        flying = in_flight(rank, ranks, micro)
        held = layers * (self.layer + flying * self.saved) + flying * self.received
        return held + (self.first if rank == 0 else 0) + (self.last if rank == ranks - 1 else 0)


def in_flight(rank: int, ranks: int, micro: int) -> int:
    """Return the maximum number of micro-batches whose activations a rank holds (see `operations`)."""
    return min(micro, warmup(rank, ranks) + 1)


def warmup(rank: int, ranks: int) -> int:
    """Return the forward passes of a rank before it alternates forward and backward passes.

    Twice as many as 1F1B needs, as in Eager-1F1B (https://arxiv.org/abs/2211.05322): while an activation travels to the next
    rank and its gradient travels back, the rank computes.
    """
    return 2 * (ranks - 1 - rank)


def divide_layers(layers: int, facts: Sequence[RankFacts], costs: LayerCosts, micro: int) -> list[int]:
    """Return the number of layers of every rank, at least one each, that minimize the time of the slowest rank.

    Each layer goes to the rank that would finish it first and has memory for it, which is optimal for equal layers.
    `facts`: one per rank, in rank order. If a speed is unknown (0), ranks count as equally fast. `micro`: micro-batches
    of a step. Raises UserError: there are more ranks than layers, or the ranks together have too little memory.
    """
    ranks = len(facts)
    check_ranks(ranks, layers)
    seconds = [fact.layer_seconds for fact in facts]
    if not all(seconds):
        seconds = [1.0] * ranks

    def most(rank: int) -> int:
        room = facts[rank].room
        if room is None:
            return layers
        return bisect_right(range(layers + 1), room, key=lambda count: costs.needed(count, rank, ranks, micro)) - 1

    def time(rank: int, count: int) -> float:
        return (count + (costs.head if rank == ranks - 1 else 0)) * seconds[rank]

    counts, limits = [1] * ranks, [most(rank) for rank in range(ranks)]
    small = [rank for rank in range(ranks) if limits[rank] < 1]
    # The ranks that have memory for another layer, by the time at which they would finish it.
    queue = [(time(rank, 2), rank) for rank in range(ranks) if limits[rank] > 1]
    heapify(queue)
    while queue and sum(counts) < layers:
        _, rank = queue[0]
        counts[rank] += 1
        if counts[rank] < limits[rank]:
            heapreplace(queue, (time(rank, counts[rank] + 1), rank))
        else:
            heappop(queue)
    if small or sum(counts) < layers:
        raise UserError(_too_large(layers, facts, costs, micro))
    return counts


def check_ranks(ranks: int, layers: int) -> None:
    """Check that every rank has a layer. Raises UserError."""
    if ranks > layers:
        raise UserError(
            f"strategy: pipeline has {ranks} ranks, but the model has {layers} layers: use at most {layers} ranks"
        )


def _too_large(layers: int, facts: Sequence[RankFacts], costs: LayerCosts, micro: int) -> str:
    ranks = len(facts)
    need = sum(costs.needed(0, rank, ranks, micro) for rank in range(ranks))
    need += sum(costs.layer + in_flight(rank, ranks, micro) * costs.saved for rank in range(ranks)) * layers / ranks
    have = ", ".join(f"{fact.room / 2**30:.1f}" for fact in facts if fact.room is not None)
    return (
        f"strategy: pipeline needs about {need / 2**30:.1f} GiB over {ranks} ranks, which have {have} GiB: "
        "add hosts, or set a smaller batch_size or gradient_checkpointing=true"
    )


def parse_layers(text: str) -> list[int]:
    """Return the numbers in the field `pipeline_layers`. Raises ValueError if one is 0."""
    counts = [int(word) for word in text.split(",") if word]
    if not all(counts):
        raise ValueError(f"pipeline_layers: every rank needs a layer, got {text}")
    return counts


def given_layers(text: str, ranks: int, layers: int) -> list[int]:
    """Return the numbers of layers that a user gives. Raises UserError if they are not those of this model on these ranks."""
    counts = parse_layers(text)
    if len(counts) != ranks or sum(counts) != layers:
        raise UserError(
            f"pipeline_layers: {text} has {len(counts)} ranks and {sum(counts)} layers, but the run has {ranks} ranks and the "
            f"model has {layers} layers: give one number per rank with the sum {layers}, or remove it"
        )
    return counts
