"""Which samples are in which step: a pure function of (seed, epoch, place), so no sampler state to save or lose."""

from collections.abc import Sequence

import numpy as np


def permutation(n: int, *key: int) -> np.ndarray:
    """Return a permutation of range(n) that depends on `key` alone.

    Sorted raw Philox words: numpy keeps a bit generator's raw stream stable between versions, but not what
    Generator.permutation makes of it, and unlike hosts must agree.
    """
    seed = np.random.SeedSequence([*key])
    return np.argsort(np.random.Philox(seed).random_raw(n), kind="stable")


def best_fit(lengths: Sequence[int], capacity: int, order: Sequence[int]) -> list[list[int]]:
    """Pack items into bins of `capacity`: best-fit decreasing, equal lengths taken as they come in `order`.

    Args:
        lengths: length of every item, 1 to `capacity`.
        order: the items to pack.

    Returns:
        Bins as lists of items. Their lengths are the same multiset for every order, so every epoch has as many.
    """
    space: list[list[int]] = [[] for _ in range(capacity + 1)]  # space[s]: bins with s places left
    free = 0  # bit s is set while space[s] holds a bin, so the best fit is the lowest set bit >= length
    bins: list[list[int]] = []
    for item in sorted(order, key=lambda place: -lengths[place]):
        length = int(lengths[item])
        if not 1 <= length <= capacity:
            raise ValueError(f"item {item} has length {length}, takes 1 to {capacity}")
        fits = free >> length
        if fits:
            left = length + (fits & -fits).bit_length() - 1
            chosen = space[left].pop()
            if not space[left]:
                free ^= 1 << left
        else:
            left = capacity
            chosen = len(bins)
            bins.append([])
        bins[chosen].append(int(item))
        space[left - length].append(chosen)
        free |= 1 << (left - length)
    return bins


class Order:
    """The rows of every step of a run, from the lengths of its samples and the spec alone."""

    def __init__(self, lengths: np.ndarray, *, seed: int, capacity: int, packing: bool, epochs: int, rows: int) -> None:
        """Args:
        lengths: tokens of every sample, int64 [samples].
        capacity: tokens of a row (seq_length).
        rows: rows in one step over all ranks.
        """
        self._lengths, self._seed, self._capacity, self._packing = lengths.tolist(), seed, capacity, packing
        self._epoch: tuple[int, list[list[int]]] = (-1, [])
        self.rows_per_step = rows
        self.rows_per_epoch = len(self.epoch(0))
        self.total_rows = self.rows_per_epoch * epochs
        # The last step takes what is left: nothing is dropped.
        self.steps = -(-self.total_rows // rows)

    def epoch(self, epoch: int) -> list[list[int]]:
        """Return the rows of one epoch, in order; a row is a list of samples."""
        if self._epoch[0] != epoch:
            shuffled = permutation(len(self._lengths), self._seed, epoch, 0)
            if self._packing:
                rows = best_fit(self._lengths, self._capacity, shuffled.tolist())
                rows = [rows[place] for place in permutation(len(rows), self._seed, epoch, 1)]
            else:
                rows = [[int(sample)] for sample in shuffled]
            self._epoch = (epoch, rows)
        return self._epoch[1]

    def step(self, step: int) -> list[list[int]]:
        """Return the rows of step `step` (from 0); a step may reach over the end of an epoch."""
        first = step * self.rows_per_step
        places = range(first, min(first + self.rows_per_step, self.total_rows))
        return [self.epoch(place // self.rows_per_epoch)[place % self.rows_per_epoch] for place in places]


def share(rows: int, shares: Sequence[int], rank: int) -> slice:
    """Return the part of `rows` rows that is `rank`'s: contiguous, in rank order, in proportion to `shares`.

    Cumulative rounding: the parts cover every row once, and no part is more than one row off its exact share.
    """
    total = sum(shares)
    before = sum(shares[:rank])
    return slice(rows * before // total, rows * (before + shares[rank]) // total)


def micro_batches(rows: Sequence[list[int]], size: int, least: int = 1) -> list[list[list[int]]]:
    """Cut a rank's rows into micro-batches of at most `size` rows; at least `least` (1 or more), the last ones empty.

    A rank without rows still has to take part in the step's collectives.
    """
    parts = [list(rows[first : first + size]) for first in range(0, len(rows), size)]
    return parts + [[] for _ in range(least - len(parts))]
