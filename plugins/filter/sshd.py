"""Filters of the role ssh: the settings of sshd that are weaker than the role guarantees, as `sshd -T` prints them."""

from __future__ import annotations

import re
from typing import Any

# From weak to strict. `sshd -T` of some versions prints without-password for prohibit-password.
ROOT_LOGIN = ("yes", "prohibit-password", "forced-commands-only", "no")
# The settings that the drop-in guarantees at least, in the names of man sshd_config.
TARGETS = {
    "PasswordAuthentication": "no",
    "KbdInteractiveAuthentication": "no",
    "PermitEmptyPasswords": "no",
    "PermitRootLogin": "prohibit-password",
    "X11Forwarding": "no",
    "MaxAuthTries": "6",
    "LoginGraceTime": "30",
}
# A dead connection ends after the product, in seconds. Zero in either one disables the check.
ALIVE = {"ClientAliveInterval": "30", "ClientAliveCountMax": "4"}
# If a login needs one of these methods in addition to a key, disabling it would lock the user out.
METHOD_OF = {"PasswordAuthentication": "password", "KbdInteractiveAuthentication": "keyboard-interactive"}


def strictness(name: str, value: str) -> float:
    """Return a number that is higher for a stricter value of a setting; the lowest for a value that is not known."""
    if name == "PermitRootLogin":
        value = value.replace("without-password", "prohibit-password")
        return ROOT_LOGIN.index(value) if value in ROOT_LOGIN else -1
    if value.isdigit():
        # LoginGraceTime 0 means no limit.
        return float("-inf") if name == "LoginGraceTime" and value == "0" else -int(value)
    return 1 if value == "no" else 0 if value == "yes" else float("-inf")


def read_settings(output: str) -> dict[str, str]:
    """Return the settings that `sshd -T` prints, by their names in lower case."""
    return {name: value for name, _space, value in (line.partition(" ") for line in output.splitlines())}


def alive_seconds(settings: dict[str, str]) -> float:
    """Return the seconds after which sshd closes a dead connection; infinite if it never does."""
    interval, count = (settings.get(name.lower(), "") for name in ALIVE)
    return int(interval) * int(count) or float("inf") if interval.isdigit() and count.isdigit() else float("inf")


def sshd_hardening(output: str, more: str = "") -> dict[str, list[str]]:
    """Return the `lines` of the drop-in, and the settings that would become weaker, and so are `refused`.

    Args:
        output: what `sshd -T` prints without the drop-in.
        more: lines of the configuration with authentication methods that a login needs in addition to a key.
    """
    base, lines, refused = read_settings(output), [], []
    needed = " ".join(re.findall(r"(?im)^\s*AuthenticationMethods[\s=]\s*(.+)$", more)).replace(",", " ")
    for name, target in TARGETS.items():
        value = base.get(name.lower(), "")
        if name in METHOD_OF and re.search(rf"(^|\s){METHOD_OF[name]}($|[\s:])", needed):
            refused.append(f"{name} {value} (AuthenticationMethods needs it)")
        elif strictness(name, value) < strictness(name, target):
            lines.append(f"{name} {target}")
        elif strictness(name, value) > strictness(name, target):
            refused.append(f"{name} {value}")
    if alive_seconds(base) > alive_seconds({name.lower(): value for name, value in ALIVE.items()}):
        for name, target in ALIVE.items():
            value = base.get(name.lower(), "")
            if not value.isdigit() or not 0 < int(value) <= int(target):
                lines.append(f"{name} {target}")
    return {"lines": lines, "refused": refused}


def sshd_ineffective(lines: list[str], output: str) -> list[str]:
    """Return `NAME is VALUE` for each line of the drop-in that `sshd -T` does not honor. The checks of the connection have no order."""
    after, pairs = read_settings(output), [line.split() for line in lines]
    return [
        f"{name} is {after.get(name.lower(), 'unknown')}"
        for name, target in pairs
        if name not in ALIVE and strictness(name, after.get(name.lower(), "")) < strictness(name, target)
    ]


class FilterModule:
    """Filters for the settings of sshd, by their names in templates."""

    def filters(self) -> dict[str, Any]:
        return {"sshd_hardening": sshd_hardening, "sshd_ineffective": sshd_ineffective}
