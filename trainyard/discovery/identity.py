"""Which answers come from one machine. Before login there are only hints; `duplicates` uses the facts after login."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from .networks import address_order
from .replies import Loaded, Model, Text
from .scan import Answer
from .ssh import KEY

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


class Place(BaseModel):
    """An address of a machine, and what was found there."""

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
    places: tuple[Place, ...]

    @property
    def addresses(self) -> list[str]:
        """The addresses of the machine."""
        return [p.address for p in self.places]


def places(answers: Sequence[Answer], macs: dict[str, str], ssh_ports: dict[str, int], ssh_port: int) -> list[Place]:
    """Return one place per address: several ports at one address are always one machine."""
    by_address: dict[str, list[Answer]] = {}
    for answer in answers:
        by_address.setdefault(answer.target.address, []).append(answer)
    return [
        Place(
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
        for address, group in sorted(by_address.items(), key=lambda item: place_order(item[0]))
    ]


def place_order(address: str) -> tuple:
    """Return a sort key: addresses that other machines can reach first, IPv4 before IPv6, by number."""
    ip = ipaddress.ip_address(address)
    return (ip.is_loopback, ip.is_link_local, *address_order(ip))


def machines(found: Sequence[Place], own_addresses: set[str]) -> tuple[list[Machine], list[str]]:
    """Group places by machine.

    Args:
        found: the result of `places`.
        own_addresses: the addresses of the machine that scans.

    Returns:
        The machines, sorted by their first address, and warnings about pairs that look like clones.
    """
    warnings = []
    groups: list[list[_Hints]] = []
    for place in found:
        hints = _hints(place, own_addresses)
        same = []
        for group in groups:
            for member in group:
                same_machine, warning = _same_machine(member, hints)
                if warning:
                    warnings.append(warning)
                if same_machine:
                    same.append(group)
                    break
        groups = [g for g in groups if g not in same] + [[hints, *(h for g in same for h in g)]]
    result = [
        Machine(
            local=group[0].own, places=tuple(sorted((h.place for h in group), key=lambda p: place_order(p.address)))
        )
        for group in groups
    ]
    return sorted(result, key=lambda m: address_order(m.places[0].address)), warnings


@dataclass(frozen=True, eq=False)
class _Hints:
    """Hints about the machine of a place: whether it is this machine, SSH keys, network card, modification times of models."""

    place: Place
    own: bool
    keys: frozenset[str]
    mac: str
    models: frozenset[tuple[str, str, str]]


def _hints(place: Place, own_addresses: set[str]) -> _Hints:
    return _Hints(
        place,
        ipaddress.ip_address(place.address).is_loopback or place.address.partition("%")[0] in own_addresses,
        frozenset(place.host_keys),
        place.mac,
        frozenset((m.name, m.digest, m.modified_at) for s in place.servers for m in s.models if m.modified_at),
    )


def _same_machine(a: _Hints, b: _Hints) -> tuple[bool, str]:
    """Return whether two places are one machine, and a warning if the user should check them.

    The SSH host key is the strongest hint. The MAC address identifies the network card, and the modification times of the
    models (in nanoseconds) the disk. A cloned image has the same key and often the same models, but another network card.
    """
    if a.own or b.own:
        return a.own and b.own, ""
    same_key = bool(a.keys & b.keys)
    if a.keys and b.keys and not same_key:
        return False, ""
    pair = f"{a.place.address} and {b.place.address}"
    macs_known = bool(a.mac and b.mac)
    same_mac = macs_known and a.mac == b.mac
    same_models = bool(a.models) and a.models == b.models
    if same_key:
        # Some models are enough: one of the two may have a second server with other models.
        if same_mac or a.models & b.models or (not macs_known and a.models == b.models):
            return True, ""
        return False, (
            f"{pair} present the same SSH host key but seem to be two machines (clones of one image): create new "
            "keys on one of them (sudo rm /etc/ssh/ssh_host_* && sudo ssh-keygen -A, then restart ssh)"
        )
    if same_mac:
        return a.models == b.models, ""
    if same_models and macs_known:
        return False, (
            f"{pair} have models with the same modification times: they are one machine with two network cards, or clones; "
            "playbooks/identity.yml checks it as soon as both can be logged in to"
        )
    return same_models, ""
