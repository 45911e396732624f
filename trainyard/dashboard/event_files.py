"""Copies of the TensorBoard event files of runs, as they grow. TensorBoard reads them in a folder of the dashboard."""

from __future__ import annotations

import base64
import binascii
import shutil
from collections.abc import Mapping
from pathlib import Path

from trainyard.connection import RemoteError
from trainyard.dashboard.state import Cluster
from trainyard.dashboard.streams import HostStream

RUNS = 12  # that are copied at the same time
LIMIT = 256 << 20  # bytes of all copies


class EventFiles:
    """The event files of the runs that were opened last, each run in a folder of its name."""

    def __init__(self, folder: Path, cluster: Cluster, streams: Mapping[str, HostStream]) -> None:
        self.folder, self._cluster, self._streams = folder, cluster, streams
        self._copies: dict[str, _Copy] = {}

    def add(self, run: str) -> None:
        """Copy a run from now on, and drop the one that was added first if there are too many."""
        copy = self._copies.pop(run, None) or _Copy(run, self.folder / run)
        self._copies[run] = copy
        while len(self._copies) > RUNS:
            self._copies.pop(next(iter(self._copies))).clear()

    async def update(self) -> int:
        """Copy what is new. Returns the bytes of all copies. Raises RemoteError or OSError if no run could be copied."""
        errors: list[RemoteError | OSError] = []
        for copy in list(self._copies.values()):
            try:
                await copy.update(self._cluster, self._streams, LIMIT - self._bytes + copy.bytes)
            except (RemoteError, OSError) as error:
                errors.append(error)
        if errors and len(errors) == len(self._copies):
            raise errors[0]
        return self._bytes

    @property
    def _bytes(self) -> int:
        return sum(copy.bytes for copy in self._copies.values())


class _Copy:
    """The copy of one run."""

    def __init__(self, run: str, folder: Path) -> None:
        self.run, self._folder = run, folder
        self._host = ""
        self._offsets: dict[str, int] = {}  # {file of the host: bytes that are copied}

    @property
    def bytes(self) -> int:
        return sum(self._offsets.values())

    def clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._offsets.clear()

    async def update(self, cluster: Cluster, streams: Mapping[str, HostStream], limit: int) -> None:
        """Copy new data, up to `limit` bytes in all. Raises RemoteError and OSError."""
        run = cluster.runs.get(self.run)
        if run is None:
            self.clear()
            return
        for host in [part.host for part in run.newest or run.parts.values() if cluster.hosts[part.host].connected]:
            sizes = (await streams[host].ask("event_files", run=self.run))["files"]
            if sizes:
                break
        else:
            return
        # Another host, or another start of the run on it: the copies start from the beginning.
        if host != self._host or any(sizes.get(name, -1) < offset for name, offset in self._offsets.items()):
            self.clear()
            self._host = host
        for name, size in sorted(sizes.items()):
            while self._offsets.setdefault(name, 0) < size and self.bytes < limit:
                if not await self._copy_part(streams[host], name):
                    break

    async def _copy_part(self, stream: HostStream, name: str) -> bool:
        """Append the next part of a file; return whether there was one. Raises RemoteError and OSError."""
        offset = self._offsets[name]
        answer = await stream.ask("event_part", run=self.run, file=name, offset=offset)
        try:
            part = base64.b64decode(answer["data"], validate=True)
        except binascii.Error:
            raise RemoteError(f"{stream.host.name} sent a damaged part of an event file") from None
        self._folder.mkdir(mode=0o700, exist_ok=True)
        # The name of the copy is a number: a host must not choose a path on the controller. TensorBoard reads the files
        # by the order of their names.
        number = list(self._offsets).index(name)
        with (self._folder / f"events.out.tfevents.{number:010}").open("ab") as file:
            file.write(part)
        self._offsets[name] += len(part)
        return bool(part)
