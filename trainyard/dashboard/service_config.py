"""The settings of the service `trainyard-dashboard`, as the controller writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from trainyard.connection import Host
from trainyard.queue.client import queue_host


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
