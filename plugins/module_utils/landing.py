"""The host's side of staging: which files have to travel, and putting them in place whole. Standard library only.

    python - < '{"do": "compare", "files": {"/path": "sha256", ...}}'      -> {"lacking": [...]}
    python - < '{"do": "place", "files": {...}, "contents": {"/path": [mode, base64]}, "arrived": {"/path": "/aside"}}'

The question follows this program on stdin, after a line that ends it (see plugins/action/stage.py).
"""

from __future__ import annotations

import base64
import hashlib
import os
from pathlib import Path
from typing import Any


def digest(path: Path) -> str:
    """Return the file's SHA-256 in hex, or an empty string if there is none."""
    try:
        with path.open("rb") as file:
            total = hashlib.sha256()
            while block := file.read(1 << 20):
                total.update(block)
            return total.hexdigest()
    except OSError:
        return ""


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Compare checksums, or put what arrived and small contents in their places; say what changed."""
    os.umask(0o022)
    if question["do"] == "compare":
        return {"lacking": [path for path, wanted in question["files"].items() if digest(Path(path)) != wanted]}
    changed = []
    try:
        for path, aside in question["arrived"].items():
            if digest(Path(aside)) != question["files"][path]:
                Path(aside).unlink(missing_ok=True)
                return {"error": f"{path} arrived damaged: run it again"}
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(aside).replace(path)
            changed.append(path)
        for path, (mode, content) in question["contents"].items():
            target, data = Path(path), base64.b64decode(content)
            if target.exists() and target.read_bytes() == data and target.stat().st_mode & 0o777 == mode:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            aside = target.with_name(f".tmp-{target.name}-{os.getpid()}")
            with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
                file.write(data)
            aside.chmod(mode)
            aside.replace(target)
            changed.append(path)
    except OSError as error:
        return {"error": f"cannot write {error.filename}: {error.strerror}"}
    return {"changed": changed}
