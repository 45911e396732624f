"""The host's side of staging: find missing files, and move received files to their targets.

Standard library only.
"""

from __future__ import annotations

import base64
import contextlib
import os
import time
from pathlib import Path
from typing import Any

from trainer.supervise.files import write_atomic
from trainyard.remote.digests import Digests, sha256_file
from trainyard.remote.local_files import content_digest

STALE = 86_400.0  # s after which a file that arrived belongs to a transfer that was killed


def receive(request: dict[str, Any]) -> dict[str, Any]:
    """Move the files that have arrived to their targets; if none is missing, also write the small files.

    Args:
        request: `files`, {path: SHA-256 digest}; `arrived`, {path: temporary path}; `contents`, {path: [mode, content in
            base64]}; `modes`, {path: mode of its source}: others may read a file only if they may read its source; `links`,
            {path: [file or folder that the host has, its digest]}; `cache`, the file of known digests; `incoming`, a
            folder for files to come; `check`, change nothing.

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
        install(Path(temporary), Path(path), request["files"][path], digests)
        changed.append(path)
    links = [
        path
        for path, (source, digest) in request.get("links", {}).items()
        if needs_link(Path(path), Path(source), digest, digests)
    ]
    if not request["check"]:
        for path in links:
            link(Path(path), Path(request["links"][path][0]))
    lacking = [path for path, digest in request["files"].items() if digests.of(Path(path)) != digest]
    if request["check"]:
        return {"lacking": lacking, "changed": links + lacking}
    digests.keep()
    if lacking:
        prepare_incoming(Path(request["incoming"]))
        return {"lacking": lacking}
    changed += links
    for path, mode in modes.items():
        with contextlib.suppress(PermissionError):  # another user's file, which has the same contents
            restrict(Path(path), mode)
    for path, (mode, content) in request["contents"].items():
        if write_if_changed(Path(path), base64.b64decode(content), mode):
            changed.append(path)
    return {"lacking": [], "changed": changed}


def prepare_incoming(incoming: Path) -> None:
    """Create the folder for incoming files, and remove the files that killed transfers left in it. Raises OSError."""
    incoming.mkdir(parents=True, exist_ok=True)
    incoming.chmod(0o700)  # a copy has its mode only after it has arrived
    for file in incoming.iterdir():
        with contextlib.suppress(OSError):  # another transfer ends
            if time.time() - file.lstat().st_mtime > STALE:
                file.unlink()


def install(temporary: Path, target: Path, digest: str, digests: Digests, found: str = "") -> None:
    """Move a received file to its target. If its digest is wrong, remove it and raise ValueError.

    Args:
        found: the digest of the received file, if it is known.
    """
    if not found:
        found = sha256_file(temporary)
    if found != digest:
        temporary.unlink(missing_ok=True)
        raise ValueError(f"{target} arrived damaged; run the same command again")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary.replace(target)
    digests.record(target, digest)


def needs_link(target: Path, source: Path, digest: str, digests: Digests) -> bool:
    """Return whether `target` must become a link to `source`. Raises ValueError if `source` has another content."""
    found = content_digest(source, digests)
    if found != digest:
        what = "differs from the file that the run was planned with" if found else "is missing or cannot be read"
        raise ValueError(f"{source} {what}; run the same command again")
    if target.is_symlink():
        return target.readlink() != source
    if not target.exists():
        return True
    if content_digest(target, digests) == digest:  # an earlier run copied it
        return False
    if target.is_dir():
        raise ValueError(f"{target} exists and differs from {source}; remove it")
    return True


def link(target: Path, source: Path) -> None:
    """Make `target` a link to `source` in one step. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(source)
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
