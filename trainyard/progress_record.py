"""The progress of a long action on the controller, in a file that the dashboard shows."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from trainer.common.errors import MAX_MESSAGE
from trainer.common.files import write_atomic
from trainer.common.formats import printable
from trainer.supervise.processes import process_stat
from trainyard.remote.run_queries import is_orphan

SUFFIX = ".progress.json"
LIMIT = 1 << 20  # bytes of a record that is read
RECORDS = 200  # of a folder that are read, the newest
SILENT = 45.0  # s without a message after which the process of a record that was received counts as gone


class ProgressRecord:
    """One action: with ProgressRecord(path, "deploy", run="r") as record: record.update(...).

    The file has `kind`, `state` (running, done or failed), `error`, `began` and `updated` in seconds since the epoch, `pid`
    and `pid_start` of the process, and the fields of the action. It is replaced as a whole. The action does not depend on
    it, so a disk that is full does not stop it.
    """

    def __init__(self, path: Path | None, kind: str, **fields: Any) -> None:
        """Prepare for an action; with no `path`, nothing is written."""
        found = process_stat(os.getpid())
        self._path, self._lock = path, threading.Lock()
        self._values: dict[str, Any] = {"kind": kind, "state": "running", "error": "", "began": time.time()}
        self._values |= {"pid": os.getpid(), "pid_start": found[2] if found else 0, **fields}

    def update(self, **fields: Any) -> None:
        """Set fields and write the file."""
        with self._lock:
            self._values |= fields | {"updated": time.time()}
            self._write()

    def update_part(self, group: str, name: str, **fields: Any) -> None:
        """Set fields of an entry in a dict of the record, such as that of a host. Called in any thread."""
        with self._lock:
            group_values = self._values.setdefault(group, {})
            group_values[name] = group_values.get(name, {}) | fields
            self._values["updated"] = time.time()
            self._write()

    def __enter__(self) -> ProgressRecord:
        self.update()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        text = printable(error, MAX_MESSAGE) or (kind.__name__ if kind else "")
        self.update(state="failed" if kind else "done", error="" if error is None else text)

    def _write(self) -> None:
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, json.dumps(self._values), 0o600)


def read_progress(folder: Path, *, received: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the records of a folder, the newest first; one whose process has exited has the state `interrupted`.

    Args:
        received: whether controllers send the records, which write them again while their process runs.
    """
    found = []
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError):
            status = path.stat()
            if status.st_size <= LIMIT:
                found.append((status.st_mtime, path))
    for changed, path in sorted(found, reverse=True)[:RECORDS]:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            record = json.loads(path.read_bytes())
            if isinstance(record, dict) and isinstance(record.get("kind"), str):
                silent = received and record.get("state") == "running" and time.time() - changed > SILENT
                orphan = silent if received else is_orphan(record)
                yield record | ({"state": "interrupted"} if orphan else {})
