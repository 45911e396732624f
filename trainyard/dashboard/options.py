"""The options of the dashboard."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from trainer.config.fields import declare
from trainer.errors import UserError
from trainyard.connection import Host, HostConnection
from trainyard.dashboard.project import Project
from trainyard.playbook_options import PlaybookOptions
from trainyard.run.options import LaunchOptions

PORT = 5000
PACKAGES = ("starlette", "uvicorn", "sse_starlette", "jinja2", "prometheus_client")  # of the extra `dashboard`


class DashboardOptions(PlaybookOptions):
    """Where the dashboard listens."""

    dashboard_port: int = declare(
        PORT, "port of the dashboard on 127.0.0.1; 0 for any free port", suggested_names=["port"], ge=0, le=65_535
    )


def run_dashboard(
    hosts: list[Host],
    connect: Callable[[Host], HostConnection],
    launch: LaunchOptions,
    options: DashboardOptions,
    report: Callable[[str], None],
    *,
    find_queue: Callable[[], str],
    project: Project,
    check: bool = False,
) -> dict[str, Any]:
    """Serve the dashboard until Ctrl-C, see `server.serve`; with `check`, do not.

    Args:
        find_queue: returns the name of the queue host; raises UserError where there is no queue.
        project: whose runs are started again and deployed.

    Raises:
        UserError: a package is not installed, a host is not described completely, or the port is in use.
    """
    if missing := [package for package in PACKAGES if importlib.util.find_spec(package) is None]:
        raise UserError(
            f"the dashboard needs the package {missing[0]}: run {sys.executable} -m pip install 'trainyard[dashboard]'"
        )
    from trainyard.dashboard.server import serve

    if check:
        return {"skipped": True, "msg": f"would serve the dashboard on 127.0.0.1:{options.dashboard_port}"}
    return serve(hosts, connect, launch, options, report, find_queue, project)
