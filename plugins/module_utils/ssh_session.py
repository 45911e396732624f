"""Find the SSH connection that started this process. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class SshSession(NamedTuple):
    """The SSH connection of this process, as the host sees it."""

    address: str  # of this host
    port: int  # of this host
    peer: str  # address of the controller, or of the gateway or jump host through which it connects


def ssh_session() -> SshSession | None:
    """Return the SSH connection, or None without one.

    sudo removes SSH_CONNECTION from the environment of its command, so this searches the parent processes in /proc.
    """
    process = os.getpid()
    while process > 1:
        try:
            environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
        except OSError:
            return None
        for entry in environment:
            name, _equals, value = entry.partition(b"=")
            words = value.decode(errors="replace").split()
            if name == b"SSH_CONNECTION" and len(words) == 4 and words[3].isdigit():
                return SshSession(words[2].partition("%")[0], int(words[3]), words[0].partition("%")[0])
        process = int(status.rpartition(")")[2].split()[1])
    return None
