"""The interface between the training loop, the model and the training methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from trainer.common.lazy import LazyModule

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch
    import torch.nn.functional as F

    from trainer.data import packing
    from trainer.data.corpus import Corpus
    from trainer.distributed.world import World
    from trainer.method.method_plan import MethodPlan
    from trainer.method.module_with_loss import ModelWithLoss
    from trainer.records.step_metrics import MethodSums
else:
    torch, F, packing = LazyModule("torch"), LazyModule("torch.nn.functional"), LazyModule("trainer.data.packing")

Rows = Sequence[Sequence[int]]
_PLACES = 1024  # whose probabilities are in memory at once


class Batch(NamedTuple):
    """One micro-batch on this rank's device: int64 [rows, T] each (see `trainer.data.packing.collate`).

    `extra`: what the loss of the method needs beside the tokens, in a type of the method; for sft the probabilities of a
    teacher, or None. `places`: those whose next token has a label, int64 [n], as `loss_positions` returns them; None: unknown.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    extra: Any = None
    places: torch.Tensor | None = None


@dataclass(frozen=True)
class Work:
    """The work of this rank in one optimizer update, or in an evaluation.

    Attributes:
        parts: the rows of every micro-batch, as lists of indices in `corpus`. With `Strategy.lockstep` every rank has as many.
        counts: tokens and trained_tokens of this rank, if not those of its samples.
    """

    corpus: Corpus  # the samples
    rows: Rows  # the rows of all ranks that share the update
    parts: Sequence[Rows]
    total: float  # what the loss of the update is divided by, the same on all ranks that share its gradient
    weight: float  # this rank's part of `total`: the parts of all ranks add up to it
    step: int  # the step, from 0; -1 in an evaluation
    shared: Any = None  # what all micro-batches of the update need, in a type of the method
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class AheadContext:
    """What a method needs to prepare steps in advance, and again after a restart."""

    corpus: Corpus  # the training samples
    run_dir: Path  # the folder of the run
    prompts: Callable[[int], Sequence[int]]  # returns the samples of a step (from 0), for all ranks
    checkpoints: Callable[[], Collection[int]]  # returns the steps of the checkpoints of this host


@dataclass(frozen=True)
class RunContext:
    """What a method may use of its run: see `Method.begin`."""

    tokenizer: Any  # that of the model
    module: ModelWithLoss  # the model in full, with the method
    autocast: Callable[[], AbstractContextManager[Any]]  # returns the context of a forward pass
    steps: int  # number of steps of the run
    columns: Sequence[str] = ()  # of the records of the corpus, if it has records
    ahead: AheadContext | None = None  # what is needed to prepare steps in advance


class Rank(Protocol):
    """What `Method.prepare` may ask of the training loop. `group`: the ranks that share the update."""

    @property
    def group(self) -> World:
        """The ranks that share the gradient of the update, or the evaluation."""
        ...

    def batch(self, work: Work, rows: Rows) -> Batch:
        """Return the micro-batch of these rows on the device of this rank."""
        ...

    def score(self, batch: Batch) -> float:
        """Return the method's loss of a micro-batch without gradients. It may be a collective: all ranks call it as often."""
        ...

    def sum(self, values: list[float]) -> list[float]:
        """Sum values over the ranks that share the gradient of the update. All of them call it."""
        ...

    def waiting(self, note: str) -> None:
        """Report that this rank is alive, and what it does."""
        ...


class Method(ABC):
    """The computation of one method on this rank: the tensors of a micro-batch, its loss and its metrics.

    `iterations`: optimizer updates from the work of one `prepare`. `keeps_dropout`: whether the model trains with its own dropout.
    `examples`: records for a person to read, which the loop takes.
    """

    iterations = 1
    keeps_dropout = False

    def __init__(self) -> None:
        self._sums: dict[str, float | torch.Tensor] = defaultdict(float)
        self.examples: list[dict[str, Any]] = []

    def begin(self, run: RunContext) -> None:  # noqa: B027  most methods need nothing of it
        """Receive what the method may use of the run, before the first step."""

    def end(self) -> None:  # noqa: B027  most methods open nothing
        """Release what the method has opened, after the last step."""

    def measures(self, plan: MethodPlan) -> MethodSums:
        """Return the names of the metrics' sums, and how metrics follow from them: by default those of the plan."""
        return plan

    def prepare(self, work: Work, rank: Rank) -> Work:
        """Return the work of an update with what it needs before its first micro-batch, such as a mean over all ranks.

        All ranks that share the update call it.
        """
        return work

    def batch(
        self, work: Work, rows: Rows, pad: int, length: int | None, on_device: Callable[[np.ndarray], torch.Tensor]
    ) -> Batch:
        """Return the micro-batch of some rows of `work`; no rows give one row of padding without loss.

        `pad`: token id of the padding. `length`: tokens per row; None for the length of the longest row. `on_device`:
        moves an array to the device of this rank.
        """
        return arranged(packing.collate(work.corpus, rows, pad=pad, length=length), on_device)

    @abstractmethod
    def loss(self, module: ModelWithLoss, batch: Batch) -> torch.Tensor:
        """Return the loss of a micro-batch summed over its samples, a float32 scalar that depends on the trained weights."""

    def reference_values(self, work: Work, rows: Rows, rank: Rank) -> np.ndarray:
        """Return what `Corpus.references` has for the samples of these rows, float64 [samples, 2], from the untrained model.

        A rank without the output head of the model returns nothing.
        """
        raise NotImplementedError

    def add_metrics(self, **sums: torch.Tensor | float) -> None:
        """Add sums over the samples of a micro-batch to the metrics; names as in `MethodPlan.sums`."""
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + (value if isinstance(value, float) else value.detach().double())

    def take_examples(self) -> list[dict[str, Any]]:
        taken, self.examples = self.examples, []
        return taken

    def take_metrics(self, names: Sequence[str]) -> list[float]:
        """Return the sums of the metrics since the last call, in the order of `names`."""
        taken = [float(self._sums[name]) for name in names]
        self._sums.clear()
        return taken


def next_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return the label of the token after each place of the flattened micro-batch, -100 at the end of a row."""
    return F.pad(labels[:, 1:], (0, 1), value=packing.IGNORED).flatten()


def arranged(
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray], on_device: Callable[[np.ndarray], torch.Tensor]
) -> Batch:
    """Return a micro-batch of arrays as `packing.lay_out` returns them. Its places are found here: a device would have to wait for them."""
    places = loss_positions(torch.from_numpy(arrays[2])).numpy()
    ids, positions, labels = map(on_device, arrays)
    return Batch(ids, positions, labels, places=on_device(places))


def loss_positions(labels: torch.Tensor) -> torch.Tensor:
    """Return the places of a flattened micro-batch whose next token has a label, int64 [n]; the first place if there is none."""
    selected = (next_labels(labels) != packing.IGNORED).nonzero().squeeze(1)
    return selected if len(selected) else selected.new_zeros(1)


def places_of(batch: Batch) -> torch.Tensor:
    """Return the places of a micro-batch whose next token has a label, see `loss_positions`."""
    return loss_positions(batch.labels) if batch.places is None else batch.places


def label_logps(module: ModelWithLoss, batch: Batch, temperature: float = 1.0) -> torch.Tensor:
    """Return the log-probability of every label given the tokens before it, float32 [rows, T]; 0 where there is no label.

    `temperature`: that of the probabilities. The value at place t belongs to the token at t + 1. It has a gradient also if the micro-batch has no label.
    """
    targets = next_labels(batch.labels)
    places = places_of(batch)
    logits = module.selected_logits(batch.ids, batch.positions, places)
    logits = logits.float() if temperature == 1 else logits.float() / temperature  # a copy is as large as the logits
    each = -F.cross_entropy(logits, targets[places], ignore_index=packing.IGNORED, reduction="none")
    return each.new_zeros(len(targets)).index_copy(0, places, each).view(batch.ids.shape)


def label_statistics(
    module: ModelWithLoss, batch: Batch, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of every label, and the entropy of the probabilities at its place, float32 [rows, T] each.

    As `label_logps`, but without gradients.
    """
    targets = next_labels(batch.labels)
    places = places_of(batch)
    logits = module.selected_logits(batch.ids, batch.positions, places)
    found = torch.zeros(2, len(targets), device=logits.device)
    for start in range(0, len(places), _PLACES):
        chosen = places[start : start + _PLACES]
        every = F.log_softmax(logits[start : start + _PLACES].float() / temperature, -1)
        labels = targets[chosen]
        found[0, chosen] = every.gather(1, labels.clamp(min=0)[:, None]).squeeze(1) * (labels != packing.IGNORED)
        found[1, chosen] = -(every.exp() * every).sum(-1) * (labels != packing.IGNORED)
    logps, entropies = found.view(2, *batch.ids.shape)
    return logps, entropies
