"""The progress of distillations and deployments, read from the files that they write on the controller while a page shows them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainyard.dashboard.state import Cluster
from trainyard.progress_record import read_progress
from trainyard.replies import ReplyError, checked_reply

INTERVAL = 1.0  # s between two looks at the files
SHOWN = 20  # records of each kind, the newest


class ProgressWatch:
    """Reads the records while a page shows them. Used in the event loop only.

    Attributes:
        distillations: see `reply_types.DistillProgress`, the newest first.
        deployments: see `reply_types.DeployProgress`, the newest first.
    """

    def __init__(self, cluster: Cluster, work: Path) -> None:
        """Take the folder `.trainyard` of the project."""
        self._cluster, self._folders = cluster, {"distill": work / "answers", "deploy": work / "deploy"}
        self.distillations: list[dict[str, Any]] = []
        self.deployments: list[dict[str, Any]] = []
        self._pages = 0
        self._wake = asyncio.Event()

    @contextlib.contextmanager
    def page(self) -> Iterator[None]:
        """Read the records as long as the context lasts."""
        self._pages += 1
        self._wake.set()
        try:
            yield
        finally:
            self._pages -= 1

    async def run(self) -> None:
        """Read while there are pages, until the task is cancelled."""
        while True:
            self._wake.clear()
            if self._pages:
                await self.read()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), INTERVAL if self._pages else None)

    async def read(self) -> None:
        """Read once."""
        before = (self.distillations, self.deployments)
        found = await asyncio.to_thread(lambda: {kind: _records(kind, path) for kind, path in self._folders.items()})
        self.distillations, self.deployments = found["distill"], found["deploy"]
        if (self.distillations, self.deployments) != before:
            self._cluster.change()


def _records(kind: str, folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for record in read_progress(folder):
        with contextlib.suppress(ReplyError):
            if record["kind"] == kind and len(found) < SHOWN:
                found.append(checked_reply(f"progress {kind}", record))
    return found
