"""Read CSV files; and Parquet, Arrow, folders of `datasets.save_to_disk` and the hub through the library `datasets`.

The library runs in a process with limits, and is imported late: it takes a second, and the controller may not have it.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.common.errors import UserError, first_line
from trainer.common.formats import printable, quoted
from trainer.common.inputs import open_regular, path_kind, read_regular
from trainer.common.packages import how_to_install
from trainer.common.text_encoding import first_not_utf8, not_utf8
from trainer.config.dataset_source import COLUMNS, MESSAGE_KEYS, SHAPES
from trainer.data.dataset_files import COLUMNAR, TABLES, WHOLE, all_files, format_of
from trainer.data.json_files import MAX_LINE, decoded, most_decoded
from trainer.data.record_keys import MEANINGFUL
from trainer.data.table_process import MEMORY, plain, records_apart

if TYPE_CHECKING:
    from types import ModuleType

MAX_HEADER = 1024 * 1024  # bytes of the names of all columns
_MAGIC: dict[str, tuple[bytes, ...]] = {".parquet": (b"PAR1",), ".arrow": (b"ARROW1", b"\xff\xff\xff\xff")}
_BATCH = 64  # rows of a Parquet file that are decoded at once
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
        raise _no_library(what) from None
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    with _library_errors(what):
        yield datasets


@contextlib.contextmanager
def _library_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (UserError, GeneratorExit, MemoryError):
        raise
    except Exception as error:  # the library's own classes, pyarrow's, pandas'
        raise UserError(f"dataset: cannot read {what}: {_reason(error)}") from None


def _no_library(what: str) -> UserError:
    return UserError(
        f"dataset: {what} needs the package datasets, which is not installed: {how_to_install('datasets')}"
    )


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8 text"
    cause = error.__cause__ or error
    text = " ".join(str(cause).split()) or type(cause).__name__  # the library writes remedies on further lines
    if isinstance(cause, MemoryError) or "out of memory" in text:
        raise MemoryError
    return printable(text.removeprefix("Error tokenizing data. C error: "), 300)


def table_records(path: Path, columns: Mapping[str, str]) -> Iterator[tuple[int, Any]]:
    """Yield (record number, record) of a Parquet or Arrow file.

    `columns`: names of a shape and of the columns that are used for them. Other columns are not read. Raises UserError:
    the file is damaged or not of its format, it decodes to too much, or `datasets` is not installed; OSError: the file
    cannot be read.
    """
    with open_regular(path) as file:  # refuses a FIFO
        size, begin = os.fstat(file.fileno()).st_size, file.read(6)
    if not begin.startswith(_MAGIC[format_of(path)]):
        raise UserError(f"dataset: cannot read {path}: it does not begin as a {format_of(path)} file: save it again")
    if not has_library():
        raise _no_library(str(path))
    yield from records_apart("read_table", (str(path), dict(columns)), printable(path), most_decoded(size))


def read_table(name: str, columns: Mapping[str, str]) -> Iterator[tuple[int, Any]]:
    """Yield the records of `table_records`, in the process that calls it.

    Not through `datasets`, which decodes a whole row group at once.
    """
    from pyarrow import ipc, parquet

    path = Path(name)
    with _library_errors(str(path)), open_regular(path) as file:
        if format_of(path) == ".parquet":
            table = parquet.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
            names = table.schema_arrow.names
            batches = table.iter_batches(_BATCH, columns=_chosen(path, names, columns), use_threads=False)
        else:
            is_file = file.read(6).startswith(b"ARROW1")
            file.seek(0)
            reader = (ipc.open_file if is_file else ipc.open_stream)(file)
            chosen = _chosen(path, reader.schema.names, columns)
            whole = (reader.get_batch(index) for index in range(reader.num_record_batches)) if is_file else reader
            batches = (part for batch in whole for part in _parts(batch.select(chosen)))
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from enumerate(({key: plain(value) for key, value in row.items()} for row in rows), 1)


def _parts(batch: Any) -> Iterator[Any]:
    """Yield a record batch of an Arrow file in small ones; Arrow checks nothing before it reads."""
    batch.validate(full=True)
    for start in range(0, batch.num_rows, _BATCH):
        yield batch.slice(start, _BATCH)


def _chosen(path: Path, names: Sequence[str], columns: Mapping[str, str]) -> list[str]:
    """Return the columns of a file to read. Raises UserError if two have one name."""
    if double := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"dataset: {path}: two columns have the name {quoted(double)}: rename one")
    return _wanted(names, columns)


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
        yield {key: plain(value) for key, value in row.items()}


def csv_header(path: Path) -> tuple[list[str], str]:
    """Return the names of the columns of a CSV or TSV file, and the delimiter: that which the header has most often.

    Raises UserError: the file has no header, or a name occurs twice.
    """
    with decoded(path) as file:
        line = file.readline(MAX_HEADER)
    if reason := not_utf8(line):
        raise UserError(f"{path}:1: {reason}")
    head = line.decode("utf-8-sig").rstrip("\r\n")
    if not head.strip():
        raise UserError(f"dataset: {path} is empty: expected a first line with the names of the columns")
    delimiter = "\t" if format_of(path) == ".tsv" else max(_DELIMITERS, key=head.count)
    try:
        names = next(csv.reader([head], delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise _not_csv(path, 1, error) from None
    if double := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{path}:1: two columns have the name {quoted(double)}: rename one")
    return names, delimiter


def csv_records(path: Path, columns: Mapping[str, str]) -> Iterator[tuple[int, Any]]:
    """Yield (record number, record) of a CSV or TSV file. Every cell is text: 007 is no number, and NA no missing value.

    An empty cell is null, as Parquet files have it: CSV does not distinguish an empty text from a missing one.
    `columns`: names of a shape and of the columns that are used for them. Other columns are left out. Raises UserError:
    the file is not CSV; OSError: it cannot be read.
    """
    names, delimiter = csv_header(path)
    wanted = _wanted(names, columns)
    csv.field_size_limit(MAX_LINE)
    with decoded(path) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        # Not strict, an unbalanced quote makes one cell of the rest of the file.
        rows = csv.reader(text, delimiter=delimiter, strict=True)
        begin, number = 1, 0  # the line of a record, and its number
        try:
            next(rows, None)  # the header
            begin = rows.line_num + 1
            for cells in rows:
                if cells:  # an empty line is no record
                    number += 1
                    yield number, _csv_record(path, number, names, cells, wanted)
                begin = rows.line_num + 1
        except UnicodeDecodeError:
            with decoded(path) as file:
                line, reason = first_not_utf8(file, MAX_LINE)
            where = f"{path}:{line}: {reason}" if reason else f"dataset: cannot read {path}: not UTF-8 text"
            raise UserError(where) from None
        except csv.Error as error:
            raise _not_csv(path, begin, error) from None


def _csv_record(
    path: Path, number: int, names: Sequence[str], cells: Sequence[str], wanted: Iterable[str]
) -> dict[str, str | None]:
    if len(cells) != len(names):
        count = "more" if len(cells) > len(names) else "fewer"
        raise UserError(
            f"{path}: record {number}: has {count} cells than the header has names ({len(cells)}, not {len(names)}): "
            "put a cell that holds a delimiter or a quote into quotes"
        )
    row = dict(zip(names, cells, strict=True))
    return {name: row[name] or None for name in wanted}


def _not_csv(path: Path, line: int, error: csv.Error) -> UserError:
    reason = first_line(error)
    if "new-line character" in reason:  # a carriage return alone at the end of lines
        remedy = "save it again with line feeds"
    else:
        remedy = 'a cell that begins with a quote (") must end with one, and quotes within it are doubled ("")'
    return UserError(f"{path}:{line}: not CSV: {reason}: {remedy}")


def saved_records(folder: Path, split: str, columns: Mapping[str, str]) -> Iterator[tuple[int, Any]]:
    """Yield (record number, record) of a folder that `datasets.save_to_disk` wrote. Raises UserError."""
    files = all_files(folder)  # refuses a FIFO
    _check_saved_names(folder)
    if not has_library():
        raise _no_library(str(folder))
    most = most_decoded(sum(path.stat().st_size for path in files))
    yield from records_apart("read_saved", (str(folder), split, dict(columns)), printable(folder), most)


def _check_saved_names(folder: Path) -> None:
    """Check that a saved dataset names files of its own folder only. Raises UserError."""
    parts, file = [folder], folder / "dataset_dict.json"
    if path_kind(file) == "file":
        parts = [_named(folder, file, name) for name in _listed(file, "splits")]
    for part in parts:
        state = part / "state.json"
        for entry in _listed(state, "_data_files"):
            _named(folder, state, entry.get("filename") if isinstance(entry, dict) else None)


def _listed(path: Path, key: str) -> list[Any]:
    """Return the list under a key of a JSON file of a saved dataset. Raises UserError."""
    try:
        value = json.loads(read_regular(path, MAX_HEADER))[key]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(
            f"dataset: cannot read {printable(path)}: {first_line(error)}: save the dataset again"
        ) from None
    if not isinstance(value, list):
        raise UserError(f"dataset: {printable(path)}: {quoted(key)} is no list: save the dataset again")
    return value


def _named(folder: Path, path: Path, name: Any) -> Path:
    """Return what a file of a saved dataset names. Raises UserError if that is outside of the folder."""
    with contextlib.suppress(OSError, ValueError, RuntimeError, TypeError):  # links in a circle, NUL
        found = path.parent / name
        if found.resolve().is_relative_to(folder.resolve()) and path_kind(found):
            return found
    raise UserError(
        f"dataset: {printable(path)} names {quoted(name)}, which is not in the folder of the dataset: save the dataset again"
    )


def read_saved(folder: str, split: str, columns: Mapping[str, str]) -> Iterator[tuple[int, Any]]:
    """Yield the records of `saved_records`, in the process that calls it."""
    with _library(folder) as datasets:
        rows = datasets.load_from_disk(folder)
        if isinstance(rows, dict):
            if split not in rows:
                known = " or ".join(printable(name, 40) for name in rows)
                raise UserError(f"dataset: {folder} has no split {quoted(split)}: set dataset_split to {known}")
            rows = rows[split]
        elif split not in (WHOLE, str(rows.split)):
            raise UserError(
                f"dataset: {folder} has no split {quoted(split)}: it was saved without splits: leave dataset_split out"
            )
        yield from enumerate(_selected(rows, columns), 1)


def card_files(folder: Path, config: str, split: str) -> list[Path]:
    """Return the files of a split that the README of a folder names, in the order of the library.

    Raises UserError: the README names no such configuration or split.
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

    Raises UserError: the dataset is unavailable, takes too much memory, or `datasets` is not installed.
    """
    if not has_library():
        raise _no_library(f"{name} ({split}) from the hub or its cache")
    # The library converts the files to its cache first: that takes as long as they are large, and whole row groups.
    limits = {"memory": 4 * MEMORY, "seconds": 24 * 3600}
    yield from records_apart("read_hub", (name, config, split, dict(columns)), printable(name), None, **limits)


def _with_owner(name: str) -> str:
    """Return the hub's OWNER/NAME for the name of a dataset. Raises UserError."""
    from huggingface_hub import dataset_info

    try:
        found = str(dataset_info(name).id)
    except Exception as error:  # the library's own classes, and those of its HTTP client
        raise UserError(
            f"dataset: no file {printable(name)}, and the hub does not say whose dataset it is: {_reason(error)}: "
            "give a file, or OWNER/NAME"
        ) from None
    if "/" not in found:
        raise UserError(f"dataset: {printable(name)} on the hub has no owner: give a file, or OWNER/NAME")
    return found


def read_hub(name: str, config: str, split: str, columns: Mapping[str, str]) -> Iterator[tuple[int, Any]]:
    """Yield the records of `hub_records`, in the process that calls it."""
    with _library(f"{name} ({split}) from the hub or its cache") as datasets:
        # Without an owner, the library may take a name for one of its own readers, which read any file that is near.
        rows = datasets.load_dataset(name if "/" in name else _with_owner(name), config or None, split=split)
        yield from enumerate(_selected(rows, columns))
