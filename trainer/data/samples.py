"""Read the samples of a run's datasets, and check every record. Needs no torch and no tokenizer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import printable, quoted
from trainer.common.inputs import path_kind, refuse_lfs_pointer
from trainer.config import FORMER_DATASET, OBSERVATORY, RunSpec
from trainer.config.dataset_source import DatasetSource
from trainer.config.methods import METHODS, Data
from trainer.data.dataset_files import (
    COLUMNAR,
    TABLES,
    WHOLE,
    data_files,
    format_of,
    has_card,
    is_hub_dataset,
    is_saved,
    needs_library,
)
from trainer.data.json_files import json_records
from trainer.data.preferences import to_record
from trainer.data.shapes import SHAPE_NAMES, Sample, UnknownShapeError
from trainer.data.table_files import card_files, csv_records, has_library, hub_records, saved_records, table_records


def source_of(path: Path | str) -> DatasetSource:
    """Return the source of a file, a folder or a hub id, with the settings of a run that sets nothing else."""
    return DatasetSource.model_validate({"path": str(path), "split": WHOLE})


def read_samples(path: Path) -> list[Sample]:
    """Read a dataset file or folder and check every record. Raises UserError as `read_source`."""
    return read_source(source_of(path))


def read_source(source: DatasetSource, *, data: Data = "answers") -> list[Sample]:
    """Read a dataset and check every record.

    `data`: what a sample is, see `METHODS`. Raises UserError: the dataset is missing, unreadable or empty, or a record
    is invalid (``file:line: reason`` for the first).
    """
    samples = list(iter_source(source, data=data))
    if not samples:
        raise UserError(f"dataset: {source.path} is empty: expected one JSON object per line, with {SHAPE_NAMES}")
    return samples


NO_FORMER_DATASET = f"dataset: {FORMER_DATASET} is not part of trainyard any more: start a new run with dataset={OBSERVATORY}, or with a file"


def iter_source(source: DatasetSource, *, data: Data = "answers") -> Iterator[Sample]:
    """Yield the samples of a dataset in their order; arguments and errors as for `read_source`, but it may be empty."""
    if source.path == FORMER_DATASET and not path_kind(Path(source.path)):
        raise UserError(NO_FORMER_DATASET)
    if source.path == OBSERVATORY:
        raise UserError(f"dataset: only ansible-playbook train.yml provides {source.path}: set dataset to a JSONL file")
    for before, (where, record) in enumerate(read_records(source)):
        try:
            yield to_record(data, record, source.columns, source.ignore_keys).at(where)
        except ValueError as error:
            raise UserError(f"{where}: {_problem(error, before)}") from None


def samples_of(spec: RunSpec) -> Iterator[Sample]:
    """Yield the samples of all datasets of the spec, in their order. Raises UserError as `read_source`."""
    for source in spec.sources:
        yield from read_source(source, data=METHODS[spec.method].data)


def check_source(source: DatasetSource, *, data: Data = "answers") -> list[Sample] | None:
    """Check a dataset as far as the installed packages allow: without `datasets`, JSON and CSV files.

    Returns its samples, or None if only a part of them can be read. `data`: what a sample is, see `METHODS`. Raises
    UserError: as `read_source`.
    """
    path = Path(source.path)
    kind = path_kind(path)
    if has_library() or not needs_library(source.path):
        return read_source(source, data=data)
    _check_choice(source)
    if kind == "folder" and not is_saved(path) and not has_card(path):
        for file in data_files(path, source.split):
            check_source(source.model_copy(update={"path": str(file), "split": WHOLE}), data=data)
    return None


def needs_missing_library(name: str) -> bool:
    """Return whether this machine cannot read all of the dataset of this name: it lacks the library `datasets`."""
    return needs_library(name) and not has_library()


def _problem(error: ValueError, before: int) -> str:
    """Return what is wrong with a record, and what to do. `before`: records before it, all of which have a known shape."""
    if before and isinstance(error, UnknownShapeError):
        return f"{error.what}, as the records before it have: correct this record, or remove it"
    return str(error)


def read_records(source: DatasetSource) -> Iterator[tuple[str, Any]]:
    """Yield (where, record) of a dataset, of any shape. Raises UserError if it is missing or unreadable."""
    path, columns = Path(source.path), source.columns
    _check_choice(source)
    if is_hub_dataset(source.path):
        for number, record in hub_records(source.path, source.config, source.split, columns):
            yield f"dataset: {source.path} record {number}", record
        return
    try:
        if path_kind(path) == "folder":
            yield from _folder_records(path, source)
        else:
            yield from _file_records(path, source)
    except FileNotFoundError:
        raise UserError(
            f"dataset: no such file: {path}: set a JSONL file, '{OBSERVATORY}', or a hub id (org/name)"
        ) from None
    except OSError as error:
        raise UserError(f"dataset: cannot read {path}: {error.strerror}") from None


def _check_choice(source: DatasetSource) -> None:
    """Raise UserError if a split or a configuration is chosen of a dataset that cannot have one: all of it would be read."""
    path = Path(source.path)
    kind = path_kind(path)
    remedy = "in a list of datasets, set {} of the entry that has one; for others, leave it out"
    if kind == "file" and source.split != WHOLE:
        raise UserError(
            f"dataset: {printable(path)} is a file, which has no split {quoted(source.split)} (dataset_split): "
            + remedy.format("split")
        )
    has_configurations = kind == "folder" and has_card(path) and not is_saved(path)
    if kind and source.config and not has_configurations:
        raise UserError(
            f"dataset: {printable(path)} has no configuration {quoted(source.config)} (dataset_config), which only a hub "
            f"dataset or its copy has: {remedy.format('config')}"
        )


def _folder_records(folder: Path, source: DatasetSource) -> Iterator[tuple[str, Any]]:
    if is_saved(folder):
        for number, record in saved_records(folder, source.split, source.columns):
            yield f"dataset: {folder} record {number}", record
        return
    card = has_card(folder)
    for path in card_files(folder, source.config, source.split) if card else data_files(folder, source.split):
        yield from _file_records(path, source)


def _file_records(path: Path, source: DatasetSource) -> Iterator[tuple[str, Any]]:
    shown = printable(path, 4096)
    refuse_lfs_pointer(path, "dataset")
    if format_of(path) in TABLES:
        for number, record in csv_records(path, source.columns):
            yield f"{shown}: record {number}", record
    elif format_of(path) in COLUMNAR:
        for number, record in table_records(path, source.columns):
            yield f"{shown}: record {number}", record
    else:
        for number, record in json_records(path):
            yield f"{shown}:{number}", record
