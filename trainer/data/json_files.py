"""Read JSONL files and JSON lists.

Not through `datasets`, which reports no line of an invalid record, and reads the text "2024-01-31" as a date, and a record
without a key like one with null. This reader also limits what a hostile file can cost: a line is at most 16 MiB.
"""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from trainer.common.errors import UserError, first_line
from trainer.common.formats import quoted
from trainer.common.inputs import open_regular
from trainer.common.packages import how_to_install
from trainer.common.text_encoding import first_not_utf8, not_utf8
from trainer.data.dataset_files import format_of

MAX_LINE = 16 * 1024 * 1024  # bytes of one record
PIECE = 1024**2  # bytes of one read
MAX_LIST = 4 * 1024**3  # bytes of a JSON list, whose text is read as a whole
MIN_DECODED, MAX_RATIO = 256 * 1024**2, 200  # limits of what a file decodes to: bytes, and multiple of its size
_TEXT = (".txt", ".md", ".text", ".rst")
_TEXT_HINT = 'to train on plain text, write a .jsonl file with one text per line: {"text": "..."}'
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def json_records(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (line number, record) of a JSONL file, or (item number, record) of a list in a .json file.

    Raises UserError: a line is not JSON (``file:line: reason``), or the file is damaged; OSError: the file cannot be
    read.
    """
    try:
        with decoded(path) as file:
            if format_of(path) == ".json":
                yield from _list_or_lines(file, path)
            else:
                yield from _lines(file, path)
    except UserError as error:
        if format_of(path) in _TEXT and "not JSON" in str(error):
            raise UserError(f"{error}; {_TEXT_HINT}") from None
        raise


@contextlib.contextmanager
def decoded(path: Path) -> Iterator[BinaryIO]:
    """Open a file, decompressed as its suffix says. Raises UserError if it is damaged, in the block too."""
    try:
        with open_regular(path) as raw, unpacked(raw, path) as file:
            yield file
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise _damaged(path, error) from None
    except OSError as error:
        if error.strerror is None:  # of bz2 and of pyarrow
            raise _damaged(path, error) from None
        raise


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: damaged {path.suffix} file ({first_line(error)}): copy it again")


def unpacked(raw: BinaryIO, path: Path) -> BinaryIO:
    file = _unpacked(raw, path)
    if file is raw:
        return raw
    return io.BufferedReader(_Counted(file, path, most_decoded(os.fstat(raw.fileno()).st_size)))


def most_decoded(size: int) -> int:
    """Return to how many bytes a file of this size may decode. No real dataset is near it."""
    return max(MIN_DECODED, MAX_RATIO * size)


class _Counted(io.RawIOBase):
    """A decompressed file that refuses to decode to more than `most` bytes."""

    def __init__(self, file: BinaryIO, path: Path, most: int) -> None:
        self._file, self._path, self._left, self._most = file, path, most, most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise UserError(
                f"{self._path}: decompresses to more than {self._most >> 20} MiB, far more than its size: decompress it, and "
                "look at its contents"
            )
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _unpacked(raw: BinaryIO, path: Path) -> BinaryIO:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if suffix == ".bz2":
        return cast(BinaryIO, bz2.BZ2File(raw))
    if suffix == ".xz":
        return cast(BinaryIO, lzma.LZMAFile(raw))
    if suffix == ".zst":
        try:
            import pyarrow
        except ImportError:
            raise UserError(
                f"dataset: {path} needs the package pyarrow: {how_to_install('pyarrow')}; or use .gz"
            ) from None
        return cast(BinaryIO, io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd")))
    return raw


def _list_or_lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the records of a .json file: a list, or one object per line."""
    # In pieces: a read reserves as much memory as it asks for.
    data = bytearray()
    while piece := file.read(min(PIECE, MAX_LIST + 1 - len(data))):
        data += piece
    if len(data) > MAX_LIST:
        raise UserError(f"{path}: longer than {MAX_LIST // 1024**3} GiB: use .jsonl, one sample per line")
    try:
        text = data.decode("utf-8-sig")
        begin = _after_space(text, 0)
        if text[begin : begin + 1] == "[":
            yield from enumerate(_items(text, begin + 1, path), 1)
            return
        value, end = _decode(text, begin, path, "the file is no list, and its first value is")
        rest = _after_space(text, end)
        if rest < len(text) and not isinstance(value, dict):
            raise json.JSONDecodeError("Extra data", text, rest)
    except ValueError as error:
        line, reason = first_not_utf8(io.BytesIO(data), MAX_LINE)
        number, why = (line, reason) if reason else (getattr(error, "lineno", 1), _reason(error))
        raise _not_json(path, number, why) from None
    except RecursionError:
        raise UserError(f"{path}:1: not JSON: nested too deeply") from None
    if rest < len(text):
        yield from _lines(io.BytesIO(data), path)
        return
    lists = [key for key, inner in value.items() if isinstance(inner, list)] if isinstance(value, dict) else []
    how = ""
    if len(lists) == 1 and lists[0].isidentifier():  # an object such as {"data": [...]}
        how = f"; its key {quoted(lists[0])} has one: jq .{lists[0]} FILE > LIST.json"
    raise UserError(
        f"{path}: contains a {type(value).__name__}, expected a list of samples (or use .jsonl, one sample per line){how}"
    )


def _items(text: str, at: int, path: Path) -> Iterator[Any]:
    """Yield the items of a JSON list that begins before `at`, one after the other: a list takes 20 times its text."""
    at = _after_space(text, at)
    number = 0
    while number or text[at : at + 1] != "]":
        number += 1
        item, at = _decode(text, at, path, f"item {number} is")
        yield item
        at = _after_space(text, at)
        if text[at : at + 1] == "]":
            break
        if text[at : at + 1] != ",":
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
        at = _after_space(text, at + 1)
    if (end := _after_space(text, at + 1)) < len(text):
        raise json.JSONDecodeError("Extra data", text, end)


def _decode(text: str, at: int, path: Path, what: str) -> tuple[Any, int]:
    """Return the JSON value at a place, and its end. Only then is a longer part of the text decoded.

    Raises ValueError: it is not JSON; UserError: it is too long; `what` begins the reason.
    """
    size = 64 * 1024
    while True:
        part = text[at : at + size]
        last = at + size >= len(text)
        try:
            value, end = _DECODER.raw_decode(part)
            if end < len(part) or last:  # a number may go on
                return value, at + end
        except json.JSONDecodeError as error:
            if last:
                raise json.JSONDecodeError(error.msg, text, at + error.pos) from None
        if size >= MAX_LINE:
            raise UserError(f"{path}: {what} longer than {MAX_LINE // 1024**2} MiB, or not JSON: use .jsonl")
        size *= 4


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
        if len(line) > MAX_LINE:
            raise UserError(
                f"{path}:{number}: longer than {MAX_LINE // 1024 // 1024} MiB: expected one sample per line"
            )
        if not line.strip():
            continue
        try:
            record = json.loads(line.rstrip().decode("utf-8-sig"))
        except ValueError as error:
            hint = " (a file with one list needs the suffix .json)" if number == 1 and line.strip() == b"[" else ""
            raise _not_json(path, number, f"{not_utf8(line) or _reason(error)}{hint}") from None
        except RecursionError:
            raise UserError(f"{path}:{number}: not JSON: nested too deeply") from None
        yield number, record


def _not_json(path: Path, number: int, reason: str) -> UserError:
    return UserError(f"{path}:{number}: not JSON: {reason}")


def _reason(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return "not UTF-8 text" if isinstance(error, UnicodeError) else str(error)
