"""Texts and numbers as people and models write them: thousands, signs and the forms of Unicode. Standard library only."""

from __future__ import annotations

import re
import unicodedata
from decimal import Context, Decimal

_LONGEST = 100  # characters
_EXACT = Context(prec=2 * _LONGEST)
# Signs, digits' separators and marks that are written in several ways, and characters that nobody sees.
_SAME = {0x2010: "-", 0x2011: "-", 0x2012: "-", 0x2013: "-", 0x2212: "-", 0x2018: "'", 0x2019: "'", 0x2044: "/"}
_SAME |= {0x66B: ".", 0x66C: ",", **dict.fromkeys((0xAD, 0x200B, 0x200E, 0x200F, 0x2060, 0xFEFF), "")}
_KEPT = ("<super>", "<sub>", "<fraction>")  # 10² is not 102
_NUMBER = re.compile(r"[-+]?(?:[1-9]\d{0,2}([,' _])\d{3}(?:\1\d{3})*|\d+)?(?:\.\d*)?(?:[eE][-+]?\d{1,6})?")


def plain(text: str) -> str:
    """Return a text in which each character has one form, such as the digits of full width, spaces and minus; superscripts stay."""
    if unicodedata.is_normalized("NFKC", text):  # so is each of its characters
        return text if text.isascii() else text.translate(_SAME)
    parts = (
        each if unicodedata.decomposition(each).startswith(_KEPT) else unicodedata.normalize("NFKC", each)
        for each in unicodedata.normalize("NFC", text)
    )
    return "".join(parts).translate(_SAME)


def number(text: str) -> Decimal | None:
    """Return the number that a text is, in a form that equal numbers share; None for another text.

    Thousands may stand between commas, apostrophes, spaces or underscores, in groups of three digits: 1,5 is no number, because it is
    15 nowhere, and 1.5 only to some.
    """
    text = plain(text).strip()
    found = _NUMBER.fullmatch(text) if len(text) <= _LONGEST else None
    if not found:
        return None
    try:
        return (Decimal(text.replace(found[1] or ",", "")) + 0).normalize(_EXACT)
    except ArithmeticError:
        return None
