"""The settings of the service `trainyard-dashboard`, as the controller writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from trainer.errors import UserError
from trainyard.connection import Host
from trainyard.queue.host import queue_host


def service_config(
    hosts: Sequence[Host], groups: Mapping[str, Sequence[str]], variables: Mapping[str, Any], address: str, port: int
) -> str:
    """Return the contents of `config.json`. They have no secret.

    Args:
        variables: the variables of every host by name.
        address: cluster address of the host of the service.
    """
    entries = []
    for host in hosts:
        login = {"user": host.login.user, "port": host.login.port}
        entries.append(asdict(replace(host, env={})) | {"login": login})
    try:
        queue = queue_host(groups, lambda host, name: variables[host].get(name))
    except UserError:
        queue = ""
    return json.dumps({"hosts": entries, "queue": queue, "address": address, "port": port}, indent=1) + "\n"
