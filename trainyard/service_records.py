"""Records of this controller for the dashboard's service: starts of runs, and the progress of answers and deployments."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainyard import front_end
from trainyard.inventory import service_host
from trainyard.progress_record import SUFFIX
from trainyard.run.launch.start_record import LIMIT
from trainyard.wire.connection import HostConnection, InventoryError, RemoteError
from trainyard.wire.copy_files import in_time

WAIT = 3.0  # s that a start waits for the host of the service
ANSWER_LIMIT = 15.0  # s for the host of the service to keep a record
INTERVAL = 2.0  # s between two checks for progress
AGAIN = 10.0  # s after which an unchanged record is sent again: the service then knows that its process lives
FOLDERS = ("answers", "deploy")  # of `.trainyard`, with records of progress
Connect = Callable[[str], HostConnection]


class ServiceRecords:
    """Sends records to the host of the service. If that fails, it reports this once, and the action continues."""

    def __init__(self, host: str, connect: Connect, report: Callable[[str], None]) -> None:
        """Take the name of the host. `connect` is called in the thread of the caller of a method."""
        self._host, self._connect, self._report, self._failed = host, connect, report, False
        self._kept: dict[str, str] = {}  # {name: contents}

    def keep(self, name: str, content: str) -> None:
        """Send one record, such as `starts/RUN.json`, within WAIT seconds. A service that has failed gets no further one."""
        if self._failed or self._kept.get(name) == content:
            return
        try:
            self._send(self._connect(self._host), name, content, WAIT)
            self._kept[name] = content
        except (RemoteError, InventoryError) as error:
            self._fail(error)

    @contextlib.contextmanager
    def following(self, work: Path) -> Iterator[None]:
        """Send the records of progress that change below the folder `.trainyard` during the action."""
        try:
            connection = self._connect(self._host)
        except (RemoteError, InventoryError) as error:
            self._fail(error)
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(target=self._follow, args=(connection, work, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(ANSWER_LIMIT + INTERVAL)

    def _follow(self, connection: HostConnection, work: Path, ended: threading.Event) -> None:
        known, running, last = dict(_records(work)), dict[Path, float](), False
        while not last:
            last = ended.wait(INTERVAL)
            if last and self._failed:  # it would only delay the end of the action
                return
            for path, changed in _records(work):
                if known.get(path) != changed or time.monotonic() - running.get(path, float("inf")) > AGAIN:
                    known[path] = changed
                    running.pop(path, None)
                    if self._send_file(connection, path):
                        running[path] = time.monotonic()

    def _send_file(self, connection: HostConnection, path: Path) -> bool:
        """Send a record of progress; return whether its action runs."""
        try:
            content = path.read_text(encoding="utf-8")
            self._send(connection, f"{path.parent.name}/{path.name}", content)
            return bool(json.loads(content)["state"] == "running")
        except (RemoteError, OSError, ValueError, LookupError, TypeError) as error:
            self._fail(error)
            return True

    def _send(self, connection: HostConnection, name: str, content: str, limit: float = ANSWER_LIMIT) -> None:
        if len(content) > LIMIT:
            raise RemoteError(f"{name} is larger than {LIMIT >> 20} MiB")
        request = {"folder": f"{connection.host.data_dir}/dashboard", "name": name, "content": content}
        if not in_time(connection, lambda: connection.call("keep_record", request), limit)["kept"]:
            raise RemoteError(f"it is not installed: run {front_end.playbook('site')}")

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            self._report(f"warning: the service of the dashboard on {self._host} does not get a record: {error}")
        self._failed = True


def dashboard_host(groups: Mapping[str, Sequence[str]], variable: Callable[[str, str], Any]) -> str:
    """Return the host of the service; empty if the inventory has none.

    Args:
        variable: returns a variable of a host, or None.
    """
    name = service_host(groups)
    return name if name and variable(name, "dashboard_state") == "present" else ""


def service_records(
    groups: Mapping[str, Sequence[str]],
    variable: Callable[[str, str], Any],
    connect: Connect,
    report: Callable[[str], None],
    check: bool = False,
) -> ServiceRecords | None:
    """Return what sends records to the service; None without a service, or with `check`. Arguments as for `dashboard_host`."""
    name = "" if check else dashboard_host(groups, variable)
    return ServiceRecords(name, connect, report) if name else None


@contextlib.contextmanager
def following(records: ServiceRecords | None, work: Path) -> Iterator[None]:
    """Send the progress of an action to the service, if there is one."""
    with records.following(work) if records else contextlib.nullcontext():
        yield


def _records(work: Path) -> list[tuple[Path, int]]:
    """Return the records of progress, and when they changed."""
    found = []
    for folder in FOLDERS:
        for path in (work / folder).glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                found.append((path, path.stat().st_mtime_ns))
    return found
