"""Which samples are in which step: a pure function of (seed, epoch, position), so a sampler has no state to save."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from trainer.config import RunSpec
from trainer.data.packing import best_fit

_HELD_OUT_KEY = 0xE7A1  # separates the permutation for the evaluation split from those of the epochs


def permutation(n: int, *key: int) -> np.ndarray:
    """Return a permutation of range(n), int64 [n], that depends only on `key`.

    It sorts raw Philox words: NumPy guarantees the raw stream of a bit generator across versions, but not the result of
    Generator.permutation, and hosts with different versions must agree.
    """
    seed = np.random.SeedSequence([*key])
    return np.argsort(np.random.Philox(seed).random_raw(n), kind="stable")


def held_out(spec: RunSpec, samples: int) -> list[int]:
    """Return the indices of the samples that are reserved for evaluation; they depend only on the seed and the counts."""
    # Random tokens have no structure to evaluate.
    if not spec.eval_split or spec.fake_data:
        return []
    count = min(samples - 1, max(1, round(samples * spec.eval_split)))
    return [int(i) for i in permutation(samples, spec.seed, _HELD_OUT_KEY)[:count]]


class Order:
    """The rows of every step of a run, derived from the lengths of its samples and the spec alone."""

    def __init__(self, lengths: np.ndarray, *, seed: int, capacity: int, packing: bool, epochs: int, rows: int) -> None:
        """Args:
        lengths: tokens of every sample, int64 [samples].
        capacity: tokens per row (seq_length).
        rows: rows per step over all ranks.
        """
        self._lengths, self._seed, self._capacity, self._packing = lengths.tolist(), seed, capacity, packing
        self._epoch: tuple[int, list[list[int]]] = (-1, [])
        self.rows_per_step = rows
        self.rows_per_epoch = len(self.epoch(0))
        self.total_rows = self.rows_per_epoch * epochs
        # The last step takes the remaining rows: none is dropped.
        self.steps = -(-self.total_rows // rows)

    @classmethod
    def of(cls, spec: RunSpec, lengths: np.ndarray) -> Order:
        """Return the order that `spec` defines for training samples of these lengths (int64 [samples], in tokens)."""
        return cls(
            lengths,
            seed=spec.seed,
            capacity=spec.seq_length,
            packing=bool(spec.packing),
            epochs=spec.epochs,
            rows=spec.rows_per_step,
        )

    def epoch(self, epoch: int) -> list[list[int]]:
        """Return the rows of one epoch, in order; a row is a list of sample indices."""
        if self._epoch[0] != epoch:
            shuffled = permutation(len(self._lengths), self._seed, epoch, 0)
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
        return [self.epoch(index // self.rows_per_epoch)[index % self.rows_per_epoch] for index in indices]
