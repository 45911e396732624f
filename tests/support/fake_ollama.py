"""Servers that answer like Ollama, and hostile servers, on real sockets in a separate process.

with serve([Server("127.0.0.2")]): ...
python fake_ollama.py < servers.json      (prints `ready` when all servers listen)
"""

import asyncio
import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from netlab import in_namespace


@dataclass(frozen=True)
class Server:
    """One listening port. `kind` names a function or a reply of this module; `delay` is in seconds before each reply."""

    address: str
    port: int = 11434
    namespace: str = ""
    kind: str = "ollama"
    delay: float = 0.0
    version: str = "0.12.3"
    models: list[dict[str, Any]] = field(default_factory=list)
    loaded: list[dict[str, Any]] = field(default_factory=list)


def model(
    name: str, family: str = "qwen2", modified: str = "2026-01-02T03:04:05.678901234Z", **more: Any
) -> dict[str, Any]:
    """Return an entry of /api/tags in the format of Ollama 0.12."""
    digest = "a8b0c51577010a279d933d14c2a8ab4b268079d44c5c8830c0a93900f1827c67"
    details = {"parent_model": "", "format": "gguf", "family": family, "families": [family]}
    details |= {"parameter_size": "494.03M", "quantization_level": "Q4_K_M"}
    about = {"name": name, "model": name, "modified_at": modified, "size": 397821319, "digest": digest}
    return about | {"details": details} | more


@contextlib.contextmanager
def serve(servers: list[Server]) -> Iterator[None]:
    """Run the servers in another process until the block ends."""
    process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    try:
        process.stdin.write(json.dumps([dataclasses.asdict(s) for s in servers]))
        process.stdin.close()
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("the fake servers did not start")
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def body(server: Server, path: str) -> bytes:
    """Return the body of Ollama's reply to `path`."""
    replies: dict[str, Any] = {"/api/tags": {"models": server.models}, "/api/ps": {"models": server.loaded}}
    replies["/api/version"] = {"version": server.version}
    return json.dumps(replies[path]).encode()


def http(content: bytes, kind: str = "application/json") -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n" % (kind.encode(), len(content)) + content
    )


async def ollama(server: Server, path: str, out: asyncio.StreamWriter) -> None:
    out.write(http(body(server, path)))


async def segments(server: Server, path: str, out: asyncio.StreamWriter) -> None:
    """A complete reply in segments of 40 bytes."""
    reply = http(body(server, path))
    for i in range(0, len(reply), 40):
        out.write(reply[i : i + 40])
        await out.drain()
        await asyncio.sleep(0.002)


async def to_the_end(server: Server, path: str, out: asyncio.StreamWriter) -> None:
    """No length: the body ends with the connection."""
    out.write(b"HTTP/1.0 200 OK\r\n\r\n" + body(server, path))


async def without_ps(server: Server, path: str, out: asyncio.StreamWriter) -> None:
    """Ollama before 0.1.33: no /api/ps."""
    out.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n" if path == "/api/ps" else http(body(server, path)))


async def huge_list(server: Server, path: str, out: asyncio.StreamWriter) -> None:
    """10 MB of valid models."""
    if path == "/api/tags":
        out.write(http(json.dumps({"models": [model(f"m{i}") for i in range(25_000)]}).encode()))
    else:
        out.write(http(body(server, path)))


async def drip(server: Server, path: str, out: asyncio.StreamWriter) -> None:
    """One byte every 50 ms."""
    for byte in http(body(server, path) + b" " * 10_000):
        out.write(bytes([byte]))
        await out.drain()
        await asyncio.sleep(0.05)


async def drip_ps(server: Server, path: str, out: asyncio.StreamWriter) -> None:
    """Ollama whose list of loaded models does not end."""
    await (drip if path == "/api/ps" else ollama)(server, path, out)


async def tarpit(server: Server, path: str, out: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def hang_up(server: Server, path: str, out: asyncio.StreamWriter) -> None:
    out.transport.abort()


OK = b"HTTP/1.1 200 OK\r\n"
REPLIES = {
    "html": http(b"<html><body>router login</body></html>", "text/html"),
    "ok_everywhere": http(b"{}"),
    "redirect": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    "wrong_json": http(b'{"version": ["0.12.3"], "models": {"name": 1}}'),
    "broken_json": http(b'{"version": "0.12.3", "models": [{"name": "x"'),
    "deep_json": http(b'{"version":' + b"[" * 500_000 + b"]" * 500_000 + b"}"),
    "cut_short": OK + b"Content-Length: 1000\r\n\r\n{",
    "absurd_length": OK + b"Content-Length: 99999999999999999\r\n\r\n{",
    "garbage": bytes(range(256)) * 100,
}
ENDLESS = {
    "endless": (OK + b"\r\n", b" " * 65536),
    "endless_chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 1000),
    "endless_header": (OK, b"X-A: " + b"a" * 8000 + b"\r\n"),
}
HOSTILE = (
    *("html", "ok_everywhere", "redirect", "wrong_json", "broken_json", "deep_json", "huge_list", "endless"),
    *("endless_chunks", "endless_header", "drip", "tarpit", "hang_up", "cut_short", "absurd_length", "garbage"),
)


async def _main(servers: list[Server]) -> None:
    for server in servers:
        listener = in_namespace(server.namespace, lambda s=server: _listen(s)) if server.namespace else _listen(server)
        await asyncio.start_server(_answer(server), sock=listener)
    print("ready", flush=True)
    await asyncio.Event().wait()


def _listen(server: Server) -> socket.socket:
    family = socket.AF_INET6 if ":" in server.address else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(socket.getaddrinfo(server.address, server.port)[0][4])
    listener.listen(1024)
    return listener


def _answer(server: Server) -> Any:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
            await asyncio.sleep(server.delay)
            first, more = ENDLESS.get(server.kind, (REPLIES.get(server.kind, b""), b""))
            writer.write(first)
            while more:
                writer.write(more)
                await writer.drain()
            if not first:
                await globals()[server.kind](server, path, writer)
            await writer.drain()
            writer.close()

    return answer


if __name__ == "__main__":
    asyncio.run(_main([Server(**s) for s in json.load(sys.stdin)]))
