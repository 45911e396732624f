"""Logs of runs as they grow: those of all ranks side by side, or one file. All browsers that show the same one share the reading."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from trainyard.dashboard.state import ClusterView, DashboardRun
from trainyard.dashboard.streams import HostStream
from trainyard.wire.connection import RemoteError

INTERVAL = 0.4  # s between two queries about a log, for any number of browsers
LINES = 2000  # lines that are kept
BEGIN = 300  # lines of a log that a page shows at first, of all ranks together
LEAST = 20  # of them from each rank
AGAIN = "--- the log begins again"
Place = tuple[int, str]  # number of the next line, and the error that was shown
Key = tuple[str, str, str]  # run, host and file; host and file are empty for all ranks


class RunLog:
    """The newest lines of one log, or of those of all ranks of a run.

    Attributes:
        error: why a host did not answer the newest query, or an empty string.
    """

    def __init__(self, key: Key) -> None:
        self.run, self._host, self._file = key
        self.error = ""
        self._lines: deque[tuple[int, str, str]] = deque(maxlen=LINES)  # number, rank or an empty string, text
        self._count = 0
        self._places: dict[tuple[str, str], int] = {}  # {(host, file): offset}
        self._read = 0.0
        self._lock = asyncio.Lock()

    async def news(
        self, place: Place | None, cluster: ClusterView, streams: Mapping[str, HostStream]
    ) -> tuple[dict[str, Any], Place]:
        """Return `lines` after a place, pairs of label and text, and `error`; an empty dict for no news; and the next place."""
        await self.update(cluster, streams)
        after = (self._count, self.error)
        if after == place:
            return {}, after
        first = place[0] if place else 0
        return {"lines": [line for number, *line in self._lines if number >= first], "error": self.error}, after

    async def update(self, cluster: ClusterView, streams: Mapping[str, HostStream]) -> None:
        """Read the lines that are new."""
        async with self._lock:
            run = cluster.runs.get(self.run)
            if time.monotonic() - self._read < INTERVAL or run is None:
                return
            files = self._files(run)
            begin = max(LEAST, BEGIN // max(1, len(files)))
            asked = [self._ask(streams[host], host, file, begin) for host, file, _ in files]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            errors = []
            for (host, file, label), answer in zip(files, answers, strict=True):
                if isinstance(answer, RemoteError):
                    errors.append(str(answer))
                elif isinstance(answer, BaseException):
                    raise answer
                else:
                    self._take(host, file, label, answer)
            self.error = "; ".join(dict.fromkeys(errors))
            self._read = time.monotonic()

    def _files(self, run: DashboardRun) -> list[tuple[str, str, str]]:
        """Return host, file and label of each log."""
        if self._file:
            return [(self._host, self._file, "")]
        return [(host, f"rank{rank}.log", f"rank {rank}") for rank, (host, _) in sorted(run.ranks.items())]

    async def _ask(self, stream: HostStream, host: str, file: str, begin: int) -> dict[str, Any]:
        since = self._places.get((host, file), -begin)
        return await stream.ask("log", run=self.run, file=file, since=since)

    def _take(self, host: str, file: str, label: str, answer: dict[str, Any]) -> None:
        lines = list(answer["lines"])
        if answer["offset"] < self._places.get((host, file), 0):  # another start of the run
            lines.insert(0, AGAIN)
        self._places[host, file] = answer["offset"]
        for line in lines:
            self._lines.append((self._count, label, line))
            self._count += 1
