"""The queue on the dashboard: queried from the queue host while a page is open, and kept as rows and a timeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.common.errors import UserError
from trainyard.dashboard.page_watch import PageWatch
from trainyard.dashboard.state import ClusterView
from trainyard.queue.lease_step import AGAIN
from trainyard.queue.queue_client import QueueState, parse_state
from trainyard.queue.queue_tables import ENDED, describe, list_history, list_queue, run_state
from trainyard.queue.slurm_lease import ASKED_FOR
from trainyard.remote.queue_job import NOT_INSTALLED
from trainyard.wire.connection import RemoteError

PAUSE = 3.0  # s between an answer of the queue host and the next query
RECENT = 100  # ended runs that the queue host returns
JUST_ENDED = 20  # of them that the page shows
JUST_ENDED_HOURS = 24
UNFINISHED = tuple(state for state in ENDED if state != "finished")


class Asks(Protocol):
    """A connection to a host that answers queries."""

    async def ask(self, query: str, **request: Any) -> dict[str, Any]:
        """Return the checked answer. Raises RemoteError."""
        ...


@dataclass(frozen=True)
class QueueView:
    """An answer of the queue host, as the page shows it.

    Attributes:
        live: runs that wait or run, in the order in which they start; see `history.describe`. `start` of a waiting run is
            when Slurm expects it to start.
    """

    live: list[dict[str, Any]]
    ended: list[dict[str, Any]]  # runs that have just ended, the newest first
    state: QueueState  # the answer itself
    at: float  # time of the answer, in seconds since the epoch

    @property
    def names(self) -> set[str]:
        """The runs that can be changed."""
        return {run["run"] for run in self.live} | {run for run in self.state.requests if self.can_start(run)}

    def can_start(self, run: str) -> bool:
        """Return whether a run has ended without a result, so that it can be added again."""
        return run in self.state.requests and run not in self.state.jobs and run_state(run, self.state) in UNFINISHED


class QueueWatch(PageWatch):
    """Asks the queue host while a page shows the queue. Used in the event loop only.

    Attributes:
        host: name of the queue host; empty if it is not among the hosts of the dashboard.
        missing: why there is no queue, and how to get one.
        view: the newest answer, or None.
        error: why the last request has no answer, or an empty string.
        since: when `error` began, in seconds since the epoch.
    """

    def __init__(self, cluster: ClusterView, streams: Mapping[str, Asks], find_queue: Callable[[], str]) -> None:
        """Find the queue host. `find_queue`: returns its name; raises UserError where there is no queue."""
        super().__init__(PAUSE)
        self._cluster, self._streams = cluster, streams
        self.host = self.missing = self.error = ""
        self.view: QueueView | None = None
        self.since = 0.0
        try:
            self.host = find_queue()
        except UserError as error:
            self.missing = str(error)
            return
        if self.host not in streams:
            why = f"the queue host {self.host} is not among the hosts of the dashboard"
            self.missing = f"{why}: start it without --limit"
            self.host = ""

    async def run(self) -> None:
        """Ask while there are pages, until the task is cancelled; without a queue, return."""
        if self.host:
            await super().run()

    async def update(self) -> None:
        """Ask once, and keep the answer or the error."""
        try:
            answer = await self._streams[self.host].ask("queue", recent=RECENT)
            self.view, self.error, self.missing = make_view(parse_state(answer), time.time()), "", ""
            add_events(self.view.state, self._cluster)
        except RemoteError as error:
            self.since = self.since if self.error else time.time()
            self.error = str(error)
            self.missing = self.error if NOT_INSTALLED in self.error else ""
        except Exception as error:  # a fault in this code affects the queue only, and must be visible
            self.since = self.since if self.error else time.time()
            self.error = f"{type(error).__name__}: {error}"
        self._cluster.change()


def make_view(queue: QueueState, at: float) -> QueueView:
    """Return the page's data from an answer that arrived at `at`."""
    live: list[dict[str, Any]] = list_queue(queue)["runs"]
    for run in live:
        if run["state"] in ("waiting", "held"):
            run["start"] = queue.jobs[run["run"]].start
    past = [
        run
        for run in list_history(queue)["runs"]
        if run["state"] in ENDED and run["run"] not in queue.jobs and run["end"] > queue.now - 3600 * JUST_ENDED_HOURS
    ]
    past.sort(key=lambda run: -run["end"])
    return QueueView(live, past[:JUST_ENDED], queue, at)


def add_events(queue: QueueState, cluster: ClusterView) -> None:
    """Add the events that only the queue records: runs that returned to it, and runs that failed before they had a
    folder."""
    for run in queue.requests:
        for attempt in queue.attempts(run):
            end, reason = attempt.get("end"), attempt.get("reason", "")
            if attempt.get("order") != AGAIN or not end:
                continue
            kind = "preempted" if ASKED_FOR in reason else "requeued"
            text = f"run {run} returned to the queue: {reason or 'no reason is known'}"
            cluster.add_event(kind, text, at=end, key=(kind, run, str(attempt["begin"])), run=run)
        if run_state(run, queue) == "failed" and run not in cluster.runs:
            found = describe(run, queue)
            text = f"run {run} failed: {found['reason'] or 'no cause is known'}"
            cluster.add_event("failed", text, at=found["end"] or found["submitted"], key=("queued", run), run=run)
