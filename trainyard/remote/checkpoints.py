"""The checkpoints of a run on a host, for the queue, which moves a run to other hosts. Standard library only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trainer.supervise.files import read_json

MANIFEST = "manifest.json"
STEP = re.compile(r"step-\d{8}")
FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")  # a checkpoint has no folders


def checkpoints(request: dict[str, Any]) -> dict[str, Any]:
    """Return `steps`: the size of every file of each complete checkpoint, by name.

    Args:
        request: `run_dir`.
    """
    return {"steps": complete(Path(request["run_dir"]) / "checkpoints")}


def complete(folder: Path) -> dict[str, dict[str, int]]:
    """Return the files with their sizes of each checkpoint in a folder that has all its files, by name."""
    found = {}
    for path in sorted(folder.glob("step-*")) if folder.is_dir() else []:
        files = (read_json(path / MANIFEST) or {}).get("files")
        if not STEP.fullmatch(path.name) or not isinstance(files, dict) or not all(map(FILE.fullmatch, files)):
            continue
        try:
            sizes = {name: (path / name).stat().st_size for name in (MANIFEST, *files)}
        except OSError:
            continue
        if all(isinstance(entry, dict) and sizes[name] == entry.get("bytes") for name, entry in files.items()):
            found[path.name] = sizes
    return found
