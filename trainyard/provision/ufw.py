"""Read the rules in ufw's files, plan changes, and build ufw commands. Standard library only, no Ansible."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple

ANYWHERE = {4: "0.0.0.0/0", 6: "::/0"}
_TUPLE = re.compile(r"^### tuple ### (?P<words>.*?)(?: comment=(?P<comment>[0-9A-Fa-f]*))?$")


class Rule(NamedTuple):
    """One rule of user.rules (family 4) or user6.rules (family 6).

    A rule without a port or a source has "any" and ANYWHERE there. `rest` holds the direction, interface and application
    profile. Two rules are the same rule for ufw if they differ only in their comments.
    """

    family: int
    action: str
    protocol: str
    port: str
    target: str
    source_port: str
    source: str
    rest: str = "in"
    comment: str = ""

    @property
    def identity(self) -> tuple[object, ...]:
        """Every field but the comment."""
        return self[:-1]


def parse_rules(text: str, family: int) -> list[Rule]:
    """Return the rules of a user.rules or user6.rules file; other lines are ignored."""
    rules = []
    for line in text.splitlines():
        if not (match := _TUPLE.match(line)):
            continue
        words = match["words"].split()
        if len(words) >= 7:
            try:
                comment = bytes.fromhex(match["comment"] or "").decode(errors="replace")
            except ValueError:
                comment = ""
            action, protocol, port, target, source_port, source = words[:6]
            rest = " ".join(words[6:])
            rules.append(Rule(family, action, protocol, port, target, source_port, source, rest, comment))
    return rules


def allow_rules(port: str, protocol: str, source: str, comment: str) -> list[Rule]:
    """Return the rules that allow `source` (an address, a network or "any"): "any" needs one rule per address family.

    Raises ValueError with a one-line message for values that ufw does not accept.
    """
    if protocol not in ("tcp", "udp", "any"):
        raise ValueError(f"proto is {protocol!r}: expected tcp, udp or any")
    if port != "any" and not _is_port(port):
        raise ValueError(f"port is {port!r}: expected a number from 1 to 65535 or a range such as 6000:6010")
    if ":" in port and protocol == "any":
        raise ValueError(f"port is {port!r}: a range requires proto tcp or udp")
    if source == "any":
        return [Rule(n, "allow", protocol, port, ANYWHERE[n], "any", ANYWHERE[n], "in", comment) for n in (4, 6)]
    try:
        network = ipaddress.ip_network(source, strict=False)
    except ValueError:
        raise ValueError(f"source is {source!r}: expected an IP address, a network or any") from None
    address = str(network) if "/" in source and network.num_addresses > 1 else str(network.network_address)
    anywhere = ANYWHERE[network.version]
    return [Rule(network.version, "allow", protocol, port, anywhere, "any", address, "in", comment)]


def plan_changes(current: Iterable[Rule], mark: str, desired: Iterable[Rule]) -> tuple[list[Rule], list[Rule]]:
    """Return the rules to delete and the rules to add; a rule with a new comment is added again.

    Only rules whose comment starts with `mark` are managed. A desired rule that already exists without the mark belongs
    to another program or user and is unchanged: adding it would mark it, and a later call would delete it.
    """
    current, desired = list(current), list(desired)
    managed = {rule.identity: rule for rule in current if rule.comment.startswith(mark)}
    unmanaged = {rule.identity for rule in current} - set(managed)
    keep = {rule.identity for rule in desired} - unmanaged
    delete = [rule for identity, rule in managed.items() if identity not in keep]
    add = [rule for rule in desired if rule.identity in keep and managed.get(rule.identity) != rule]
    return delete, add


def command_words(rule: Rule) -> list[str]:
    """Return the arguments of a ufw command for the rule, without its comment."""
    words = [rule.action, *(["out"] if rule.rest == "out" else [])]
    if rule.protocol != "any":
        words += ["proto", rule.protocol]
    # "any" would stand for both address families; the full network stands for one.
    words += ["from", rule.source, "to", rule.target]
    return words + ([] if rule.port == "any" else ["port", rule.port])


def describe(rule: Rule) -> str:
    """Return the rule as one line of a diff."""
    ports = f"{rule.port}/{rule.protocol}" if rule.port != "any" else f"any {rule.protocol}"
    source = f"to {rule.target}" if rule.rest == "out" else f"from {rule.source}"
    source = source.replace(ANYWHERE[rule.family], "anywhere")
    return f"{rule.action} {ports} {source}{' (v6)' if rule.family == 6 else ''}  # {rule.comment}"


def _is_port(port: str) -> bool:
    ends = port.split(":")
    numbers = [int(end) if re.fullmatch(r"\d{1,5}", end) else 0 for end in ends]
    return len(ends) <= 2 and all(1 <= n <= 65535 for n in numbers) and numbers == sorted(set(numbers))
