"""Which inventory entries are one machine: the facts, after login."""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any


@dataclass(frozen=True)
class Settled:
    """`drop`: entry -> (the entry to keep, why). `warnings`: clones, shared GPUs, false aliases. `verdict`: one line."""

    machines: int
    drop: dict[str, tuple[str, str]]
    warnings: tuple[str, ...]
    verdict: str


def settle(
    identities: Mapping[str, Mapping[str, Any]],
    logins: Mapping[str, str],
    aliases: Mapping[str, Sequence[str]],
) -> Settled:
    """Judges the entries that could be logged in to.

    Args:
        identities: entry -> what the module machine_identity_info returned, in the inventory's order; the first of several
            entries for one machine is kept.
        logins: entry -> the address that it was reached at.
        aliases: entry -> all addresses that discovery took for this machine.
    """
    drop: dict[str, tuple[str, str]] = {}
    warnings: list[str] = []
    for (a, one), (b, other) in combinations(identities.items(), 2):
        if a in drop or b in drop:
            continue
        why = _same_machine(one, other, logins.get(a, ""), logins.get(b, ""))
        if why:
            drop[b] = (a, why)
        else:
            warnings += _clones(a, one, b, other)
    kept = {name: facts for name, facts in identities.items() if name not in drop}
    for name, facts in kept.items():
        listed = {link["address"] for link in facts["links"]}
        for address in aliases.get(name, []):
            bare = address.partition("%")[0]
            if bare not in listed and not ipaddress.ip_address(bare).is_loopback:
                warnings.append(
                    f"{address} was taken for {name}, which has no such address: declare it as a machine of its own"
                )
    return Settled(len(kept), drop, tuple(warnings), _verdict(kept, drop, logins))


def _same_machine(one: Mapping[str, Any], other: Mapping[str, Any], login: str, other_login: str) -> str:
    """Why two entries are one machine; empty when they are two.

    Only login addresses are compared with the other's list: many machines have a 172.17.0.1 of their own.
    """
    if one["boot_id"] and one["boot_id"] == other["boot_id"]:
        return "same boot id"
    for address, facts in ((login, other), (other_login, one)):
        if address and not address.startswith("127.") and any(link["address"] == address for link in facts["links"]):
            return f"{address} is an address of both"
    return ""


def _clones(a: str, one: Mapping[str, Any], b: str, other: Mapping[str, Any]) -> list[str]:
    warnings = []
    if one["machine_id"] and one["machine_id"] == other["machine_id"]:
        warnings.append(
            f"{a} and {b} are clones of one image (same machine-id): on one of them run sudo rm /etc/machine-id "
            "/var/lib/dbus/machine-id; sudo systemd-machine-id-setup; sudo reboot"
        )
    if set(one["host_keys"]) & set(other["host_keys"]):
        warnings.append(
            f"{a} and {b} have the same SSH host key: who has one can pose as the other; on one of them run "
            "sudo rm /etc/ssh/ssh_host_* && sudo ssh-keygen -A, restart ssh, and accept the new key"
        )
    for gpu in sorted(set(one["gpus"]) & set(other["gpus"])):
        warnings.append(f"{a} and {b} share one GPU ({gpu}): two ranks on it take turns; keep one of them")
    return warnings


def _verdict(
    kept: Mapping[str, Mapping[str, Any]], drop: Mapping[str, tuple[str, str]], logins: Mapping[str, str]
) -> str:
    text = f"{len(kept)} machine{'' if len(kept) == 1 else 's'}"
    if drop:
        text += f" behind {len(kept) + len(drop)} entries"
    if not kept:
        return f"{text}: nobody could be asked"
    if len(kept) == 1:
        return f"{text}: training on several is not worth it: there is only one machine"
    shared = [set(a["gpus"]) & set(b["gpus"]) for a, b in combinations(kept.values(), 2)]
    if any(shared):
        return f"{text}: training on several is not worth it: they share a GPU"
    speeds = {}
    for name, facts in kept.items():
        link = next((link for link in facts["links"] if link["address"] == logins.get(name)), None)
        if link and link["wireless"]:
            return f"{text}: training on several is worth it with LoRA or DiLoCo alone: {name} is on Wi-Fi ({link['device']})"
        if link and link["mbit"]:
            speeds[name] = link["mbit"]
    if not speeds:
        return f"{text}: training on several is worth a try; the speed of their links is unknown"
    slowest = min(speeds, key=lambda name: speeds[name])
    if speeds[slowest] < 1000:
        return (
            f"{text}: training on several is worth it with LoRA or DiLoCo alone: {slowest}'s link has "
            f"{speeds[slowest]} Mbit/s, and full fine-tuning sends every gradient at every step"
        )
    return f"{text}: training on several is worth it; the slowest link is {slowest}'s with {speeds[slowest]} Mbit/s"
