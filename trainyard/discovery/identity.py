"""Group answers by machine. Before login there are only hints; `duplicates` uses the facts after login."""

import ipaddress
from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from trainyard.discovery.networks import address_order
from trainyard.discovery.ollama_replies import Loaded, Model, Text
from trainyard.discovery.scan import Answer
from trainyard.discovery.ssh import KEY

Address = Annotated[str, AfterValidator(lambda text: str(ipaddress.ip_address(text)))]
Port = Annotated[int, Field(ge=1, le=65535)]


class Server(BaseModel):
    """An Ollama server. `response_ms` is the response time of /api/version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    port: Port
    version: Text
    models: tuple[Model, ...]
    loaded: tuple[Loaded, ...]
    response_ms: float


class Endpoint(BaseModel):
    """An address of a machine, and the scan result at this address."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: Address
    mac: Annotated[str, StringConstraints(pattern=r"^[0-9a-f:]{0,60}$")] = ""
    ssh_port: Port = 22
    host_keys: tuple[Annotated[str, StringConstraints(pattern=f"^{KEY.pattern}$")], ...] = ()
    servers: tuple[Server, ...]


class Machine(BaseModel):
    """A machine with its addresses in numerical order, loopback last. `local` is true for the machine that scans."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    local: bool
    endpoints: tuple[Endpoint, ...]

    @property
    def addresses(self) -> list[str]:
        """The addresses of the machine."""
        return [p.address for p in self.endpoints]


def endpoints(
    answers: Sequence[Answer], macs: dict[str, str], ssh_ports: dict[str, int], ssh_port: int
) -> list[Endpoint]:
    """Return one endpoint per address: several ports at one address are always one machine."""
    by_address: dict[str, list[Answer]] = {}
    for answer in answers:
        by_address.setdefault(answer.target.address, []).append(answer)
    return [
        Endpoint(
            address=address,
            mac=macs.get(address, ""),
            ssh_port=ssh_ports.get(address, ssh_port),
            host_keys=group[0].host_keys,
            servers=tuple(
                Server(
                    port=a.target.port,
                    version=a.version,
                    models=a.models,
                    loaded=a.loaded,
                    response_ms=a.response_ms,
                )
                for a in sorted(group, key=lambda a: a.target.port)
            ),
        )
        for address, group in sorted(by_address.items(), key=lambda item: endpoint_order(item[0]))
    ]


def endpoint_order(address: str) -> tuple:
    """Return a sort key: addresses that other machines can reach first, IPv4 before IPv6, by number."""
    ip = ipaddress.ip_address(address)
    return (ip.is_loopback, ip.is_link_local, *address_order(ip))


def machines(found: Sequence[Endpoint], own_addresses: set[str]) -> tuple[list[Machine], list[str]]:
    """Group endpoints by machine. The time is linear in the number of addresses and keys.

    Args:
        found: the result of `endpoints`.
        own_addresses: the addresses of the machine that scans.

    Returns:
        The machines, sorted by their first address, and warnings about machines that present the same key.
    """
    own = [i for i, endpoint in enumerate(found) if _is_own(endpoint.address, own_addresses)]
    groups = Groups(len(found))
    for members in (own, *_same_machine(found, set(own))):
        for other in members[1:]:
            groups.join(members[0], other)
    result = [
        Machine(
            local=members[0] in own[:1],
            endpoints=tuple(sorted((found[i] for i in members), key=lambda p: endpoint_order(p.address))),
        )
        for members in groups.members()
    ]
    return sorted(result, key=lambda m: address_order(m.endpoints[0].address)), _shared_keys(found, set(own), groups)


class Groups:
    """Disjoint sets of the numbers 0 to `count` - 1."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def find(self, number: int) -> int:
        """Return the number that stands for the set of `number`."""
        while self._parent[number] != number:
            self._parent[number] = self._parent[self._parent[number]]
            number = self._parent[number]
        return number

    def join(self, a: int, b: int) -> None:
        """Unite the sets of two numbers; the smaller number stands for the result."""
        low, high = sorted((self.find(a), self.find(b)))
        self._parent[high] = low

    def members(self) -> list[list[int]]:
        """Return the sets in the order of their smallest number."""
        sets: dict[int, list[int]] = {}
        for number in range(len(self._parent)):
            sets.setdefault(self.find(number), []).append(number)
        return list(sets.values())


def _is_own(address: str, own_addresses: set[str]) -> bool:
    return ipaddress.ip_address(address).is_loopback or address.partition("%")[0] in own_addresses


def _same_machine(found: Sequence[Endpoint], own: set[int]) -> Iterator[list[int]]:
    """Yield endpoints that are one machine: the same SSH host key and network card, or one of them where the other is unknown.

    Clones of one image have the same key and different cards. A Wi-Fi repeater presents its own card for all machines. The
    card is unknown behind a router, and the key without an SSH server.
    """
    by: dict[tuple[str, str], list[int]] = {}
    for i, endpoint in enumerate(found):
        if i in own:
            continue
        for key in endpoint.host_keys:
            by.setdefault((key, ""), []).append(i)
            if endpoint.mac:
                by.setdefault((key, endpoint.mac), []).append(i)
        if endpoint.mac:
            by.setdefault(("", endpoint.mac), []).append(i)
    for (key, mac), members in by.items():
        unknown = any(not (found[i].mac if key else found[i].host_keys) for i in members)
        if (key and mac) or unknown:
            yield members


def _shared_keys(found: Sequence[Endpoint], own: set[int], groups: Groups) -> list[str]:
    """Return a warning for each machine that presents the SSH host key of an earlier one."""
    warnings = []
    first_with: dict[str, int] = {}
    warned: set[tuple[int, int]] = set()
    for i, endpoint in enumerate(found):
        if i in own:
            continue
        for key in endpoint.host_keys:
            first = first_with.setdefault(key, i)
            pair = (groups.find(first), groups.find(i))
            if pair[0] != pair[1] and pair not in warned:
                warned.add(pair)
                warnings.append(f"{found[first].address} and {endpoint.address} {_SAME_KEY}")
    return warnings


_SAME_KEY = (
    "present the same SSH host key on different network cards: if they are clones of one image, create new keys on one of "
    "them (sudo rm /etc/ssh/ssh_host_* && sudo ssh-keygen -A, then restart ssh); if they are one machine, exclude an address"
)
