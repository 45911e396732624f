"""Who has the port open, and is it Ollama: all at once, within what the kernel and this process can hold."""

import asyncio
import errno
import resource
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from . import replies
from .http import BadReply, get
from .networks import Target, neighbour_limit
from .settings import Settings
from .ssh import fetch_host_keys

# The kernel asks three times for a silent neighbour, one second apart; so long the entry cannot be reclaimed.
NEIGHBOUR_SECONDS = 3.2


@dataclass(frozen=True)
class Answer:
    """An Ollama server. `response_ms` is /api/version's, from the request to its last byte."""

    target: Target
    version: str
    models: tuple[replies.Model, ...] = ()
    loaded: tuple[replies.Loaded, ...] = ()
    left_out: int = 0
    response_ms: float = 0.0
    host_keys: tuple[str, ...] = ()


@dataclass
class Findings:
    """All that a scan saw. `silent` gave no sign within the timeout; `rejected` have the port open and are not Ollama."""

    answers: list[Answer] = field(default_factory=list)
    rejected: list[tuple[Target, str]] = field(default_factory=list)
    silent: list[Target] = field(default_factory=list)
    refused: list[Target] = field(default_factory=list)


async def scan(targets: Sequence[Target], settings: Settings, ssh_ports: dict[str, int]) -> Findings:
    """Asks every target, and the silent ones again when `passes` is 2.

    Args:
        targets: what to ask.
        settings: timeouts, passes, concurrency, verify.
        ssh_ports: address -> SSH port, where it is not `settings.ssh_port`.

    Returns:
        the findings, in the order of their addresses whoever answered first.
    """
    scanner = _Scanner(settings, ssh_ports)
    silent = await scanner.sweep(targets, settings.connect_timeout, scanner.at_once)
    if settings.passes == 2 and silent:
        # Wi-Fi cards that sleep wake up by the first knock: fewer at once, and longer.
        silent = await scanner.sweep(silent, settings.second_timeout, max(1, scanner.at_once // 2))
    await scanner.finish()
    place = {target: i for i, target in enumerate(targets)}
    found = scanner.findings
    found.silent = silent
    found.answers.sort(key=lambda a: place[a.target])
    found.rejected.sort(key=lambda r: place[r[0]])
    return found


class _Scanner:
    def __init__(self, settings: Settings, ssh_ports: dict[str, int]) -> None:
        self.settings = settings
        self.ssh_ports = ssh_ports
        self.findings = Findings()
        self.host_keys: dict[str, asyncio.Task[tuple[str, ...]]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        # A target under question holds three sockets; those not yet connected hold one.
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.at_once = max(1, min(settings.concurrency, (files - 128) // 4))
        self.asking = asyncio.Semaphore(max(1, self.at_once // 2))
        self.neighbours = _NeighbourTable(neighbour_limit())

    async def sweep(self, targets: Sequence[Target], timeout: float, at_once: int) -> list[Target]:
        """Knocks at every target; returns those that stayed silent for `timeout` seconds."""
        silent: list[Target] = []
        step = min(at_once, self.neighbours.limit)
        for start in range(0, len(targets), step):
            batch = targets[start : start + step]
            await self.neighbours.room_for({t.address for t in batch})
            while len(self.tasks) > self.at_once:
                await asyncio.wait(self.tasks, return_when=asyncio.FIRST_COMPLETED)
            quiet, refused = await _knock(batch, timeout, self._opened)
            silent += quiet
            self.findings.refused += refused
        return silent

    async def finish(self) -> None:
        """Waits for every question that is still open; each has a time limit of its own."""
        while self.tasks:
            await asyncio.wait(self.tasks)

    def _opened(self, target: Target, connection: socket.socket) -> None:
        task = asyncio.create_task(self._ask(target, connection))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _ask(self, target: Target, connection: socket.socket) -> None:
        async with self.asking:
            try:
                answer = await ask(target, self.settings.answer_timeout, connection)
            except BadReply as error:
                self.findings.rejected.append((target, str(error)))
                if self.settings.verify:
                    return
                answer = Answer(target, version="")
            self.findings.answers.append(replace(answer, host_keys=await self._host_keys(target.address)))

    async def _host_keys(self, address: str) -> tuple[str, ...]:
        """Once an address, however many ports it has."""
        if address not in self.host_keys:
            port = self.ssh_ports.get(address, self.settings.ssh_port)
            fetching = fetch_host_keys(address, port, self.settings.ssh_timeout)
            self.host_keys[address] = asyncio.create_task(fetching)
        return await self.host_keys[address]


async def ask(target: Target, timeout: float, connection: socket.socket | None = None) -> Answer:
    """Is it Ollama? Version, models and loaded models, all three asked at once.

    Args:
        target: whom.
        timeout: seconds for each reply, to its last byte.
        connection: a socket that is connected to it already.

    Raises:
        BadReply: /api/version or /api/tags is not what Ollama says. Without /api/ps (before 0.1.33) nothing is loaded.
    """
    took = 0.0

    async def version() -> str:
        nonlocal took
        start = time.perf_counter()
        body = await get(*target, "/api/version", timeout, connection)
        took = time.perf_counter() - start
        return replies.parse_version(body)

    async def tags() -> tuple[list[replies.Model], int]:
        return replies.parse_tags(await get(*target, "/api/tags", timeout))

    async def loaded() -> list[replies.Loaded]:
        try:
            return replies.parse_ps(await get(*target, "/api/ps", timeout))
        except BadReply:
            return []

    wrong: BadReply | None = None
    try:
        async with asyncio.TaskGroup() as questions:
            told = questions.create_task(version()), questions.create_task(tags()), questions.create_task(loaded())
    except* BadReply as errors:
        wrong = BadReply(str(errors.exceptions[0]))
    if wrong:  # raised in there it would come as a group of one, in Debian 12's Python
        raise wrong
    models, left_out = told[1].result()
    return Answer(
        target, told[0].result(), tuple(models), tuple(told[2].result()), left_out, response_ms=round(took * 1000, 1)
    )


async def _knock(
    batch: Sequence[Target], timeout: float, opened: Callable[[Target, socket.socket], None]
) -> tuple[list[Target], list[Target]]:
    """Connects to the whole batch at once; returns the silent ones and those that refused.

    Bare sockets: a task and a timer for each of 254 addresses would take a tenth of the timeout by themselves. For the
    same reason the clock starts with the first of the batch; the last has half the timeout at least, however slow we are.
    """
    loop = asyncio.get_running_loop()
    pending: dict[Target, socket.socket] = {}
    silent: list[Target] = []
    refused: list[Target] = []
    all_done = asyncio.Event()

    def settle(target: Target, connection: socket.socket, error: int) -> None:
        if error == 0:
            opened(target, connection)
            return
        connection.close()
        if error in (errno.ECONNREFUSED, errno.ECONNRESET):
            refused.append(target)
        else:  # unreachable, no route, no buffer: it said nothing itself
            silent.append(target)

    def writable(target: Target) -> None:
        connection = pending.pop(target)
        loop.remove_writer(connection)
        settle(target, connection, connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        if not pending:
            all_done.set()

    start = loop.time()
    try:
        for target in batch:
            family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
            connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            error = connection.connect_ex(_socket_address(target))
            if error == errno.EINPROGRESS:
                pending[target] = connection
                loop.add_writer(connection, writable, target)
            else:
                settle(target, connection, error)
        if pending:
            async with asyncio.timeout_at(max(start + timeout, loop.time() + timeout / 2)):
                await all_done.wait()
    except TimeoutError:
        pass
    finally:
        for connection in pending.values():
            loop.remove_writer(connection)
            connection.close()
    return silent + list(pending), refused


def _socket_address(target: Target) -> tuple:
    address, _, scope = target.address.partition("%")
    if ":" not in address:
        return address, target.port
    return address, target.port, 0, socket.if_nametoindex(scope) if scope else 0


class _NeighbourTable:
    """Keeps the addresses asked within the last NEIGHBOUR_SECONDS below what the kernel's table holds."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._until: dict[str, float] = {}

    async def room_for(self, addresses: set[str]) -> None:
        while True:
            now = time.monotonic()
            self._until = {a: until for a, until in self._until.items() if until > now}
            if len(self._until.keys() | addresses) <= self.limit:
                break
            await asyncio.sleep(min(self._until.values()) - now)
        self._until |= dict.fromkeys(addresses, now + NEIGHBOUR_SECONDS)
