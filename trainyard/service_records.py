"""Records of this controller for the dashboard's service: starts of runs, and results of evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainyard import front_end
from trainyard.inventory import service_host
from trainyard.run.launch.start_record import LIMIT
from trainyard.wire.connection import HostConnection, InventoryError, RemoteError
from trainyard.wire.copy_files import in_time

WAIT = 3.0  # s that a start waits for the host of the service
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
            self._send(self._connect(self._host), name, content)
            self._kept[name] = content
        except (RemoteError, InventoryError) as error:
            self._fail(error)

    def _send(self, connection: HostConnection, name: str, content: str) -> None:
        if len(content) > LIMIT:
            raise RemoteError(f"{name} is larger than {LIMIT >> 20} MiB")
        request = {"folder": f"{connection.host.data_dir}/dashboard", "name": name, "content": content}
        if not in_time(connection, lambda: connection.call("keep_record", request), WAIT)["kept"]:
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
