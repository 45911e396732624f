"""Several datasets in one run: the samples of an epoch, and the held-out ones, by the weights of the datasets."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from trainer.common.formats import printable

if TYPE_CHECKING:
    from trainer.config import RunSpec

_ROTATION_KEY = 2  # separates the permutations here from those of the epochs, whose third key is 0 or 1


def permutation(n: int, *key: int) -> np.ndarray:
    """Return a permutation of range(n), int64 [n], that depends only on `key`.

    It sorts raw Philox words: NumPy guarantees the raw stream of a bit generator across versions, but not the result of
    Generator.permutation, and hosts with different versions must agree.
    """
    seed = np.random.SeedSequence([*key])
    return np.argsort(np.random.Philox(seed).random_raw(n), kind="stable")


class Mixture:
    """The samples of every epoch, a pure function of (seed, epoch).

    A dataset of n samples and weight w has ceil(w n (e + 1)) - ceil(w n e) places in epoch e. They are the next places of a
    rotation through all of its samples in a fixed random order: no sample is used more than once more than another one,
    in an epoch and since the start of the run.
    """

    def __init__(self, sources: np.ndarray, weights: Sequence[float], seed: int) -> None:
        """Args:
        sources: the number of the dataset of every sample, int [samples].
        weights: how many times an epoch uses each sample of a dataset.
        """
        self._size = len(sources)
        self._exact = [Fraction(repr(float(weight))) for weight in weights]
        self.is_plain = all(weight == 1 for weight in weights)
        self.is_constant = all(weight.denominator == 1 for weight in self._exact)  # every epoch has the same samples
        self._rotations: list[np.ndarray] = []
        if not self.is_plain:
            for number in range(len(weights)):
                indices = np.flatnonzero(sources == number)
                self._rotations.append(indices[permutation(len(indices), seed, number, _ROTATION_KEY)])

    def _place(self, number: int, epoch: int) -> int:
        return -int(-self._exact[number] * len(self._rotations[number]) * epoch // 1)

    def count(self, epoch: int) -> int:
        if self.is_plain:
            return self._size
        return sum(self._place(number, epoch + 1) - self._place(number, epoch) for number in range(len(self._exact)))

    def samples(self, epoch: int) -> np.ndarray:
        """Return the samples of an epoch, int64 [count(epoch)], those of each dataset together."""
        if self.is_plain:
            return np.arange(self._size)
        parts = []
        for number, rotation in enumerate(self._rotations):
            places = np.arange(self._place(number, epoch), self._place(number, epoch + 1))
            parts.append(rotation[places % max(1, len(rotation))])
        return np.concatenate(parts).astype(np.int64)


def describe_mixture(spec: RunSpec, sources: np.ndarray, names: str = "") -> list[str]:
    """Return one line for each of several datasets: its samples, its weight and its part of an epoch.

    `names`: what the user calls the datasets, as RunSpec.dataset_name; empty: their paths in the spec. `sources`: the
    number of the dataset of every training sample, int [samples].
    """
    listed = spec.sources
    if len(listed) == 1 and listed[0].weight == 1:
        return []
    counts = np.bincount(sources, minlength=len(listed)).tolist()
    called = names.split(", ")
    if len(called) != len(listed):  # unknown, or a name has a comma
        called = [source.path for source in listed]
    total = sum(count * source.weight for count, source in zip(counts, listed, strict=True)) or 1
    return [
        f"dataset {printable(name)}: {count} samples x {source.weight:g}, {count * source.weight / total:.0%} of an epoch"
        for count, source, name in zip(counts, listed, called, strict=True)
    ]
