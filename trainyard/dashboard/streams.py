"""One connection per host, over which its sampler sends lines and answers queries."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable
from typing import Any

from trainer.common.errors import MAX_MESSAGE
from trainer.common.formats import printable
from trainyard.ollama.servers import host_urls
from trainyard.wire.connection import Host, RemoteError, Transport, last_line
from trainyard.wire.remote_archive import remote_command, remote_input
from trainyard.wire.replies import REPLY_LIMIT, ReplyError, checked_reply, untrusted_json

SILENT = 4.0  # s without a line after which a host counts as lost
GIVE_UP = 12.0  # s without a line after which the connection is reopened
KEEP_ALIVE = 5.0  # s between two empty lines to the host
RETRY = (1.0, 2.0, 5.0, 10.0)  # s before the next attempts to connect
QUERY_LIMIT = 15.0  # s for an answer
ERRORS_LIMIT = 64 << 10  # bytes of standard error that are kept
LINES = frozenset({"host", "beat", "run", "gone", "unreadable", "reply"})

Receive = Callable[[str, str, dict[str, Any]], None]
"""Takes the name of the host, the kind of a line, and the line."""


class HostStream:
    """The connection to one host. It is reopened whenever it is lost."""

    def __init__(self, host: Host, transport: Transport, receive: Receive, lost: Callable[[str, str], None]) -> None:
        """Prepare for a host.

        `receive`: gets every valid line. `lost`: gets the host's name and why it does not answer.
        """
        self.host, self.transport = host, transport
        self._receive, self._lost = receive, lost
        self._numbers = itertools.count(1)
        self._queries: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._silent = False

    async def run(self) -> None:
        """Keep the host connected until the task is cancelled."""
        failures = 0
        while True:
            self._silent = False
            connected = False
            try:
                async for kind, line in self._lines():
                    connected = True
                    self._handle(kind, line)
                reason = "the connection was closed"
            except (RemoteError, ReplyError, OSError) as error:
                reason = printable(error, MAX_MESSAGE)
            except Exception as error:  # a fault in this code affects this host only, and must be visible
                reason = printable(f"{type(error).__name__}: {error}", MAX_MESSAGE)
            self._fail_queries(reason)
            self._lost(self.host.name, reason)
            failures = 0 if connected else min(failures + 1, len(RETRY) - 1)
            await asyncio.sleep(RETRY[failures])

    async def ask(self, query: str, **request: Any) -> dict[str, Any]:
        """Send a query to the host and return its answer. Raises RemoteError."""
        if self._writer is None or self._silent:
            raise RemoteError(f"{self.host.name} does not answer")
        number = next(self._numbers)
        self._queries[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(json.dumps({"id": number, "query": query, **request}).encode() + b"\n")
            await self._writer.drain()
            answer = await asyncio.wait_for(self._queries[number], QUERY_LIMIT)
            return checked_reply(f"query {query}", answer)
        except TimeoutError:
            raise RemoteError(f"{self.host.name} has not answered the query {query} for {QUERY_LIMIT:.0f} s") from None
        except OSError:
            raise RemoteError(f"{self.host.name} does not answer") from None
        except ReplyError as error:
            raise RemoteError(f"{self.host.name} {error}") from None
        finally:
            self._queries.pop(number, None)

    async def _lines(self) -> Any:
        """Connect, and yield the kind and content of each line. Raises RemoteError and ReplyError."""
        command = remote_command("sample", self.host.python)
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        argv, environment = self.transport.stream_argv(command), self.transport.environment
        process = await asyncio.create_subprocess_exec(*argv, env=environment, limit=REPLY_LIMIT, **pipes)
        assert process.stdin and process.stdout and process.stderr
        errors = bytearray()
        address, urls = self.host.address or "127.0.0.1", host_urls(self.host)
        request = {"data_dir": self.host.data_dir, "address": address, "ollama_urls": urls}
        helpers = [asyncio.create_task(_read_errors(process.stderr, errors))]
        try:
            process.stdin.write(remote_input(request, "sample"))
            self._writer = process.stdin
            helpers.append(asyncio.create_task(_keep_alive(process.stdin)))
            while line := await self._read_line(process.stdout):
                if parsed := _parse(line):
                    yield parsed
            await asyncio.wait(helpers[:1], timeout=1.0)
            raise RemoteError(last_line(errors.decode(errors="replace")) or "the connection was closed")
        finally:
            self._writer = None
            for helper in helpers:
                helper.cancel()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _read_line(self, source: asyncio.StreamReader) -> bytes:
        """Return the next line, or nothing at the end. Raises RemoteError after GIVE_UP seconds."""
        try:
            return await asyncio.wait_for(source.readline(), SILENT)
        except TimeoutError:
            self._silent = True
            self._lost(self.host.name, f"sends nothing for {SILENT:.0f} s")
        try:
            line = await asyncio.wait_for(source.readline(), GIVE_UP - SILENT)
        except TimeoutError:
            raise RemoteError(f"sends nothing for {GIVE_UP:.0f} s") from None
        self._silent = False
        return line

    def _handle(self, kind: str, line: dict[str, Any]) -> None:
        if kind != "reply":
            self._receive(self.host.name, kind, line)
        elif (waiting := self._queries.get(line["id"])) and not waiting.done():
            if "answer" in line:
                waiting.set_result(line["answer"])
            else:
                waiting.set_exception(RemoteError(line.get("error") or "sent no answer"))

    def _fail_queries(self, reason: str) -> None:
        for waiting in self._queries.values():
            if not waiting.done():
                waiting.set_exception(RemoteError(f"{self.host.name}: {reason}"))


def _parse(line: bytes) -> tuple[str, dict[str, Any]] | None:
    """Return the kind of a line and its checked content; None for what login scripts print.

    A line of a known kind that is not valid becomes a line of the kind `invalid` with its `error`. Raises RemoteError,
    ReplyError: it is not a line of a sampler.
    """
    if not line.startswith(b"{"):
        return None
    value = untrusted_json(line.decode(errors="replace"))
    kind = str(value.get("kind")) if isinstance(value, dict) else ""
    if kind not in LINES:
        error = value.get("error") if isinstance(value, dict) else None
        raise RemoteError(error or "sent a line of an unknown kind")
    try:
        return kind, checked_reply(f"sample {kind}", value)
    except ReplyError as error:
        return "invalid", {"error": str(error)}


async def _read_errors(source: asyncio.StreamReader, kept: bytearray) -> None:
    while part := await source.read(1 << 14):
        kept += part
        del kept[:-ERRORS_LIMIT]


async def _keep_alive(target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while True:
            await asyncio.sleep(KEEP_ALIVE)
            target.write(b"\n")
            await target.drain()
