"""Entries of PreparedRun.files: what the controller copies to the hosts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainyard.remote.digests import Digests
from trainyard.remote.local_files import tree_digest


def file_entry(source: Path, target: str, digests: dict[str, str], kind: str) -> dict[str, Any]:
    """Return the entry of a file, or of a folder's files.

    Args:
        target: below the data directory of a host.
        digests: {relative name: SHA-256}; the name of a file is empty.
    """
    sizes = {name: (source / name if name else source).stat().st_size for name in digests}
    about = {"kind": kind, "src": str(source), "dest": target, "sha256": digests, "digest": tree_digest(digests)}
    return about | {"bytes": sum(sizes.values()), "sizes": sizes}


def folder_entry(
    folder: Path, target: str, digests: Digests, kind: str, files: Iterable[Path] | None = None
) -> dict[str, Any]:
    """Return the entry of a folder; its digest is appended to `target`.

    Args:
        files: those of the folder to copy; by default all.
    """
    chosen = [file for file in sorted(folder.rglob("*")) if file.is_file()] if files is None else files
    contents = {str(file.relative_to(folder)): digests.of(file) for file in chosen}
    return file_entry(folder, f"{target}-{tree_digest(contents)[:12]}", contents, kind)
