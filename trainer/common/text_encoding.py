"""Text that is not UTF-8: where it is not, and the remedy, for error messages. Standard library only."""

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


def not_utf8(line: bytes) -> str:
    """Say where a line is not UTF-8 text, and how to convert the file; empty for UTF-8."""
    marked = next((name for mark, name in _BOMS if line.startswith(mark)), "")
    if encoding := marked or next((name for zeros, name in _WITHOUT_BOM if re.match(zeros, line)), ""):
        return f"not UTF-8 text, but {encoding}: {_iconv(encoding)}"
    try:
        line.decode()
    except UnicodeDecodeError as error:
        return (
            f"not UTF-8 text at byte {error.start + 1}: correct the line, or convert a file that has another encoding, such as "
            f"Windows-1252: {_iconv('WINDOWS-1252')}"
        )
    return ""


def first_not_utf8(file: BinaryIO, longest: int) -> tuple[int, str]:
    """Return the number of the first line that is not UTF-8, and what `not_utf8` says; (0, "") if there is none.

    `longest`: bytes of a line at which the search ends.
    """
    for number, line in enumerate(iter(lambda: file.readline(longest), b""), 1):
        if len(line) == longest:
            break
        if reason := not_utf8(line):
            return number, reason
    return 0, ""


def _iconv(encoding: str) -> str:
    return f"iconv -f {encoding} -t UTF-8 FILE > NEW"
