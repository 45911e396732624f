"""Filters for the Python environments of the hosts. The logic is in trainyard/python_env."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def python_environments(hostvars: Any, hosts: Sequence[str], built: bool = False) -> dict[str, Any]:
    """Return for each host what M(python_env_info) registered before the build, or with `built` after it.

    A host whose environment was not built, as in check mode, has only the earlier result.
    """
    environments = {}
    for host in hosts:
        after = hostvars[host].get("__python_created", {}).get("info") if built else None
        environments[host] = after or hostvars[host]["__python_info"]["info"]
    return environments


def python_env_error(infos: Any) -> str:
    """Return one line that says how the environments of the hosts differ, or an empty string."""
    # Every worker of Ansible that renders a template loads all filter plugins; this import takes a quarter of a second.
    from trainyard.python_env.environment_plan import consistency_error

    return consistency_error(infos)


class FilterModule:
    """Filters for Python environments, by their names in templates."""

    def filters(self) -> dict[str, Any]:
        return {"python_environments": python_environments, "python_env_error": python_env_error}
