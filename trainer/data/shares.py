"""The division of the rows of a step among ranks and micro-batches. Standard library only: the run spec imports it."""

from collections.abc import Sequence


def share(rows: int, shares: Sequence[int], rank: int) -> slice:
    """Return the slice of `rows` rows that belongs to `rank`: contiguous, in rank order, in proportion to `shares`.

    Cumulative rounding: the slices cover every row exactly once, and no slice is more than one row off its exact share.
    """
    total = sum(shares)
    before = sum(shares[:rank])
    return slice(rows * before // total, rows * (before + shares[rank]) // total)


def micro_batches(rows: Sequence[list[int]], size: int, least: int = 1) -> list[list[list[int]]]:
    """Split the rows of a rank into micro-batches of at most `size` rows, padded with empty ones to at least `least`.

    `least` is 1 or more: a rank without rows still takes part in the collectives of the step.
    """
    batches = [list(rows[first : first + size]) for first in range(0, len(rows), size)]
    return batches + [[] for _ in range(least - len(batches))]
