"""Which answers come from one machine. Before login there are hints only; `settle` has the facts afterwards."""

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
    """One Ollama server. `response_ms` is /api/version's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    port: Port
    version: Text
    models: tuple[Model, ...]
    loaded: tuple[Loaded, ...]
    response_ms: float


class Place(BaseModel):
    """One address of a machine, and what was seen there."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: Address
    mac: Annotated[str, StringConstraints(pattern=r"^[0-9a-f:]{0,60}$")] = ""
    ssh_port: Port = 22
    host_keys: tuple[Annotated[str, StringConstraints(pattern=f"^{KEY.pattern}$")], ...] = ()
    servers: tuple[Server, ...]


class Machine(BaseModel):
    """One machine: its addresses in numerical order, loopback last. `local`: it is the one that scans."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    local: bool
    places: tuple[Place, ...]

    @property
    def addresses(self) -> list[str]:
        return [p.address for p in self.places]


def places(answers: Sequence[Answer], macs: dict[str, str], ssh_ports: dict[str, int], ssh_port: int) -> list[Place]:
    """One place an address: several ports at one address are one machine anyway."""
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
    """Sorts a machine's addresses: those that others can reach first, IPv4 before IPv6, by number."""
    ip = ipaddress.ip_address(address)
    return (ip.is_loopback, ip.is_link_local, *address_order(ip))


def machines(found: Sequence[Place], own_addresses: set[str]) -> tuple[list[Machine], list[str]]:
    """Groups places into machines.

    Args:
        found: the places, from `places`.
        own_addresses: the addresses of the machine that scans.

    Returns:
        the machines by the number of their first address, and warnings about pairs that look like clones.
    """
    warnings = []
    groups: list[list[_Hints]] = []
    for place in found:
        hints = _hints(place, own_addresses)
        same = []
        for group in groups:
            for member in group:
                one, why_not = _one_machine(member, hints)
                if why_not:
                    warnings.append(why_not)
                if one:
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
    """What may tell a place's machine: it is ours; its SSH keys; its network card; its models' times on disk."""

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


def _one_machine(a: _Hints, b: _Hints) -> tuple[bool, str]:
    """Whether two places are one machine, and a warning where somebody should look.

    The SSH host key says most, the MAC says which network card, the models' modification times (to the nanosecond)
    say which disk. A cloned image has the key, and often the models, but never the network card.
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
        # Not all models: one of the two may have a second server, with models of its own.
        if same_mac or a.models & b.models or (not macs_known and a.models == b.models):
            return True, ""
        return False, (
            f"{pair} show the same SSH host key and look like two machines (clones of one image): give one of them new "
            "keys (sudo rm /etc/ssh/ssh_host_* && sudo ssh-keygen -A, then restart ssh)"
        )
    if same_mac:
        return a.models == b.models, ""
    if same_models and macs_known:
        return False, (
            f"{pair} have the same models to the nanosecond: one machine with two network cards, or clones; "
            "playbooks/identity.yml tells once both can be logged in to"
        )
    return same_models, ""
