"""The project on the controller, as far as the dashboard uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainyard.run.launch.start_record import (
    has_start,
    options_of,
    read_service_start,
    read_start,
    service_hosts,
    service_run,
)
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.session import RunSession
from trainyard.run.types import SessionState
from trainyard.service_records import dashboard_host
from trainyard.wire.connection import Host, HostConnection


@dataclass(frozen=True)
class Project:
    """The project's folder, with the starts of runs and the progress of other programs.

    Attributes:
        home: the folder.
        service: name of the host with the dashboard's service, which receives records; empty without it, and in the service.
        is_service: whether the folder is that of the service, which has records of the controllers and none of their files.
    """

    home: Path
    service: str = ""
    is_service: bool = False

    @classmethod
    def of(
        cls,
        home: Path,
        groups: Mapping[str, Sequence[str]],
        variables: Mapping[str, Mapping[str, Any]],
    ) -> Project:
        """Return the project of an inventory, with the `variables` of each host by its name."""
        return cls(home, dashboard_host(groups, lambda host, name: variables[host].get(name)))

    @property
    def work(self) -> Path:
        """Folder of created files and records."""
        return self.home / ".trainyard"

    @property
    def received(self) -> Path:
        """Folder of the service with the records of the controllers, see `trainyard.remote.keep_record`."""
        return self.work / "received"

    def can_start(self, run: str) -> bool:
        """Return whether it is known how a run was started."""
        return self._received_start(run).is_file() if self.is_service else has_start(self.home, run)

    def for_user(self, host: Host) -> Host:
        """Return a host as a user logs in to it: the service's key is not the user's, and permits no forwarding."""
        return replace(host, login=replace(host.login, key_file="", extra_arguments=())) if self.is_service else host

    def session_of(
        self,
        run: str,
        hosts: Sequence[Host],
        connect: Callable[[Host], HostConnection],
        options: LaunchOptions,
        **how: Any,
    ) -> RunSession:
        """Return a session that starts a run again as it was started, or resumes it.

        Args:
            hosts: those of the dashboard.
            options: the launch options of the inventory.
            how: further arguments of RunSession.

        Raises:
            UserError: it is not known how the run was started, or a host of it is not among the hosts.
        """
        if self.is_service:
            start = read_service_start(self._received_start(run), run)
            state = SessionState(prepared=service_run(start, self.work))
            return RunSession(
                service_hosts(start, hosts), connect, options_of(start, options), home=self.home, state=state, **how
            )
        record = read_start(self.home, run)
        known = {host.name: host for host in hosts}
        if missing := [name for name in record.hosts if name not in known]:
            raise UserError(
                f"run {run} was started on {missing[0]}, which is not in this inventory: start it with trainyard train"
            )
        if lost := sorted({*record.variables} - {*options.run_env}):
            how["report"](
                f"warning: {', '.join(lost)} of run_env {'is' if len(lost) == 1 else 'are'} not set: values are not kept, set them "
                "in the inventory"
            )
        own = [known[name] for name in record.hosts]
        return RunSession(own, connect, options_of(record, options), home=self.home, spec=record.spec, **how)

    def _received_start(self, run: str) -> Path:
        return self.received / "starts" / f"{run}.json"
