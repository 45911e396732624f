"""The network interface on the way to another host. Standard library only; no packet is sent."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from pathlib import Path
from typing import Any

SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B  # netdevice(7)


def interfaces() -> list[dict[str, Any]]:
    """Return `name`, `address` and `mask` of every interface that is up and has an IPv4 address."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                request = struct.pack("256s", name.encode()[:15])
                address, mask = (
                    socket.inet_ntoa(fcntl.ioctl(query.fileno(), number, request)[20:24])
                    for number in (SIOCGIFADDR, SIOCGIFNETMASK)
                )
                found.append({"name": name, "address": address, "mask": mask})
    return found


def source_address(peer: str) -> str:
    """Return the address from which this host reaches `peer`, by its routing table. Raises OSError without a route."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as query:
        query.connect((peer, 9))
        return str(query.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the name of the interface that has an address, or an empty string."""
    if ":" in address:
        wanted = socket.inet_pton(socket.AF_INET6, address).hex()
        for line in Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines():
            fields = line.split()
            if fields[0] == wanted:
                return fields[5]
        return ""
    if address.startswith("127."):
        return "lo"
    return next((entry["name"] for entry in interfaces() if entry["address"] == address), "")


def interface_to(head: str, routes: Path = Path("/proc/net/route")) -> str:
    """Return the interface on the route to the head of a run; an empty string if it is unknown, or if `head` names loopback itself.

    A host often resolves its own name to 127.0.1.1, where no other host reaches it. Then it is the interface of the default
    route, or the only one.
    """
    try:
        found = {str(row[4][0]) for row in socket.getaddrinfo(head, None, socket.AF_INET)}
        if outside := sorted(address for address in found if not address.startswith("127.")):
            return interface_of(source_address(outside[0]))
    except OSError:
        return ""
    if head == "localhost" or head in found:
        return ""
    by_default = [
        line.split()[0] for line in routes.read_text(encoding="utf-8").splitlines() if line.split()[1] == "00000000"
    ]
    others = [entry["name"] for entry in interfaces() if not entry["address"].startswith("127.")]
    return by_default[0] if by_default else others[0] if len(others) == 1 else ""
