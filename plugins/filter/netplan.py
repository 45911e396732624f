"""Filter `netplan_problems`: what is wrong with the addresses that the inventory gives out. Thin: see module_utils/addresses."""

from __future__ import annotations

from typing import Any

from trainyard.addresses import problems

NAMES = ("netplan_address", "netplan_gateway", "netplan_dns", "netplan_mtu", "netplan_nic")


def netplan_problems(hostvars: Any, hosts: list[str]) -> list[str]:
    """Return a plain line for each thing that is wrong, over all hosts of the cluster."""
    return problems(
        {
            host: {name: hostvars[host][name] for name in NAMES if name in hostvars[host]}
            | {"present": str(hostvars[host].get("ansible_host", ""))}
            for host in hosts
        }
    )


class FilterModule:
    """For Ansible."""

    def filters(self) -> dict[str, Any]:
        return {"netplan_problems": netplan_problems}
