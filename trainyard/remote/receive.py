"""The host's side of staging: which files have to travel, and putting them in place whole. Standard library only.

    {"files": {"/path": "sha256", ...}, "arrived": {"/path": "/aside"}, "contents": {"/path": [mode, base64]},
     "cache": "/path", "incoming": "/folder", "check": false}      ->  {"lacking": [...]} or {"lacking": [], "changed": [...]}

The question follows this program on stdin, after a line that ends it (see plugins/action/stage.py).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any


class Digests:
    """SHA-256 of files, remembered by size, times and inode: a model of many gigabytes is read once, not at every start."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        try:
            self._known: dict[str, list[Any]] = json.loads(cache.read_bytes())
        except (OSError, ValueError):
            self._known = {}
        self._news = False

    def of(self, path: Path) -> str:
        """Return the file's SHA-256 in hex, or an empty string if it cannot be read."""
        try:
            with path.open("rb") as file:
                mark = _mark(os.fstat(file.fileno()))
                if (known := self._known.get(str(path))) and known[:-1] == mark:
                    return str(known[-1])
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            return ""
        self._known[str(path)] = [*mark, digest]
        self._news = True
        return digest

    def keep(self) -> None:
        """Write what is new beside the files; a full disk costs only the memory of it."""
        if not self._news:
            return
        self._known = {path: known for path, known in self._known.items() if Path(path).exists()}
        aside = self._cache.with_name(f".tmp-{self._cache.name}-{os.getpid()}")
        try:
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(json.dumps(self._known))
            aside.replace(self._cache)
        except OSError:
            aside.unlink(missing_ok=True)


def _mark(seen: os.stat_result) -> list[int]:
    # ctime too: it moves with every write, and nobody can set it back.
    return [seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino]


def receive(question: dict[str, Any]) -> dict[str, Any]:
    """Put what arrived in its place; say what is lacking still, or write the small contents and say what changed."""
    os.umask(0o022)
    digests = Digests(Path(question["cache"]))
    changed = []
    try:
        for path, aside in question["arrived"].items():
            with Path(aside).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != question["files"][path]:
                Path(aside).unlink(missing_ok=True)
                return {"error": f"{path} arrived damaged: run it again"}
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(aside).replace(path)
            changed.append(path)
        lacking = [path for path, wanted in question["files"].items() if digests.of(Path(path)) != wanted]
        if question["check"]:
            return {"lacking": lacking, "changed": lacking}
        digests.keep()
        if lacking:
            Path(question["incoming"]).mkdir(parents=True, exist_ok=True)
            return {"lacking": lacking}
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
    return {"lacking": [], "changed": changed}
