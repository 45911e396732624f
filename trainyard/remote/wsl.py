"""What Windows sets for a host that runs in WSL2. Standard library only."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from trainyard.remote.host_facts import read

TIME_LIMIT = 20.0  # s
# Packages that every NVIDIA driver for Linux consists of, in Debian, Ubuntu and the repository of NVIDIA.
DRIVER = re.compile(r"(?:nvidia-driver|libnvidia-compute)(?:-\d[a-z0-9.+-]*)?|libcuda1")
MEMORY = re.compile(r"^[ \t]*memory[ \t]*=", re.MULTILINE | re.IGNORECASE)  # in a .wslconfig


def gather(ssh_port: int, root: Path = Path("/")) -> dict[str, Any] | None:
    """Return what Windows sets for this host; None outside of WSL2, whose kernel is named like 5.15.153.1-microsoft-standard-WSL2.

    `ssh_port`: the port of this host's SSH server. `root`: the root folder. Returns `networking`, the mode (nat,
    mirrored, bridged, consomme, none); `sshd`, whether a server listens on `ssh_port`; `driver`, installed packages of
    a driver for Linux; `memory_set`, whether a .wslconfig sets a limit of the memory.
    """
    if "microsoft" not in read(root / "proc/sys/kernel/osrelease"):  # WSL1 writes it with a capital letter
        return None
    # Versions without wslinfo have no other mode than NAT. Only mirrored networking has the device loopback0.
    mirrored = "mirrored" if (root / "sys/class/net/loopback0").exists() else "nat"
    packages = output("dpkg-query", "--show", "--showformat=${db:Status-Status} ${Package}\n").splitlines()
    installed = [name for state, _, name in (line.partition(" ") for line in packages) if state == "installed"]
    return {
        "networking": output("wslinfo", "--networking-mode").strip() or mirrored,
        "sshd": listens(ssh_port, root),
        "driver": [name for name in installed if DRIVER.fullmatch(name)],
        "memory_set": any(MEMORY.search(read(path)) for path in (root / "mnt/c/Users").glob("*/.wslconfig")),
    }


def listens(port: int, root: Path) -> bool:
    """Return whether a program listens on a TCP port. With mirrored networking, a connection may reach a server of Windows."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in read(root / "proc/net" / name).splitlines()[1:]]
    return any(len(row) > 3 and int(row[1].rpartition(":")[2], 16) == port and row[3] == "0A" for row in rows)


def output(*command: str) -> str:
    """Return what a program prints, or an empty string if it fails."""
    how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "timeout": TIME_LIMIT, "check": False}
    try:
        done = subprocess.run(command, capture_output=True, text=True, **how)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""
