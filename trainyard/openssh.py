"""Transports that need no Ansible: OpenSSH's own client, and a local process."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

from trainyard.connection import Login, RemoteError, last_line

UNREACHABLE = 255  # ssh's exit code for an error of its own
# Multiplexing: requests that follow within two minutes share the first one's connection.
PERSIST = ("-o", "ControlMaster=auto", "-o", "ControlPersist=120s")
OPTIONS = (
    *("-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
# A Unix socket's path holds 107 bytes; ssh appends a digest of 40 characters and a suffix of 17.
SOCKET_FOLDER_LIMIT = 107 - 1 - 40 - 17


class LocalTransport:
    """Runs commands on the controller itself."""

    kind = "local"

    def execute(self, command: str, stdin: bytes | None = None) -> tuple[int, bytes, bytes]:
        """Run a shell command; return its exit code, standard output and standard error."""
        return _completed(["/bin/sh", "-c", command], stdin)

    def put(self, source: str, target: str) -> None:
        """Copy a file. Raises RemoteError."""
        try:
            shutil.copyfile(source, target)
        except OSError as error:
            raise RemoteError(f"cannot copy {source} to {target}: {error.strerror}") from None

    def fetch(self, source: str, target: str) -> None:
        """Copy a file. Raises RemoteError."""
        try:
            shutil.copyfile(source, target)
        except OSError as error:
            raise RemoteError(f"cannot fetch {source}: {error.strerror}") from None


class OpenSSHTransport:
    """Runs commands over ssh. The host key must be known: an unknown or changed key is an error, never a question."""

    kind = "ssh"

    def __init__(self, login: Login) -> None:
        """Prepare for a host; nothing connects before the first request."""
        self.login = login
        # extra_arguments come first: ssh takes the first value of an option.
        self._ssh = ["ssh", *login.ssh_arguments(), *OPTIONS, *multiplexing(), "-T", "--", login.destination()]

    def execute(self, command: str, stdin: bytes | None = None) -> tuple[int, bytes, bytes]:
        """Run a shell command; return its exit code, standard output and standard error. Raises RemoteError."""
        code, out, err = _completed([*self._ssh, remote_shell(command)], stdin)
        if code == UNREACHABLE:
            raise RemoteError(last_line(err.decode(errors="replace")) or "unreachable")
        return code, out, err

    def put(self, source: str, target: str) -> None:
        """Copy a file of the controller to the host. Raises RemoteError."""
        try:
            with Path(source).open("rb") as file:
                self._copy(f"cat > {shlex.quote(target)}", stdin=file)
        except (OSError, RemoteError) as error:
            raise RemoteError(f"cannot copy {source} to {target}: {_reason(error)}") from None

    def fetch(self, source: str, target: str) -> None:
        """Copy a file of the host to the controller. Raises RemoteError."""
        try:
            with Path(target).open("wb") as file:
                self._copy(f"cat < {shlex.quote(source)}", stdin=subprocess.DEVNULL, stdout=file)
        except (OSError, RemoteError) as error:
            raise RemoteError(f"cannot fetch {source}: {_reason(error)}") from None

    def _copy(self, command: str, **streams: Any) -> None:
        done = subprocess.run([*self._ssh, remote_shell(command)], stderr=subprocess.PIPE, check=False, **streams)
        if done.returncode:
            raise RemoteError(last_line(done.stderr.decode(errors="replace")) or f"exit code {done.returncode}")


def remote_shell(command: str) -> str:
    """Return what ssh sends for a shell command. The user's login shell may be any; /bin/sh runs the command."""
    return f"exec /bin/sh -c {shlex.quote(command)}"


def multiplexing() -> tuple[str, ...]:
    """Return ssh's options for shared connections; none if there is no private folder with a path short enough."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "trainyard/ssh"
    if len(os.fsencode(folder)) > SOCKET_FOLDER_LIMIT:
        return ()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError:
        return ()
    return (*PERSIST, "-o", f"ControlPath={folder}/%C")


def _completed(argv: list[str], stdin: bytes | None) -> tuple[int, bytes, bytes]:
    source: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    done = subprocess.run(argv, capture_output=True, check=False, **source)
    return done.returncode, done.stdout, done.stderr


def _reason(error: Exception) -> str:
    return str(error.strerror if isinstance(error, OSError) else error)
