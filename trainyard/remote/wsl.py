"""What Windows sets for a host that runs in WSL2. Standard library only."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from trainyard.remote.host_facts import first_line

TIME_LIMIT = 20.0  # s
CONFIG_LIMIT = 1 << 16  # bytes
# Packages that every NVIDIA driver for Linux consists of, in Debian, Ubuntu and the repository of NVIDIA.
DRIVER = re.compile(r"(?:nvidia-driver|libnvidia-compute)(?:-\d[a-z0-9.+-]*)?|libcuda1")


def gather(ssh_port: int, root: Path = Path("/")) -> dict[str, Any] | None:
    """Return what Windows sets for this host; None outside of WSL2, whose kernel is named like 5.15.153.1-microsoft-standard-WSL2.

    `ssh_port`: the port of this host's SSH server. `root`: the root folder.

    Returns:
        `networking`, the mode (nat, mirrored, bridged, consomme, none); `sshd`, whether a server listens on `ssh_port`;
        `driver`, installed packages of a driver for Linux; `memory_set`, whether a .wslconfig sets a limit of the memory.
    """
    if "microsoft" not in first_line(root / "proc/sys/kernel/osrelease"):  # WSL1 writes it with a capital letter
        return None
    # Versions without wslinfo have no other mode than NAT. Only mirrored networking has the device loopback0.
    mirrored = "mirrored" if (root / "sys/class/net/loopback0").exists() else "nat"
    packages = output("dpkg-query", "--show", "--showformat=${db:Status-Status} ${Package}\n").splitlines()
    installed = [name for state, _, name in (line.partition(" ") for line in packages) if state == "installed"]
    return {
        "networking": output("wslinfo", "--networking-mode").strip() or mirrored,
        "sshd": listens(ssh_port, root),
        "driver": [name for name in installed if DRIVER.fullmatch(name)],
        "memory_set": any(sets_memory(path) for path in (root / "mnt/c/Users").glob("*/.wslconfig")),
    }


def listens(port: int, root: Path) -> bool:
    """Return whether a program listens on a TCP port. With mirrored networking, a connection may reach a server of Windows."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in text(root / "proc/net" / name).splitlines()[1:]]
    return any(len(row) > 3 and int(row[1].rpartition(":")[2], 16) == port and row[3] == "0A" for row in rows)


def sets_memory(config: Path) -> bool:
    """Return whether a .wslconfig limits the memory of WSL2."""
    return bool(re.search(r"^[ \t]*memory[ \t]*=", text(config), re.MULTILINE | re.IGNORECASE))


def text(path: Path) -> str:
    """Return a file's text, or an empty string if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(CONFIG_LIMIT).decode(errors="replace")
    except OSError:
        return ""


def output(*command: str) -> str:
    """Return what a program prints, or an empty string if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=TIME_LIMIT, check=False
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""
