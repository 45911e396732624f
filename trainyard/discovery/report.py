"""What came out of a scan, and the words for it."""

from pydantic import BaseModel, ConfigDict

from .identity import Address, Machine, Port
from .replies import Text


class Report(BaseModel):
    """One scan, whole: it goes into the cache and comes back checked. `scanned_at` in seconds since 1970."""

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
    machines: tuple[Machine, ...]
    warnings: tuple[str, ...]


def summary(report: Report) -> str:
    """What was scanned, how long it took and what answered, in one line."""
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
    """How many machines, whether training on several is worth it, and why not, in one line.

    Args:
        machines: how many were found.
        ready: how many of them can be logged in to (host key known, or this machine).
        elsewhere: declared machines of the cluster that the scan did not find.
    """
    usable = ready + elsewhere
    text = f"{_count(machines, 'machine')} found"
    if elsewhere:
        text += f", {elsewhere} more declared"
    if usable >= 2:
        return f"{text}, {usable} ready: training on several is worth a try; playbooks/identity.yml says what the links allow"
    if machines + elsewhere >= 2:
        return (
            f"{text}, {usable} ready: training on several is not possible yet: "
            f"{machines - ready} {_be(machines - ready)} untrusted until the SSH host key is accepted"
        )
    if machines + elsewhere == 1:
        return f"{text}: training on several is not worth it: there is only one machine"
    return f"{text}: nothing to train on"


def advice(report: Report) -> list[str]:
    """What to try next after an empty scan, the likeliest first."""
    tips = [
        "on each machine Ollama must listen on the network: OLLAMA_HOST=0.0.0.0 ollama serve "
        f"(by itself it takes 127.0.0.1 only), and its firewall must let port {report.ports[0]} in"
    ]
    if report.refused:
        tips[0] = f"{_count(report.refused, 'port')} refused: machines are there; " + tips[0]
    if not report.networks:
        tips.insert(
            0, "no private network is attached to this machine: write one under networks, or machines under hosts"
        )
    if report.passes == 1:
        tips.append("machines on Wi-Fi may sleep: passes: 2 asks the silent addresses again, slower")
    tips.append("without Ollama, write the machines down: cp inventory/hosts.example.yml inventory/hosts.yml")
    return tips


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _be(number: int) -> str:
    return "is" if number == 1 else "are"
