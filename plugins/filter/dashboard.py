"""Filters of the role dashboard. The logic is in trainyard/dashboard/dashboard_service.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError


def dashboard_config(
    hostvars: Any, members: Sequence[str], groups: Mapping[str, Sequence[str]], address: str, port: Any
) -> str:
    """Return the contents of the file with the settings of the service."""
    # Here, because they load pydantic, and every worker of Ansible loads every filter plugin.
    from trainyard.dashboard.dashboard_service import service_config
    from trainyard.host_variables import make_host
    from trainyard.wire.connection import InventoryError

    try:
        hosts = [make_host(name, hostvars[name]) for name in members]
        for host in hosts:
            host.check()
    except InventoryError as error:
        raise AnsibleFilterError(str(error)) from error
    return service_config(hosts, groups, address, int(port))


class FilterModule:
    """The filter for the dashboard's configuration, by its name in templates."""

    def filters(self) -> dict[str, Any]:
        return {"dashboard_config": dashboard_config}
