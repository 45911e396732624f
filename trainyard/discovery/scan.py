"""Scan all targets at once, within the limits of the kernel and of this process, and check open ports for Ollama."""

import asyncio
import errno
import functools
import resource
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from trainer.generation.ollama_client import OllamaClient, OllamaError
from trainyard.discovery import ollama_replies as replies
from trainyard.discovery.networks import Target
from trainyard.discovery.settings import Settings
from trainyard.discovery.ssh import fetch_host_keys

REPLY_LIMIT = 2 << 20  # bytes; a real /api/tags with 1,000 models is about 0.4 MB
# The kernel's neighbour table has 1,024 entries for the entire machine. An address without an answer occupies one for 3 s.
UNPACED = 512  # targets that are scanned without pauses
RATE = 200  # targets per second with pauses


@dataclass(frozen=True)
class LanServer:
    """An Ollama server, the number of its malformed models, and the SSH host keys of its machine."""

    server: replies.Server
    left_out: int = 0
    host_keys: tuple[str, ...] = ()


@dataclass
class Findings:
    """The results of a scan. `silent` did not answer within the timeout; `rejected` have an open port that is not Ollama."""

    answers: list[LanServer] = field(default_factory=list)
    rejected: list[tuple[Target, str]] = field(default_factory=list)
    silent: list[Target] = field(default_factory=list)
    refused: list[Target] = field(default_factory=list)


async def scan(targets: Sequence[Target], settings: Settings, ssh_ports: dict[str, int]) -> Findings:
    """Scan every target, and with `passes` 2 the silent targets again. Returns the findings, sorted by address.

    `targets`: the addresses and ports. `settings`: timeouts, passes, concurrency, verify. `ssh_ports`: address -> SSH
    port, if it is not `settings.ssh_port`.
    """
    scanner = _Scanner(settings, ssh_ports)
    silent = await scanner.sweep(targets, settings.connect_timeout, scanner.at_once)
    if settings.passes == 2 and silent:
        # The first attempt wakes up Wi-Fi cards in power-save mode. The second has a longer timeout and fewer targets at once.
        silent = await scanner.sweep(silent, settings.second_timeout, max(1, scanner.at_once // 2))
    await scanner.finish()
    order = {target: i for i, target in enumerate(targets)}
    found = scanner.findings
    found.silent = silent
    found.answers.sort(key=lambda a: order[Target(a.server.address, a.server.port)])
    found.rejected.sort(key=lambda r: order[r[0]])
    return found


class _Scanner:
    def __init__(self, settings: Settings, ssh_ports: dict[str, int]) -> None:
        self.settings = settings
        self.ssh_ports = ssh_ports
        self.findings = Findings()
        self.host_keys: dict[str, asyncio.Task[tuple[str, ...]]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        # A target that is checked for Ollama uses three sockets; a target that is not connected yet uses one.
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.at_once = max(1, min(settings.concurrency, (files - 128) // 4))
        asking = max(1, self.at_once // 2)
        self.asking = asyncio.Semaphore(asking)
        self.threads = ThreadPoolExecutor(3 * asking)

    async def sweep(self, targets: Sequence[Target], timeout: float, at_once: int) -> list[Target]:
        """Connect to every target; return those that do not answer within `timeout` seconds."""
        silent: list[Target] = []
        for start in range(0, len(targets), at_once):
            batch = targets[start : start + at_once]
            if start and len(targets) > UNPACED:
                await asyncio.sleep(len(batch) / RATE)
            while len(self.tasks) > self.at_once:
                await asyncio.wait(self.tasks, return_when=asyncio.FIRST_COMPLETED)
            quiet, refused = await _connect_all(batch, timeout, self._opened)
            silent += quiet
            self.findings.refused += refused
        return silent

    async def finish(self) -> None:
        """Wait for all open requests; each has its own timeout."""
        while self.tasks:
            await asyncio.wait(self.tasks)
        self.threads.shutdown(wait=False)

    def _opened(self, target: Target) -> None:
        task = asyncio.create_task(self._ask(target))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _ask(self, target: Target) -> None:
        async with self.asking:
            try:
                identify = functools.partial(self._host_keys, target.address)
                answer = await ask(target, self.settings.answer_timeout, self.threads, identify)
            except OllamaError as error:
                self.findings.rejected.append((target, str(error)))
                if self.settings.verify:
                    return
                answer = LanServer(replies.Server(address=target.address, port=target.port, version=""))
            self.findings.answers.append(replace(answer, host_keys=await self._host_keys(target.address)))

    def _host_keys(self, address: str) -> asyncio.Task[tuple[str, ...]]:
        """Fetch the host keys of an address, once for all its ports."""
        if address not in self.host_keys:
            port = self.ssh_ports.get(address, self.settings.ssh_port)
            fetching = fetch_host_keys(address, port, self.settings.answer_timeout)
            self.host_keys[address] = asyncio.create_task(fetching)
        return self.host_keys[address]


async def ask(
    target: Target,
    timeout: float,
    threads: ThreadPoolExecutor | None = None,
    identify: Callable[[], object] = lambda: None,
) -> LanServer:
    """Return version, models and loaded models of an Ollama server, which are requested at the same time by `threads`.

    A server without /api/ps (before 0.1.33) has no loaded models. Raises OllamaError: the reply of /api/version or
    /api/tags is not from Ollama. The message contains no text from the network. `timeout`: seconds for each reply, to its
    last byte. `identify`: called once the reply of /api/version is from Ollama, while the other replies are read.
    """
    client = OllamaClient(target.url, connect_timeout=timeout, idle_timeout=timeout, deadline=timeout)

    async def get(path: str) -> replies.Reply:
        request = functools.partial(client.get, path, limit=REPLY_LIMIT)
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, request)
        except OllamaError as error:
            raise OllamaError(f"HTTP status {error.status}" if error.status else str(error)) from None

    async def version() -> tuple[str, float]:
        start = time.perf_counter()
        found = replies.version(await get("/api/version"))
        took = time.perf_counter() - start
        identify()
        return found, took

    async def models() -> tuple[list[replies.Model], int]:
        return replies.models(await get("/api/tags"))

    async def loaded() -> list[replies.Loaded]:
        try:
            return replies.loaded(await get("/api/ps"))
        except OllamaError:
            return []

    wrong: OllamaError | None = None
    try:
        async with asyncio.TaskGroup() as requests:
            results = requests.create_task(version()), requests.create_task(models()), requests.create_task(loaded())
    except* OllamaError as errors:
        wrong = OllamaError(str(errors.exceptions[0]))
    if wrong:  # raised inside the block, it would be an exception group in Python 3.11
        raise wrong
    (found, took), (listed, left_out) = results[0].result(), results[1].result()
    server = replies.Server(
        address=target.address,
        port=target.port,
        version=found,
        models=tuple(listed),
        loaded=tuple(results[2].result()),
        response_ms=round(took * 1000, 1),
    )
    return LanServer(server, left_out)


async def _connect_all(
    batch: Sequence[Target], timeout: float, opened: Callable[[Target], None]
) -> tuple[list[Target], list[Target]]:
    """Connect to all targets of a batch at once; return the silent ones and those that refused.

    Plain sockets are used, because a task and a timer for each of 254 addresses take a tenth of the timeout. For the same
    reason the timeout starts with the first target of the batch; the last target has at least half of it.
    """
    loop = asyncio.get_running_loop()
    pending: dict[Target, socket.socket] = {}
    silent: list[Target] = []
    refused: list[Target] = []
    all_done = asyncio.Event()

    def finish(target: Target, connection: socket.socket, error: int) -> None:
        connection.close()
        if error == 0:
            opened(target)
        elif error in (errno.ECONNREFUSED, errno.ECONNRESET):
            refused.append(target)
        else:  # unreachable, no route or no buffer: the target itself has not answered
            silent.append(target)

    def writable(target: Target) -> None:
        connection = pending.pop(target)
        loop.remove_writer(connection)
        finish(target, connection, connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
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
                finish(target, connection, error)
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
