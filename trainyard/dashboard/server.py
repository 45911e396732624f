"""Start the dashboard."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

from trainer.common.errors import UserError
from trainer.common.files import cache_folder
from trainyard import front_end
from trainyard.dashboard.actions import Actions
from trainyard.dashboard.app import Dashboard
from trainyard.dashboard.dashboard_options import DashboardOptions
from trainyard.dashboard.evaluation_watch import EvaluationWatch
from trainyard.dashboard.project import Project
from trainyard.dashboard.queue_watch import QueueWatch
from trainyard.dashboard.security import ListenAddress, SessionAuth, read_token
from trainyard.dashboard.start_form import NewRuns
from trainyard.dashboard.state import ClusterView
from trainyard.dashboard.streams import HostStream
from trainyard.dashboard.views import Pages
from trainyard.run.launch_options import LaunchOptions
from trainyard.wire.connection import Host, HostConnection

CONNECTIONS = 512  # at the same time; a client without a token can open them, too


def serve(
    hosts: list[Host],
    connect: Callable[[Host], HostConnection],
    launch: LaunchOptions,
    options: DashboardOptions,
    tls: tuple[Path, Path] | None,
    report: Callable[[str], None],
    find_queue: Callable[[], str],
    project: Project,
) -> dict[str, Any]:
    """Serve the dashboard until Ctrl-C or SIGTERM. Call it in the main thread.

    Args:
        launch: limits of the actions.
        tls: files of the certificate and of its key; None without TLS.
        report: gets the URL with the token; in systemd's journal, the file of the token.
        find_queue: returns the name of the queue host; raises UserError where there is no queue.
        project: whose runs are started again and deployed.

    Raises UserError: the address is not one of this machine, the port is in use, or the token cannot be read.
    """
    token_file = cache_folder() / "dashboard-token"  # a folder that units hide from ranks on this machine
    token, listener = read_token(token_file), _listen(options)
    site = ListenAddress(options.dashboard_listen, listener.getsockname()[1], tls is not None)
    access = SessionAuth(site, token, str(token_file))
    cluster = ClusterView(hosts)
    streams = {host.name: HostStream(host, connect(host).transport, cluster.receive, cluster.lost) for host in hosts}
    queue = QueueWatch(cluster, streams, find_queue)
    pages = Pages(cluster, access.csrf, queue, EvaluationWatch(cluster, project), project.can_start)
    pages.new_runs = NewRuns(project.home, hosts, launch)
    actions = Actions(hosts, connect, launch, pages, project)
    app = Dashboard(cluster, streams, pages, actions, access, project).app()
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # it would have the token
        server_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=2,
        ws="none",
        ssl_certfile=tls[0] if tls else None,
        ssl_keyfile=str(tls[1]) if tls else None,
    )
    # Other users may read the journal, in which a unit of systemd writes.
    where = f"{site.url} (the token is in {token_file})" if _in_journal() else access.url
    report(f"dashboard: {where}")
    can = "start, stop and deploy runs, ask models, and change the queue"
    report(f"Whoever has the token can {can}. Ctrl-C ends the dashboard; runs continue.")
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again when it has closed the connections
        uvicorn.Server(config).run(sockets=[listener])
    return {"lines": []}


def _in_journal() -> bool:
    """Return whether the output of this process goes to systemd's journal (systemd.exec(5), JOURNAL_STREAM)."""
    try:
        output = os.fstat(1)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{output.st_dev}:{output.st_ino}"


def _listen(options: DashboardOptions) -> socket.socket:
    address, port = options.dashboard_listen, options.dashboard_port
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        other = front_end.option("dashboard_port", min(port + 1, 65535))
        remedy = f"end what uses the port, or use another one: {other}"
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = "set dashboard_listen to an address of this machine, as `ip address` lists them"
        raise UserError(f"the dashboard cannot listen on {options.address}: {error.strerror}: {remedy}") from None
    listener.listen(128)
    return listener
