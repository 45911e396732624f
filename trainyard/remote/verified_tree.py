"""Program trees of the queue's service, which are compared with their archive before they run. Standard library only."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path

LIMIT = 1 << 30  # bytes of an archive, and of a file of a tree


class TreeError(Exception):
    """A tree or an archive is not what was installed; the message is one line without a remedy."""


def read_regular(path: Path) -> bytes:
    """Return the contents of a regular file that is no link. Raises OSError (for a link, too) and TreeError."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > LIMIT:
            raise TreeError(f"{path} is not a regular file, or too large")
        return file.read(LIMIT)


def tree_digests(tree: Path) -> dict[str, str]:
    """Return {name: SHA-256} of the files below a folder. Raises OSError, and TreeError for a link or a special file."""

    def fail(error: OSError) -> None:
        raise error

    found = {}
    for folder, folders, names in os.walk(tree, onerror=fail):
        if links := [path for path in (Path(folder), *(Path(folder, name) for name in folders)) if path.is_symlink()]:
            raise TreeError(f"{links[0]} is a link")
        for path in (Path(folder, name) for name in names):
            found[str(path.relative_to(tree))] = hashlib.sha256(read_regular(path)).hexdigest()
    return found


def check_digests(tree: Path, expected: Mapping[str, str]) -> None:
    """Raise TreeError if a tree has not exactly the expected files. Raises OSError if it is unreadable."""
    found = tree_digests(tree)
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            what = "is missing" if name not in found else "was added" if name not in expected else "was changed"
            raise TreeError(f"{tree / name} {what} after the program was installed")


def unpack(content: bytes, tree: Path) -> bool:
    """Make a read-only tree of a zip file, unless it is one; return whether it changed. Other files of the tree go.

    Raises OSError, zipfile.BadZipFile, and TreeError for names that leave the tree.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = [entry for entry in archive.infolist() if not entry.is_dir()]
        expected = {entry.filename: hashlib.sha256(archive.read(entry)).hexdigest() for entry in entries}
        try:
            check_digests(tree, expected)
            return False
        except (OSError, TreeError):
            pass
        temporary = tree.with_name(f".tmp-{tree.name}")
        remove(temporary)
        temporary.mkdir(parents=True)
        archive.extractall(temporary)
    check_digests(temporary, expected)
    _make_read_only(temporary)
    remove(tree)
    temporary.rename(tree)
    return True


def remove(tree: Path) -> None:
    """Remove a tree that may be read-only. Raises OSError."""
    if tree.is_symlink() or tree.is_file():
        tree.unlink()
    elif tree.exists():
        for folder, _, _ in os.walk(tree):
            Path(folder).chmod(0o700)
        shutil.rmtree(tree)


def _make_read_only(tree: Path) -> None:
    for folder, _, names in os.walk(tree, topdown=False):
        for name in names:
            Path(folder, name).chmod(0o444)
        Path(folder).chmod(0o555)
