"""Who may use the dashboard: a token or a password, session cookies, and checks of every request.

Without a password, the server listens on loopback only. Other users of the controller, and web pages in the user's
browser, can reach that address. This requires the token, the check of the header Host, and a CSRF token in every form.
On an address of a network, the server has TLS and a password.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainyard.dashboard.http_limits import LimitedListener, read_body
from trainyard.dashboard.password import AttemptLimit, matches

SESSIONS = 256  # at the same time; the oldest one ends
LIFETIME = 12 * 3600.0  # s until a session that began with a password ends
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


@dataclass(frozen=True)
class Site:
    """Where the server listens.

    Attributes:
        address: IP address.
        names: host names and addresses by which a browser may call it, the one of printed URLs first.
        tls: whether it uses TLS.
    """

    address: str
    port: int
    names: tuple[str, ...]
    tls: bool = False

    @property
    def hosts(self) -> tuple[str, ...]:
        """The values of the header Host, the one of printed URLs first."""
        names = [f"[{name}]" if ":" in name else name for name in self.names]
        bare = names if self.port == (443 if self.tls else 80) else []  # a browser omits the default port
        return (*(f"{name}:{self.port}" for name in names), *bare)

    @property
    def origins(self) -> tuple[str, ...]:
        """The values of the header Origin, the one of printed URLs first."""
        return tuple(f"http{'s' if self.tls else ''}://{host}" for host in self.hosts)


class SessionAuth:
    """The sessions of one start of the server.

    A browser begins one with the password or, if there is none, with the token of this start in the URL that the server prints.
    """

    def __init__(self, site: Site, password: str | None = None, report: Callable[[str], None] = print) -> None:
        """Begin without sessions.

        Args:
            password: its hash; None for a token.
            report: gets a line for each wrong password.
        """
        self.site, self.password, self._report = site, password, report
        self.token = "" if password else secrets.token_urlsafe(32)
        self.public = ("/health", "/login", *(("/static/",) if password else ()))  # the form to log in has styles
        # Cookies do not distinguish ports. With the prefix __Host-, a browser takes the cookie only over TLS.
        self.cookie = f"{'__Host-' if site.tls else ''}trainyard_{site.port}"
        self.csrf = secrets.token_hex(32)
        self._lifetime = LIFETIME if password else math.inf
        self._sessions: dict[bytes, float] = {}  # {digest of the cookie: when it ends}
        self._limit = AttemptLimit()
        self._thread = ThreadPoolExecutor(1, "password")  # one attempt at a time: each needs memory

    @property
    def url(self) -> str:
        """The URL with which a user begins."""
        return f"{self.site.origins[0]}/{'' if self.password else f'login?token={self.token}'}"

    @property
    def help(self) -> str:
        """What to do without a session."""
        if self.password:
            return "Log in at /login.\n"
        return "Open the URL that `trainyard dashboard` printed when it started: it contains the token.\n"

    async def login(self, request: Request, form: Callable[[str], str]) -> Response:
        """Begin a session for the right token or password; without it, say why or show the form.

        Args:
            form: returns the page with the form and a message.
        """
        if not self.password:
            if request.method == "GET" and same(request.query_params.get("token", ""), self.token):
                return self.begin_session()
            return PlainTextResponse("401: wrong token. " + self.help, 401)
        if request.method != "POST":
            return HTMLResponse(form(""))
        fields = await self.read_fields(request)
        if fields is None:
            return PlainTextResponse(NOT_OUR_FORM, 403)
        wait = await self._try(request.scope, fields.get("password", ""))
        if wait is None:
            return self.begin_session()
        if wait:
            return HTMLResponse(form(f"Too many wrong passwords: try again in {math.ceil(wait)} s."), 429)
        return HTMLResponse(form("The password is wrong."), 401)

    async def permits(self, scope: Scope) -> bool:
        """Return whether a request may be answered: it belongs to a session, or it is for /metrics with its credentials.

        They are the token as a bearer token, or the password of HTTP's basic authentication with any user name.
        """
        if self.in_session(scope):
            return True
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        if scope["path"] != "/metrics" or scheme.lower() != ("basic" if self.password else "bearer"):
            return False
        if not self.password:
            return same(given.strip(), self.token)
        try:
            password = base64.b64decode(given.strip(), validate=True).decode().partition(":")[2]
        except ValueError:
            return False
        return await self._try(scope, password) is None

    async def _try(self, scope: Scope, password: str) -> float | None:
        """Return None for the right password; 0 for a wrong one; the seconds to wait after too many wrong ones."""
        assert self.password
        address = str((scope.get("client") or ("unknown",))[0])
        if wait := self._limit.begin(address):
            return wait
        if await asyncio.get_running_loop().run_in_executor(self._thread, matches, self.password, password):
            self._limit.withdraw(address)
            return None
        self._report(f"dashboard: wrong password from {address}")
        return 0.0

    def in_session(self, scope: Scope) -> bool:
        """Return whether a request has the cookie of a session that has not ended."""
        given = Request(scope).cookies.get(self.cookie, "")
        return time.monotonic() < self._sessions.get(_digest(given), -math.inf)

    def begin_session(self) -> Response:
        """Set the cookie of a new session, and continue with the first page."""
        now = time.monotonic()
        self._sessions = {key: end for key, end in self._sessions.items() if end > now}
        while len(self._sessions) >= SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        session = secrets.token_urlsafe(32)
        self._sessions[_digest(session)] = now + self._lifetime
        response = RedirectResponse("/", 303)
        how = self._cookie_attributes | {"max_age": int(LIFETIME) if self.password else None}
        response.set_cookie(self.cookie, session, **how)
        return response

    def end_session(self, request: Request) -> Response:
        """End the session of a request."""
        self._sessions.pop(_digest(request.cookies.get(self.cookie, "")), None)
        response = RedirectResponse("/login", 303)
        response.delete_cookie(self.cookie, **self._cookie_attributes)
        return response

    @property
    def _cookie_attributes(self) -> dict[str, Any]:
        return {"httponly": True, "samesite": "strict", "path": "/", "secure": self.site.tls}

    async def read_form(self, request: Request) -> dict[str, str] | None:
        """Return the fields of a form of our own pages; None for a form that came from elsewhere, or is too large."""
        fields = await self.read_fields(request)
        return fields if fields and same(fields.get("csrf", ""), self.csrf) else None

    async def read_fields(self, request: Request) -> dict[str, str] | None:
        """As `read_form`, without the CSRF token, which a browser has only after it has logged in."""
        # What the browser says of the page that sends the form.
        same_origin = request.headers.get("origin", self.site.origins[0]) in self.site.origins
        if not same_origin or request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return None
        body = await read_body(request)
        if body is None:
            return None
        return {name: values[-1] for name, values in parse_qs(body.decode(errors="replace")).items()}


def same(given: str, secret: str) -> bool:
    """Compare texts in a time that reveals nothing about the secret."""
    return hmac.compare_digest(given.encode(), secret.encode())


def _digest(session: str) -> bytes:
    # The table has digests, so that the time to find one reveals nothing about a session.
    return hashlib.sha256(session.encode()).digest()


class AuthMiddleware:
    """Answers a request only for the right Host and, except for public paths, in a session; adds HEADERS."""

    def __init__(self, app: ASGIApp, access: SessionAuth, listener: LimitedListener) -> None:
        self.app, self.access, self.listener = app, access, listener

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

        with self.listener.request(tuple(scope.get("client") or ())):
            await (await self._refusal(scope) or self.app)(scope, receive, send_with_headers)

    async def _refusal(self, scope: Scope) -> Response | None:
        site, path, headers = self.access.site, str(scope["path"]), Headers(scope=scope)
        if headers.get("host", "").lower() not in site.hosts:
            return PlainTextResponse(f"400: unknown host name: use {' or '.join(site.names)}.\n", 400)
        if any(path == one or (one.endswith("/") and path.startswith(one)) for one in self.access.public):
            return None
        if await self.access.permits(scope):
            return None
        if self.access.password and scope["method"] == "GET" and "text/html" in headers.get("accept", ""):
            return RedirectResponse("/login", 303)
        return PlainTextResponse("401: not logged in. " + self.access.help, 401)
