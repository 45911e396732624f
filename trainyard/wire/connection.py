"""Connections to the hosts of a cluster: the description of a host, its transport, and parallel requests to many hosts.

Nothing here depends on Ansible. The transports are in `trainyard.wire.openssh`: OpenSSH, or a local process.
"""

from __future__ import annotations

import functools
import ipaddress
import resource
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from trainer.common.errors import MAX_MESSAGE, TrainyardError
from trainer.common.formats import printable, quoted
from trainyard.wire.remote_archive import remote_command, remote_input
from trainyard.wire.replies import ReplyError, checked_reply, last_object

R = TypeVar("R")
OUTPUT_LIMIT = 16 << 20  # bytes that a host may answer: a reply, and what its login scripts print before it
FILES_PER_REQUEST = 10  # pipes of the client process, its input, and what waits for them
FILES_BESIDE = 256  # that the process has open besides
PAUSE = 1.0  # s of a turn of a loop beyond which the controller itself did not run
TOO_MUCH = f"sent more than {OUTPUT_LIMIT >> 20} MiB; the connection was closed"


class RemoteError(TrainyardError):
    """A host did not answer, or it answered with an error; the message is one line, whatever the host sent."""

    def __init__(self, message: object) -> None:
        super().__init__(printable(message, MAX_MESSAGE))


class InvalidReplyError(RemoteError):
    """A host answered with an error, or not as the verb does."""


class InventoryError(TrainyardError):
    """The inventory does not describe a host completely; the message is one line."""

    def __init__(self, message: object) -> None:
        super().__init__(printable(message, MAX_MESSAGE))


class Transport(Protocol):
    """Runs commands and copies files on one host. Used by one thread at a time."""

    kind: str  # "local" or "ssh"
    environment: dict[str, str] | None  # of the process of `stream_argv`; None for that of this one

    def execute(self, command: str, stdin: bytes | None = None) -> tuple[int, bytes, bytes]:
        """Run a shell command; return its exit code, standard output and standard error.

        Raises RemoteError if the host is unreachable.
        """
        ...

    def stream_argv(self, command: str) -> list[str]:
        """Return the arguments of a process that runs a shell command until its standard input ends."""
        ...

    def put(self, source: str, target: str) -> None:
        """Copy a file of the controller to the host. Raises RemoteError."""
        ...

    def fetch(self, source: str, target: str) -> None:
        """Copy a file of the host to the controller. Raises RemoteError."""
        ...

    def abort(self) -> None:
        """End the command or the copy that another thread has in progress, which then raises an error or returns."""
        ...


@dataclass(frozen=True)
class Login:
    """How to log in to a host over SSH; an empty `address` is the controller itself."""

    address: str = ""
    user: str = ""
    port: int = 0
    key_file: str = ""
    extra_arguments: tuple[str, ...] = ()  # further arguments of ssh, such as `-o UserKnownHostsFile=...`
    executable: str = "ssh"
    password: str = field(default="", repr=False)

    def destination(self) -> str:
        """Return `user@address` as ssh takes it."""
        return f"{self.user}@{self.address}" if self.user else self.address

    def ssh_command(self) -> list[str]:
        """Return ssh and its arguments before the destination. ssh takes the first value of an option."""
        words = [self.executable, *(["-i", self.key_file] if self.key_file else []), *self.extra_arguments]
        words += ["-o", "BatchMode=no", "-o", "NumberOfPasswordPrompts=1"] if self.password else []
        return [*words, *(["-p", str(self.port)] if self.port else [])]


@dataclass(frozen=True)
class Host:
    """The inventory's description of a host of the cluster."""

    name: str
    address: str  # the IP address at which its peers reach it
    data_dir: str
    python: str  # the interpreter of the cluster's Python environment
    backend: str = "auto"  # of the supervisor: auto, systemd or process
    processes: int = 0  # ranks on this host; 0 for one per GPU, or one without a GPU
    gpus: tuple[str, ...] | None = None  # numbers or UUIDs of the GPUs that runs may use; None for all
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # variables of the ranks; may hold secrets
    shows: tuple[str, ...] = ()  # paths that the units of all runs show here
    lease: str = ""  # under the queue: file on the host that is locked while the run may use it; empty otherwise
    cpus: tuple[int, ...] = ()  # processors that the ranks may use; empty for all
    ollama_port: int = 0  # TCP port of its Ollama, if that is part of the cluster; else 0
    ollama_urls: tuple[str, ...] = ()  # where it reaches its own Ollama, in this order; empty for the usual addresses
    managed: bool = True  # whether trainyard configures the host as root
    services: tuple[str, ...] = ()  # which of "ollama" and "queue" it installs there
    system_python: str = "/usr/bin/python3"  # the interpreter that Ansible uses
    login: Login = field(default_factory=Login)

    def check(self) -> None:
        """Check that a run can be planned on the host. Raises InventoryError."""
        try:
            ipaddress.ip_address(self.address)
        except ValueError:
            raise InventoryError(
                f"{self.name}: cluster_address is {quoted(self.address)}; set it to the IP address at which its peers reach it"
            ) from None
        for name, path in (("cluster_data_dir", self.data_dir), ("cluster_python", self.python)):
            if not path.startswith("/"):
                raise InventoryError(f"{self.name}: {name} is {quoted(path)}; set it to an absolute path on the host")


class HostConnection:
    """One host and the transport that reaches it. Used by one thread at a time."""

    def __init__(self, host: Host, transport: Transport) -> None:
        self.host = host
        self.transport = transport

    def call(self, verb: str, request: dict[str, Any], *, python: str = "") -> dict[str, Any]:
        """Run a verb of the remote archive on the host and return its answer.

        `verb`: see trainyard/remote/__main__.py. `request`: sent as JSON on standard input, so it may hold secrets.
        `python`: the interpreter on the host; by default that of the cluster's environment. Raises RemoteError: the
        host is unreachable, the answer is `{"error": ...}`, or it is not a reply to the verb.
        """
        return self.run(remote_command(verb, python or self.host.python), remote_input(request, verb), verb)

    def run(self, command: str, stdin: bytes | None = None, verb: str = "") -> dict[str, Any]:
        """Run a shell command on the host and return the last JSON object on its standard output.

        `verb`: what the answer replies to, see trainyard/reply_types; empty accepts any object. Raises RemoteError:
        there is no such object, it has an `error`, or it is not a reply to the verb.
        """
        code, out, err = self.transport.execute(command, stdin)
        try:
            answer = last_object(out)
            if answer is None:
                raise RemoteError(last_line(err.decode(errors="replace")) or f"no answer, exit code {code}")
            if "error" in answer:
                raise InvalidReplyError(answer["error"])
            return checked_reply(verb, answer)
        except ReplyError as error:
            raise InvalidReplyError(str(error)) from None

    def put(self, source: str, target: str) -> None:
        """Copy a file of the controller to the host. Raises RemoteError."""
        self.transport.put(source, target)

    def fetch(self, source: str, target: str) -> None:
        """Copy a file of the host to the controller. Raises RemoteError."""
        self.transport.fetch(source, target)


def last_line(text: str) -> str:
    """Return the last line of an error output, which names the cause, as printable text."""
    return printable((text[-4 * MAX_MESSAGE :].strip().splitlines() or [""])[-1].strip(), MAX_MESSAGE)


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files, if it is too low for `count` more, as far as the system permits.

    It is 1024 by default, which about 300 requests over SSH at once exceed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + FILES_BESIDE
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class AwakeClock:
    """Seconds in which this process ran. Silence of a host counts only while the controller asks.

    A suspended controller (Ctrl-Z, a paused virtual machine, load) would take its own pause for the silence of every host.
    """

    def __init__(self) -> None:
        self._paused, self._turned_at = 0.0, time.monotonic()

    def now(self) -> float:
        """Return the time, without the pauses that `turn` has seen."""
        return time.monotonic() - self._paused

    def turn(self) -> None:
        """Begin a turn of a loop; a turn that took longer than PAUSE was a pause."""
        elapsed = time.monotonic() - self._turned_at
        self._turned_at += elapsed
        if elapsed > PAUSE:
            self._paused += elapsed


def alone(host: Host) -> Host:
    """Return a host whose connections are not shared: the processes of the shared one may be halted there."""
    arguments = ("-o", "ControlPath=none", *host.login.extra_arguments)  # ssh takes the first value of an option
    return replace(host, login=replace(host.login, extra_arguments=arguments))


class FanOut(Generic[R]):
    """Sends one request to many hosts in parallel, with a daemon thread per host: a host that hangs does not block the exit.

    `answers` and `errors` fill up while the threads run; both are keyed by the name of the host.
    """

    _all: ClassVar[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()

    def __init__(self, requests: Mapping[str, Callable[[], R]]) -> None:
        self.answers: dict[str, R] = {}
        self.errors: dict[str, str] = {}
        allow_open_files(FILES_PER_REQUEST * len(requests))
        self.threads = {
            host: threading.Thread(target=self._request, args=(host, request), daemon=True)
            for host, request in requests.items()
        }
        for thread in self.threads.values():
            self._all.add(thread)
            thread.start()

    @classmethod
    def join_all(cls, limit: float) -> list[threading.Thread]:
        """Wait up to `limit` seconds for the threads of all requests; return those that are left."""
        deadline = time.monotonic() + limit
        for thread in list(cls._all):
            thread.join(max(0.0, deadline - time.monotonic()))
        return [thread for thread in list(cls._all) if thread.is_alive()]

    def _request(self, host: str, request: Callable[[], R]) -> None:
        try:
            self.answers[host] = request()
        except Exception as error:  # whatever it is, it concerns this host only
            self.errors[host] = printable(error, MAX_MESSAGE)

    def wait(self, limit: float, doubtful: Collection[str] = (), grace: float = 0.0) -> FanOut[R]:
        """Wait up to `limit` seconds for all hosts; then record an error for each host without an answer.

        Hosts in `doubtful` are not expected to answer: they get at most `grace` seconds more than the other hosts need.
        """
        clock = AwakeClock()
        start = clock.now()
        deadline = start + limit
        for host, thread in sorted(self.threads.items(), key=lambda item: item[0] in doubtful):
            if host in doubtful:
                deadline = min(deadline, clock.now() + grace)
                grace = 0.0
            while thread.is_alive() and (left := deadline - clock.now()) > 0:
                thread.join(min(left, PAUSE / 2))
                clock.turn()
            if thread.is_alive():
                self.errors.setdefault(host, f"no answer within {clock.now() - start:.0f} s")
        return self


def call_hosts(
    connect: Callable[[str], HostConnection], verb: str, requests: Mapping[str, dict[str, Any]]
) -> FanOut[dict[str, Any]]:
    """Send its request of a verb to each host at once, over new connections."""
    return FanOut({host: functools.partial(connect(host).call, verb, request) for host, request in requests.items()})
