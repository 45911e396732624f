"""Formats of numbers, tables and untrusted text in messages for users.

Standard library only: the controller also uses this module.
"""

from collections.abc import Callable, Sequence


def table(rows: Sequence[Sequence[str]], right: bool = False) -> list[str]:
    """Return the lines of a text table whose columns are two spaces apart.

    Returns one line per row, without trailing spaces; an empty list for no rows. Raises ValueError: a row has more or
    fewer cells than the first one. `rows`: cells of every row; the first row is the header. All rows have the same
    number of cells. `right`: align all columns to the right instead of to the left.
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


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Return a number with its noun, whose plural ends in `plural`: ``1 run``, ``2 runs``."""
    return f"{number} {noun}{'' if number == 1 else plural}"


def mib(size: float) -> str:
    """Return a number of bytes in MiB, rounded, with thousands separators and without the unit."""
    return f"{size / 2**20:,.0f}"


def printable(text: object, limit: int = 200) -> str:
    """Return untrusted text so that a message can contain it: one line of at most `limit` characters.

    Control characters, line separators, bidirectional controls, other invisible characters and lone surrogates become
    escapes as in Python's repr: a terminal neither executes nor reorders what it shows. Printable text of any script is
    unchanged. `text`: any object; what is not a string is converted with str(). `limit`: maximum length of the result
    in characters; a longer text ends with ``...``.
    """
    whole = text if isinstance(text, str) else _convert(str, text)
    parts: list[str] = []
    room = limit
    for char in whole[: limit + 1]:
        part = char if char.isprintable() else ascii(char)[1:-1]
        parts.append(part)
        room -= len(part)
        if room < 0:
            break
    if room >= 0:
        return "".join(parts)
    while room < 3 and parts:  # room for the dots, without a part of an escape
        room += len(parts.pop())
    return "".join(parts) + "..."[:limit]


def quoted(value: object, limit: int = 80) -> str:
    """Return an untrusted value as Python writes it (a string in quotes), as printable text of at most `limit` characters."""
    # repr of a long string costs as much as the string, and only its start is shown.
    return printable(_convert(repr, value[: limit + 1] if isinstance(value, str) else value), limit)


def _convert(how: Callable[[object], str], value: object) -> str:
    try:
        return how(value)
    except (ValueError, RecursionError, OverflowError):  # Python refuses to print an integer of more than 4300 digits
        return f"<{type(value).__name__}>"
