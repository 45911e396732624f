"""Find inventory entries that are one machine, by facts that are known after login."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from trainer.common.formats import counted

SLOW_LINK = 1000  # Mbit/s, below which a full gradient at every step takes too long


@dataclass(frozen=True)
class Duplicates:
    """The result of `find_duplicates`."""

    machines: int  # number of different machines
    drop: dict[str, tuple[str, str]]  # entry -> (the entry to keep, reason)
    warnings: tuple[str, ...]  # clones and shared GPUs
    verdict: str  # whether distributed training is useful, in one line
    useful: bool  # whether it is, with some strategy


def find_duplicates(identities: Mapping[str, Mapping[str, Any]], logins: Mapping[str, str]) -> Duplicates:
    """Compare the entries that can be logged in to; the first of several entries for one machine is kept.

    `identities`: entry -> result of the module machine_identity_info, in the order of the inventory. `logins`: entry ->
    the address at which it was reached.
    """
    drop: dict[str, tuple[str, str]] = {}
    warnings: list[str] = []
    for (a, one), (b, other) in combinations(identities.items(), 2):
        if a in drop or b in drop:
            continue
        reason = _same_machine(one, other, logins.get(a, ""), logins.get(b, ""))
        if reason:
            drop[b] = (a, reason)
        else:
            warnings += _clones(a, one, b, other)
    kept = {name: facts for name, facts in identities.items() if name not in drop}
    useful = len(kept) > 1 and not _share_gpu(kept)
    return Duplicates(len(kept), drop, tuple(warnings), _verdict(kept, drop, logins), useful)


def _same_machine(one: Mapping[str, Any], other: Mapping[str, Any], login: str, other_login: str) -> str:
    """Return why two entries are one machine, or an empty string if they are two.

    Only login addresses are compared with the addresses of the other entry: many machines have their own 172.17.0.1.
    """
    if one["boot_id"] and one["boot_id"] == other["boot_id"]:
        return "same boot id"
    for address, facts in ((login, other), (other_login, one)):
        if address and not address.startswith("127.") and any(link["address"] == address for link in facts["links"]):
            return f"both have the address {address}"
    return ""


def _clones(a: str, one: Mapping[str, Any], b: str, other: Mapping[str, Any]) -> list[str]:
    """Return warnings about two machines with the same machine-id, SSH host key or GPU."""
    warnings = []
    if one["machine_id"] and one["machine_id"] == other["machine_id"]:
        remedy = "sudo rm /etc/machine-id /var/lib/dbus/machine-id; sudo systemd-machine-id-setup; sudo reboot"
        warnings.append(f"{a} and {b} are clones of one image (same machine-id): on one of them run {remedy}")
    if set(one["host_keys"]) & set(other["host_keys"]):
        what = f"{a} and {b} have the same SSH host key, so each can impersonate the other"
        remedy = "sudo rm /etc/ssh/ssh_host_* && sudo ssh-keygen -A, restart ssh, and accept the new key"
        warnings.append(f"{what}: on one of them run {remedy}")
    for gpu in sorted(set(one["gpus"]) & set(other["gpus"])):
        warnings.append(f"{a} and {b} share one GPU ({gpu}), which two ranks would use alternately: keep one of them")
    return warnings


def _share_gpu(kept: Mapping[str, Mapping[str, Any]]) -> bool:
    return any(set(a["gpus"]) & set(b["gpus"]) for a, b in combinations(kept.values(), 2))


def _verdict(
    kept: Mapping[str, Mapping[str, Any]], drop: Mapping[str, tuple[str, str]], logins: Mapping[str, str]
) -> str:
    """Return one line: how many machines there are, and which kind of distributed training their links allow."""
    text = counted(len(kept), "machine") + (f" in {len(kept) + len(drop)} entries" if drop else "")
    if not kept:
        return f"{text}: no machine could be reached"
    if len(kept) == 1 or _share_gpu(kept):
        why = "they share a GPU" if len(kept) > 1 else "there is only one machine"
        return f"{text}: distributed training is not useful: {why}"
    of_few = f"{text}: distributed training is useful with LoRA or DiLoCo only"
    speeds = {}
    for name, facts in kept.items():
        link = next((link for link in facts["links"] if link["address"] == logins.get(name)), None)
        if link and link["wireless"]:
            return f"{of_few}: {name} uses Wi-Fi ({link['device']})"
        if link and link["mbit"]:
            speeds[name] = link["mbit"]
    if not speeds:
        return f"{text}: distributed training is possible; the speed of the links is unknown"
    slowest = min(speeds, key=lambda name: speeds[name])
    speed = f"{speeds[slowest]} Mbit/s"
    if speeds[slowest] < SLOW_LINK:
        return f"{of_few}: the link of {slowest} has {speed}, and full fine-tuning sends all gradients at every step"
    return f"{text}: distributed training is useful; the slowest link is that of {slowest} with {speed}"
