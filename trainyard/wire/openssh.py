"""Transports that need no Ansible: OpenSSH's own client, and a local process."""

from __future__ import annotations

import os
import selectors
import shlex
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import IO, Any

from trainer.common.files import cache_folder, write_atomic
from trainer.supervise.processes import descendants, send_signal
from trainyard.wire.connection import OUTPUT_LIMIT, TOO_MUCH, Host, HostConnection, Login, RemoteError, last_line

UNREACHABLE = 255  # exit code of ssh if ssh itself fails
# Multiplexing: requests that follow within two minutes share the first one's connection.
PASSWORD = "TRAINYARD_SSH_PASSWORD"  # variable of ssh's process, which only its user can read
PERSIST = ("-o", "ControlMaster=auto", "-o", "ControlPersist=120s")
OPTIONS = (
    *("-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
)
ABORT_POLL = 0.5  # s between two checks whether the command was ended
# A Unix socket's path holds 107 bytes; ssh appends a digest of 40 characters and a suffix of 17.
SOCKET_FOLDER_LIMIT = 107 - 1 - 40 - 17


class _Processes:
    """Runs one client process at a time, and reads no more of its output than a reply can have."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._aborted = threading.Event()

    def abort(self) -> None:
        """Kill the process that is running, and those that it has started."""
        self._aborted.set()
        if (process := self._process) and process.poll() is None:
            for pid in (*descendants(process.pid), process.pid):
                send_signal(pid, signal.SIGKILL)

    def run(self, argv: list[str], stdin: bytes | None) -> tuple[int, bytes, bytes]:
        """Run a program; return its exit code and its output. Raises RemoteError if it writes too much."""
        with _input(stdin) as source:
            code, out, err = self._run(argv, stdin=source, stdout=subprocess.PIPE)
        if max(len(out), len(err)) > OUTPUT_LIMIT:
            raise RemoteError(TOO_MUCH)
        return code, out, err

    def copy(self, argv: list[str], **streams: Any) -> None:
        """Run a program between files. Raises RemoteError with the last line of its errors."""
        code, _, err = self._run(argv, **streams)
        if code:
            raise RemoteError(last_line(err.decode(errors="replace")) or f"exit code {code}")

    def _run(self, argv: list[str], **streams: Any) -> tuple[int, bytes, bytes]:
        self._aborted.clear()
        self._process = subprocess.Popen(argv, stderr=subprocess.PIPE, env=self._environment, **streams)
        with self._process as process:  # closes its pipes
            out, err = _read_output(process, self._aborted)
            return process.wait(), out, err


class LocalTransport:
    """Runs commands on the controller itself."""

    kind = "local"
    environment: dict[str, str] | None = None

    def __init__(self) -> None:
        """Prepare for commands."""
        self._processes = _Processes()
        self.abort = self._processes.abort

    def execute(self, command: str, stdin: bytes | None = None) -> tuple[int, bytes, bytes]:
        """Run a shell command; return its exit code, standard output and standard error. Raises RemoteError."""
        return self._processes.run(self.stream_argv(command), stdin)

    def stream_argv(self, command: str) -> list[str]:
        """Return the arguments of a process that runs a shell command until its standard input ends."""
        return ["/bin/sh", "-c", command]

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
    """Runs commands over ssh. The host key must be known: an unknown or changed key is an error."""

    kind = "ssh"

    def __init__(self, login: Login) -> None:
        """Prepare for a host; the first request connects."""
        self.login = login
        self.environment = password_environment(login.password)
        self._processes = _Processes(self.environment)
        self.abort = self._processes.abort
        self._ssh = [*login.ssh_command(), *OPTIONS, *multiplexing(), "-T", "--", login.destination()]

    def execute(self, command: str, stdin: bytes | None = None) -> tuple[int, bytes, bytes]:
        """Run a shell command; return its exit code, standard output and standard error. Raises RemoteError."""
        code, out, err = self._processes.run([*self._ssh, remote_shell(command)], stdin)
        if code == UNREACHABLE:
            raise RemoteError(last_line(err.decode(errors="replace")) or "unreachable")
        return code, out, err

    def stream_argv(self, command: str) -> list[str]:
        """Return the arguments of a process that runs a shell command until its standard input ends.

        It has a connection of its own: a shared one ends neither with the process, nor when the host is lost.
        """
        alone = ("-o", "ControlMaster=no", "-o", "ControlPath=none")
        program, *login = self.login.ssh_command()
        return [program, *alone, *login, *OPTIONS, "-T", "--", self.login.destination(), remote_shell(command)]

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
        self._processes.copy([*self._ssh, remote_shell(command)], **streams)


def open_connection(host: Host) -> HostConnection:
    """Return the connection to a host, which the first request opens. Use it in one thread at a time."""
    return HostConnection(host, OpenSSHTransport(host.login) if host.login.address else LocalTransport())


def password_environment(password: str) -> dict[str, str] | None:
    """Return the environment with which ssh takes a password from a program instead of a terminal; None without a password."""
    if not password:
        return None
    program = cache_folder() / "askpass"
    program.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not program.exists():
        write_atomic(program, f"#!/bin/sh\nprintf '%s\\n' \"${PASSWORD}\"\n".encode(), 0o700)
    return {**os.environ, "SSH_ASKPASS": str(program), "SSH_ASKPASS_REQUIRE": "force", PASSWORD: password}


def remote_shell(command: str) -> str:
    """Return what ssh sends for a shell command. /bin/sh runs the command, whatever the user's login shell is."""
    return f"exec /bin/sh -c {shlex.quote(command)}"


def multiplexing() -> tuple[str, ...]:
    """Return ssh's options for shared connections; none if there is no private folder with a path short enough."""
    folder = cache_folder() / "ssh"
    if len(os.fsencode(folder)) > SOCKET_FOLDER_LIMIT:
        return ()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError:
        return ()
    return (*PERSIST, "-o", f"ControlPath={folder}/%C")


def _input(content: bytes | None) -> IO[bytes]:
    """Return an open file that holds a program's input, in memory only: it may contain secrets."""
    if content is None:
        return Path(os.devnull).open("rb")
    file = os.fdopen(os.memfd_create("request"), "w+b")
    file.write(content)
    file.seek(0)
    return file


def _read_output(process: subprocess.Popen[bytes], aborted: threading.Event) -> tuple[bytes, bytes]:
    """Return what a process writes to its pipes until it closes them; kill it if that is more than OUTPUT_LIMIT.

    ssh's shared connection keeps the pipes open after the client was killed; `aborted` handles this.
    """
    output = {process.stdout: bytearray(), process.stderr: bytearray()}  # the first key is None for a copy to a file
    with selectors.DefaultSelector() as selector:
        for pipe in filter(None, output):
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(ABORT_POLL):
                part = os.read(key.fd, 1 << 16)
                output[key.fileobj] += part  # type: ignore[index]
                if not part:
                    selector.unregister(key.fileobj)
            if aborted.is_set():
                break
            if any(len(content) > OUTPUT_LIMIT for content in output.values()):
                process.kill()
                break
    return bytes(output[process.stdout]), bytes(output[process.stderr])


def _reason(error: Exception) -> str:
    return str(error.strerror if isinstance(error, OSError) else error)
