"""Pack samples into rows of at most seq_length tokens, and lay rows out as arrays."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from trainer.data.corpus import Corpus

IGNORED = -100  # the label of a position without loss, as torch's cross_entropy has it
_EMPTY_WIDTH = 8  # tokens of the padding row of an empty micro-batch


def best_fit(lengths: Sequence[int], capacity: int, order: Sequence[int]) -> list[list[int]]:
    """Pack items into bins of `capacity` by best-fit decreasing; items of equal length keep their order in `order`.

    `lengths`: length of every item, 1 to `capacity`. `order`: indices of the items to pack. Raises ValueError: the
    length of an item is out of range. Returns Bins as lists of item indices. The multiset of bin lengths is the same
    for every order, so all epochs have the same number of bins.
    """
    bins_with_space: list[list[int]] = [[] for _ in range(capacity + 1)]  # [s]: the bins with s units of free space
    occupied = 0  # bit s is set if bins_with_space[s] is not empty: the best fit is the lowest set bit >= length
    bins: list[list[int]] = []
    for item in sorted(order, key=lambda index: -lengths[index]):
        length = int(lengths[item])
        if not 1 <= length <= capacity:
            raise ValueError(f"item {item} has length {length}, expected 1 to {capacity}")
        fitting = occupied >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            chosen = bins_with_space[space].pop()
            if not bins_with_space[space]:
                occupied ^= 1 << space
        else:
            space = capacity
            chosen = len(bins)
            bins.append([])
        bins[chosen].append(int(item))
        bins_with_space[space - length].append(chosen)
        occupied |= 1 << (space - length)
    return bins


def collate(
    corpus: "Corpus", rows: Sequence[Sequence[int]], *, pad: int, length: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lay rows of samples, each with one sequence, out as one micro-batch.

    `rows`: sample indices of every row; no rows give one row of padding without loss. `pad`: token id of the padding.
    `length`: tokens per row (T); None for the length of the longest row.

    Returns:
        ids, positions, labels: int64 [rows, T] each. Positions restart at 0 with every sample, which separates packed
        samples; padding has the complement ~position (below 0). Labels are -100 where there is no loss.
    """
    spans = [[slice(corpus.starts[sample], corpus.starts[sample + 1]) for sample in row] for row in rows]
    return lay_out([[(corpus.tokens[span], corpus.trained[span]) for span in row] for row in spans], pad, length)


def lay_out(
    rows: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]], pad: int, length: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lay sequences out as one micro-batch; arguments and results as for `collate`.

    `rows`: the token ids of the sequences of every row, and which of them carry loss.
    """
    width = length or max((sum(len(tokens) for tokens, _ in row) for row in rows), default=0) or _EMPTY_WIDTH
    ids: np.ndarray = np.full((max(1, len(rows)), width), pad, np.int64)
    labels = np.full_like(ids, IGNORED)
    positions = np.zeros_like(ids)
    for index, row in enumerate(rows or [[]]):
        end = 0
        for tokens, trained in row:
            start, end = end, end + len(tokens)
            ids[index, start:end] = tokens
            positions[index, start:end] = np.arange(end - start)
            labels[index, start:end] = np.where(trained, tokens, IGNORED)
        # The padding continues the positions of the last sample: no label depends on it, and a row with one sample
        # then needs no attention mask. The complement marks it.
        positions[index, end:] = ~(np.arange(width - end) + (positions[index, end - 1] + 1 if end else 0))
    return ids, positions, labels
