"""What can be wrong with the addresses that an inventory gives out, seen on the controller. Pure Python, no Ansible."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

MTU = range(576, 9217)


def problems(hosts: dict[str, dict[str, Any]]) -> list[str]:
    """Return a plain line for each thing that is wrong with the hosts' netplan_* variables.

    `hosts` are all of the cluster, by name; `present` is the address that a host is reached at now.
    """
    said = []
    taken: dict[str, str] = {}
    for host, of in hosts.items():
        if of.get("netplan_address"):
            said += [f"{host}: {line}" for line in of_host(of)]
            address = str(of["netplan_address"]).partition("/")[0]
            if address in taken:
                said.append(f"netplan_address of {taken[address]} and {host} are both {address}")
            taken.setdefault(address, host)
    for host, of in hosts.items():
        owner = taken.get(str(of.get("present", "")))
        if owner and owner != host and hosts[owner].get("present") != of["present"]:
            said.append(
                f"netplan_address of {owner} is {of['present']}, where {host} is reached now: move {host} first"
            )
    return said


def of_host(of: dict[str, Any]) -> list[str]:
    """Return what is wrong with one host's variables, whatever the others say."""
    text = str(of["netplan_address"])
    try:
        wished = ipaddress.ip_interface(text)
    except ValueError:
        wished = None
    if wished is None or "/" not in text:
        return [f"netplan_address is {text!r}, takes an address with its prefix, such as 192.168.1.11/24"]
    said = []
    network = wished.network
    if wished.ip.is_loopback or wished.ip.is_multicast or wished.ip.is_unspecified:
        said.append(f"netplan_address is {text}, which no NIC can have")
    elif network.prefixlen < network.max_prefixlen - 1 and wished.ip in (network.network_address, _last(network)):
        said.append(f"netplan_address is {text}, which is the network's own address: take one between")
    gateway = str(of.get("netplan_gateway") or "")
    if gateway and gateway != "none":
        if (address := _address(gateway)) is None:
            said.append(f"netplan_gateway is {gateway!r}, takes an IP address, or none")
        elif address not in network:
            said.append(f"netplan_gateway {gateway} is not in the network {network} of netplan_address")
        elif address == wished.ip:
            said.append(f"netplan_gateway {gateway} is the host's own address")
    dns = of.get("netplan_dns")
    for server in dns if isinstance(dns, list) else [] if dns in (None, "") else [dns]:
        if _address(str(server)) is None:
            said.append(f"netplan_dns has {server!r}, takes IP addresses")
    mtu = str(of.get("netplan_mtu") or 0)
    if mtu != "0" and not (mtu.isdecimal() and int(mtu) in MTU):
        said.append(f"netplan_mtu is {mtu}, takes {MTU.start} to {MTU.stop - 1} bytes")
    elif mtu != "0" and wished.version == 6 and int(mtu) < 1280:
        said.append(f"netplan_mtu is {mtu}, and IPv6 takes 1280 bytes at least")
    nic = str(of.get("netplan_nic") or "")
    if nic and not re.fullmatch(r"[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}|[^\s/:]{1,15}", nic):
        said.append(f"netplan_nic is {nic!r}, takes the name of a NIC or its MAC")
    return said


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _last(network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> object:
    """The broadcast address; IPv6 has none."""
    return network.broadcast_address if network.version == 4 else None
