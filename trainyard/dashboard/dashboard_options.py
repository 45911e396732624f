"""The options of the dashboard."""

from __future__ import annotations

import importlib.util
import ipaddress
from collections.abc import Callable
from typing import Any

from pydantic import field_validator

from trainer.common.errors import UserError
from trainer.config.fields import declare
from trainyard.dashboard.project import Project
from trainyard.playbook_options import PlaybookOptions
from trainyard.project_folder import pip_install
from trainyard.run.launch_options import LaunchOptions
from trainyard.wire.connection import Host, HostConnection

LOOPBACK, PORT = "127.0.0.1", 5000
PASSWORD = "dashboard_password"  # a variable of the inventory, for a vault; no option, which a command line could show
# Of the extra `dashboard`.
PACKAGES = ("starlette", "uvicorn", "sse_starlette", "jinja2", "prometheus_client", "cryptography")


class DashboardOptions(PlaybookOptions):
    """Where the dashboard listens."""

    dashboard_port: int = declare(
        PORT, "port of the dashboard; 0 for any free port", suggested_names=["port"], ge=0, le=65_535
    )
    dashboard_listen: str = declare(
        LOOPBACK,
        "IP address of this machine at which the dashboard listens; one that is not loopback needs a password, and has TLS",
        expected="an IP address of this machine",
    )
    dashboard_password_file: str = declare(
        "",
        "file of mode 0600 with the password, or with its hash; the variable `dashboard_password` has the same effect",
    )
    dashboard_certificate: str = declare(
        "", "PEM file of the TLS certificate; by default one that the dashboard makes and signs itself"
    )
    dashboard_key: str = declare("", "PEM file of the key of `dashboard_certificate`")

    @field_validator("dashboard_listen")
    @classmethod
    def _one_address(cls, value: str) -> str:
        if ipaddress.ip_address(value).is_unspecified:
            raise ValueError("it stands for all addresses: name one")
        return str(ipaddress.ip_address(value))

    @property
    def public(self) -> bool:
        """Whether other machines may reach the address."""
        return not ipaddress.ip_address(self.dashboard_listen).is_loopback

    @property
    def address(self) -> str:
        """Address and port, for messages."""
        host = f"[{self.dashboard_listen}]" if ":" in self.dashboard_listen else self.dashboard_listen
        return f"{host}:{self.dashboard_port}"


def run_dashboard(
    hosts: list[Host],
    connect: Callable[[Host], HostConnection],
    launch: LaunchOptions,
    options: DashboardOptions,
    report: Callable[[str], None],
    *,
    find_queue: Callable[[], str],
    project: Project,
    password: str = "",
    check: bool = False,
) -> dict[str, Any]:
    """Serve the dashboard until Ctrl-C, see `server.serve`; with `check`, do not.

    Args:
        find_queue: returns the name of the queue host; raises UserError where there is no queue.
        project: whose runs are started again and deployed; its work folder has the certificate that the dashboard makes.
        password: the variable `dashboard_password`.

    Raises:
        UserError: a package is not installed, a host is not described completely, the port is in use, or other machines
            reach the address and there is no password.
    """
    if missing := [package for package in PACKAGES if importlib.util.find_spec(package) is None]:
        names = [package.replace("_", "-") for package in missing]
        raise UserError(f"the dashboard needs the package {names[0]}: run {pip_install(names)}")
    from trainyard.dashboard.server import login_method, serve

    method = login_method(options, password, project.work / "dashboard", check)
    if check:
        return {"skipped": True, "msg": f"would serve the dashboard on {options.address}"}
    return serve(hosts, connect, launch, method, report, find_queue, project)
