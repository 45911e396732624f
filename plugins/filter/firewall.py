"""Filters of the role firewall: validate its variables and list its rules. The logic is in trainyard/provision/ufw.py."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Any

from trainyard.provision.ufw import allow_rules


def firewall_problems(
    peers: dict[str, str],
    openings: list[dict[str, Any]],
    allow: list[dict[str, Any]],
    controller_ports: Iterable[Any] = (),
) -> list[str]:
    """Return one line for each address, port or source that is not valid."""
    problems = []
    for host, address in peers.items():
        try:
            ipaddress.ip_address(address)
        except ValueError:
            expected = "the IP address at which its peers reach it"
            problems.append(f"cluster_address of {host} is {address!r}, expected {expected}")
    controller = [{"port": port} for port in controller_ports]
    named = {"firewall_openings": openings, "firewall_allow": allow, "firewall_controller_ports": controller}
    for name, entries in named.items():
        for entry in entries:
            try:
                allow_rules(str(entry["port"]), entry.get("proto", "tcp"), str(entry.get("source", "any")), "")
            except ValueError as error:
                problems.append(f"{name}: {error}")
    return problems


def firewall_rules(
    peers: dict[str, str],
    host: str,
    openings: list[dict[str, Any]],
    allow: list[dict[str, Any]],
    controller_ports: Iterable[Any] = (),
) -> list[dict[str, str]]:
    """Return the rules of `host` for M(ufw_rules): all TCP ports and the UDP openings for every peer, and `allow`.

    An opening with a `source` is open to that address only. All TCP ports are open to peers, because gloo and NCCL listen on random high ports.
    This includes TCP openings. The TCP ports `controller_ports` are open to the controller, whose address the host takes from its SSH
    connection.
    """
    rules = []
    for peer, address in peers.items():
        if address == peers.get(host):
            continue
        rules.append({"proto": "tcp", "source": address, "why": f"peer {peer}"})
        rules += [
            {"port": str(opening["port"]), "proto": "udp", "source": address, "why": f"{opening['why']}, peer {peer}"}
            for opening in openings
            if opening.get("proto") == "udp" and "source" not in opening
        ]
    of_controller = {"proto": "tcp", "source": "controller", "why": "controller"}
    rules += [{"port": str(port), **of_controller} for port in controller_ports]
    for entry in [*(opening for opening in openings if "source" in opening), *allow]:
        source = {"port": str(entry["port"]), "source": str(entry.get("source", "any"))}
        why = str(entry.get("why", "")) or "firewall_allow"
        rules.append({**source, "proto": entry.get("proto", "tcp"), "why": why})
    return rules


class FilterModule:
    """Filters for firewall rules, by their names in templates."""

    def filters(self) -> dict[str, Any]:
        return {"firewall_problems": firewall_problems, "firewall_rules": firewall_rules}
