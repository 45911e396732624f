"""The metrics of the runs that someone looks at, read from the first host that has them."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from trainyard.connection import RemoteError
from trainyard.dashboard.state import Cluster
from trainyard.dashboard.streams import HostStream
from trainyard.replies import ReplyError, checked_reply, untrusted_json

KEPT = 32  # runs whose metrics stay in memory
INTERVAL = 0.3  # s between two queries about a run, however many browsers show it
STEPS = 2_000_000  # records of a run
POINTS = 4000  # steps that a browser receives at once; of more, every n-th one
COLUMNS = ("step", "loss", "lr", "grad_norm", "tokens_per_second", "step_seconds", "comm_share")


class RunRecords:
    """The records of one run.

    Attributes:
        generation: changes when earlier records are no longer valid, as after a resume.
        columns: a list per field of metrics.jsonl, one entry per step; `step_seconds` and `comm_share` have a list of ranks.
        evals: [step, loss] of every evaluation.
        error: why the newest query failed.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.generation = 0
        self.columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        self.evals: list[list[Any]] = []
        self.error = ""
        self._host = ""
        self._places: dict[str, tuple[int, int]] = {}  # {file: (offset, inode)}
        self._read = 0.0
        self._lock = asyncio.Lock()

    async def update(self, cluster: Cluster, streams: Mapping[str, HostStream]) -> None:
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
            for line in answer["lines"]:
                try:
                    add(checked_reply(kind, untrusted_json(line)))
                except (ReplyError, AttributeError):
                    continue  # the process died while it wrote this line
            self._places[file] = (answer["offset"], answer["inode"])
            more = answer["more"] and answer["offset"] > offset

    def _reset(self, file: str) -> None:
        if file == "metrics.jsonl" and self.columns["step"]:
            self.columns = {name: [] for name in COLUMNS}
            self.generation += 1
        elif file == "evals.jsonl" and self.evals:
            self.evals = []
            self.generation += 1

    def _add_step(self, record: dict[str, Any]) -> None:
        steps = self.columns["step"]
        if len(steps) < STEPS and (not steps or record["step"] > steps[-1]):
            for name in COLUMNS:
                self.columns[name].append(record.get(name))

    def _add_eval(self, record: dict[str, Any]) -> None:
        if not self.evals or record["step"] > self.evals[-1][0]:
            self.evals.append([record["step"], record["eval_loss"]])

    def series(self, first: int = 0) -> dict[str, Any]:
        """Return the records from number `first` on as JSON data; of more than POINTS, every n-th one and the last."""
        count = len(self.columns["step"])
        stride = max(1, -(-(count - first) // POINTS))
        places = list(range(first, count, stride))
        if places and places[-1] != count - 1:
            places.append(count - 1)
        return {
            "run": self.run,
            "generation": self.generation,
            "first": first,
            "count": count,
            "columns": {name: [values[place] for place in places] for name, values in self.columns.items()},
            "evals": self.evals,
        }


class RecordStore:
    """The records of the runs that were shown last."""

    def __init__(self, cluster: Cluster, streams: Mapping[str, HostStream]) -> None:
        self._cluster, self._streams = cluster, streams
        self._known: OrderedDict[str, RunRecords] = OrderedDict()

    async def read(self, run: str) -> RunRecords:
        """Return the records of a run, with those that are new."""
        records = self._known.setdefault(run, RunRecords(run))
        self._known.move_to_end(run)
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        await records.update(self._cluster, self._streams)
        return records
