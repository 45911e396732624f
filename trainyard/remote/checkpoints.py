"""The checkpoints of a run on a host, for the queue, which moves a run to other hosts. Standard library only."""

from __future__ import annotations

import hashlib
import json
import os
import re
from typing import Any

from trainer.supervise.link_free import LinkFreePath, run_folder
from trainer.supervise.run_files import read_json

MANIFEST = "manifest.json"
STEP = re.compile(r"step-\d{8}")
FILE = re.compile(r"\.?[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")  # a checkpoint has no folders


def checkpoints(request: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoints of a run of which this host has every file that it should have. `request`: `run_dir`.

    Returns:
        `steps`: the size of every file here of each checkpoint, by name; `shards`: for each checkpoint that is divided among
        hosts, `elsewhere`, the files that others have, and `digest`, which is the same on all of its hosts.
    """
    folder = run_folder(request["run_dir"]) / "checkpoints"
    steps = complete(folder)
    return {"steps": steps, "shards": {step: found for step in steps if (found := _shards(folder / step))}}


def complete(folder: LinkFreePath) -> dict[str, dict[str, int]]:
    """Return the files with their sizes of each checkpoint in a folder that has all files of its manifest, by name."""
    found = {}
    for path in [folder / name for name in folder.entries() if STEP.fullmatch(name)] if folder.is_folder() else []:
        files = (read_json(path / MANIFEST) or {}).get("files")
        if not isinstance(files, dict) or not all(map(FILE.fullmatch, files)):
            continue
        try:
            sizes = {name: file_size(path / name) for name in (MANIFEST, *files)}
        except OSError:
            continue
        if all(isinstance(entry, dict) and sizes[name] == entry.get("bytes") for name, entry in files.items()):
            found[path.name] = sizes
    return found


def file_size(path: LinkFreePath) -> int:
    """Return the bytes of a regular file. Raises OSError."""
    with path.open_read() as file:
        return os.fstat(file.fileno()).st_size


def _shards(path: LinkFreePath) -> dict[str, Any]:
    """Return the missing files of a checkpoint on this host, and its identification; empty for a full copy."""
    manifest = read_json(path / MANIFEST) or {}
    elsewhere = manifest.get("elsewhere")
    if not isinstance(elsewhere, dict) or not elsewhere:
        return {}
    every = json.dumps({**manifest["files"], **elsewhere}, sort_keys=True)
    return {"elsewhere": sorted(elsewhere), "digest": hashlib.sha256(every.encode()).hexdigest()}
