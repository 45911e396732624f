"""The bounded client of all model servers: Ollama's HTTP API, and requests of other APIs. Standard library only, for hosts.

The server is not trusted: its reply may be endless, too large, too slow or malformed. Every request has a deadline, and
every reply a limit. Source of the API: https://github.com/ollama/ollama/blob/main/docs/api.md
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from trainer.generation.ollama_names import server_form
from trainer.generation.ollama_values import count_of, seconds_of, text_of

MAX_BODY = 64 << 20  # bytes of a reply; /api/show with all tokens of a vocabulary has some MB
MAX_LINE = 1 << 20  # bytes of a line of a streamed reply
MAX_ANSWER = 8 << 20  # bytes of a streamed answer, with the JSON around its tokens
MAX_ERROR = 500  # characters of an error message
_PAGE = 100  # characters of the page of a proxy in one
_BLOCK = 1 << 16
_PATH = re.compile(r"(/[A-Za-z0-9._~%-]+)*/?")  # no query, fragment or control character
_VERSION = re.compile(r"(\d{1,5})\.(\d{1,5})\.(\d{1,5})", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")
Failure = Literal["final", "refused", "wait", "lost", "error"]
_FAILURES: dict[Failure, tuple[int, ...]] = {
    "final": (400, 413, 422),
    "refused": (301, 302, 303, 307, 308, 401, 402, 403, 404, 405, 501),
    "wait": (429, 503),
    "lost": (0, 408, 502, 504),
}


class OllamaError(Exception):
    """A request failed. The message is one line of printable text.

    `status`: HTTP status, or 0 if there was no complete reply. `failure`: what it means. `final`: the same request
    fails again, here and elsewhere; `refused`: so does any such request to this server; `wait`: the server answers
    later; `lost`: the connection, or the server behind a proxy; `error`: any other.
    """

    def __init__(self, message: str, status: int = 0, failure: Failure | None = None) -> None:
        text = "".join(char if char.isprintable() else " " for char in message[:MAX_ERROR])
        super().__init__(text)
        self.status = status
        known: Failure = next((name for name, codes in _FAILURES.items() if status in codes), "error")
        # Ollama says with 400 that a model, such as one for embeddings, has no chat.
        self.failure: Failure = failure or ("refused" if status == 400 and "does not support" in text else known)


@dataclass(frozen=True)
class Answer:
    """What a model answered. Times are in seconds.

    Attributes:
        truncated: the prompt with the answer did not fit into the context, so the model has not read all of it.
    """

    text: str  # the answer, without the thinking that the server separates
    thinking: str  # the thinking that the server separates; empty where it does not
    finished: str  # why it ended: `stop`, or `length` at the limit of tokens
    tokens: int  # number of generated tokens
    queued: float  # time in the server's queue, before it loaded the model or read the prompt
    seconds: float  # time of the server from the request to the end of the answer
    prompt_tokens: int = 0  # number of tokens of the prompt that the model has read; 0 if the server does not tell it
    truncated: bool = False


class Cancel:
    """Ends a request from another thread: `cancel()` closes its connection. `silent` is the time since its last byte.

    `begun`: the server has begun to answer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.cancelled = self.begun = False
        self.heard = time.monotonic()

    @property
    def silent(self) -> float:
        """Seconds since the last byte of the server."""
        return time.monotonic() - self.heard

    def watch(self, connected: socket.socket) -> None:
        """Close this socket when the request is cancelled. Raises OllamaError if it was."""
        with self._lock:
            self._socket = connected
            if self.cancelled:
                raise OllamaError("the request was cancelled")

    def cancel(self) -> None:
        """Close the connection. The request raises OllamaError."""
        with self._lock:
            self.cancelled = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)


class _BoundedSocket(socket.socket):
    """A connected socket whose reads end at a deadline, even if bytes arrive slowly."""

    deadline = float("inf")
    idle = 60.0
    cancel: Cancel | None = None

    def _limit(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.settimeout(min(self.idle, left))

    def recv_into(self, *args: Any) -> int:
        self._limit()
        count = super().recv_into(*args)
        if self.cancel:
            self.cancel.heard = time.monotonic()
        return count

    def sendall(self, *args: Any) -> None:
        self._limit()
        super().sendall(*args)


def is_server_url(url: str) -> bool:
    """Return whether a text is the address of a server: `http://ADDRESS[:PORT][/PATH]`."""
    try:
        OllamaClient(url)
    except (OllamaError, ValueError):
        return False
    return True


def hide_password(text: str) -> str:
    """Return a text without what stands before `@` in an address: user and password."""
    return re.sub(r"//[^/\s]*@", "//", text)


class OllamaClient:
    """One server. Every method raises OllamaError; a method may be used in several threads at once.

    Args:
        url: `http://ADDRESS[:PORT][/PATH]`; the paths of requests follow this one.
        port: if the address has none.
        connect_timeout: seconds to connect.
        idle_timeout: seconds without a byte after which a request fails.
        deadline: seconds for a complete reply, unless a method has its own.
        headers: of every request.
    """

    def __init__(
        self,
        url: str,
        *,
        port: int = 11434,
        connect_timeout: float = 3.0,
        idle_timeout: float = 30.0,
        deadline: float = 60.0,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            self._address, self.port = parts.hostname or "", parts.port or port
        except ValueError:
            self._address = ""
        if (
            not self._address
            or parts.scheme != "http"
            or not _PATH.fullmatch(url[len("http://") + len(parts.netloc) :])
        ):
            raise OllamaError(f"{hide_password(url)} is no address of a server: expected http://ADDRESS:PORT")
        if "@" in parts.netloc:
            raise OllamaError(f"{hide_password(url)}: user and password in an address are not supported: remove them")
        self._address = urllib.parse.unquote(self._address)  # the zone of a link-local IPv6 address
        self.url, self._path, self._headers = url, parts.path.rstrip("/"), dict(headers)
        self._connect_timeout, self._idle, self._deadline = connect_timeout, idle_timeout, deadline

    # The server ---------------------------------------------------------------------------------------------------------

    def version(self, timeout: float = 3.0) -> tuple[int, int, int]:
        """Return the version of the server, for comparison with other versions."""
        reply = self.get("/api/version", deadline=timeout)
        match = _VERSION.match(str(reply.get("version")))
        if not match:
            raise OllamaError("/api/version has no version")
        return int(match[1]), int(match[2]), int(match[3])

    def tags(self) -> dict[str, str]:
        """Return the digest (64 hex digits) of every model of the server by its name. Malformed entries are left out."""
        return {name: str(entry["digest"]) for name, entry in self._models().items()}

    def entry(self, model: str) -> dict[str, Any]:
        """Return the entry of a model in /api/tags, whatever its spelling; empty if the server does not have it."""
        wanted = server_form(model)
        return next((entry for name, entry in self._models().items() if server_form(name) == wanted), {})

    def size(self, model: str) -> int:
        """Return the bytes of the files of a model, with its base; 0 if the server does not have it or does not report it."""
        size = self.entry(model).get("size")
        return size if isinstance(size, int) else 0

    def _models(self) -> dict[str, dict[str, Any]]:
        models = self.get("/api/tags").get("models") or []
        if not isinstance(models, list):
            raise OllamaError("/api/tags has no list of models")
        found = {}
        for entry in models:
            name, digest = (entry.get("name"), entry.get("digest")) if isinstance(entry, dict) else ("", "")
            if isinstance(name, str) and name.isprintable() and _DIGEST.fullmatch(str(digest)):
                found[name] = entry
        return found

    def loaded(self) -> list[str]:
        """Return the names of the models that are in memory, sorted. Malformed entries are left out."""
        models = self.get("/api/ps").get("models") or []
        entries = [entry.get("name") for entry in models if isinstance(entry, dict)] if isinstance(models, list) else []
        return sorted(name for name in entries if isinstance(name, str) and name.isprintable())

    def digest(self, model: str) -> str:
        """Return the digest of a model; empty if the server does not have it. `name` is `name:latest`."""
        return str(self.entry(model).get("digest", ""))

    def show(self, model: str, verbose: bool = False, deadline: float | None = None) -> dict[str, Any]:
        """Return /api/show: `template`, `modelfile`, `details`, `model_info`; with `verbose` all tokens, too."""
        return self.post("/api/show", {"model": model, "verbose": verbose}, deadline=deadline)

    # Answers ------------------------------------------------------------------------------------------------------------

    def chat(self, model: str, messages: Sequence[Mapping[str, str]], **more: Any) -> Answer:
        """Return the answer to a chat. `more` as in `generate`."""
        return self._answer("/api/chat", {"model": model, "messages": list(messages)}, **more)

    def generate(self, model: str, prompt: str, *, raw: bool = False, **more: Any) -> Answer:
        """Return the answer to a prompt.

        `raw`: the prompt is not put into the model's template. `more`: `options` of the model (temperature,
        num_predict, seed); `deadline` in seconds; `first` in seconds, until the first byte, in which the server may
        load the model; `cancel`, to end it from another thread; `hear`, which receives each text of the reply; `keep`,
        the maximum of its bytes; `fields` of the request, such as `think`.
        """
        return self._answer("/api/generate", {"model": model, "prompt": prompt, "raw": raw}, **more)

    def _answer(
        self,
        path: str,
        body: dict[str, Any],
        *,
        options: Mapping[str, Any] | None = None,
        deadline: float = 600.0,
        first: float = 600.0,
        cancel: Cancel | None = None,
        hear: Callable[[str], None] | None = None,
        keep: int = MAX_ANSWER,
        fields: Mapping[str, Any] = MappingProxyType({}),
    ) -> Answer:
        # New servers refuse what they would truncate; `Answer.truncated` shows what older ones have truncated.
        body = body | {"stream": True, "options": dict(options or {}), "truncate": False, "shift": False, **fields}
        text, thinking = [], []
        last: dict[str, Any] = {}
        for line in self._lines("POST", path, body, deadline=deadline, first=first, cancel=cancel, keep=keep):
            message = line.get("message", line)  # of /api/chat
            if not isinstance(message, dict):
                raise OllamaError(f"the reply of {path} has no message", 500)
            text.append(text_of(message, "response" if message is line else "content"))
            thinking.append(text_of(message, "thinking"))
            if hear:
                hear(text[-1])
            last = line
        if last.get("done") is not True:
            raise OllamaError("the answer is incomplete")
        total, *parts = (
            seconds_of(last, name)
            for name in ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
        )
        tokens, read = (count_of(last, name) for name in ("eval_count", "prompt_eval_count"))
        context = body["options"].get("num_ctx")
        return Answer(
            text="".join(text),
            thinking="".join(thinking),
            finished="length" if last.get("done_reason") == "length" else "stop",
            tokens=tokens,
            queued=max(0.0, total - sum(parts)),
            seconds=total,
            prompt_tokens=read,
            truncated=bool(context) and (read >= context or read + tokens > context),
        )

    # Models -------------------------------------------------------------------------------------------------------------

    def create(self, body: Mapping[str, Any], deadline: float = 600.0) -> None:
        """Create a model. `body` has the fields of /api/create; their names depend on the version of the server."""
        self._follow("/api/create", body, deadline, idle=deadline)  # silent while it quantizes

    def pull(self, model: str, deadline: float = 24 * 3600.0, report: Callable[[str], None] | None = None) -> None:
        """Let the server fetch a model from its registry. `report` receives each new status."""
        self._follow("/api/pull", {"model": model}, deadline, report)

    def copy(self, source: str, target: str) -> None:
        """Give a model a second name."""
        self._read("POST", "/api/copy", {"source": source, "destination": target})

    def delete(self, model: str) -> bool:
        """Delete a model; return whether the server had it."""
        try:
            self._read("DELETE", "/api/delete", {"model": model})
        except OllamaError as error:
            if error.status == 404:
                return False
            raise
        return True

    def has_blob(self, digest: str) -> bool:
        """Return whether the server has the blob with this SHA-256 (64 hex digits)."""
        try:
            self._read("HEAD", f"/api/blobs/sha256:{digest}")
        except OllamaError as error:
            if error.status == 404:
                return False
            raise
        return True

    def put_blob(self, path: Path, digest: str, deadline: float = 3600.0) -> None:
        """Send a file with this SHA-256 (64 hex digits) as a blob, unless the server has it."""
        if not self.has_blob(digest):
            with path.open("rb") as file:
                size = str(path.stat().st_size)
                blocks = iter(lambda: file.read(_BLOCK), b"")
                headers = {"Content-Length": size}
                self._read("POST", f"/api/blobs/sha256:{digest}", blocks, headers=headers, deadline=deadline)

    def _follow(
        self,
        path: str,
        body: Mapping[str, Any],
        deadline: float,
        report: Callable[[str], None] | None = None,
        idle: float | None = None,
    ) -> None:
        status, limits = "", dict[str, Any](deadline=deadline, first=deadline, idle=idle)
        for line in self._lines("POST", path, dict(body) | {"stream": True}, keep=0, **limits):
            new = text_of(line, "status")
            if report and new != status:
                report(new[:MAX_ERROR])
            status = new
        if status != "success":
            raise OllamaError(f"{path} ended without success{f': {status}' if status else ''}")

    # HTTP ---------------------------------------------------------------------------------------------------------------

    def get(self, path: str, **more: Any) -> dict[str, Any]:
        """Return the reply of another API of the server, an object. `more`: `deadline` in seconds, `limit` in bytes."""
        return _parse_object(self._read("GET", path, **more), path)

    def post(self, path: str, body: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Return the reply of another API to a request, an object. `more`: as in `send`."""
        return _parse_object(self._read("POST", path, body, **more), path)

    def send(self, path: str, body: dict[str, Any], **more: Any) -> None:
        """Send a request of another API, and ignore the text of its reply. `more`: `deadline` and `first` in seconds, `cancel`."""
        self._read("POST", path, body, **more)

    def events(self, path: str, body: dict[str, Any], **more: Any) -> Iterator[dict[str, Any]]:
        """Yield the objects of a reply of another API, as server-sent events or lines. `more` as in `generate`."""
        yield from self._lines("POST", path, body, **more)

    def _read(self, method: str, path: str, body: Any = None, limit: int = MAX_BODY, **more: Any) -> bytes:
        with self._reply(method, path, body, **more) as reply:
            data = reply.read(limit + 1)
        if len(data) > limit:
            raise OllamaError(f"the reply of {path} is larger than {limit >> 20} MiB", failure="final")
        return data

    def _lines(
        self,
        method: str,
        path: str,
        body: dict[str, Any],
        *,
        keep: int = MAX_ANSWER,
        cancel: Cancel | None = None,
        **more: Any,
    ) -> Iterator[dict[str, Any]]:
        """Yield the objects of a streamed reply. An object with `error` raises. `keep`: maximum of all bytes; 0: any."""
        total = 0
        with self._reply(method, path, body, cancel=cancel, **more) as reply:
            while line := reply.readline(MAX_LINE + 1):
                total += len(line)
                if len(line) > MAX_LINE or (keep and total > keep):
                    most = f"{keep >> 20} MiB" if keep >> 20 else f"{keep >> 10} KiB"
                    raise OllamaError(f"the reply of {path} is too large: more than {most}", failure="final")
                whole, line = line.endswith(b"\n"), line.removeprefix(b"data:").strip()
                if not line or line == b"[DONE]" or line.startswith(b":"):
                    continue
                item = _parse_object(line, path, 500 if whole else 0)
                if "error" in item:
                    raise OllamaError(_error_text(line, 500), 500)
                if cancel:
                    cancel.begun = True
                yield item

    @contextlib.contextmanager
    def _reply(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | Iterable[bytes] | None = None,
        *,
        deadline: float | None = None,
        first: float = 0.0,
        idle: float | None = None,
        cancel: Cancel | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Iterator[http.client.HTTPResponse]:
        limit = deadline or self._deadline
        end = time.monotonic() + limit
        connection = http.client.HTTPConnection(self._address, self.port)
        try:
            sock = self._connect(limit, max(first, self._idle), cancel)
            connection.sock = sock
            data = json.dumps(body).encode() if isinstance(body, dict) else body
            given = {"Connection": "close", "User-Agent": "trainyard", **self._headers, **headers}
            connection.request(method, self._path + path, data, given)
            reply = connection.getresponse()
            sock.idle = idle or self._idle
            if reply.status >= 300:
                raise OllamaError(_error_text(reply.read(_BLOCK), reply.status), reply.status)
            yield reply
        except TimeoutError:
            if time.monotonic() < end:
                raise OllamaError(f"no complete reply within the time limit ({path})") from None
            raise OllamaError(
                f"no complete reply within the time limit of {limit:g} s ({path})", failure="final"
            ) from None
        except ConnectionRefusedError:
            raise OllamaError(f"connection refused at {self._address} port {self.port}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            if cancel and cancel.cancelled:
                raise OllamaError("the request was cancelled") from None
            raise OllamaError(f"the connection was lost ({path}): {type(error).__name__}") from None
        finally:
            connection.close()

    def _connect(self, deadline: float, idle: float, cancel: Cancel | None) -> _BoundedSocket:
        plain = socket.create_connection((self._address, self.port), self._connect_timeout)
        sock = _BoundedSocket(plain.family, plain.type, plain.proto, fileno=plain.detach())
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.deadline, sock.idle, sock.cancel = time.monotonic() + deadline, idle, cancel
        if cancel:
            cancel.heard = time.monotonic()
            try:
                cancel.watch(sock)
            except OllamaError:
                sock.close()
                raise
        return sock


def _parse_object(data: bytes, path: str, status: int = 500) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise OllamaError(f"the reply of {path} is not JSON", status) from None
    if not isinstance(value, dict):
        raise OllamaError(f"the reply of {path} is not a JSON object", status)
    return value


def _error_text(data: bytes, status: int) -> str:
    """Return the message of an error; of a page of a proxy, its status and its first words."""
    with contextlib.suppress(OllamaError):
        found = _parse_object(data, "")
        inner = found.get("error")  # of vLLM: an object
        if text := text_of(inner, "message") if isinstance(inner, dict) else text_of(found, "error"):
            return text
        data = b""
    words = re.sub(
        r"<(head|style|script)\b.*?</\1>|<[^>]*>", " ", data.decode(errors="replace"), flags=re.DOTALL | re.I
    )
    shown = " ".join(words.split())[:_PAGE]
    return f"HTTP status {status}" + (f": {shown}" if shown else "")
