"""The inventory as a playbook's action and the command line hand it on: hosts, groups, variables, connections and launch options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainyard.run.launch_options import LaunchOptions
from trainyard.wire.connection import Host, HostConnection


def service_host(groups: Mapping[str, Sequence[str]]) -> str:
    """Return the host of the cluster's services: the first of the group queue, head or cluster that is in the cluster
    (see roles/cluster); empty without a cluster."""
    members = groups.get("cluster", [])
    names = [name for group in ("queue", "head", "cluster") for name in groups.get(group, []) if name in members]
    return names[0] if names else ""


@dataclass(frozen=True)
class ClusterHosts:
    """The cluster of an inventory, of a play or of the command line.

    Attributes:
        connect: makes the connection to a host of the inventory, given the host or its name; called in the main thread.
        launch_of: returns the launch options with these values on top of the inventory's.
    """

    hosts: list[Host]  # those of the group `cluster`, or those of them that `--limit` selects
    groups: Mapping[str, Sequence[str]]  # names of the hosts of every group
    variables: Mapping[str, Mapping[str, Any]]  # the variables of every host by name, templates resolved
    connect: Callable[[Host | str], HostConnection]
    launch_of: Callable[[Mapping[str, Any]], LaunchOptions]

    def variable(self, host: str, name: str) -> Any:
        """Return a variable of a host, or None."""
        return self.variables[host].get(name)
