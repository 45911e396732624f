"""Hostile strings: text that has broken parsers, templates, shells, terminals or files. For suites and fuzzers."""

from __future__ import annotations

import operator

from tables import table

# Every character at which str.splitlines ends a line, and NUL, at which C ends a string.
LINE_BREAKS: list[str] = ["\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\0"]

_TABLE = {
    kind: [one if isinstance(one, str) else "".join(map(operator.mul, one[::2], one[1::2])) for one in strings]
    for kind, strings in table("hostile_strings").items()
}
TERMINAL_STRINGS: list[str] = _TABLE["terminal"]

HOSTILE_STRINGS: list[str] = [*(f"a{char}b" for char in LINE_BREAKS), *TERMINAL_STRINGS, *_TABLE["syntax"]]
"""Every hostile string that can be encoded as UTF-8."""

UNENCODABLE_STRINGS: list[str] = ["\ud800", "a\udfffb", "\udc80\udcff"]
"""Lone surrogates: JSON can express them, UTF-8 cannot."""

HOSTILE_BYTES: list[bytes] = [
    b"\xff\xfe\xfd",
    b"\xef\xbb\xbf{}",
    b"\xc0\x80",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\x00" * 64,
    "text".encode("utf-16"),
    b"\x1f\x8b\x08\x00",
    b"PK\x03\x04",
    b"\xe2\x80",
]
"""Bytes that are not UTF-8, or that start like a file of another format."""
