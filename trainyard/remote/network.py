"""Network interfaces and ports of this host. Standard library only; no packet is sent."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from trainer.supervise.interface import interfaces

VIRTUAL = ("lo", "docker", "br-", "virbr", "veth", "tun", "tap", "wg", "tailscale", "cni", "flannel", "podman")


def interface_details() -> list[dict[str, Any]]:
    """Return `interfaces` with `mtu` in bytes, `mbit` (0 if unknown), `wireless` and `virtual`."""
    found = []
    for entry in interfaces():
        folder = Path("/sys/class/net", entry["name"])
        details = {
            "mtu": interface_mtu(entry["name"], 0),
            "mbit": interface_mbit(entry["name"]),
            "wireless": (folder / "wireless").exists() or (folder / "phy80211").exists(),
            "virtual": entry["name"].startswith(VIRTUAL),
        }
        found.append(entry | details)
    return found


def interface_mbit(name: str) -> int:
    """Return the speed in Mbit/s that an interface's driver states; 0 if it states none (Wi-Fi, no carrier)."""
    try:
        return max(0, int(Path("/sys/class/net", name, "speed").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return 0


def interface_mtu(name: str, default: int = 1500) -> int:
    """Return an interface's MTU in bytes, or `default` if there is no such interface."""
    try:
        return int(Path("/sys/class/net", name or "none", "mtu").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return default


def addresses() -> list[str]:
    """Return this host's IPv4 addresses in order, without loopback: they distinguish clones of one image."""
    return sorted({entry["address"] for entry in interfaces() if not entry["address"].startswith("127.")})


def addresses_v6() -> list[str]:
    """Return this host's IPv6 addresses in order, link-local ones included, without loopback."""
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="utf-8").splitlines()
    except OSError:  # IPv6 is disabled
        return []
    found = {socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])) for line in lines}
    return sorted(found - {"::1"})


def port_is_free(port: int) -> bool:
    """Return whether a server can listen on a port of all addresses now, as torch's TCPStore does."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            server.bind(("", port))
            server.listen(1)
        except OSError:
            return False
    return True
