"""Near duplicates among texts, by MinHash. Imports numpy."""

from __future__ import annotations

import zlib

import numpy as np

from trainyard.ollama.filters import word_runs

_SHINGLE = 3  # words
_BANDS, _ROWS = 20, 5  # a pair with a similarity of 0.8 shares a band with a probability of 0.9996
_PRIME = (1 << 61) - 1


class NearDuplicates:
    """Finds near duplicates by MinHash and locality-sensitive hashing, and confirms each by its exact similarity.

    The packages for it do not fit: datasketch needs scipy, which is larger than everything else on the controller.
    """

    def __init__(self, similarity: float) -> None:
        self._similarity = similarity
        draw = np.random.default_rng(1)
        # 31 bits, so that products fit into 64 bits.
        self._a = draw.integers(1, 1 << 31, (1, _BANDS * _ROWS), dtype=np.uint64)
        self._b = draw.integers(0, 1 << 31, (1, _BANDS * _ROWS), dtype=np.uint64)
        self._bands: list[dict[bytes, list[int]]] = [{} for _ in range(_BANDS)]
        self._kept: list[np.ndarray] = []

    def add(self, text: str) -> bool:
        """Return whether a kept text is a near duplicate of this one; keep it if none is."""
        hashes = self._shingles(text)
        signature = ((hashes[:, None] * self._a + self._b) % np.uint64(_PRIME)).min(axis=0)
        keys = [band.tobytes() for band in signature.reshape(_BANDS, _ROWS)]
        candidates = {index for band, key in zip(self._bands, keys, strict=True) for index in band.get(key, ())}
        if any(_jaccard(hashes, self._kept[index]) >= self._similarity for index in candidates):
            return True
        for band, key in zip(self._bands, keys, strict=True):
            band.setdefault(key, []).append(len(self._kept))
        self._kept.append(hashes)
        return False

    @staticmethod
    def _shingles(text: str) -> np.ndarray:
        """Return 32-bit hashes of all runs of three words, uint64 [runs], sorted, each once; of the text if it is short."""
        parts = list(word_runs(text, _SHINGLE)) or [text]
        return np.unique(np.array([zlib.crc32(part.encode()) for part in parts], dtype=np.uint64))


def _jaccard(one: np.ndarray, other: np.ndarray) -> float:
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (len(one) + len(other) - shared)
