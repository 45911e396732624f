"""The result of a scan: its machines and its messages. Which of them are one machine shows after login, see `duplicates`."""

import ipaddress
from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from trainyard.discovery.networks import address_order
from trainyard.discovery.ollama_replies import Address, Port, Server, Text
from trainyard.discovery.scan import LanServer
from trainyard.discovery.ssh import KEY


class LanMachine(BaseModel):
    """The servers of one address, or of all addresses of the machine that scans (`local`), whose loopback is last."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    local: bool
    ssh_port: Port = 22
    host_keys: tuple[Annotated[str, StringConstraints(pattern=f"^{KEY.pattern}$")], ...] = ()
    servers: Annotated[tuple[Server, ...], Field(min_length=1)]

    @property
    def addresses(self) -> list[str]:
        """The addresses of the machine; the first is the one to use."""
        return list(dict.fromkeys(server.address for server in self.servers))


def machines(
    answers: Iterable[LanServer], own_addresses: set[str], ssh_ports: dict[str, int], ssh_port: int
) -> list[LanMachine]:
    """Return one machine per address, and one for all addresses of this machine, sorted by their first address."""
    groups: dict[str, list[LanServer]] = {}

    def order(answer: LanServer) -> tuple:
        """Sort addresses that other machines can reach first, IPv4 before IPv6, by number."""
        ip = ipaddress.ip_address(answer.server.address)
        return ip.is_loopback, ip.is_link_local, *address_order(ip), answer.server.port

    for answer in sorted(answers, key=order):
        address = answer.server.address
        own = ipaddress.ip_address(address).is_loopback or address.partition("%")[0] in own_addresses
        groups.setdefault("" if own else address, []).append(answer)
    result = [
        LanMachine(
            local=not address,
            ssh_port=ssh_ports.get(group[0].server.address, ssh_port),
            host_keys=group[0].host_keys,
            servers=tuple(a.server for a in group),
        )
        for address, group in groups.items()
    ]
    return sorted(result, key=lambda machine: address_order(machine.addresses[0]))


class ScanReport(BaseModel):
    """The result of a scan; it is cached, and validated when it is read from the cache. `scanned_at` is in seconds since 1970."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    networks: tuple[Text, ...]
    skipped: tuple[Text, ...]
    unresolved: tuple[Text, ...]
    ports: tuple[Port, ...]
    addresses: int
    passes: int
    seconds: float
    scanned_at: float
    silent: int
    refused: int
    rejected: tuple[tuple[Text, Text], ...]
    left_out: int
    own_addresses: tuple[Address, ...]
    machines: tuple[LanMachine, ...]


def summary(report: ScanReport) -> str:
    """Return one line: what was scanned, how long it took, and what answered."""
    ports = ", ".join(map(str, report.ports))
    where = ", ".join(report.networks) or "no network"
    text = (
        f"scanned {where} ({_count(report.addresses, 'address', 'es')}, port {ports}) in {report.seconds:.2f} s: "
        f"{_count(len(report.machines), 'machine')} with Ollama"
    )
    if report.rejected:
        text += f", {_count(len(report.rejected), 'open port')} that {_be(len(report.rejected))} not Ollama"
    return text


def verdict(machines: int, ready: int, elsewhere: int) -> str:
    """Return one line: how many machines were found, and whether distributed training is possible.

    `ready`: number of those that can be logged in to (the host key is known, or it is this machine). `elsewhere`: number
    of declared machines of the cluster that the scan did not find.
    """
    usable = ready + elsewhere
    text = f"{_count(machines, 'machine')} found"
    if elsewhere:
        text += f", {elsewhere} more declared"
    if usable >= 2:
        return f"{text}, {usable} ready: distributed training is possible; ansible-playbook playbooks/identity.yml checks the links"
    if machines + elsewhere >= 2:
        return (
            f"{text}, {usable} ready: distributed training is not possible yet: "
            f"{machines - ready} {_be(machines - ready)} untrusted until you accept the SSH host key"
        )
    if machines + elsewhere == 1:
        return f"{text}: distributed training is not useful: there is only one machine"
    return f"{text}: there is no machine to train on"


def advice(report: ScanReport) -> list[str]:
    """Return what to try after a scan without result, the most likely cause first."""
    tips = [
        "on each machine, let Ollama listen on the network: OLLAMA_HOST=0.0.0.0 ollama serve "
        f"(by default it listens on 127.0.0.1), and open port {report.ports[0]} in its firewall"
    ]
    if report.refused:
        tips[0] = f"{_count(report.refused, 'port')} refused the connection, so machines exist there; " + tips[0]
    if not report.networks and not report.addresses:
        tips.insert(0, "this machine is not attached to a private network: set networks, or list machines in hosts")
    if report.passes == 1:
        tips.append("machines with Wi-Fi may save power: with passes: 2, addresses without an answer are scanned again")
    tips.append("to add machines without Ollama: cp inventory/hosts.example.yml inventory/hosts.yml")
    return tips


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _be(number: int) -> str:
    return "is" if number == 1 else "are"
