"""Reads small files of a run folder, and lists sizes and digests of others. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.supervise.link_free import LinkFreePath, run_folder
from trainyard.remote.digests import sha256_file
from trainyard.remote.trees import matching

TEXT_LIMIT = 4 << 20  # bytes of a text; a larger one is left out


def read_files(request: dict[str, Any]) -> dict[str, Any]:
    """Return the requested contents, sizes and digests of files below a folder. No link below it is followed.

    `request`: `run_dir`, or any other `folder`, of which code in ranks cannot exchange the path; `text`, names of files
    to read; `sizes` and `sha256`, patterns. Returns `text`: {name: content, or None for a file that is missing or too
    large}; `sizes`: {path in the folder: bytes}; `sha256`: {path in the folder: digest in hex}.
    """
    folder = run_folder(request["run_dir"]) if "run_dir" in request else LinkFreePath(Path(request["folder"]))
    return {
        "text": {name: _text(folder / name) for name in request.get("text", [])},
        "sizes": {name: path.stat().st_size for name, path in _matches(folder, request.get("sizes", []))},
        "sha256": {name: sha256_file(path) for name, path in _matches(folder, request.get("sha256", []))},
    }


def _text(path: LinkFreePath) -> str | None:
    try:
        return path.read(TEXT_LIMIT).decode(errors="replace")
    except OSError:
        return None


def _matches(folder: LinkFreePath, patterns: list[str]) -> Iterator[tuple[str, LinkFreePath]]:
    for path in (path for pattern in patterns for path in matching(folder, pattern)):
        if path.is_file():
            yield str(path.path.relative_to(folder.path)), path
