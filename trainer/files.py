"""Files that a reader never sees half of."""

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainer.errors import DiskError, disk_trouble


def write_atomic(path: Path, data: str | bytes, mode: int = 0o644) -> None:
    """Write `data` aside, fsync and rename it to `path`: a reader sees the old file or the new one."""
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
    sync_folder(path.parent)


@contextlib.contextmanager
def whole_folder(final: Path, what: str) -> Iterator[Path]:
    """Yield a folder to write files into, which takes the place of `final` when they are all there and on the disk.

    Raises:
        DiskError: no room, or a disk that cannot be written; begins with `what`.
    """
    aside = final.with_name(f".tmp-{final.name}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        yield aside
        sync_files(aside)
        # Left by a start that died between this and the result.
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
    except Exception as error:
        shutil.rmtree(aside, ignore_errors=True)
        if why := disk_trouble(error):
            raise DiskError(
                f"{what}: cannot write to {final.parent}: {why}: make room and start the run again"
            ) from error
        raise


def sync_folder(path: Path) -> None:
    """Make a rename inside `path` (or, if it is a file, what was written to it) survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_files(folder: Path) -> None:
    """Make what was written into the files of `folder`, and their names, survive a power cut."""
    for file in folder.iterdir():
        sync_folder(file)
    sync_folder(folder)


def sha256_file(path: Path) -> str:
    """Return a file's SHA-256 in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_tree(path: Path) -> str:
    """Return one SHA-256 over the names and contents of all files below `path` (or of the one file it is)."""
    if path.is_file():
        return sha256_file(path)
    total = hashlib.sha256()
    for file in sorted(item for item in path.rglob("*") if item.is_file()):
        total.update(f"{file.relative_to(path)}\0{sha256_file(file)}\n".encode())
    return total.hexdigest()
