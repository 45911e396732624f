"""The host's side of staging: find missing files, and move received files to their targets.

Standard library only.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from pathlib import Path
from typing import Any

from trainer.supervise.link_free import LinkFreePath
from trainyard.remote.digests import Digests, sha256_file
from trainyard.remote.local_files import content_digest
from trainyard.remote.trees import path_below

STALE = 86_400.0  # s after which a file that arrived belongs to a transfer that was killed


def receive(request: dict[str, Any]) -> dict[str, Any]:
    """Move the files that have arrived to their targets in the store. No link below the store is followed.

    `request`: `files`, {path: SHA-256 digest}; `arrived`, {path: temporary path}; `modes`, {path: mode of its source}:
    others may read a file only if they may read its source; `links`, {path: [file or folder that the host has, its
    digest]}; `cache`, the file of known digests, in the folder of the store; `incoming`, a folder for files to come;
    `check`, change nothing. Returns `lacking`, the paths that are missing or differ; `changed`, the paths that were (or
    with `check` would be) written, unless files are lacking. `{"error": ...}` for a damaged file, or one that cannot be
    written.
    """
    try:
        return place(request)
    except OSError as error:
        return {"error": f"cannot write {error.filename}: {error.strerror}"}
    except ValueError as error:
        return {"error": str(error)}


def place(request: dict[str, Any]) -> dict[str, Any]:
    """Carry out `receive`. Raises ValueError for a damaged file, OSError for one that cannot be written."""
    cache, modes = Path(request["cache"]), request.get("modes", {})
    stored = functools.partial(path_below, cache.parent)
    digests, changed = Digests(cache), []
    for path, temporary in request["arrived"].items():
        restrict(stored(temporary), modes.get(path, 0o777))
        install(stored(temporary), stored(path), request["files"][path], digests)
        changed.append(path)
    wanted = request.get("links", {}).items()
    links = [path for path, (name, digest) in wanted if needs_link(stored(path), Path(name), digest, digests)]
    if not request["check"]:
        for path in links:
            link(stored(path), Path(request["links"][path][0]))
    lacking = [path for path, digest in request["files"].items() if not is_held(stored(path), digest, digests)]
    if request["check"]:
        return {"lacking": lacking, "changed": links + lacking}
    digests.keep()
    if lacking:
        prepare_incoming(stored(request["incoming"]))
        return {"lacking": lacking}
    changed += links
    for path, mode in modes.items():
        with contextlib.suppress(PermissionError):  # another user's file, which has the same contents
            if not read_link(stored_entry(stored(path))):
                restrict(stored(path), mode)
    return {"lacking": [], "changed": changed}


def incoming_folder(path: str) -> LinkFreePath:
    """Return the folder for incoming files of a store."""
    return path_below(Path(path).parent, path)


def prepare_incoming(incoming: LinkFreePath) -> None:
    """Create the folder for incoming files, and remove the files that killed transfers left in it. Raises OSError."""
    incoming.root.mkdir(parents=True, exist_ok=True)
    incoming.make_folder()
    incoming.set_mode(0o700)  # a copy has its mode only after it has arrived
    for name in incoming.entries():
        with contextlib.suppress(OSError):  # another transfer ends
            if time.time() - (incoming / name).stat().st_mtime > STALE:
                (incoming / name).remove()


def install(temporary: LinkFreePath, target: LinkFreePath, digest: str, digests: Digests, found: str = "") -> None:
    """Move a received file with the digest `found`, if known, to its target; one with a wrong digest is a ValueError."""
    if (found or sha256_file(temporary)) != digest:
        temporary.remove(missing_ok=True)
        raise ValueError(f"{target} arrived damaged; run the same command again")
    if read_link(entry := stored_entry(target)) and entry != target:
        entry.remove()
    target.parent.make_folder()
    temporary.move_to(target)
    digests.record(target, digest)


def stored_entry(path: LinkFreePath) -> LinkFreePath:
    """Return the model or dataset of the store that a file belongs to: the only name that may be a link, see `link`."""
    return LinkFreePath(path.root, *path.names[:2])


def read_link(path: LinkFreePath) -> str:
    """Return what a link names; empty if it is no link."""
    with contextlib.suppress(OSError), path.in_folder() as folder:
        return os.readlink(path.name, dir_fd=folder)
    return ""


def is_held(path: LinkFreePath, digest: str, digests: Digests) -> bool:
    """Return whether the store has a file with this digest, also where an earlier run has linked what the host had."""
    if digests.of(path) == digest:
        return True
    source = read_link(stored_entry(path))
    return bool(source) and digests.of(Path(source, *path.names[2:])) == digest


def needs_link(target: LinkFreePath, source: Path, digest: str, digests: Digests) -> bool:
    """Return whether `target` must become a link to `source`. Raises ValueError if `source` has another content."""
    found = content_digest(source, digests)
    if found != digest:
        what = "differs from the file that the run was planned with" if found else "is missing or cannot be read"
        raise ValueError(f"{source} {what}; run the same command again")
    if not target.exists():
        return True
    if found := read_link(target):
        return found != str(source)
    if content_digest(target, digests) == digest:  # an earlier run copied it
        return False
    if target.is_folder():
        raise ValueError(f"{target} exists and differs from {source}; remove it")
    return True


def link(target: LinkFreePath, source: Path) -> None:
    """Make `target` a link to `source` in one step. Raises OSError."""
    target.parent.make_folder()
    temporary = target.aside()
    with temporary.in_folder() as folder:
        os.symlink(source, temporary.name, dir_fd=folder)
    temporary.move_to(target)


def restrict(path: LinkFreePath, mode: int) -> None:
    """Remove the permissions of a file that its source does not have. The owner can always read it."""
    current = path.stat().st_mode & 0o777
    if surplus := current & ~(mode | 0o600):
        path.set_mode(current & ~surplus)
