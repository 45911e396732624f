"""Read CSV, Parquet, Arrow, folders of `datasets.save_to_disk` and the hub through the library `datasets`.

The library is imported late: it takes a second, and the controller may not have it.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import itertools
import lzma
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.dataset_source import COLUMNS, MESSAGE_KEYS, SHAPES
from trainer.data.files import COLUMNAR, TABLES, all_files, format_of
from trainer.data.json_files import MAX_LINE, unpacked
from trainer.data.record_keys import MEANINGFUL
from trainer.errors import UserError, first_line
from trainer.formats import printable, quoted
from trainer.inputs import open_regular
from trainer.text_encoding import first_not_utf8, not_utf8

if TYPE_CHECKING:
    from types import ModuleType

MAX_HEADER = 1024 * 1024  # bytes of the names of all columns
CHECKED_ROWS = 1000  # of a CSV file that is checked where `datasets` is not installed
_DELIMITERS = ",;\t|"


def has_library() -> bool:
    """Return whether `datasets` is installed, without importing it."""
    return importlib.util.find_spec("datasets") is not None


@contextlib.contextmanager
def _library(what: str) -> Iterator[ModuleType]:
    """Import `datasets`; its errors become UserErrors of one line that begin with `what`."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"dataset: {what} needs the package 'datasets', which is not installed: pip install 'trainyard[node]'"
        ) from None
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield datasets
    except (UserError, GeneratorExit):
        raise
    except Exception as error:  # the library's own classes, pyarrow's, pandas'
        raise UserError(f"dataset: cannot read {what}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8 text"
    cause = error.__cause__ or error
    text = " ".join(str(cause).split()) or type(cause).__name__  # the library writes remedies on further lines
    return printable(text.removeprefix("Error tokenizing data. C error: "), 300)


def table_records(path: Path, columns: Mapping[str, str]) -> Iterator[tuple[int, Any]]:
    """Yield (record number, record) of a CSV, TSV, Parquet or Arrow file.

    Args:
        columns: names of a shape and of the columns that are used for them. Other columns are not read.

    Raises:
        UserError: the file is damaged or not of its format, or `datasets` is not installed.
        OSError: the file cannot be read.
    """
    with open_regular(path):  # refuses a FIFO
        pass
    kind = format_of(path)
    if path.suffix.lower() == ".zst":
        raise UserError(f"dataset: {path}: decompress it first, or use .gz: zstd -d FILE")
    with _library(str(path)) as datasets, tempfile.TemporaryDirectory() as work:
        options: dict[str, Any] = {}
        if kind in TABLES:
            names, delimiter = csv_header(path)
            # Every cell is text: the library would make numbers of 007, and nothing of NA.
            text = {name: datasets.Value("string") for name in _wanted(names, columns)}
            options = {"features": datasets.Features(text), "sep": delimiter, "keep_default_na": False}
        rows = datasets.load_dataset(
            "csv" if kind in TABLES else kind.removeprefix("."),
            data_files=[_literal(path)],
            split="train",
            streaming=True,  # no second copy on disk
            cache_dir=work,  # for its lock files
            **options,
        )
        try:
            yield from enumerate(_selected(rows, columns), 1)
        except UnicodeDecodeError:
            raise _not_utf8(path) from None


def _literal(path: Path) -> str:
    """Return a path without a meaning of its characters as a pattern."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in str(path.absolute()))


def _wanted(names: Iterable[str], columns: Mapping[str, str]) -> list[str]:
    """Return the columns to read: those that can be a part of a sample; all if they have no shape, for the message."""
    names = list(names)
    known = {*names, *columns}
    if not any(known.issuperset(required) for required, _ in SHAPES):
        return names
    used = {*COLUMNS, *MEANINGFUL, *columns.values()}.difference(MESSAGE_KEYS)
    return [name for name in names if name in used]


def _selected(rows: Any, columns: Mapping[str, str]) -> Iterator[Any]:
    """Yield the records of a dataset of the library, with the columns that are used: others may be images."""
    names = rows.column_names
    if names and len(chosen := _wanted(names, columns)) < len(names):
        rows = rows.select_columns(chosen)
    if hasattr(rows, "decode"):
        rows = rows.decode(False)  # images and audio stay bytes
    for row in rows:
        yield {key: _without_null(value) for key, value in row.items()}


def _without_null(value: Any) -> Any:
    """Return a nested value without keys that have null: Parquet gives every object of a column all keys."""
    if isinstance(value, dict):
        return {key: _without_null(entry) for key, entry in value.items() if entry is not None}
    return [_without_null(entry) for entry in value] if isinstance(value, list) else value


def csv_header(path: Path) -> tuple[list[str], str]:
    """Return the names of the columns of a CSV or TSV file, and the delimiter: that which the header has most often.

    Raises:
        UserError: the file has no header, or a name occurs twice.
    """
    with open_regular(path) as raw, unpacked(raw, path) as file:
        try:
            line = file.readline(MAX_HEADER)
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            raise UserError(f"{path}: damaged {path.suffix} file ({first_line(error)}): copy it again") from None
    if reason := not_utf8(line):
        raise UserError(f"{path}:1: {reason}")
    head = line.decode("utf-8-sig").rstrip("\r\n")
    if not head.strip():
        raise UserError(f"dataset: {path} is empty: expected a first line with the names of the columns")
    delimiter = "\t" if format_of(path) == ".tsv" else max(_DELIMITERS, key=head.count)
    names = next(csv.reader([head], delimiter=delimiter))
    if double := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{path}:1: two columns have the name {quoted(double)}: rename one")
    return names, delimiter


def csv_records(path: Path, limit: int | None = CHECKED_ROWS) -> Iterator[tuple[int, Any]]:
    """Yield (record number, record) of the first `limit` records (None: all) of a CSV file without `datasets`.

    Raises:
        UserError: the file is not CSV.
        OSError: it cannot be read.
    """
    names, delimiter = csv_header(path)
    csv.field_size_limit(MAX_LINE)
    with (
        open_regular(path) as raw,
        unpacked(raw, path) as file,
        io.TextIOWrapper(file, "utf-8-sig", newline="") as text,
    ):
        rows = csv.DictReader(text, names, restval="", delimiter=delimiter)
        try:
            next(rows, None)  # the header
            yield from enumerate(itertools.islice(rows, limit), 1)
        except UnicodeDecodeError:
            raise _not_utf8(path) from None
        except csv.Error as error:
            raise UserError(f"dataset: cannot read {path}: {first_line(error)}") from None


def _not_utf8(path: Path) -> UserError:
    """Return the error of a table with a line that is not UTF-8 text."""
    with open_regular(path) as raw, unpacked(raw, path) as file:
        line, reason = first_not_utf8(file, MAX_LINE)
    return UserError(f"{path}:{line}: {reason}" if reason else f"dataset: cannot read {path}: not UTF-8 text")


def saved_records(folder: Path, split: str, columns: Mapping[str, str]) -> Iterator[tuple[int, Any]]:
    """Yield (record number, record) of a folder that `datasets.save_to_disk` wrote. Raises UserError."""
    all_files(folder)  # refuses a FIFO
    with _library(str(folder)) as datasets:
        rows = datasets.load_from_disk(str(folder))
        if isinstance(rows, dict):
            if split not in rows:
                known = " or ".join(printable(name, 40) for name in rows)
                raise UserError(f"dataset: {folder} has no split {quoted(split)}: set dataset_split to {known}")
            rows = rows[split]
        yield from enumerate(_selected(rows, columns), 1)


def card_files(folder: Path, config: str, split: str) -> list[Path]:
    """Return the files of a split that the README of a folder names, in the order of the library.

    Raises:
        UserError: the README names no such configuration or split.
    """
    with _library(str(folder)) as datasets, tempfile.TemporaryDirectory() as work:
        names = datasets.get_dataset_config_names(str(folder))
        if config not in names and not (not config and (len(names) == 1 or "default" in names)):
            known = " or ".join(printable(name, 40) for name in names)
            raise UserError(f"dataset: {folder} has no configuration {quoted(config)}: set dataset_config to {known}")
        builder = datasets.load_dataset_builder(str(folder), name=config or None, cache_dir=work)
        files = builder.config.data_files or {}
        if split not in files:
            known = " or ".join(printable(name, 40) for name in files)
            raise UserError(f"dataset: {folder} has no split {quoted(split)}: set dataset_split to {known}")
        paths = [Path(name) for name in files[split]]
    top = os.path.abspath(folder)  # noqa: PTH100 - the files of the hub's cache are links, which stay as they are
    for path in paths:
        if not os.path.abspath(path).startswith(f"{top}{os.sep}"):  # noqa: PTH100
            raise UserError(f"dataset: the README of {folder} names {printable(path)}, which is outside of the folder")
        if format_of(path) not in (*TABLES, *COLUMNAR, ".json", ".jsonl", ".ndjson"):
            raise UserError(f"dataset: {printable(path)} has a format that is not supported")
    return paths


def hub_records(name: str, config: str, split: str, columns: Mapping[str, str]) -> Iterator[tuple[int, Any]]:
    """Yield (record number, record) of a dataset of the hub, or of the library's cache. It honours HF_HUB_OFFLINE.

    Raises:
        UserError: the dataset is unavailable, or `datasets` is not installed.
    """
    with _library(f"{name} ({split}) from the hub or its cache") as datasets:
        rows = datasets.load_dataset(name, config or None, split=split)
        yield from enumerate(_selected(rows, columns))
