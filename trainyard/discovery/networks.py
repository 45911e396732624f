"""The addresses to scan: the networks of this machine, their addresses, and the kernel's neighbour table."""

import ipaddress
import json
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from trainyard.discovery.settings import Settings, SettingsError

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IPNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

# Ranges without public machines. `is_private` of the standard library also includes documentation and benchmark ranges.
PRIVATE = [
    ipaddress.ip_network(n)
    for n in (
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "127.0.0.0/8"),
        *("fc00::/7", "fe80::/10", "::1/128"),
    )
]


@dataclass(frozen=True)
class Attached:
    """An address of this machine, and its network."""

    interface: str
    address: IPAddress
    network: IPNetwork


class Target(NamedTuple):
    """One TCP port of one IP address."""

    address: str
    port: int

    @property
    def url(self) -> str:
        """The address of a server at this port."""
        host = f"[{self.address.replace('%', '%25')}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}"


@dataclass(frozen=True)
class Plan:
    """What to scan: `targets` in numerical order, `networks` for the summary, and `skipped` networks with the reason."""

    targets: tuple[Target, ...]
    networks: tuple[str, ...]
    skipped: tuple[str, ...]


def attached() -> list[Attached]:
    """Return the addresses of this machine on interfaces that are up, including loopback. Raises SettingsError without `ip`."""
    found = []
    for link in _ip("address"):
        if "UP" not in link.get("flags", []) or link.get("operstate") == "DOWN":
            continue
        for info in link.get("addr_info", []):
            address = ipaddress.ip_address(info["local"])
            network = ipaddress.ip_network(f"{address}/{info['prefixlen']}", strict=False)
            found.append(Attached(link["ifname"], address, network))
    return found


def plan(settings: Settings, here: list[Attached], resolved: dict[str, list[str]]) -> Plan:
    """Return the addresses and ports to scan. Raises SettingsError for a wrong network or interface.

    `here`: the addresses of this machine, from `attached`. `resolved`: those of the names under `hosts`, from `resolve`.
    """
    known = {a.interface for a in here}
    for name in settings.interfaces:
        if name not in known:
            others = ", ".join(sorted(known))
            raise SettingsError(f"interface: {name} is not up on this machine; its interfaces are {others}")
    named = [_private_network(text) for text in settings.networks if text != "auto"]
    size = sum(n.num_addresses for n in named)
    if size > settings.max_addresses:
        raise SettingsError(
            f"networks: {', '.join(map(str, named))} is {size:,} addresses, more than max_addresses "
            f"({settings.max_addresses:,}); specify a smaller network, or increase max_addresses"
        )
    automatic, skipped = _automatic(settings, here, size) if "auto" in settings.networks else ([], [])
    networks = list(dict.fromkeys(named + automatic))
    ports: dict[IPAddress, set[int]] = {a: set(settings.ports) for network in networks for a in network.hosts()}
    for address, port in _singles(settings, here, resolved):
        ports.setdefault(address, set()).update([port] if port else settings.ports)
    excluded = [_network("exclude", text) for text in settings.exclude]
    targets = tuple(
        Target(str(address), port)
        for address in sorted(ports, key=address_order)
        if not any(address in network for network in excluded)
        for port in sorted(ports[address])
    )
    return Plan(targets, tuple(map(str, networks)), tuple(skipped))


def address_order(address: str | IPAddress) -> tuple[int, int, str]:
    """Return a sort key: by number, and IPv4 before IPv6. As text, .10 would sort before .9."""
    ip = ipaddress.ip_address(address) if isinstance(address, str) else address
    return ip.version, int(ip), getattr(ip, "scope_id", None) or ""


def host_and_port(text: str) -> tuple[str, int | None]:
    """Split `node1`, `10.0.0.5:11500`, `[fd00::5]:11434`, `fe80::5%eth0` or `http://node1:11434` into host and port.

    Raises SettingsError: not one of these forms, or an address that only servers listen on (0.0.0.0, ::).
    """
    bare = re.sub(r"^http://", "", text.strip()).rstrip("/")
    match = re.fullmatch(r"\[([0-9A-Fa-f:.]+(?:%[\w.-]+)?)\](?::(\d{1,5}))?|([\w.-]+)(?::(\d{1,5}))?", bare)
    if match:
        host, port = match[1] or match[3], match[2] or match[4]
    elif _is_address(bare):
        host, port = bare, None
    else:
        raise SettingsError(f"hosts: {text!r} is neither a name nor an address; expected NAME, ADDRESS or ADDRESS:PORT")
    if _is_address(host) and ipaddress.ip_address(host).is_unspecified:
        raise SettingsError(f"hosts: {host} is an address to listen on; specify the machine's own address")
    if port is not None and not 1 <= int(port) <= 65535:
        raise SettingsError(f"hosts: {text!r} has port {port}, expected 1 to 65535")
    return host, int(port) if port else None


def resolve(names: Iterable[str], timeout: float = 1.0) -> dict[str, list[str]]:
    """Return the addresses of each name. All names are resolved at the same time.

    A name without an answer within `timeout` seconds has no addresses. Daemon threads are used instead of a pool, which
    would wait for a thread that a DNS server without an answer blocks for 10 s and more.
    """
    found: dict[str, list[str]] = {}

    def look_up(name: str) -> None:
        try:
            answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            answers = []
        found[name] = list(dict.fromkeys(str(a[4][0]) for a in answers))

    wanted = dict.fromkeys(names)
    threads = []
    for name in wanted:
        if _is_address(name):
            found[name] = [str(ipaddress.ip_address(name))]
        else:
            threads.append(threading.Thread(target=look_up, args=(name,), daemon=True))
            threads[-1].start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {name: list(found.get(name, [])) for name in wanted}


def _automatic(settings: Settings, here: list[Attached], taken: int) -> tuple[list[IPNetwork], list[str]]:
    """Return the attached private networks, the smallest first, up to max_addresses; and why others are skipped."""
    candidates: dict[IPNetwork, str] = {
        a.network: a.interface
        for a in here
        if a.network.version == 4
        and not a.address.is_loopback
        and _is_private(a.network)
        and (not settings.interfaces or a.interface in settings.interfaces)
    }
    networks: list[IPNetwork] = []
    skipped: list[str] = []
    for network in sorted(candidates, key=lambda n: (n.num_addresses, int(n.network_address))):
        taken += network.num_addresses
        if taken <= settings.max_addresses:
            networks.append(network)
        else:
            skipped.append(
                f"{network} on {candidates[network]} has {network.num_addresses:,} addresses, more than max_addresses "
                f"({settings.max_addresses:,}) leaves: add a part of it to networks, or increase max_addresses"
            )
    return networks, skipped


def _singles(
    settings: Settings, here: list[Attached], resolved: dict[str, list[str]]
) -> list[tuple[IPAddress, int | None]]:
    """Return single addresses from `hosts`, loopback and the kernel's neighbours, with the port where one is given."""
    singles: list[tuple[IPAddress, int | None]] = []
    if settings.this_machine:
        singles.append((ipaddress.ip_address("127.0.0.1"), None))
    for text in settings.hosts:
        host, port = host_and_port(text)
        singles += [(ipaddress.ip_address(a), port) for a in resolved.get(host, [])]
    if settings.ipv6_neighbours:
        wanted = settings.interfaces or tuple({a.interface for a in here if not a.address.is_loopback})
        for neighbour in _ip("-6", "neighbour"):
            local = ipaddress.ip_address(neighbour["dst"]).is_link_local
            if local and neighbour.get("dev") in wanted and "lladdr" in neighbour:
                singles.append((ipaddress.ip_address(f"{neighbour['dst']}%{neighbour['dev']}"), None))
    return singles


def _private_network(text: str) -> IPNetwork:
    network = _network("networks", text)
    if not _is_private(network):
        raise SettingsError(f"networks: {network} is public and is never scanned; add single machines to hosts")
    return network


def _network(option: str, text: str) -> IPNetwork:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise SettingsError(f"{option}: {text!r} is not a network; expected the form 192.168.1.0/24") from error


def _is_private(network: IPNetwork) -> bool:
    return any(network.version == p.version and network.subnet_of(p) for p in PRIVATE)  # type: ignore[arg-type]


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _ip(*arguments: str) -> list[dict]:
    try:
        out = subprocess.run(["ip", "-json", *arguments], capture_output=True, check=True, timeout=5).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise SettingsError(f"cannot list the networks here with `ip` ({error}); install iproute2") from error
    return json.loads(out or b"[]")
