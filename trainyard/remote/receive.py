"""The host's side of staging: find missing files, and move received files to their targets.

Standard library only.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from trainer.supervise.files import write_atomic


class Digests:
    """SHA-256 digests of files, cached by size, times and inode: a model of many gigabytes is read only once."""

    def __init__(self, cache: Path) -> None:
        """Read the cache; a missing or damaged one is empty."""
        self._cache = cache
        try:
            self._known: dict[str, list[Any]] = json.loads(cache.read_bytes())
        except (OSError, ValueError):
            self._known = {}
        self._changed = False

    def of(self, path: Path) -> str:
        """Return the file's digest in hex, or an empty string if it cannot be read."""
        try:
            with path.open("rb") as file:
                identity = _identity(os.fstat(file.fileno()))
                if (known := self._known.get(str(path))) and known[:-1] == identity:
                    return str(known[-1])
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            return ""
        self._known[str(path)] = [*identity, digest]
        self._changed = True
        return digest

    def keep(self) -> None:
        """Write the cache if it has changed. A full disk is no error: the digests are computed again."""
        if not self._changed:
            return
        self._known = {path: known for path, known in self._known.items() if Path(path).exists()}
        try:
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._cache, json.dumps(self._known).encode())
        except OSError:
            return


def _identity(stat: os.stat_result) -> list[int]:
    # ctime changes with every write, and no program can set it.
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def receive(request: dict[str, Any]) -> dict[str, Any]:
    """Move the files that have arrived to their targets; if none is missing, also write the small files.

    Args:
        request: `files`, {path: SHA-256 digest}; `arrived`, {path: temporary path}; `contents`, {path: [mode, content in
            base64]}; `modes`, {path: mode of its source}: others may read a file only if they may read its source; `cache`,
            the file of known digests; `incoming`, a folder for files to come; `check`, change nothing.

    Returns:
        `lacking`, the paths that are missing or differ; `changed`, the paths that were (or with `check` would be)
        written, unless files are lacking. `{"error": ...}` for a damaged file, or one that cannot be written.
    """
    try:
        return place(request)
    except OSError as error:
        return {"error": f"cannot write {error.filename}: {error.strerror}"}
    except ValueError as error:
        return {"error": str(error)}


def place(request: dict[str, Any]) -> dict[str, Any]:
    """Carry out `receive`. Raises ValueError for a damaged file, OSError for one that cannot be written."""
    digests, modes = Digests(Path(request["cache"])), request.get("modes", {})
    changed = []
    for path, temporary in request["arrived"].items():
        restrict(Path(temporary), modes.get(path, 0o777))
        install(Path(temporary), Path(path), request["files"][path])
        changed.append(path)
    lacking = [path for path, digest in request["files"].items() if digests.of(Path(path)) != digest]
    if request["check"]:
        return {"lacking": lacking, "changed": lacking}
    digests.keep()
    if lacking:
        incoming = Path(request["incoming"])
        incoming.mkdir(parents=True, exist_ok=True)
        incoming.chmod(0o700)  # a copy has its mode only after it has arrived
        return {"lacking": lacking}
    for path, mode in modes.items():
        with contextlib.suppress(PermissionError):  # another user's file, which has the same contents
            restrict(Path(path), mode)
    for path, (mode, content) in request["contents"].items():
        if write_if_changed(Path(path), base64.b64decode(content), mode):
            changed.append(path)
    return {"lacking": [], "changed": changed}


def install(temporary: Path, target: Path, digest: str) -> None:
    """Move a received file to its target. If its digest is wrong, remove it and raise ValueError."""
    with temporary.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != digest:
        temporary.unlink(missing_ok=True)
        raise ValueError(f"{target} arrived damaged; run the same command again")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary.replace(target)


def restrict(path: Path, mode: int) -> None:
    """Remove the permissions of a file that its source does not have. The owner can always read it."""
    current = path.stat().st_mode & 0o777
    if surplus := current & ~(mode | 0o600):
        path.chmod(current & ~surplus)


def write_if_changed(target: Path, content: bytes, mode: int) -> bool:
    """Write a file unless it has this content and mode; return whether it was written."""
    if target.exists() and target.read_bytes() == content and target.stat().st_mode & 0o777 == mode:
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, content, mode)
    return True
