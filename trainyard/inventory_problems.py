"""Faults that the inventory alone tells, before a host is contacted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainyard.queue.slurm_conf import SLURM_NAME


def inventory_problems(hostvars: Any, addresses: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """Return host, check of preflight, problem and remedy for each fault: an address that peers cannot use, a name that Slurm refuses.

    `addresses`: at which peers reach the hosts, in the order of the inventory.
    """
    problems: list[tuple[str, str, str, str]] = []
    seen: dict[str, str] = {}
    loopback = {host for host, at in addresses.items() if at.startswith("127.") or at in ("::1", "localhost")}
    for host, address in addresses.items():
        here = str(hostvars[host].get("ansible_connection", "")).endswith("local")  # several may be this machine
        if not here and (other := seen.setdefault(address.lower(), host)) != host:
            remedy = "set ansible_host or cluster_address of one"
            problems.append((host, "address", f"{other} and {host} both have the address {address}", remedy))
        if host in loopback and len(loopback) < len(addresses):
            text = f"has the address {address}, which its peers cannot reach"
            problems.append((host, "address", text, "set cluster_address to that of its network"))
        if hostvars[host].get("queue_state") == "present" and ":" in address:
            text = f"has the address {address}, at which Slurm fetches no configuration"
            problems.append((host, "queue", text, "set cluster_address to its IPv4 address, or queue_state to absent"))
        if hostvars[host].get("queue_state") == "present" and not SLURM_NAME.fullmatch(host):
            text = "has a name that Slurm refuses, which takes letters, digits, dots and dashes"
            problems.append((host, "queue", text, "rename it in the inventory"))
    return problems
