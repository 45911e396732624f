"""Group answers by machine. Before login there are only hints; `duplicates` uses the facts after login."""

import ipaddress
from collections.abc import Callable, Iterator, Sequence
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
    """Group places by machine. The time is linear in the number of models, addresses and keys.

    Args:
        found: the result of `places`.
        own_addresses: the addresses of the machine that scans.

    Returns:
        The machines, sorted by their first address, and warnings about machines that look like clones.
    """
    hints = [_hints(place, own_addresses) for place in found]
    groups = Groups(len(hints))
    for members in _same_machine(hints):
        for other in members[1:]:
            groups.join(members[0], other)
    warnings = _clones(hints, groups)
    result = [
        Machine(
            local=hints[members[0]].own,
            places=tuple(sorted((hints[i].place for i in members), key=lambda p: place_order(p.address))),
        )
        for members in groups.members()
    ]
    return sorted(result, key=lambda m: address_order(m.places[0].address)), warnings


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


def _same_machine(hints: Sequence[_Hints]) -> Iterator[list[int]]:
    """Yield places that are one machine.

    The SSH host key is the strongest hint. The MAC address identifies the network card, and the modification times of the
    models (in nanoseconds) the disk. A cloned image has the same key and often the same models, but another network card.
    """
    yield [i for i, hint in enumerate(hints) if hint.own]
    by: dict[tuple, list[int]] = {}
    for i, hint in enumerate(hints):
        if hint.own:
            continue
        for key in hint.keys:
            # Some models are enough: one of the two may have a second server with other models.
            for model in hint.models:
                by.setdefault(("key and model", key, model), []).append(i)
            if hint.mac:
                by.setdefault(("key and card", key, hint.mac), []).append(i)
            by.setdefault(("key and all models", key, hint.models), []).append(i)
        if hint.mac:
            by.setdefault(("card and all models", hint.mac, hint.models), []).append(i)
        if hint.models:
            by.setdefault(("all models", hint.models), []).append(i)
    for (what, *_), members in by.items():
        if len(members) > 1:
            yield from _EVIDENCE[what]([(i, hints[i]) for i in members])


_Members = list[tuple[int, _Hints]]


def _all(members: _Members) -> Iterator[list[int]]:
    yield [i for i, _ in members]


def _if_a_card_is_unknown(members: _Members) -> Iterator[list[int]]:
    """Unknown cards, as behind a router, may be the same; two known cards are compared in another step."""
    if any(not hint.mac for _, hint in members):
        yield [i for i, _ in members]


def _if_a_key_is_unknown(members: _Members) -> Iterator[list[int]]:
    if any(not hint.keys for _, hint in members):
        yield [i for i, _ in members]


def _if_a_key_and_a_card_are_unknown(members: _Members) -> Iterator[list[int]]:
    """Two places with the same models are one machine if neither their keys nor their cards can be compared."""
    neither = [i for i, hint in members if not hint.keys and not hint.mac]
    only_card = [i for i, hint in members if not hint.keys and hint.mac]
    only_key = [i for i, hint in members if hint.keys and not hint.mac]
    if neither:
        yield [i for i, _ in members]
    elif only_card and only_key:
        yield only_card + only_key


_EVIDENCE: dict[str, Callable[[_Members], Iterator[list[int]]]] = {
    "key and model": _all,
    "key and card": _all,
    "key and all models": _if_a_card_is_unknown,
    "card and all models": _if_a_key_is_unknown,
    "all models": _if_a_key_and_a_card_are_unknown,
}


def _clones(hints: Sequence[_Hints], groups: Groups) -> list[str]:
    """Return a warning for each machine that presents the SSH host key of an earlier one."""
    warnings = []
    first_with: dict[str, int] = {}
    warned: set[tuple[int, int]] = set()
    for i, hint in enumerate(hints):
        if hint.own:
            continue
        for key in sorted(hint.keys):
            first = first_with.setdefault(key, i)
            pair = (groups.find(first), groups.find(i))
            if pair[0] == pair[1] or pair in warned:
                continue
            warned.add(pair)
            warnings.append(f"{hints[first].place.address} and {hint.place.address} {_SAME_KEY}")
    return warnings


_SAME_KEY = (
    "present the same SSH host key but seem to be two machines (clones of one image): create new "
    "keys on one of them (sudo rm /etc/ssh/ssh_host_* && sudo ssh-keygen -A, then restart ssh)"
)
