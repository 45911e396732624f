"""The data that the dashboard keeps between starts: a file of JSON lines in its own folder on the controller."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from trainer.common.files import write_atomic
from trainyard.wire.connection import Host

LIMIT = 4 << 20  # bytes of the file; then the older half is dropped
SOURCE_LIMIT, PERIOD = 1000, 3600.0  # records of one host in a period (s); more are left out
LINE = 16 << 10  # bytes of a line that is read


class History:
    """An append-only file of records with a bound on its size. Several dashboards of the same hosts share it.

    A record is not synced: the last ones may be lost with the machine. A line that a crash cut off is ignored.
    """

    def __init__(self, folder: Path, hosts: Iterable[Host], warn: Callable[[str], None] = lambda text: None) -> None:
        """Take the file of a cluster.

        Args:
            folder: folder of the dashboard on the controller.
            hosts: hosts of the cluster; other hosts have another file.
            warn: receives a message, once, when the file cannot be written.
        """
        described = sorted((host.name, host.address, host.data_dir) for host in hosts)
        digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]
        self.path, self.warn = folder / f"events-{digest}.jsonl", warn
        self._failed = False
        self._written: Counter[str] = Counter()
        self._since = -math.inf

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the records in the order in which they were written."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            while line := file.readline(LIMIT):
                record: Any = None
                with contextlib.suppress(ValueError, RecursionError):
                    record = json.loads(line) if len(line) <= LINE else None
                if isinstance(record, dict):
                    yield record

    def append(self, record: dict[str, Any], source: str = "") -> None:
        """Write a record, unless the host `source` has caused too many."""
        now = time.monotonic()
        if now - self._since > PERIOD:
            self._since, self._written = now, Counter()
        self._written[source] += 1
        if source and self._written[source] > SOURCE_LIMIT:
            return
        line = json.dumps(record).encode() + b"\n"
        if len(line) > LINE:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.write(handle, line)
                size = os.fstat(handle).st_size
            finally:
                os.close(handle)
            if size > LIMIT:
                self._shorten()
            self._failed = False
        except OSError as error:
            if not self._failed:
                self._failed = True
                self.warn(
                    f"the dashboard cannot write {self.path}: {error.strerror}: free disk space or fix its permissions"
                )

    def _shorten(self) -> None:
        with self.path.open("rb") as file:
            file.seek(-(LIMIT // 2), os.SEEK_END)
            file.readline()
            rest = file.read()
        write_atomic(self.path, rest, 0o600)
