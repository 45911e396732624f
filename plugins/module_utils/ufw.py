"""ufw's rules as they stand in its files, and the commands that add and withdraw one. Pure Python, no Ansible."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple

ANYWHERE = {4: "0.0.0.0/0", 6: "::/0"}
_TUPLE = re.compile(r"^### tuple ### (?P<words>.*?)(?: comment=(?P<comment>[0-9A-Fa-f]*))?$")


class Rule(NamedTuple):
    """One line of user.rules (family 4) or user6.rules (6), as ufw writes it.

    `port` and `source` are "any" and ANYWHERE where the rule does not say; `rest` is what else it says (its direction,
    interfaces, application), so that two rules are the same rule exactly if all but `comment` is equal.
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
    def what(self) -> tuple[object, ...]:
        """All but the comment: what ufw takes for the same rule."""
        return self[:-1]


def parse(text: str, family: int) -> list[Rule]:
    """Return the rules of a user.rules or user6.rules; lines that are none are passed over."""
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


def wanted(port: str, protocol: str, source: str, comment: str) -> list[Rule]:
    """Return the rules that let `source` (an address, a network, or "any") in; from anywhere is one a family.

    Raises ValueError with a plain line for what ufw would not take.
    """
    if protocol not in ("tcp", "udp", "any"):
        raise ValueError(f"proto is {protocol!r}, takes tcp, udp or any")
    if port != "any" and not _port(port):
        raise ValueError(f"port is {port!r}, takes a number from 1 to 65535 or a range such as 6000:6010")
    if ":" in port and protocol == "any":
        raise ValueError(f"port is {port!r}, and a range takes a proto: tcp or udp")
    if source == "any":
        return [Rule(n, "allow", protocol, port, ANYWHERE[n], "any", ANYWHERE[n], "in", comment) for n in (4, 6)]
    try:
        network = ipaddress.ip_network(source, strict=False)
    except ValueError:
        raise ValueError(f"{source!r} is no IP address or network") from None
    where = str(network) if "/" in source and network.num_addresses > 1 else str(network.network_address)
    everywhere = ANYWHERE[network.version]
    return [Rule(network.version, "allow", protocol, port, everywhere, "any", where, "in", comment)]


def changes(there: Iterable[Rule], mark: str, desired: Iterable[Rule]) -> tuple[list[Rule], list[Rule]]:
    """Return the rules to withdraw and those to add (or to give another comment).

    Rules whose comment begins with `mark` are ours. One that somebody else has made already stays theirs: ufw would only
    put our comment on it, and we would withdraw it one day.
    """
    there, desired = list(there), list(desired)
    ours = {rule.what: rule for rule in there if rule.comment.startswith(mark)}
    others = {rule.what for rule in there} - set(ours)
    keep = {rule.what for rule in desired} - others
    withdraw = [rule for what, rule in ours.items() if what not in keep]
    add = [rule for rule in desired if rule.what in keep and ours.get(rule.what) != rule]
    return withdraw, add


def words(rule: Rule) -> list[str]:
    """Return the rule as words of a ufw command, from its action on, without the comment."""
    said = [rule.action]
    if rule.protocol != "any":
        said += ["proto", rule.protocol]
    # Said in full even where it is anywhere: that, and not "any", is of one family.
    said += ["from", rule.source, "to", rule.target]
    return said + ([] if rule.port == "any" else ["port", rule.port])


def line(rule: Rule) -> str:
    """Return the rule as a person reads it in a diff."""
    what = f"{rule.port}/{rule.protocol}" if rule.port != "any" else f"any {rule.protocol}"
    where = "anywhere" if rule.source in ANYWHERE.values() else rule.source
    return f"{rule.action} {what} from {where}{' (v6)' if rule.family == 6 else ''}  # {rule.comment}"


def _port(port: str) -> bool:
    ends = port.split(":")
    numbers = [int(end) if re.fullmatch(r"\d{1,5}", end) else 0 for end in ends]
    return len(ends) <= 2 and all(1 <= n <= 65535 for n in numbers) and numbers == sorted(set(numbers))
