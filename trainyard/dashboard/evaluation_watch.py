"""Results of evaluations, read from files on the controller while a page shows them."""

from __future__ import annotations

import asyncio

from trainyard.dashboard.page_watch import PageWatch
from trainyard.dashboard.project import Project
from trainyard.dashboard.state import ClusterView
from trainyard.evaluate.kept_evaluations import FOLDER, KeptEvaluation, kept_evaluations

INTERVAL = 1.0  # s between two checks


class EvaluationWatch(PageWatch):
    """Reads the results while a page shows them. `found`: results of `trainyard evaluate` by name, the newest first."""

    def __init__(self, cluster: ClusterView, project: Project) -> None:
        super().__init__(INTERVAL)
        self._cluster, self._project = cluster, project
        self.found: dict[str, KeptEvaluation] = {}

    async def update(self) -> None:
        """Read the results once."""
        found = await asyncio.to_thread(kept_evaluations, self._project.work / FOLDER)
        if found.keys() != self.found.keys():
            self.found = found
            self._cluster.change()
