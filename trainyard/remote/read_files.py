"""Reads small files of a run folder, and lists sizes and digests of others. Standard library only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainyard.remote.digests import sha256_file


def read_files(request: dict[str, Any]) -> dict[str, Any]:
    """Return the requested contents, sizes and digests of files below a folder.

    Args:
        request: `folder`, an absolute path; `text`, names of files to read; `sizes` and `sha256`, glob patterns.

    Returns:
        `text`: {name: content, or None for a missing file}; `sizes`: {path in the folder: bytes}; `sha256`: {path in
        the folder: digest in hex}.
    """
    folder = Path(request["folder"])
    return {
        "text": {name: _text(folder / name) for name in request.get("text", [])},
        "sizes": {name: path.stat().st_size for name, path in _matches(folder, request.get("sizes", []))},
        "sha256": {name: sha256_file(path) for name, path in _matches(folder, request.get("sha256", []))},
    }


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace", encoding="utf-8")
    except OSError:
        return None


def _matches(folder: Path, patterns: list[str]) -> list[tuple[str, Path]]:
    paths = [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
    return [(str(path.relative_to(folder)), path) for path in paths]
