"""A bounded HTTP GET. The server is not trusted: its reply may be endless, too large or malformed.

The request is HTTP/1.0, to which no server answers in chunks.
"""

import asyncio
import contextlib
import re
import socket

MAX_HEADER = 16 * 1024  # bytes
MAX_BODY = 2 * 1024 * 1024  # bytes; a real /api/tags with 1,000 models is about 0.4 MB


class BadReply(Exception):
    """The reply is invalid. The message contains no text from the network."""


async def get(address: str, port: int, path: str, timeout: float, connected: socket.socket | None = None) -> bytes:
    """Return the body of `GET http://address:port/path`.

    Args:
        address: an IP address; IPv6 link-local with its %scope.
        port: TCP port.
        path: a constant path, which is not escaped.
        timeout: seconds from the connection to the last byte of the reply.
        connected: a socket that is already connected; it is closed in any case.

    Raises:
        BadReply: not HTTP, a status other than 200 (redirects are not followed), too large, too slow, or incomplete.
    """
    writer = None
    try:
        async with asyncio.timeout(timeout):
            if connected is None:
                reader, writer = await asyncio.open_connection(address, port, limit=MAX_HEADER)
            else:
                reader, writer = await asyncio.open_connection(sock=connected, limit=MAX_HEADER)
            host = f"[{address.partition('%')[0]}]" if ":" in address else address
            writer.write(
                f"GET {path} HTTP/1.0\r\nHost: {host}:{port}\r\nAccept: application/json\r\n"
                "User-Agent: trainyard\r\nConnection: close\r\n\r\n".encode()
            )
            return await _read_reply(reader)
    except TimeoutError:
        raise BadReply(f"no complete reply within {timeout:g} s") from None
    except asyncio.IncompleteReadError:
        raise BadReply("the reply is incomplete") from None
    except (asyncio.LimitOverrunError, ValueError):
        raise BadReply("the reply is not HTTP") from None
    except OSError:
        raise BadReply("the connection was lost") from None
    finally:
        if writer is not None:
            # abort() instead of close(), which waits until the peer has read everything.
            writer.transport.abort()
        elif connected is not None:
            with contextlib.suppress(OSError):
                connected.close()


async def _read_reply(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status = re.match(r"HTTP/1\.[01] (\d{3})[ \r]", head)
    if not status:
        raise BadReply("the reply is not HTTP")
    if status[1] != "200":
        raise BadReply(f"HTTP status {status[1]}")
    length = re.search(r"^content-length:[ \t]*(\d{1,18})[ \t]*\r$", head, re.ASCII | re.IGNORECASE | re.MULTILINE)
    if length and int(length[1]) <= MAX_BODY:
        return await reader.readexactly(int(length[1]))
    body = bytearray()
    while not length and len(body) <= MAX_BODY and (part := await reader.read(65536)):
        body += part
    if length or len(body) > MAX_BODY:
        raise BadReply(f"the reply is larger than {MAX_BODY // 1024 // 1024} MiB")
    return bytes(body)
