"""Queries of the sampler: metrics, logs and the spec of one run. Standard library only."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from trainer.supervise.link_free import LinkFreePath
from trainer.supervise.run_files import read_json, read_log
from trainyard.remote.trees import matching

CHUNK = 256 << 10  # bytes of metrics in one answer
SPEC_LIMIT = 256 << 10  # bytes
SEARCH_LIMIT = 64 << 20  # bytes of a log that a search reads, from its end
PART = 1 << 20  # bytes of it that are in memory at a time, and the rest of their last line
MATCHES = 500  # lines that a search returns, the last ones
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
RECORDS = ("metrics.jsonl", "evals.jsonl")


def _run_dir(runs_dir: LinkFreePath, request: Mapping[str, Any]) -> LinkFreePath:
    name = str(request["run"])
    if not RUN_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a run")
    return runs_dir / name


def records(runs_dir: LinkFreePath, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return complete lines of a file of records.

    `request`: `run`; `file`, one of RECORDS; `offset` in bytes, and the `inode` of the file that it belongs to. Returns
    `lines`; `offset` at which the next query continues; `inode`; `more`, whether there are more lines; `reset`, whether
    the file was replaced, so that the lines are those from its beginning.
    """
    if request["file"] not in RECORDS:
        raise ValueError(f"{request['file']!r} has no records")
    try:
        file = (_run_dir(runs_dir, request) / request["file"]).open_read()
    except FileNotFoundError:
        return {"lines": [], "offset": 0, "inode": 0, "more": False, "reset": True}
    with file:
        found = os.fstat(file.fileno())
        reset = found.st_ino != request["inode"] or found.st_size < request["offset"]
        offset = 0 if reset else int(request["offset"])
        file.seek(offset)
        text = file.read(CHUNK)
    complete = text.rfind(b"\n") + 1
    return {
        "lines": text[:complete].decode(errors="replace").splitlines(),
        "offset": offset + complete,
        "inode": found.st_ino,
        "more": complete > 0 and found.st_size > offset + complete,
        "reset": reset,
    }


def log(runs_dir: LinkFreePath, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return lines of the log `file` of a `run`, see `read_log`; `since`: a byte, or -N for the last N lines."""
    path = _run_dir(runs_dir, request) / "logs" / str(request["file"])
    path.open_read().close()  # raises the reason
    return read_log(path, int(request["since"]))


def search(runs_dir: LinkFreePath, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the last lines of a log that contain a text, whatever its case.

    `request`: `run`; `file`, a name in logs/; `text`. Returns `lines`; `found`, the number of lines that contain the
    text; `skipped`, the bytes before those that were searched.
    """
    path, text = _run_dir(runs_dir, request) / "logs" / str(request["file"]), str(request["text"]).lower()
    with path.open_read() as file:
        skipped = max(0, file.seek(0, os.SEEK_END) - SEARCH_LIMIT)
        file.seek(skipped)
        found, last = 0, deque[str](maxlen=MATCHES)
        while file.tell() < skipped + SEARCH_LIMIT and (part := file.read(PART) + file.readline(PART)):
            lines = [line for line in part.decode(errors="replace").splitlines() if text in line.lower()]
            found += len(lines)
            last.extend(line[:4000] for line in lines)
    return {"lines": list(last), "found": found, "skipped": skipped}


def describe(runs_dir: LinkFreePath, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return `spec`, the text of the spec; `origin`, what it calls model and dataset; `logs`, {file: bytes}."""
    folder = _run_dir(runs_dir, request)
    try:
        with (folder / "spec.yml").open_read() as file:
            spec = file.read(SPEC_LIMIT).decode(errors="replace")
    except FileNotFoundError:
        spec = ""
    logs = {path.name: path.stat().st_size for path in matching(folder, "logs/*.log")[:4096]}
    return {"spec": spec, "origin": read_json(folder / "origin.json") or {}, "logs": logs}


Query = Callable[[LinkFreePath, Mapping[str, Any]], dict[str, Any]]
QUERIES: dict[str, Query] = {"records": records, "log": log, "search": search, "describe": describe}
