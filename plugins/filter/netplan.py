"""Filter `netplan_problems`: errors in the addresses that the inventory assigns. The logic is in trainyard/provision/addresses.py."""

from __future__ import annotations

from typing import Any

from trainyard.provision.addresses import address_errors

NAMES = ("netplan_address", "netplan_gateway", "netplan_dns", "netplan_mtu", "netplan_nic")


def netplan_problems(hostvars: Any, hosts: list[str]) -> list[str]:
    """Return one line for each error in the `netplan_*` variables of all hosts of the cluster."""
    settings = {}
    for host in hosts:
        settings[host] = {name: hostvars[host][name] for name in NAMES if name in hostvars[host]}
        settings[host]["current"] = str(hostvars[host].get("ansible_host", ""))
    return address_errors(settings)


class FilterModule:
    """The filter that checks network settings, by its name in templates."""

    def filters(self) -> dict[str, Any]:
        return {"netplan_problems": netplan_problems}
