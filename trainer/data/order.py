"""The samples of each step: a pure function of (seed, epoch, position), so a sampler has no state to save."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from trainer.common.errors import UserError
from trainer.data.mixture import Mixture, permutation
from trainer.data.packing import best_fit

if TYPE_CHECKING:
    from trainer.config import RunSpec

_HELD_OUT_KEY = 0xE7A1  # separates the permutation for the evaluation split from those of the epochs
_PART_KEY = 0xDA7A  # does so for those of data_part


def held_out(spec: RunSpec, samples: int, sources: np.ndarray | None = None) -> list[int]:
    """Return the indices of the samples that are reserved for evaluation; they depend only on `common_seed` and the counts.

    They are the fraction `eval_split` of all samples. For a dataset with a weight below 1, they are the fraction of the
    samples that an epoch uses. `samples`: the number of samples. `sources`: the number of the dataset of every sample,
    int [samples]; None if there is one dataset.
    """
    # Random tokens have no structure to evaluate.
    if not spec.eval_split or spec.fake_data:
        return []
    weights = [source.weight for source in spec.sources]
    if all(weight == 1 for weight in weights):
        count = min(samples - 1, max(1, round(samples * spec.eval_split)))
        return [int(i) for i in permutation(samples, spec.common_seed, _HELD_OUT_KEY)[:count]]
    sources = np.zeros(samples, np.int32) if sources is None else sources
    chosen: list[int] = []
    for number, weight in enumerate(weights):
        indices = np.flatnonzero(sources == number)
        count = min(len(indices) - 1, max(1, round(len(indices) * min(1.0, weight) * spec.eval_split)))
        order = permutation(len(indices), spec.common_seed, number + 1, _HELD_OUT_KEY)
        chosen += [int(i) for i in indices[order[: max(0, count)]]]
    return chosen


def training_samples(spec: RunSpec, samples: int, held_out: Sequence[int]) -> list[int]:
    """Return the indices of the samples that the run trains on, in ascending order; one that is drawn twice stands twice.

    `samples`: the number of samples. `held_out`: the indices of those that are reserved for evaluation. Raises
    UserError: the part of `data_part` has no samples.
    """
    kept = np.setdiff1d(np.arange(samples), held_out)
    if spec.shard:
        part, parts = spec.shard
        kept = np.sort(kept[permutation(len(kept), spec.common_seed, _PART_KEY)[part - 1 :: parts]])
        if not len(kept):
            raise UserError(
                f"data_part: {spec.data_part} has no samples, of {samples - len(held_out)}: use fewer parts"
            )
    elif spec.data_part:
        words = np.random.Philox(np.random.SeedSequence([spec.seed, _PART_KEY])).random_raw(len(kept))
        kept = np.sort(kept[words % len(kept)])
    return [int(index) for index in kept]


class Order:
    """The rows of every step of a run, derived from the lengths of its samples and the spec alone."""

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        seed: int,
        capacity: int,
        packing: bool,
        epochs: int,
        rows: int,
        mixture: Mixture | None = None,
        max_steps: int = 0,
        repeats: bool = True,
    ) -> None:
        """Args:
        lengths: tokens of every sample, int64 [samples].
        capacity: tokens per row (seq_length).
        rows: rows per step over all ranks.
        mixture: the samples of every epoch; None if each epoch has all of them once.
        max_steps: the number of steps; 0: all epochs.
        repeats: whether `max_steps` repeats the data instead of `epochs`, as it does in transformers; else the run ends with the earlier of both.
        """
        self._lengths, self._seed, self._capacity, self._packing = lengths.tolist(), seed, capacity, packing
        self._mixture = mixture or Mixture(np.zeros(len(lengths), np.int32), [1.0], seed)
        self._epoch: tuple[int, list[list[int]]] = (-1, [])
        self.rows_per_step = rows
        self.rows_per_epoch = len(self.epoch(0))
        enough = max_steps * rows
        self._ends = self._epoch_ends(None if max_steps and repeats else epochs, enough)
        everything = int(self._ends[-1]) if len(self._ends) else self.rows_per_epoch * epochs
        self.total_rows = enough if max_steps and repeats else min(everything, enough or everything)
        # The last step takes the remaining rows: none is dropped.
        self.steps = -(-self.total_rows // rows)

    def _epoch_ends(self, epochs: int | None, enough: int) -> np.ndarray:
        """Return the number of rows up to the end of every epoch, int64 [epochs]; empty if all epochs have as many.

        `epochs`: None: as many as are needed. `enough`: rows after which no end is needed; 0: all ends are needed.
        """
        ends: list[int] = []
        if not self._mixture.is_constant:
            total = 0
            for epoch in itertools.count() if epochs is None else range(epochs):
                total += len(self.epoch(epoch)) if self._packing else self._mixture.count(epoch)
                ends.append(total)
                if 0 < enough <= total:
                    break
        return np.array(ends, dtype=np.int64)

    @classmethod
    def of(
        cls, spec: RunSpec, lengths: np.ndarray, sources: np.ndarray | None = None, *, repeats: bool = True
    ) -> Order:
        """Return the order that `spec` defines for training samples.

        `lengths`: tokens of every sample, int64 [samples]. `sources`: the number of the dataset of every sample, int
        [samples]; None if there is one dataset. `repeats`: as for the class.
        """
        sources = np.zeros(len(lengths), np.int32) if sources is None else sources
        return cls(
            lengths,
            seed=spec.seed,
            capacity=spec.seq_length,
            packing=bool(spec.packing),
            epochs=spec.epochs,
            rows=spec.samples_per_step,
            mixture=None if spec.fake_data else Mixture(sources, [each.weight for each in spec.sources], spec.seed),
            max_steps=spec.max_steps,
            repeats=repeats,
        )

    def epoch(self, epoch: int) -> list[list[int]]:
        """Return the rows of one epoch, in order; a row is a list of sample indices."""
        if self._epoch[0] != epoch:
            samples = self._mixture.samples(epoch)
            shuffled = samples[permutation(len(samples), self._seed, epoch, 0)]
            if self._packing:
                rows = best_fit(self._lengths, self._capacity, shuffled.tolist())
                rows = [rows[index] for index in permutation(len(rows), self._seed, epoch, 1)]
            else:
                rows = [[int(sample)] for sample in shuffled]
            self._epoch = (epoch, rows)
        return self._epoch[1]

    def step(self, step: int) -> list[list[int]]:
        """Return the rows of step `step` (from 0); a step can span the end of an epoch."""
        first = step * self.rows_per_step
        indices = range(first, min(first + self.rows_per_step, self.total_rows))
        return [self._row(index) for index in indices]

    def epochs(self, steps: int) -> int:
        """Return the number of epochs that end within the first `steps` steps."""
        rows = min(steps * self.rows_per_step, self.total_rows)
        if not len(self._ends):
            return rows // self.rows_per_epoch
        return int(np.searchsorted(self._ends, rows, side="right"))

    def _row(self, index: int) -> list[int]:
        if not len(self._ends):
            return self.epoch(index // self.rows_per_epoch)[index % self.rows_per_epoch]
        epoch = int(np.searchsorted(self._ends, index, side="right"))
        return self.epoch(epoch)[index - (int(self._ends[epoch - 1]) if epoch else 0)]
