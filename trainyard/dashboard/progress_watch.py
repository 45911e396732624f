"""The progress of distillations and deployments, and results of evaluations, read while a page shows them.

The programs write it to files on the controller. In the service of the dashboard, the files are its own and those that controllers
send. The queue host answers for the runs of the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

from trainyard.dashboard.page_watch import PageWatch
from trainyard.dashboard.project import Project
from trainyard.dashboard.queue_watch import Asks
from trainyard.dashboard.state import ClusterView
from trainyard.evaluate.kept_evaluations import FOLDER, KeptEvaluation, kept_evaluations
from trainyard.progress_record import read_progress
from trainyard.wire.connection import RemoteError
from trainyard.wire.replies import ReplyError, checked_reply

INTERVAL = 1.0  # s between two checks
SHOWN = 20  # records of each kind and source, the newest: a host must not hide those of others
FOLDERS = {"distill": "answers", "deploy": "deploy"}
Records = dict[str, list[dict[str, Any]]]


class ProgressWatch(PageWatch):
    """Reads the records while a page shows them.

    Attributes:
        distillations: see `reply_types.DistillProgress`, the newest first.
        deployments: see `reply_types.DeployProgress`, the newest first.
        evaluations: results of `trainyard evaluate` by name, the newest first.
    """

    def __init__(self, cluster: ClusterView, project: Project, queue: Asks | None = None) -> None:
        """Take the project with the records.

        Args:
            queue: the connection to the queue host; None without a queue.
        """
        super().__init__(INTERVAL)
        self._cluster, self._project, self._queue = cluster, project, queue
        self._queued: Records = {kind: [] for kind in FOLDERS}
        self.distillations: list[dict[str, Any]] = []
        self.deployments: list[dict[str, Any]] = []
        self.evaluations: dict[str, KeptEvaluation] = {}

    async def update(self) -> None:
        """Read once. While the queue host does not answer, its last records are kept."""
        before = (self.distillations, self.deployments)
        await self.read_evaluations()
        here = await asyncio.to_thread(self._read_files)
        if self._queue:
            with contextlib.suppress(RemoteError):
                records = (await self._queue.ask("progress"))["records"]
                self._queued = {kind: _newest(kind, records) for kind in FOLDERS}
        found = {kind: sorted([*here[kind], *self._queued[kind]], key=lambda one: -one["updated"]) for kind in FOLDERS}
        self.distillations, self.deployments = found["distill"], found["deploy"]
        if (self.distillations, self.deployments) != before:
            self._cluster.change()

    async def read_evaluations(self) -> None:
        """Read the results of evaluations."""
        folders = [self._project.work, *([self._project.received] if self._project.is_service else ())]
        found = await asyncio.to_thread(kept_evaluations, [folder / FOLDER for folder in folders])
        if found.keys() != self.evaluations.keys():
            self.evaluations = found
            self._cluster.change()

    def _read_files(self) -> Records:
        found: Records = {}
        for kind, name in FOLDERS.items():
            found[kind] = _newest(kind, read_progress(self._project.work / name))
            if self._project.is_service:
                found[kind] += _newest(kind, read_progress(self._project.received / name, received=True))
        return found


def _newest(kind: str, records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the valid records of a kind, the newest first."""
    found: list[dict[str, Any]] = []
    for record in records:
        with contextlib.suppress(ReplyError):
            if record.get("kind") == kind:
                found.append(checked_reply(f"progress {kind}", record))
    return sorted(found, key=lambda record: -record["updated"])[:SHOWN]
