"""The project on the controller, as far as the dashboard uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.common.errors import UserError
from trainyard.run.launch.start_record import has_start, options_of, read_start
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.session import RunSession
from trainyard.wire.connection import Host, HostConnection


@dataclass(frozen=True)
class Project:
    """The project's folder `home`, with the starts of runs and the results of evaluations."""

    home: Path

    @property
    def work(self) -> Path:
        """Folder of created files and records."""
        return self.home / ".trainyard"

    def can_start(self, run: str) -> bool:
        """Return whether it is known how a run was started."""
        return has_start(self.home, run)

    def session_of(
        self,
        run: str,
        hosts: Sequence[Host],
        connect: Callable[[Host], HostConnection],
        options: LaunchOptions,
        report: Callable[[str], None],
    ) -> RunSession:
        """Return a session that starts a run again as it was started, or resumes it.

        `hosts`: those of the dashboard. `options`: the launch options of the inventory. Raises UserError: it is not
        known how the run was started, or a host of it is not among the hosts.
        """
        record = read_start(self.home, run)
        known = {host.name: host for host in hosts}
        if missing := [name for name in record.hosts if name not in known]:
            why = f"run {run} was started on {missing[0]}, which is not in this inventory"
            raise UserError(f"{why}: start it with trainyard train")
        if lost := sorted({*record.variables} - {*options.run_env}):
            what = f"{', '.join(lost)} of run_env {'is' if len(lost) == 1 else 'are'} not set"
            report(f"warning: {what}: values are not kept, set them in the inventory")
        own = [known[name] for name in record.hosts]
        return RunSession(own, connect, options_of(record, options), home=self.home, spec=record.spec, report=report)
