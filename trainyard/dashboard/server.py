"""Start the dashboard."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from trainer.common.errors import UserError
from trainyard import front_end
from trainyard.dashboard.actions import Actions
from trainyard.dashboard.app import Dashboard
from trainyard.dashboard.certificate import Certificate, own_certificate, user_certificate
from trainyard.dashboard.dashboard_options import LOOPBACK, DashboardOptions
from trainyard.dashboard.evaluation_watch import EvaluationWatch
from trainyard.dashboard.http_limits import LimitedListener
from trainyard.dashboard.password import SHORTEST, read_password
from trainyard.dashboard.project import Project
from trainyard.dashboard.queue_watch import QueueWatch
from trainyard.dashboard.security import SessionAuth, Site
from trainyard.dashboard.start_form import NewRuns
from trainyard.dashboard.state import ClusterView
from trainyard.dashboard.streams import HostStream
from trainyard.dashboard.views import Pages
from trainyard.run.launch_options import LaunchOptions
from trainyard.wire.connection import Host, HostConnection

CONNECTIONS = 512  # at the same time; a client without a password can open them, too


@dataclass(frozen=True)
class LoginMethod:
    """How a browser gets in: with the token of this start over HTTP, or with a password over TLS.

    Attributes:
        password: its hash; None for the token.
        certificate: None without a password.
    """

    options: DashboardOptions
    password: str | None = None
    certificate: Certificate | None = None


def login_method(options: DashboardOptions, password: str, home: Path, check: bool = False) -> LoginMethod:
    """Read the password and the certificate.

    Args:
        password: the variable `dashboard_password`; empty without it.
        home: folder for the certificate that the dashboard makes.
        check: make no certificate.

    Raises:
        UserError: they are unreadable, or other machines reach the address and there is no password.
    """
    # A variable of the inventory is for all dashboards of the cluster: it does not change one that only this machine reaches.
    found = read_password(password if options.public else "", options.dashboard_password_file)
    if bool(options.dashboard_certificate) != bool(options.dashboard_key):
        raise UserError("dashboard_certificate and dashboard_key belong together: set both or none")
    if found is None:
        if options.public:
            raise UserError(
                f"dashboard_listen: other machines reach {options.dashboard_listen}, and there is no password: set "
                f"dashboard_password_file to a file of mode 0600 with a password of {SHORTEST} characters or more"
            )
        if options.dashboard_certificate:
            raise UserError("dashboard_certificate: TLS needs a password: set dashboard_password_file")
        return LoginMethod(options)
    if options.dashboard_certificate:
        return LoginMethod(options, found, user_certificate(options.dashboard_certificate, options.dashboard_key))
    return LoginMethod(options, found, None if check else own_certificate(home, options.dashboard_listen))


def serve(
    hosts: list[Host],
    connect: Callable[[Host], HostConnection],
    launch: LaunchOptions,
    method: LoginMethod,
    report: Callable[[str], None],
    find_queue: Callable[[], str],
    project: Project,
) -> dict[str, Any]:
    """Serve the dashboard until Ctrl-C or SIGTERM. Call it in the main thread.

    Args:
        launch: limits of the actions.
        report: gets the URL, with the token or with the fingerprint of the certificate.
        find_queue: returns the name of the queue host; raises UserError where there is no queue.
        project: whose runs are started again and deployed.

    Raises:
        UserError: the address is not one of this machine, or the port is in use.
    """
    listener = _listen(method.options)
    access = _access(method, listener.getsockname()[1], report)
    cluster = ClusterView(hosts)
    streams = {host.name: HostStream(host, connect(host).transport, cluster.receive, cluster.lost) for host in hosts}
    queue = QueueWatch(cluster, streams, find_queue)
    pages = Pages(
        cluster, access.csrf, queue, EvaluationWatch(cluster, project), project.can_start, bool(access.password)
    )
    pages.new_runs = None if project.is_service else NewRuns(project.home, hosts, launch)
    actions = Actions(hosts, connect, launch, pages, project)
    app = Dashboard(cluster, streams, pages, actions, access, project).app(listener)
    certificate = method.certificate
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # it would have the token
        server_header=False,
        proxy_headers=False,  # a client must not choose the address at which its attempts are counted
        limit_concurrency=CONNECTIONS,
        timeout_graceful_shutdown=2,
        ws="none",
        ssl_certfile=certificate.file if certificate else None,
        ssl_keyfile=str(certificate.key_file) if certificate else None,
    )
    report(f"dashboard: {access.url}")
    if certificate:
        kind = "self-signed certificate, compare its SHA-256 fingerprint" if certificate.self_signed else "certificate"
        report(f"{kind}: {certificate.fingerprint}")
    key = "Whoever has the password" if certificate else "The URL contains a token: whoever has it"
    report(
        f"{key} can start, stop and deploy runs, ask models, and change the queue. Ctrl-C ends the dashboard; runs continue."
    )
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again when it has closed the connections
        uvicorn.Server(config).run(sockets=[listener])
    return {"lines": []}


def _access(method: LoginMethod, port: int, report: Callable[[str], None]) -> SessionAuth:
    address = method.options.dashboard_listen
    if method.password is None or method.certificate is None:
        return SessionAuth(Site(address, port, (address, "localhost") if address == LOOPBACK else (address,)))
    names = (address, *(name for name in method.certificate.names if name != address))
    return SessionAuth(Site(address, port, names, tls=True), method.password, report)


def _listen(options: DashboardOptions) -> LimitedListener:
    address, port = options.dashboard_listen, options.dashboard_port
    listener = LimitedListener(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        remedy = (
            f"end what uses the port, or use another one: {front_end.option('dashboard_port', min(port + 1, 65535))}"
        )
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = "set dashboard_listen to an address of this machine, as `ip address` lists them"
        raise UserError(f"the dashboard cannot listen on {options.address}: {error.strerror}: {remedy}") from None
    listener.listen(128)
    return listener
