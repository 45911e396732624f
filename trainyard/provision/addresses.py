"""Checks of the addresses that an inventory assigns to hosts (`netplan_*` variables). Runs on the controller."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Any

from trainer.common.formats import printable, quoted

MTU = range(576, 9217)
IPV6_MTU = 1280  # bytes, the minimum

Hosts = Mapping[str, Mapping[str, Any]]


def address_errors(hosts: Hosts) -> list[str]:
    """Return one line for each error in the `netplan_*` variables.

    Args:
        hosts: variables of all hosts of the cluster, by name; `current` is the address at which a host is reached now.
    """
    errors = []
    owners: dict[str, str] = {}
    for host, variables in hosts.items():
        if variables.get("netplan_address"):
            errors += [f"{host}: {line}" for line in host_errors(variables)]
            address = printable(variables["netplan_address"]).partition("/")[0]
            if address in owners:
                errors.append(f"netplan_address of {owners[address]} and {host} are both {address}")
            owners.setdefault(address, host)
    for host, variables in hosts.items():
        owner = owners.get(printable(variables.get("current", "")))
        if owner and owner != host and hosts[owner].get("current") != variables["current"]:
            what = f"netplan_address of {owner} is {variables['current']}, the current address of {host}"
            errors.append(f"{what}: change the address of {host} first")
    return errors


def host_errors(variables: Mapping[str, Any]) -> list[str]:
    """Return one line for each error in the variables of one host; `netplan_address` is set."""
    text = printable(variables["netplan_address"])
    try:
        interface = ipaddress.ip_interface(text)
    except ValueError:
        interface = None
    if interface is None or "/" not in text:
        return [f"netplan_address is {text!r}, expected an address with its prefix, such as 192.168.1.11/24"]
    errors = []
    network = interface.network
    reserved = [network.network_address, *([network.broadcast_address] if network.version == 4 else [])]
    if interface.ip.is_loopback or interface.ip.is_multicast or interface.ip.is_unspecified:
        errors.append(f"netplan_address is {text}, which is not a valid address of a NIC")
    elif network.prefixlen < network.max_prefixlen - 1 and interface.ip in reserved:
        errors.append(f"netplan_address is {text}, which is reserved in its network: use another address")
    errors += _gateway_errors(printable(variables.get("netplan_gateway") or ""), interface)
    dns = variables.get("netplan_dns")
    for server in dns if isinstance(dns, list) else [] if dns in (None, "") else [dns]:
        if _address(printable(server)) is None:
            errors.append(f"netplan_dns has {quoted(server)}, expected IP addresses")
    mtu = printable(variables.get("netplan_mtu") or 0)
    if mtu != "0" and not (mtu.isdecimal() and int(mtu) in MTU):
        errors.append(f"netplan_mtu is {mtu}, expected {MTU.start} to {MTU.stop - 1} bytes")
    elif mtu != "0" and interface.version == 6 and int(mtu) < IPV6_MTU:
        errors.append(f"netplan_mtu is {mtu}, IPv6 needs at least {IPV6_MTU} bytes")
    nic = printable(variables.get("netplan_nic") or "")
    if nic and not re.fullmatch(r"[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}|[^\s/:]{1,15}", nic):
        errors.append(f"netplan_nic is {nic!r}, expected the name of a NIC or its MAC address")
    return errors


def _gateway_errors(gateway: str, interface: ipaddress.IPv4Interface | ipaddress.IPv6Interface) -> list[str]:
    if not gateway or gateway == "none":
        return []
    address = _address(gateway)
    if address is None:
        return [f"netplan_gateway is {gateway!r}, expected an IP address or none"]
    if address not in interface.network:
        return [f"netplan_gateway {gateway} is not in the network {interface.network} of netplan_address"]
    if address == interface.ip:
        return [f"netplan_gateway {gateway} is the host's own address"]
    return []


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
