"""Who may use the dashboard: a token, session cookies, and checks of every request.

By default, the server listens on loopback only. Other users of the controller, and web pages in the user's browser, can reach
that address. This requires the token, the check of the header Host, and a CSRF token in every form. On an address of a network,
the server has TLS, too: a browser then calls it by a name of the certificate only.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainer.common.errors import UserError
from trainer.common.files import write_atomic
from trainer.common.inputs import open_regular

SESSIONS = 256  # at the same time; the oldest one ends
SHORTEST = 32  # characters of a token
BODY_LIMIT = 10.0  # s for the body of a request
FORM_LIMIT = 64 << 10  # bytes
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # With `no-referrer`, a browser sends the forms of our own pages with the Origin `null`.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
NOT_OUR_FORM = "403: the form did not come from this page: reload it and try again\n"


def read_token(path: Path) -> str:
    """Return the token in a file of mode 0600; write a new one if there is none.

    Raises UserError: the file is unreadable, other users can read it, or it has no token.
    """
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, f"{secrets.token_urlsafe(32)}\n".encode(), 0o600)
        with open_regular(path) as file:
            mode, token = os.fstat(file.fileno()).st_mode, file.read(1024).decode(errors="replace").strip()
    except OSError as error:
        raise UserError(f"the token of the dashboard: cannot read {path}: {error.strerror or error}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise UserError(f"the token of the dashboard: other users may have read {path}: delete it for a new one")
    if len(token) < SHORTEST or not token.isascii():
        raise UserError(
            f"the token of the dashboard: {path} has none of {SHORTEST} characters: delete it for a new one"
        )
    return token


@dataclass(frozen=True)
class ListenAddress:
    """Where the server listens. `address`: IP address. `tls`: whether it uses TLS."""

    address: str
    port: int
    tls: bool = False

    @property
    def hosts(self) -> tuple[str, ...]:
        """The values of the header Host, the one of printed URLs first."""
        names = [f"[{self.address}]" if ":" in self.address else self.address, "localhost"]
        default = 443 if self.tls else 80  # which a browser omits
        return (*(f"{name}:{self.port}" for name in names), *(names if self.port == default else ()))

    @property
    def url(self) -> str:
        """The address of the first page."""
        return f"http{'s' if self.tls else ''}://{self.hosts[0]}/"

    def permits(self, host: str) -> bool:
        """Return whether a request with this header Host is for the server: with TLS, the browser has compared the certificate."""
        return self.tls or host.lower() in self.hosts


class SessionAuth:
    """The sessions of one start of the server. A browser begins one with a URL that has the token."""

    def __init__(self, site: ListenAddress, token: str, token_file: str = "") -> None:
        """Begin without sessions. `token_file`: where the token is, for messages."""
        self.site, self.token, self._file = site, token, token_file
        # Cookies do not distinguish ports. With the prefix __Host-, a browser takes the cookie only over TLS.
        self.cookie = f"{'__Host-' if site.tls else ''}trainyard_{site.port}"
        self.csrf = secrets.token_hex(32)
        self._sessions: dict[bytes, None] = {}  # digests of the cookies, the oldest first

    @property
    def url(self) -> str:
        """The URL with which a user begins."""
        return f"{self.site.url}login?token={self.token}"

    @property
    def help(self) -> str:
        """What to do without a session."""
        return f"Open the URL that `trainyard dashboard` printed, or /login?token= with the token in {self._file}.\n"

    async def login(self, request: Request) -> Response:
        """Begin a session for the right token, and continue with the first page."""
        if not same(request.query_params.get("token", ""), self.token):
            return PlainTextResponse("401: wrong token. " + self.help, 401)
        while len(self._sessions) >= SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        session = secrets.token_urlsafe(32)
        self._sessions[_digest(session)] = None
        response = RedirectResponse("/", 303)
        response.set_cookie(self.cookie, session, httponly=True, samesite="strict", path="/", secure=self.site.tls)
        return response

    def permits(self, scope: Scope) -> bool:
        """Return whether a request may be answered: it is in a session, or it is for /metrics with the token as bearer token."""
        if self.in_session(scope):
            return True
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        return scope["path"] == "/metrics" and scheme.lower() == "bearer" and same(given.strip(), self.token)

    def in_session(self, scope: Scope) -> bool:
        """Return whether a request has the cookie of a session."""
        return _digest(Request(scope).cookies.get(self.cookie, "")) in self._sessions

    async def read_form(self, request: Request) -> dict[str, str]:
        """Return the fields of a form of our own pages. Raises HTTPException for one from elsewhere, or that is too large or slow."""
        own = f"http{'s' if self.site.tls else ''}://{request.headers.get('host', '')}".lower()
        body = b""
        with contextlib.suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(BODY_LIMIT):
                async for part in request.stream():
                    body += part
                    if len(body) > FORM_LIMIT:
                        break
                else:
                    fields = {name: values[-1] for name, values in parse_qs(body.decode(errors="replace")).items()}
                    if request.headers.get("origin", own).lower() == own and same(fields.get("csrf", ""), self.csrf):
                        return fields
        raise HTTPException(403, NOT_OUR_FORM)


def same(given: str, secret: str) -> bool:
    """Compare texts in a time that reveals nothing about the secret."""
    return hmac.compare_digest(given.encode(), secret.encode())


def _digest(session: str) -> bytes:
    # The table has digests, so that the time to find one reveals nothing about a session.
    return hashlib.sha256(session.encode()).digest()


class AuthMiddleware:
    """Answers a request only for the right Host and, except for public paths, in a session; adds HEADERS."""

    def __init__(self, app: ASGIApp, access: SessionAuth) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        await (self._refusal(scope) or self.app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        if not self.access.site.permits(Headers(scope=scope).get("host", "")):
            return PlainTextResponse(f"400: unknown host name: use {self.access.site.url}\n", 400)
        if scope["path"] in ("/health", "/login") or self.access.permits(scope):
            return None
        return PlainTextResponse("401: not logged in. " + self.access.help, 401)
