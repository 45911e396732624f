"""Atomic writes, durable writes and digests of files."""

import contextlib
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.common.errors import DiskError, disk_failure


def to_json(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON that every parser accepts: null for a number that is not finite, which JSON cannot express."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite_or_null(value), indent=indent, allow_nan=False)


def _finite_or_null(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite_or_null(each) for name, each in value.items()}
    return [_finite_or_null(each) for each in value] if isinstance(value, list | tuple) else value


def write_atomic(path: Path, data: str | bytes, mode: int = 0o644) -> None:
    """Write a file atomically and durably: readers see either the old contents or the new ones.

    Raises OSError: the file cannot be written; the old one is unchanged.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".tmp-{path.name}.")
    aside = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        aside.chmod(mode)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


@contextlib.contextmanager
def atomic_folder(final: Path, what: str) -> Iterator[Path]:
    """Yield the path of a temporary folder that replaces `final` after its files are complete and on disk.

    `what`: begins the error message. Raises DiskError: the disk is full or not writable.
    """
    aside = final.with_name(f".tmp-{final.name}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        yield aside
        sync_files(aside)
        # An earlier start can have left a folder if it ended before it wrote its result.
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
    except Exception as error:
        shutil.rmtree(aside, ignore_errors=True)
        if reason := disk_failure(error):
            raise DiskError(
                f"{what}: cannot write to {final.parent}: {reason}: free disk space and start the run again"
            ) from error
        raise


def cache_folder() -> Path:
    """Return the folder of what this user's programs of the project may keep or compute again; it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainyard"


def sync_path(path: Path) -> None:
    """Make the contents of a file, or the renames in a folder, survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_files(folder: Path) -> None:
    """Make the files in a folder and their names survive a power failure."""
    for file in folder.iterdir():
        sync_path(file)
    sync_path(folder)


def sha256_file(path: Path) -> str:
    """Return the SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_tree(path: Path) -> str:
    """Return one SHA-256 (hex) of the names and contents of all files below `path`, or of the file `path`."""
    if path.is_file():
        return sha256_file(path)
    total = hashlib.sha256()
    for file in sorted(item for item in path.rglob("*") if item.is_file()):
        total.update(f"{file.relative_to(path)}\0{sha256_file(file)}\n".encode())
    return total.hexdigest()
