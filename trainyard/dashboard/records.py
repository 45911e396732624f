"""The metrics of the runs that a page shows, read from the first host that has them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainyard.dashboard.state import ClusterView
from trainyard.dashboard.streams import HostStream
from trainyard.wire.connection import RemoteError
from trainyard.wire.replies import ReplyError, checked_reply, untrusted_json

INTERVAL = 0.3  # s between two queries about a run, for any number of browsers
STEPS = 8000  # records of a run that are kept; of more, every second one, then every fourth one, and so on
LISTED = 64  # ranks that are kept of each record
DAMAGED = 1000  # lines of one answer; what follows more of them is ignored, because a host can send 100 000 at once
Place = tuple[int, int, int]  # generation, and numbers of metrics and evaluations
COLUMNS = ("step", "loss", "lr", "grad_norm", "tokens_per_second", "step_seconds", "comm_share", "mfu")
METRICS = 64  # of a training method that are kept


class RunRecords:
    """The records of one run.

    Attributes:
        generation: changes when earlier records are no longer valid, as after a resume.
        columns: a list per field of metrics.jsonl, one entry per step; `step_seconds`, `comm_share` and `mfu` have a list of ranks.
        metrics: a list per metric of the training method, one entry per step; None where a step has none.
        evals: [step, loss] of every evaluation.
        error: why the newest query failed.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.generation = 0
        self.columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        self.metrics: dict[str, list[float | None]] = {}
        self.evals: list[list[Any]] = []
        self.error = ""
        self._host = ""
        self._count, self._stride = 0, 1  # records that were read, and of how many one is kept
        self._places: dict[str, tuple[int, int]] = {}  # {file: (offset, inode)}
        self._read = 0.0
        self._lock = asyncio.Lock()

    async def update(self, cluster: ClusterView, streams: Mapping[str, HostStream]) -> None:
        """Read the records that are new."""
        async with self._lock:
            if time.monotonic() - self._read < INTERVAL or self.run not in cluster.runs:
                return
            run = cluster.runs[self.run]
            here = [part.host for part in run.newest or run.parts.values() if cluster.hosts[part.host].connected]
            if not here:
                self.error = "no host of the run answers"
                return
            if self._host not in here:
                self._host = here[0]
                self._places.clear()
            try:
                await self._read_file(streams[self._host], "metrics.jsonl", "metrics.jsonl line", self._add_step)
                await self._read_file(streams[self._host], "evals.jsonl", "evals.jsonl line", self._add_eval)
                self.error = ""
            except RemoteError as error:
                self.error = str(error)
            self._read = time.monotonic()

    async def _read_file(self, stream: HostStream, file: str, kind: str, add: Callable[[dict[str, Any]], None]) -> None:
        more = True
        while more:
            offset, inode = self._places.get(file, (0, 0))
            answer = await stream.ask("records", run=self.run, file=file, offset=offset, inode=inode)
            if answer["reset"] and (offset or not inode):
                self._reset(file)
            damaged = 0
            for line in answer["lines"]:
                try:
                    add(checked_reply(kind, untrusted_json(line)))
                except (ReplyError, AttributeError):  # the process died while it wrote this line
                    damaged += 1
                    if damaged > DAMAGED:
                        break
            self._places[file] = (answer["offset"], answer["inode"])
            more = answer["more"] and answer["offset"] > offset

    def _reset(self, file: str) -> None:
        if file == "metrics.jsonl" and self.columns["step"]:
            self.columns, self.metrics = {name: [] for name in self.columns}, {}
            self._count, self._stride = 0, 1
            self.generation += 1
        elif file == "evals.jsonl" and self.evals:
            self.evals = []
            self.generation += 1

    def _add_step(self, record: dict[str, Any]) -> None:
        steps = self.columns["step"]
        if steps and record["step"] <= steps[-1]:
            return
        self._count += 1
        if (self._count - 1) % self._stride:
            return
        for name in COLUMNS:
            value = record.get(name)
            self.columns[name].append(value[:LISTED] if isinstance(value, list) else value)
        found = record.get("metrics", {})
        for name in found:
            if len(self.metrics) < METRICS:
                self.metrics.setdefault(name, [None] * (len(steps) - 1))
        for name, values in self.metrics.items():
            values.append(found.get(name))
        if len(steps) > STEPS:
            self._stride *= 2
            self.generation += 1
            self.columns = {name: values[::2] for name, values in self.columns.items()}
            self.metrics = {name: values[::2] for name, values in self.metrics.items()}

    def _add_eval(self, record: dict[str, Any]) -> None:
        if (not self.evals or record["step"] > self.evals[-1][0]) and len(self.evals) < STEPS:
            self.evals.append([record["step"], record["eval_loss"]])

    async def news(
        self, place: Place | None, cluster: ClusterView, streams: Mapping[str, HostStream]
    ) -> tuple[dict[str, Any], Place]:
        """Return the data after a place, or an empty dict, and the place after them."""
        await self.update(cluster, streams)
        after = (self.generation, len(self.columns["step"]), len(self.evals))
        if after == place:
            return {}, after
        return self.series(place[1] if place and place[0] == self.generation else 0), after

    def series(self, first: int = 0) -> dict[str, Any]:
        """Return the records from number `first` on as JSON data."""
        return {
            "run": self.run,
            "generation": self.generation,
            "first": first,
            "count": len(self.columns["step"]),
            "columns": {name: values[first:] for name, values in self.columns.items()},
            "metrics": {name: values[first:] for name, values in self.metrics.items()},
            "evals": self.evals,
        }
