"""Formats of numbers and tables in messages for people. Standard library only: the controller also uses this module."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], right: bool = False) -> list[str]:
    """Return the lines of a text table whose columns are two spaces apart.

    Args:
        rows: cells of every row; the first row is the header. All rows have the same number of cells.
        right: align all columns to the right instead of to the left.

    Returns:
        One line per row, without trailing spaces; an empty list for no rows.

    Raises:
        ValueError: a row has more or fewer cells than the first one.
    """
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = str.rjust if right else str.ljust
    return ["  ".join(align(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def clock(seconds: float) -> str:
    """Return a duration as ``0:42`` or ``1:02:03``; a negative one as ``0:00``."""
    minutes, rest = divmod(int(max(0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def thousands(value: float) -> str:
    """Return a number with a decimal prefix: ``950``, ``1.2k``, ``3.4M`` or ``5.6G``."""
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{prefix}"
    return f"{value:.0f}"


def mib(size: float) -> str:
    """Return a number of bytes in MiB, rounded, with thousands separators and without the unit."""
    return f"{size / 2**20:,.0f}"
