"""The settings of a drop-in that makes the configuration of sshd stricter and never weaker. Standard library only."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

INCLUDE = re.compile(r"^\s*Include[\s=]\s*(.+)$", re.I)
METHODS = re.compile(r"^\s*AuthenticationMethods[\s=]\s*(.+)$", re.I | re.M)
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


def alive_seconds(settings: dict[str, str]) -> float:
    """Return the seconds after which sshd closes a dead connection; infinite if it never does."""
    values = [settings.get(name.lower(), "") for name in ALIVE]
    seconds = [int(value) if value.isdigit() else 0 for value in values]
    return seconds[0] * seconds[1] or float("inf")


def read_settings(output: str) -> dict[str, str]:
    """Return the settings that `sshd -T` prints, by their names in lower case."""
    return {name: value for name, _space, value in (line.partition(" ") for line in output.splitlines())}


def stricter_lines(base: dict[str, str], texts: str) -> list[str]:
    """Return the lines of a drop-in: each setting of TARGETS and ALIVE that is weaker in `base`, and no other.

    Args:
        base: the settings of sshd without the drop-in, from `read_settings`.
        texts: the text of the configuration, searched for authentication methods that a login needs in addition to a key.
    """
    needed = " ".join(METHODS.findall(texts)).replace(",", " ")
    lines = [
        f"{name} {target}"
        for name, target in TARGETS.items()
        if strictness(name, base.get(name.lower(), "")) < strictness(name, target)
        and not (name in METHOD_OF and re.search(rf"(^|\s){METHOD_OF[name]}($|[\s:])", needed))
    ]
    if alive_seconds(base) > alive_seconds({name.lower(): value for name, value in ALIVE.items()}):
        for name, target in ALIVE.items():
            value = base.get(name.lower(), "")
            if not value.isdigit() or not 0 < int(value) <= int(target):
                lines.append(f"{name} {target}")
    return lines


def ineffective(lines: list[str], after: dict[str, str]) -> list[str]:
    """Return `NAME is VALUE` for each line of the drop-in that the settings `after` it do not honor."""
    pairs = [line.split() for line in lines]
    return [
        f"{name} is {after.get(name.lower(), 'unknown')}"
        for name, target in pairs
        if strictness(name, after.get(name.lower(), "")) < strictness(name, target)
    ]


def with_drop_in(main: Path, drop_in: Path, candidate: Path | None) -> tuple[str, str]:
    """Return the text of `main` with `candidate` in the place of `drop_in` or without it, and the text of all other files.

    sshd reads the files of a pattern in the order of their names. Relative patterns are relative to /etc/ssh.
    """
    texts: list[str] = []

    def replace(line: str) -> str:
        match = INCLUDE.match(line)
        if not match:
            texts.append(line)
            return line
        files: list[Path] = []
        for pattern in shlex.split(match[1], comments=True):
            absolute = Path("/etc/ssh", pattern)
            found = set(Path("/").glob(str(absolute.relative_to("/")))) - {drop_in}
            if drop_in.match(str(absolute)):
                found.add(drop_in)
            files += sorted(found)
        texts.extend(
            path.read_text(errors="replace", encoding="utf-8") for path in files if path != drop_in and path.is_file()
        )
        named = [candidate if path == drop_in else path for path in files]
        quoted = " ".join(f'"{path}"' for path in named if path)
        return f"Include {quoted}" if quoted else ""

    lines = [replace(line) for line in main.read_text(errors="replace", encoding="utf-8").splitlines()]
    return "\n".join([*lines, ""]), "\n".join(texts)


def hardening(
    main: Path, drop_in: Path, header: str, run: Callable[[str], dict[str, str]], place: Callable[[str], Path]
) -> tuple[str, list[str]]:
    """Return the text of the drop-in, empty if the configuration is strict already, and the settings that it cannot change.

    Args:
        header: comment lines at the top of the drop-in.
        run: returns the effective settings of a configuration, given as text; raises ValueError if sshd rejects it.
        place: writes a candidate of the drop-in to a temporary file and returns its path.
    """
    base_text, texts = with_drop_in(main, drop_in, None)
    lines = stricter_lines(run(base_text), texts)
    if not lines:
        return "", []
    text = "\n".join([header.rstrip("\n"), *lines, ""])
    return text, ineffective(lines, run(with_drop_in(main, drop_in, place(text))[0]))
