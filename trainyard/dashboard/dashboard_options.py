"""The options of the dashboard."""

from __future__ import annotations

import importlib.util
import ipaddress
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import field_validator

from trainer.common.errors import UserError
from trainer.common.inputs import user_path
from trainer.config.fields import declare
from trainyard.dashboard.project import Project
from trainyard.playbook_options import PlaybookOptions
from trainyard.project_folder import pip_install
from trainyard.run.launch_options import LaunchOptions
from trainyard.wire.connection import Host, HostConnection

LOOPBACK, PORT = "127.0.0.1", 5000
# Of the extra `dashboard`.
PACKAGES = ("starlette", "uvicorn", "sse_starlette", "jinja2", "prometheus_client")


class DashboardOptions(PlaybookOptions):
    """Where the dashboard listens."""

    dashboard_port: int = declare(
        PORT, "port of the dashboard; 0 for any free port", suggested_names=["port"], ge=0, le=65_535
    )
    dashboard_listen: str = declare(
        LOOPBACK,
        "IP address of this machine at which the dashboard listens; one that is not loopback needs `certfile`",
        expected="an IP address of this machine",
    )
    certfile: str = declare(
        "",
        "PEM file of a TLS certificate, with which the dashboard uses TLS",
        deprecated_names=["dashboard_certificate"],
    )
    keyfile: str = declare(
        "", "PEM file of its key, without a passphrase; by default in `certfile`", deprecated_names=["dashboard_key"]
    )

    @field_validator("dashboard_listen")
    @classmethod
    def _one_address(cls, value: str) -> str:
        if ipaddress.ip_address(value).is_unspecified:
            raise ValueError("it stands for all addresses: name one")
        return str(ipaddress.ip_address(value))

    @property
    def address(self) -> str:
        """Address and port, for messages."""
        host = f"[{self.dashboard_listen}]" if ":" in self.dashboard_listen else self.dashboard_listen
        return f"{host}:{self.dashboard_port}"

    def tls_files(self) -> tuple[Path, Path] | None:
        """Return the files of the certificate and of its key; None without TLS.

        Raises UserError: they cannot be used, or other machines reach the address and there is no certificate.
        """
        if not self.certfile:
            if self.keyfile:
                raise UserError("keyfile: it belongs to a certificate: set certfile, too")
            if not ipaddress.ip_address(self.dashboard_listen).is_loopback:
                raise UserError(
                    f"dashboard_listen: other machines reach {self.dashboard_listen}: set certfile and keyfile to a TLS "
                    "certificate and its key, or listen on 127.0.0.1 and forward the port with ssh -L"
                )
            return None
        certificate = user_path(self.certfile, "certfile").absolute()
        key = user_path(self.keyfile, "keyfile").absolute() if self.keyfile else certificate
        try:
            if key.stat().st_mode & 0o007:
                raise UserError(f"keyfile: other users may read {key}: run chmod 600 {key}")
            # Without a password, OpenSSL would ask for it on the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            raise UserError(
                f"certfile: {certificate} and {key} are not a PEM certificate and its key without a passphrase: {why}"
            ) from None
        return certificate, key


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

    `find_queue`: returns the name of the queue host; raises UserError where there is no queue. `project`: whose runs
    are started again and deployed. Raises UserError: a package is not installed, a host is not described completely,
    the port is in use, or other machines reach the address and there is no certificate.
    """
    if missing := [package for package in PACKAGES if importlib.util.find_spec(package) is None]:
        names = [package.replace("_", "-") for package in missing]
        raise UserError(f"the dashboard needs the package {names[0]}: run {pip_install(names)}")
    files = options.tls_files()
    if check:
        return {"skipped": True, "msg": f"would serve the dashboard on {options.address}"}
    from trainyard.dashboard.server import serve

    return serve(hosts, connect, launch, options, files, report, find_queue, project)
