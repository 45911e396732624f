"""The probable encoding of text that is not UTF-8, for error messages. Standard library only."""

import re
from typing import BinaryIO

_BOMS = ((b"\xff\xfe\0\0", "UTF-32"), (b"\0\0\xfe\xff", "UTF-32"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16"))
# The first two characters of JSON and of a table are ASCII, so that their zero bytes tell the encoding.
_WITHOUT_BOM = (
    (rb"[^\0]\0\0\0", "UTF-32LE"),
    (rb"\0\0\0[^\0]", "UTF-32BE"),
    (rb"([^\0]\0){2}", "UTF-16LE"),
    (rb"(\0[^\0]){2}", "UTF-16BE"),
)
_HIGH = re.compile(rb"[\x80-\xff]+")
# Undefined or unusual in Windows-1252, and usual in DOS code pages and in encodings of several bytes per character.
_UNUSUAL = frozenset(b"\x81\x82\x83\x86\x87\x88\x8d\x8f\x90\x98\x9d")
_LOOKED_AT = 64 * 1024  # bytes from the first one that is not UTF-8


def not_utf8(line: bytes, has_utf8: bool = False) -> str:
    """Say that a line is not UTF-8 text, which encoding it probably has, and how to convert the file; empty for UTF-8.

    Args:
        line: a line of the file, best the first one that is not UTF-8.
        has_utf8: whether earlier lines have characters in UTF-8, which the conversion of the file would spoil.
    """
    if encoding := _wide(line):
        return f"not UTF-8 text, but {encoding}: {_iconv(encoding)}"
    try:
        line.decode()
    except UnicodeDecodeError as error:
        runs = _HIGH.findall(line[error.start : error.start + _LOOKED_AT])
        if has_utf8 or any(map(_is_utf8, _HIGH.findall(line[:_LOOKED_AT]) + runs)):
            return f"not UTF-8 text from byte {error.start + 1} of the line, but UTF-8 before: correct this line"
        # In a language with Latin letters most characters beyond ASCII stand alone.
        alone = sum(len(run) == 1 for run in runs)
        if 2 * alone >= len(runs) and not _UNUSUAL.intersection(b"".join(runs)):
            return f"not UTF-8 text, probably Windows-1252 (Latin-1): {_iconv('WINDOWS-1252')}"
        return f"not UTF-8 text: find its encoding with file -i FILE, and convert it: {_iconv('ENCODING')}"
    return ""


def first_not_utf8(file: BinaryIO, longest: int) -> tuple[int, str]:
    """Return the number of the first line that is not UTF-8, and what `not_utf8` says; (0, "") if there is none.

    Args:
        longest: bytes of a line at which the search ends.
    """
    has_utf8 = False
    for number, line in enumerate(iter(lambda: file.readline(longest), b""), 1):
        if len(line) == longest:
            break
        if reason := not_utf8(line, has_utf8):
            return number, reason
        has_utf8 = has_utf8 or has_characters(line)
    return 0, ""


def has_characters(line: bytes) -> bool:
    """Return whether a line of UTF-8 has a character beyond ASCII, apart from a byte order mark."""
    return not line.removeprefix(b"\xef\xbb\xbf").isascii()


def _wide(head: bytes) -> str:
    """Return the encoding of text whose characters have two or four bytes each; an empty string for other text."""
    marked = next((name for mark, name in _BOMS if head.startswith(mark)), "")
    return marked or next((name for zeros, name in _WITHOUT_BOM if re.match(zeros, head)), "")


def _is_utf8(run: bytes) -> bool:
    try:
        run.decode()
    except UnicodeDecodeError:
        return False
    return True


def _iconv(encoding: str) -> str:
    return f"iconv -f {encoding} -t UTF-8 FILE > NEW"
