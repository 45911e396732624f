"""SHA-256 digests of files, with a cache. Standard library only."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from trainer.supervise.link_free import LinkFreePath, link_free
from trainer.supervise.run_files import open_regular

BLOCK = 1 << 20  # bytes
CACHE_LIMIT = 64 << 20  # bytes of the known digests; about 200 for each file


class Digests:
    """SHA-256 digests of files, cached by size, times and inode: a model of many gigabytes is read only once."""

    def __init__(self, cache: Path | LinkFreePath) -> None:
        """Read the cache; a missing or damaged one is empty."""
        self._cache = link_free(cache)
        try:
            known = json.loads(self._cache.read(CACHE_LIMIT))
        except (OSError, ValueError, RecursionError):
            known = {}
        entries = known.items() if isinstance(known, dict) else ()
        self._known: dict[str, list[Any]] = {path: entry for path, entry in entries if isinstance(entry, list)}
        self._changed = False

    def of(self, path: Path | LinkFreePath) -> str:
        """Return the file's digest in hex, or an empty string if it cannot be read."""
        try:
            with open_file(path) as file:
                identity = _identity(os.fstat(file.fileno()))
                if (known := self._known.get(str(path))) and known[:-1] == identity:
                    return str(known[-1])
                digest = file_digest(file)
        except OSError:
            return ""
        self._known[str(path)], self._changed = [*identity, digest], True
        return digest

    def record(self, path: Path | LinkFreePath, digest: str) -> None:
        """Remember the digest of a file that this process has just written and hashed."""
        self._known[str(path)], self._changed = [*_identity(path.stat()), digest], True

    def keep(self) -> None:
        """Write the cache if it has changed. A full disk is not an error: the digests are recomputed."""
        if not self._changed:
            return
        # Not of Path, which raises errors for names that no file has.
        self._known = {path: known for path, known in self._known.items() if os.path.exists(path)}  # noqa: PTH110
        with contextlib.suppress(OSError):
            self._cache.root.mkdir(parents=True, exist_ok=True)
            self._cache.write(json.dumps(self._known).encode())


def open_file(path: Path | LinkFreePath) -> BinaryIO:
    """Open a regular file for reading. Raises OSError."""
    return path.open_read() if isinstance(path, LinkFreePath) else os.fdopen(open_regular(path), "rb")


def sha256_file(path: Path | LinkFreePath) -> str:
    """Return the SHA-256 of a regular file in hex. Raises OSError."""
    with open_file(path) as file:
        return file_digest(file)


def file_digest(file: Any) -> str:
    """Return the SHA-256 in hex of an open file, from its position on. Python 3.10 has no hashlib.file_digest."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(BLOCK))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])
    return digest.hexdigest()


def _identity(stat: os.stat_result) -> list[int]:
    # ctime changes with every write, and no program can set it.
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
