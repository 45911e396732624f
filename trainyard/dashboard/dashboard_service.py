"""The service `trainyard-dashboard`, which the role dashboard installs.

    python -m trainyard.dashboard.dashboard_service [--show] FOLDER

config.json       what `service_config` returns
password          the hash of the password
certificate.pem   the user's certificate, and key.pem; without them, the service makes one
.trainyard/       what the dashboard makes: its history and its certificate

With `--show`, it prints the URL and the fingerprint of the certificate.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainyard import front_end
from trainyard.dashboard.dashboard_options import DashboardOptions, run_dashboard
from trainyard.dashboard.project import Project
from trainyard.queue.queue_client import queue_host
from trainyard.queue.run_folder import read_host
from trainyard.run.launch_options import LaunchOptions
from trainyard.wire.connection import Host, HostConnection
from trainyard.wire.openssh import OpenSSHTransport

KEY = ".ssh/trainyard_dashboard_ed25519"  # in the home of the service's user; made by the role


def service_config(hosts: Sequence[Host], groups: Mapping[str, Sequence[str]], address: str, port: int) -> str:
    """Return the contents of `config.json`. They have no secret.

    Args:
        address: cluster address of the host of the service.
    """
    entries = []
    for host in hosts:
        login = {"user": host.login.user, "port": host.login.port}
        entries.append(asdict(replace(host, env={})) | {"login": login})
    config = {"hosts": entries, "queue": queue_host(groups), "address": address, "port": port}
    return json.dumps(config, indent=1) + "\n"


def read_config(folder: Path) -> tuple[list[Host], str, DashboardOptions]:
    """Return the hosts, the name of the queue host, and the options. Raises UserError."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
        hosts = [read_host(entry, KEY) for entry in config["hosts"]]
        queue, address, port = str(config["queue"]), str(config["address"]), int(config["port"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is unreadable ({error}): run {front_end.playbook('site')}") from None
    given: dict[str, Any] = {"dashboard_listen": address, "dashboard_port": port}
    given["dashboard_password_file"] = str(folder / "password")
    if (folder / "certificate.pem").exists():
        given |= {"dashboard_certificate": str(folder / "certificate.pem"), "dashboard_key": str(folder / "key.pem")}
    return hosts, queue, DashboardOptions.from_variables(given, str(path))


def serve(folder: Path) -> None:
    """Serve until SIGTERM. Raises UserError."""
    hosts, queue, options = read_config(folder)

    def connect(host: Host) -> HostConnection:
        return HostConnection(host, OpenSSHTransport(host.login))

    run_dashboard(
        hosts,
        connect,
        LaunchOptions(),
        options,
        print,
        find_queue=lambda: queue,
        project=Project(folder, is_service=True),
    )


def show(folder: Path) -> None:
    """Print the URL and the fingerprint of the certificate. Raises UserError."""
    from trainyard.dashboard.server import login_method

    method = login_method(read_config(folder)[2], "", Project(folder).work / "dashboard")
    print(f"dashboard: https://{method.options.address}/")
    if method.certificate:
        print(f"SHA-256 fingerprint of its certificate: {method.certificate.fingerprint}")


def main() -> int:
    """Serve, or show; see the module."""
    try:
        (show if sys.argv[1] == "--show" else serve)(Path(sys.argv[-1]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
