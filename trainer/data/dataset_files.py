"""The files of a dataset: their formats, the files of a folder and of a split, and digests. Standard library only."""

import hashlib
import json
import os
import re
from pathlib import Path

from trainer.common.errors import UserError
from trainer.common.files import sha256_file
from trainer.common.formats import printable, quoted
from trainer.common.inputs import path_kind
from trainer.config.presets import FORMER_DATASET, OBSERVATORY

JSON, TABLES = (".jsonl", ".ndjson", ".json"), (".csv", ".tsv")
COLUMNAR = (".parquet", ".arrow")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
FORMATS = "JSONL, JSON, CSV, TSV, Parquet or Arrow"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WITHOUT_OWNER = re.compile(
    r"[A-Za-z][\w-]*"
)  # as wikitext: the hub forwards its first datasets' names to their owners
WHOLE = "train"  # the split of a dataset without splits, as in the library `datasets`
_MAX_FILES = 100_000
# Files of a folder that are not data: a description of the dataset, or a file of another format with one of these names.
_DESCRIPTION = re.compile(r"(?i)dataset_infos?\.json|state\.json")
_NO_DATA = re.compile(r"(?i)_.*|readme.*|licen[cs]e.*|.*\.(md|lock|sha256|py)")
# The words in a path that mark the files of a split, as on the hub.
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}


def format_of(path: Path) -> str:
    """Return the suffix of a dataset file that names its format, in lower case: `.jsonl` also for `x.jsonl.gz`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def data_suffix(path: Path) -> str:
    """Return the part of a file's name that determines its format, as in `.jsonl.gz`; any other suffix as it is."""
    last = path.suffix
    return Path(path.stem).suffix + last if last.lower() in COMPRESSED else last


def is_hub_id(name: str) -> bool:
    """Return whether `name` can only be a dataset or model on the hub: org/name, and not an existing path."""
    known = format_of(Path(name)) in (*JSON, *TABLES, *COLUMNAR)
    return bool(HUB_ID.fullmatch(name)) and not path_kind(Path(name)) and not known


def is_hub_dataset(name: str) -> bool:
    """Return whether `name` can only be a dataset on the hub, with or without its owner, and not an existing path."""
    plain = _WITHOUT_OWNER.fullmatch(name) and name not in (FORMER_DATASET, OBSERVATORY)
    return is_hub_id(name) or bool(plain and not path_kind(Path(name)))


def is_saved(folder: Path) -> bool:
    return path_kind(folder / "dataset_dict.json") == "file" or (
        path_kind(folder / "state.json") == "file" and path_kind(folder / "dataset_info.json") == "file"
    )


def has_card(folder: Path) -> bool:
    """Return whether the folder has a README that names the files of its configurations, as a copy from the hub has."""
    readme = folder / "README.md"
    if path_kind(readme) != "file":
        return False
    try:
        with readme.open("rb") as file:
            head = file.read(64 * 1024)
    except OSError:
        return False
    return head.startswith(b"---") and bool(re.search(rb"(?m)^configs:", head.partition(b"\n---")[0]))


def needs_library(name: str) -> bool:
    """Return whether only the library `datasets` reads the dataset of this name. JSON and CSV files need none."""
    path = Path(name)
    if path_kind(path) != "folder":
        return is_hub_dataset(name) or format_of(path) in COLUMNAR or path.suffix.lower() == ".zst"
    return is_saved(path) or has_card(path) or any(needs_library(str(file)) for file in all_files(path))


def all_files(folder: Path) -> list[Path]:
    """Return the regular files below a folder in sorted order, without hidden ones.

    Raises UserError: it holds something that is neither a file nor a folder, or too many files.
    """
    found = []
    for top, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            path = Path(top, name)
            if name.startswith("."):
                continue
            if path_kind(path) != "file":
                raise UserError(f"dataset: {printable(path)} is not a regular file: remove it from the folder")
            found.append(path)
            if len(found) > _MAX_FILES:
                raise UserError(f"dataset: {folder} has more than {_MAX_FILES} files: give a folder of fewer files")
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def data_files(folder: Path, split: str) -> list[Path]:
    """Return the data files of a folder that belong to a split, in sorted order.

    Files whose path has a word such as ``train`` or ``test`` belong to that split. If no path has one, all files are
    `train`. Raises UserError: the folder has no data file, a file of an unknown format, or no file of the split.
    """
    known = (*JSON, *TABLES, *COLUMNAR)
    files = [
        path
        for path in all_files(folder)
        if not _DESCRIPTION.fullmatch(path.name) and (format_of(path) in known or not _NO_DATA.fullmatch(path.name))
    ]
    for path in files:
        if format_of(path) not in known:
            raise UserError(f"dataset: {printable(path)} is not {FORMATS}: convert it, or move it out of the folder")
    if not files:
        raise UserError(f"dataset: {folder} has no file of {FORMATS}")
    splits = {path: _split_of(path.relative_to(folder)) for path in files}
    present = sorted({name for name in splits.values() if name})
    if not present:
        if split != WHOLE:
            raise UserError(
                f"dataset: {folder} has no split {quoted(split)}: none of its files names a split: leave dataset_split out"
            )
        return files
    if other := next((path for path in files if not splits[path]), None):
        raise UserError(
            f"dataset: {printable(other)} belongs to no split, but other files of the folder do ({', '.join(present)}): "
            "give the files as a list, or rename it"
        )
    chosen = [path for path in files if splits[path] == split]
    if not chosen:
        raise UserError(f"dataset: {folder} has no split {quoted(split)}: set dataset_split to {' or '.join(present)}")
    return chosen


def _split_of(path: Path) -> str:
    words = re.split(r"[^a-z]+", str(path).lower())
    return next((split for split, names in _SPLIT_WORDS.items() if set(names) & set(words)), "")


def dataset_digest(path: Path) -> str:
    """Return the SHA-256 (hex) of a dataset's file, or of the names and contents of all files of a folder."""
    if path_kind(path) == "file":
        return sha256_file(path)
    contents = [(str(file.relative_to(path)), sha256_file(file)) for file in all_files(path)]
    return hashlib.sha256(json.dumps(contents).encode()).hexdigest()
