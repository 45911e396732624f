"""Filters for the Python environments of the hosts. The logic is in trainyard/python_env."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainyard.python_env.plan import consistency_error


def python_environments(hostvars: Any, hosts: Sequence[str], built: bool = False) -> dict[str, Any]:
    """Return for each host what M(python_env_info) registered before the build, or with `built` after it.

    A host whose environment was not built, as in check mode, has only the result from before.
    """
    environments = {}
    for host in hosts:
        after = hostvars[host].get("__python_created", {}).get("info") if built else None
        environments[host] = after or hostvars[host]["__python_info"]["info"]
    return environments


class FilterModule:
    """For Ansible."""

    def filters(self) -> dict[str, Any]:
        return {"python_environments": python_environments, "python_env_error": consistency_error}
