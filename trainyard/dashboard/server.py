"""Start the dashboard."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from trainer.errors import UserError
from trainyard.connection import Host, HostConnection
from trainyard.dashboard.actions import Actions
from trainyard.dashboard.app import Dashboard
from trainyard.dashboard.history import History
from trainyard.dashboard.options import DashboardOptions
from trainyard.dashboard.progress_watch import ProgressWatch
from trainyard.dashboard.project import Project
from trainyard.dashboard.queue_watch import QueueWatch
from trainyard.dashboard.security import Access
from trainyard.dashboard.state import Cluster
from trainyard.dashboard.streams import HostStream
from trainyard.dashboard.views import Pages
from trainyard.run.options import LaunchOptions
from trainyard.run.start_record import has_start

ADDRESS = "127.0.0.1"


def serve(
    hosts: list[Host],
    connect: Callable[[Host], HostConnection],
    launch: LaunchOptions,
    options: DashboardOptions,
    report: Callable[[str], None],
    find_queue: Callable[[], str],
    project: Project,
) -> dict[str, Any]:
    """Serve the dashboard until Ctrl-C or SIGTERM. Call it in the main thread.

    Args:
        launch: limits of the actions.
        report: gets the URL, with the token.
        find_queue: returns the name of the queue host; raises UserError where there is no queue.
        project: whose runs are started again and deployed.

    Raises:
        UserError: the port is in use.
    """
    listener = _listen(options.dashboard_port)
    access = Access(listener.getsockname()[1])
    cluster = Cluster(hosts, History(project.work / "dashboard", hosts))
    streams = {host.name: HostStream(host, connect(host).transport, cluster.receive, cluster.lost) for host in hosts}
    queue = QueueWatch(cluster, streams, find_queue)
    pages = Pages(cluster, access.csrf, queue, functools.partial(has_start, project.home))
    pages.progress = ProgressWatch(cluster, project.work)
    actions = Actions(hosts, connect, launch, pages, project)
    app = Dashboard(cluster, streams, pages, actions, access).app()
    # The access log would have the token.
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=2, ws="none"
    )
    report(f"dashboard: {access.url}")
    report(
        "The URL contains a token: whoever has it can start, stop and deploy runs, and change the queue. Ctrl-C ends the dashboard; runs continue."
    )
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again when it has closed the connections
        uvicorn.Server(config).run(sockets=[listener])
    return {"lines": []}


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((ADDRESS, port))
    except OSError as error:
        listener.close()
        raise UserError(
            f"the dashboard cannot listen on {ADDRESS}:{port}: {error.strerror}: end what uses the port, or set dashboard_port"
        ) from None
    listener.listen(128)
    return listener
