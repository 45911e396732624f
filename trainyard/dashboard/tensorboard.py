"""TensorBoard behind the login: one process on a Unix socket, started for the first run that is opened and ended when idle.

Its pages have the origin of the dashboard, and their contents are data of hosts. The content security policy of these
pages therefore
lets their scripts load and read paths of TensorBoard only, and open neither windows, frames nor forms.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from trainer.errors import MAX_MESSAGE, UserError
from trainer.formats import printable
from trainyard.connection import RemoteError, last_line
from trainyard.dashboard.event_files import EventFiles
from trainyard.dashboard.http_limits import FORM_LIMIT, read_body
from trainyard.dashboard.security import Access
from trainyard.dashboard.state import Cluster
from trainyard.dashboard.streams import HostStream

if TYPE_CHECKING:
    import httpx2

IDLE = 600.0  # s without a request after which TensorBoard ends
START = 90.0  # s until it listens
COPY = 5.0  # s between two checks for new bytes of the event files
ANSWER = 60.0  # s for an answer
# Of a request and of an answer: neither cookies, credentials, redirects nor policies pass.
ASKED = ("accept", "accept-encoding", "content-type", "x-tensorboard-feature-flags")
ANSWERED = ("content-type", "content-encoding", "content-disposition")


def missing() -> str:
    """Return how to install TensorBoard where it is missing, or an empty string."""
    if importlib.util.find_spec("tensorboard"):
        return ""
    return f"{sys.executable} -m pip install tensorboard"


class TensorBoard:
    """The process and the copies of event files that it shows. Used in the event loop only."""

    def __init__(self, cluster: Cluster, streams: Mapping[str, HostStream]) -> None:
        self._cluster, self._streams = cluster, streams
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files: EventFiles | None = None
        self._client: httpx2.AsyncClient | None = None
        self._task: asyncio.Task[None] | None = None
        self._used = 0.0

    async def open(self, runs: list[str]) -> None:
        """Show these runs in addition to those that were opened before. Raises UserError with the reason why not."""
        if remedy := missing():
            raise UserError(f"TensorBoard is not installed where the dashboard runs: {remedy}")
        async with self._lock:
            self._used = time.monotonic()
            if self._process and self._process.returncode is not None:
                await self._end()
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="trainyard-tensorboard-")
                logs = Path(self._folder.name) / "runs"
                logs.mkdir(mode=0o700)
                self._files = EventFiles(logs, self._cluster, self._streams)
            assert self._files
            for run in runs:
                self._files.add(run)
            try:
                if not await self._files.update() and not self._process:
                    raise UserError("no run that was opened has TensorBoard files: set loggers=tensorboard")
                if not self._process:
                    await self._start(Path(self._folder.name))
            except (RemoteError, OSError) as error:
                raise UserError(printable(f"cannot open TensorBoard: {error}", MAX_MESSAGE)) from None
            finally:
                if not self._process:
                    await self._end()

    async def close(self) -> None:
        """End the process and remove the copies."""
        async with self._lock:
            await self._end()

    async def forward(self, request: Request, access: Access) -> Response:
        """Pass a request of a browser on to TensorBoard, and its answer back."""
        if request.method not in ("GET", "HEAD") and not access.same_origin(request):
            return PlainTextResponse("403: the request did not come from this page\n", 403)
        client = self._client
        if client is None:
            return PlainTextResponse("404: TensorBoard is not open: open it on the page of a run\n", 404)
        body = await read_body(request)
        if body is None:
            return PlainTextResponse(f"413: more than {FORM_LIMIT} bytes, or too slow\n", 413)
        self._used = time.monotonic()
        import httpx2

        headers = {"accept-encoding": "identity"} | {
            name: request.headers[name] for name in ASKED if name in request.headers
        }
        # As the browser wrote it: the path in the scope is decoded.
        target = request.scope["raw_path"] + (b"?" + request.scope["query_string"]).rstrip(b"?")
        url = httpx2.URL(scheme="http", host="tensorboard", raw_path=target)
        try:
            question = client.build_request(request.method, url, headers=headers, content=body)
            answer = await client.send(question, stream=True)
        except httpx2.HTTPError as error:
            text = printable(f"502: TensorBoard does not answer: {type(error).__name__}: {error}", MAX_MESSAGE)
            return PlainTextResponse(f"{text}: open it again on the page of a run\n", 502)
        kept = {name: answer.headers[name] for name in ANSWERED if name in answer.headers}
        return StreamingResponse(_parts(answer), answer.status_code, kept, background=BackgroundTask(answer.aclose))

    async def _start(self, folder: Path) -> None:
        """Start the process and wait until it listens. Raises UserError and OSError."""
        import httpx2

        socket, log = folder / "socket", folder / "log"
        words = [sys.executable, "-m", "trainyard.dashboard.tensorboard_server", str(socket), str(folder / "runs")]
        with log.open("wb") as output:
            self._process = process = await asyncio.create_subprocess_exec(
                *words, stdin=asyncio.subprocess.PIPE, stdout=output, stderr=output
            )
        deadline = time.monotonic() + START
        while not socket.exists():
            if process.returncode is not None or time.monotonic() > deadline:
                await self._end_process()
                reason = (
                    last_line(log.read_text(errors="replace", encoding="utf-8"))
                    or f"it does not listen after {START:.0f} s"
                )
                raise UserError(printable(f"TensorBoard did not start: {reason}", MAX_MESSAGE))
            await asyncio.sleep(0.1)
        transport = httpx2.AsyncHTTPTransport(uds=str(socket), trust_env=False)
        self._client = httpx2.AsyncClient(transport=transport, timeout=ANSWER, trust_env=False, follow_redirects=False)
        self._used = time.monotonic()
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Copy new data until no request has arrived for a while, or the process has ended."""
        while True:
            await asyncio.sleep(COPY)
            async with self._lock:
                ended = self._process is None or self._process.returncode is not None
                if ended or time.monotonic() - self._used > IDLE:
                    self._task = None
                    await self._end()
                    return
                if self._files:
                    with contextlib.suppress(RemoteError, OSError):  # the copies so far remain
                        await self._files.update()

    async def _end(self) -> None:
        if self._task:
            self._task.cancel()
        if self._client:
            await self._client.aclose()
        await self._end_process()
        if self._folder:
            self._folder.cleanup()
        self._task = self._client = self._files = self._folder = None

    async def _end_process(self) -> None:
        process, self._process = self._process, None
        if process and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # it has nothing to save
            await process.wait()


async def _parts(answer: Any) -> AsyncIterator[bytes]:
    async for part in answer.aiter_raw():  # encoded, as TensorBoard has sent it
        yield part
