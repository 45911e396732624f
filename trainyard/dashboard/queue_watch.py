"""The queue as the dashboard shows it: asked of the queue host while a page is open, and kept as rows and a timeline."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.errors import UserError
from trainyard.connection import RemoteError
from trainyard.dashboard.state import Cluster
from trainyard.dashboard.timeline import Timeline, make_timeline
from trainyard.queue.client import QueueState, parse_state
from trainyard.queue.history import ENDED, list_history, list_queue

PAUSE = 3.0  # s between an answer of the queue host and the next question
RECENT = 100  # ended runs that the queue host returns
JUST_ENDED = 20  # of them that the page shows
JUST_ENDED_HOURS = 24


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
        ended: runs that have just ended, the newest first.
        at: when the answer came, in seconds since the epoch.
    """

    live: list[dict[str, Any]]
    ended: list[dict[str, Any]]
    timeline: Timeline
    at: float

    @property
    def names(self) -> set[str]:
        """The runs that can be changed."""
        return {run["run"] for run in self.live}


class QueueWatch:
    """Asks the queue host while a page shows the queue. Used in the event loop only.

    Attributes:
        host: name of the queue host; empty without a queue.
        missing: why there is no queue, and how to get one.
        view: the newest answer, or None.
        error: why the last question has no answer, or an empty string.
        since: when `error` began, in seconds since the epoch.
    """

    def __init__(self, cluster: Cluster, streams: Mapping[str, Asks], find_queue: Callable[[], str]) -> None:
        """Find the queue host.

        Args:
            find_queue: returns its name; raises UserError where there is no queue.
        """
        self._cluster, self._streams = cluster, streams
        self.host = self.missing = self.error = ""
        self.view: QueueView | None = None
        self.since = 0.0
        self._pages = 0
        self._wake = asyncio.Event()
        try:
            self.host = find_queue()
        except UserError as error:
            self.missing = str(error)
            return
        if self.host not in streams:
            self.missing = (
                f"the queue host {self.host} is not among the hosts of the dashboard: start it without --limit"
            )
            self.host = ""

    @contextlib.contextmanager
    def page(self) -> Iterator[None]:
        """Ask the queue host as long as the context lasts."""
        self._pages += 1
        self._wake.set()
        try:
            yield
        finally:
            self._pages -= 1

    def ask_soon(self) -> None:
        """Ask without the pause, if a page is open: something was changed."""
        self._wake.set()

    async def run(self) -> None:
        """Ask while there are pages, until the task is cancelled."""
        while self.host:
            self._wake.clear()
            if self._pages:
                await self.ask()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), PAUSE if self._pages else None)

    async def ask(self) -> None:
        """Ask once, and keep the answer or the error."""
        try:
            answer = await self._streams[self.host].ask("queue", recent=RECENT)
            self.view, self.error = make_view(parse_state(answer), time.time()), ""
        except RemoteError as error:
            self.since = self.since if self.error else time.time()
            self.error = str(error)
        except Exception as error:  # a fault here concerns the queue only, and must be seen
            self.since = self.since if self.error else time.time()
            self.error = f"{type(error).__name__}: {error}"
        self._cluster.change()


def make_view(queue: QueueState, at: float) -> QueueView:
    """Return what the page shows of an answer that came at `at`."""
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
    return QueueView(live, past[:JUST_ENDED], make_timeline(queue), at)
