"""The standby process of a host's part of a run, as its supervisor sees it: it forks torchruns without any import.

The supervisor starts it in place of the first torchrun. It imports torch, transformers, peft and the trainer once, and forks that torchrun
and those of later starts, see trainer/launch/standby_process.py. It runs in the unit of the supervisor, and ends with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.supervise.link_free import LinkFreePath

# Variables that are read after the imports: by ranks when they connect, never when a library is loaded.
LATE = frozenset(
    {
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "TRAINYARD_RESTARTS",
        "TRAINYARD_SHARED_GPUS",
        "TRAINYARD_COPY_STAGES",
    }
)
LAUNCHER = ["-m", "trainer.launch.torchrun"]
PROGRAM = ["-m", "trainer.launch.standby_process"]
SEND_LIMIT = 5.0  # s for a request, which exceeds the socket's buffer only with very long variables
TRAINER = "trainer.zip"  # in the run folder
TRAINER_LIMIT = 64 << 20  # bytes of it
REFUSED = 126  # exit code of a torchrun that the standby process did not fork
_METADATA = (".dist-info", ".egg-info")


@dataclass(frozen=True)
class Imports:
    """The inputs of the modules in a standby process.

    Attributes:
        interpreter: interpreter of the command.
        packages: digest of the names and times of the installed packages.
        trainer: digest of the staged trainer.
        variables: environment variables, without those that are read later.
    """

    interpreter: str
    packages: str
    trainer: str
    variables: Mapping[str, str]

    @classmethod
    def now(cls, interpreter: str, run_dir: LinkFreePath, environment: Mapping[str, str]) -> Imports:
        """Return the state of this host. The interpreter must be the one of this process, as it is for every plan."""
        variables = {name: value for name, value in environment.items() if name not in LATE}
        return cls(interpreter, installed_packages(), file_digest(run_dir / TRAINER), variables)

    def difference(self, other: Imports) -> str:
        """Return the first thing that differs, or an empty string. A value is never named, because it may be a secret."""
        for name, what in (("interpreter", "interpreter"), ("packages", "installed packages"), ("trainer", "trainer")):
            if getattr(self, name) != getattr(other, name):
                return f"the {what} changed"
        changed = {*self.variables.items()} ^ {*other.variables.items()}
        return f"the variable {min(name for name, _ in changed)} changed" if changed else ""


def installed_packages() -> str:
    """Return a digest of this interpreter and of the names, sizes and times of the packages' metadata in its folders."""
    digest = hashlib.sha256(repr(_identity(Path(sys.executable).resolve())).encode())
    for folder in filter(os.path.isdir, sys.path):
        for entry in sorted(Path(folder).iterdir()):
            if entry.name.endswith(_METADATA):
                entry = entry / "METADATA" if entry.is_dir() else entry
            elif entry.suffix != ".pth":
                continue
            digest.update(repr((str(entry), _identity(entry))).encode())
    return digest.hexdigest()


def file_digest(path: LinkFreePath) -> str:
    """Return the SHA-256 of a file in hex; empty if it cannot be read."""
    try:
        return hashlib.sha256(path.read(TRAINER_LIMIT)).hexdigest()
    except OSError:
        return ""


def _identity(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev


class ForkedLaunch:
    """A torchrun that the standby process forks, with the attributes of subprocess.Popen that a supervisor uses.

    Until it is forked, `pid` is that of the standby process, whose end is then the end of the launch.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None


class Standby:
    """The standby process, and the socket to it."""

    def __init__(self, imports: Imports, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self.imports, self.process = imports, process
        self._channel, self._received = channel, b""
        self.pending: ForkedLaunch | None = None
        self.refusal = ""
        self._ended: dict[int, int] = {}  # exit codes of processes that ended before the answer of a launch was read

    @classmethod
    def start(cls, spawn: Callable[..., subprocess.Popen[bytes]], command: list[str], imports: Imports) -> Standby:
        """Start the process for a command of torchrun. `spawn`: starts a program with files that it inherits. Raises OSError."""
        ours, its = socket.socketpair()
        with its:
            arguments = [str(its.fileno()), *command[1 + len(LAUNCHER) :]]
            process = spawn([command[0], *PROGRAM, *arguments], None, pass_fds=(its.fileno(),))
        ours.setblocking(False)
        return cls(imports, process, ours)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def is_idle(self) -> bool:
        """Whether it is alive and waits for a request."""
        return self.process.returncode is None and self.pending is None

    def unusable(self, imports: Imports) -> str:
        """Return why no torchrun with these imports can be forked; empty if one can."""
        if not self.is_idle:
            return "it has ended" if self.process.returncode is not None else "it does not answer"
        return self.imports.difference(imports)

    def launch(self, command: list[str], environment: Mapping[str, str], log: Path) -> ForkedLaunch:
        """Ask for a torchrun; see `update`. Raises OSError if the process does not take the request."""
        request = {"arguments": command[1 + len(LAUNCHER) :], "env": dict(environment), "log": str(log)}
        self._channel.settimeout(SEND_LIMIT)
        self._channel.sendall(json.dumps(request).encode() + b"\n")
        self._channel.setblocking(False)
        self.pending, self.refusal, self._ended = ForkedLaunch(self.pid), "", {}
        return self.pending

    def update(self) -> None:
        """Read the answer to the last request, if it has arrived: set the pid of the launch, or `refusal`."""
        if self.pending is None:
            return
        with contextlib.suppress(BlockingIOError, ConnectionError):
            self._received += self._channel.recv(1 << 16)
        line, complete, rest = self._received.partition(b"\n")
        if not complete:
            return
        answer: dict[str, Any] = json.loads(line)
        self._received = rest
        self.refusal = str(answer.get("refused", ""))
        if self.refusal:
            self.pending.returncode = REFUSED
        else:
            self.pending.pid = int(answer["pid"])
            self.pending.returncode = self._ended.get(self.pending.pid)
        self.pending = None

    def note_end(self, pid: int, status: int) -> None:
        """Take note of the end of a child of the supervisor, which may be a torchrun whose pid is not known yet."""
        if self.pending:
            self._ended[pid] = os.waitstatus_to_exitcode(status)
            self.update()

    def close(self) -> None:
        """Close the socket, which ends the process when it is idle."""
        self._channel.close()


def may_serve(command: list[str]) -> bool:
    """Return whether a command is a torchrun that a standby process can fork."""
    return command[0] == sys.executable and command[1 : 1 + len(LAUNCHER)] == LAUNCHER
