"""Who may use the dashboard: a token or a password, session cookies, and checks of every request.

Without a password, the server listens on loopback only. Other users of the controller, and web pages in the user's
browser, can reach that address. This requires the token, the check of the header Host, and a CSRF token in every form.
On an address of a network, the server has
TLS and a password.
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
from typing import NamedTuple
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainyard.dashboard.http_limits import read_body
from trainyard.dashboard.password import AttemptLimit, PasswordHash

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


class LoginForm(NamedTuple):
    """An answer to a request to log in: show the form for the password."""

    message: str = ""
    status: int = 200


class Access:
    """The sessions of one start of the server. A subclass says how one begins."""

    help = ""  # for who is not logged in
    lifetime = math.inf  # s of a session
    public: tuple[str, ...] = ("/login",)  # beginnings of paths that need no session
    has_form = False  # whether a browser gets a form to log in, and a button to log out

    def __init__(self, site: Site) -> None:
        self.site = site
        # Cookies do not distinguish ports. With the prefix __Host-, a browser takes the cookie only over TLS.
        self.cookie = f"{'__Host-' if site.tls else ''}trainyard_{site.port}"
        self.csrf = secrets.token_hex(32)
        self._sessions: dict[bytes, float] = {}  # {digest of the cookie: when it ends}

    @property
    def url(self) -> str:
        """The URL with which a user begins."""
        return f"{self.site.origins[0]}/"

    async def login(self, request: Request) -> Response | LoginForm:
        """Begin a session, or return the reason for a refusal."""
        raise NotImplementedError

    async def permits(self, scope: Scope) -> bool:
        """Return whether a request may be answered: it belongs to a session, or it is for /metrics with its credentials."""
        if self.in_session(scope):
            return True
        if scope["path"] != "/metrics":
            return False
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        return await self.metrics_credentials(scope, scheme.lower(), given.strip())

    async def metrics_credentials(self, scope: Scope, scheme: str, given: str) -> bool:
        """Return whether the header Authorization, which has no other use, gives access to /metrics."""
        raise NotImplementedError

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
        self._sessions[_digest(session)] = now + self.lifetime
        response = RedirectResponse("/", 303)
        response.set_cookie(
            self.cookie,
            session,
            httponly=True,
            samesite="strict",
            path="/",
            secure=self.site.tls,
            max_age=self._max_age,
        )
        return response

    def end_session(self, request: Request) -> Response:
        """End the session of a request."""
        self._sessions.pop(_digest(request.cookies.get(self.cookie, "")), None)
        response = RedirectResponse("/login", 303)
        response.delete_cookie(self.cookie, httponly=True, samesite="strict", path="/", secure=self.site.tls)
        return response

    async def read_form(self, request: Request) -> dict[str, str] | None:
        """Return the fields of a form of our own pages; None for a form that came from elsewhere, or is too large."""
        fields = await self.read_fields(request)
        return fields if fields and same(fields.get("csrf", ""), self.csrf) else None

    async def read_fields(self, request: Request) -> dict[str, str] | None:
        """As `read_form`, without the CSRF token, which a browser has only after it has logged in."""
        if not self.same_origin(request):
            return None
        body = await read_body(request)
        if body is None:
            return None
        return {name: values[-1] for name, values in parse_qs(body.decode(errors="replace")).items()}

    def same_origin(self, request: Request) -> bool:
        """Return whether a request comes from a page of this server, according to the browser."""
        origin = request.headers.get("origin")
        if origin is not None and origin not in self.site.origins:
            return False
        return request.headers.get("sec-fetch-site", "same-origin") == "same-origin"

    @property
    def _max_age(self) -> int | None:
        return None if math.isinf(self.lifetime) else int(self.lifetime)


class TokenAccess(Access):
    """One token per start, in the URL that the server prints. Sessions last as long as the server."""

    help = "Open the URL that `trainyard dashboard` printed when it started: it contains the token.\n"

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.token = secrets.token_urlsafe(32)

    @property
    def url(self) -> str:
        """The URL that logs in."""
        return f"{super().url}login?token={self.token}"

    async def login(self, request: Request) -> Response | LoginForm:
        """Begin a session for the right token."""
        if request.method != "GET" or not same(request.query_params.get("token", ""), self.token):
            return PlainTextResponse("401: wrong token. " + self.help, 401)
        return self.begin_session()

    async def metrics_credentials(self, scope: Scope, scheme: str, given: str) -> bool:
        """Accept the token as a bearer token."""
        return scheme == "bearer" and same(given, self.token)


class PasswordAccess(Access):
    """A password. Wrong ones are limited, and a session ends after LIFETIME."""

    help = "Log in at /login.\n"
    lifetime = LIFETIME
    public = ("/login", "/static/")  # the form to log in has styles
    has_form = True

    def __init__(self, site: Site, password: PasswordHash, report: Callable[[str], None]) -> None:
        """Take the hash of the password; `report` gets a line for each wrong one."""
        super().__init__(site)
        self._password, self._report = password, report
        self._limit = AttemptLimit()
        self._thread = ThreadPoolExecutor(1, "password")  # one attempt at a time: each needs memory

    async def login(self, request: Request) -> Response | LoginForm:
        """Show the form, or begin a session for the right password."""
        if request.method != "POST":
            return LoginForm()
        fields = await self.read_fields(request)
        if fields is None:
            return PlainTextResponse(NOT_OUR_FORM, 403)
        wait = await self._try(request.scope, fields.get("password", ""))
        if wait is None:
            return self.begin_session()
        if wait:
            return LoginForm(f"Too many wrong passwords: try again in {math.ceil(wait)} s.", 429)
        return LoginForm("The password is wrong.", 401)

    async def metrics_credentials(self, scope: Scope, scheme: str, given: str) -> bool:
        """Accept the password of HTTP's basic authentication, with any user name."""
        if scheme != "basic":
            return False
        try:
            password = base64.b64decode(given, validate=True).decode().partition(":")[2]
        except ValueError:
            return False
        return await self._try(scope, password) is None

    async def _try(self, scope: Scope, password: str) -> float | None:
        """Return None for the right password; 0 for a wrong one; the seconds to wait after too many wrong ones."""
        address = str((scope.get("client") or ("unknown",))[0])
        if wait := self._limit.begin(address):
            return wait
        loop = asyncio.get_running_loop()
        if await loop.run_in_executor(self._thread, self._password.matches, password):
            self._limit.withdraw(address)
            return None
        self._report(f"dashboard: wrong password from {address}")
        return 0.0


def same(given: str, secret: str) -> bool:
    """Compare texts in a time that reveals nothing about the secret."""
    return hmac.compare_digest(given.encode(), secret.encode())


def _digest(session: str) -> bytes:
    # The table has digests, so that the time to find one reveals nothing about a session.
    return hashlib.sha256(session.encode()).digest()


class Guard:
    """Answers a request only for the right Host and, except for public paths, in a session; adds HEADERS."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
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

        await (await self._refusal(scope) or self.app)(scope, receive, send_with_headers)

    async def _refusal(self, scope: Scope) -> Response | None:
        site, path, headers = self.access.site, str(scope["path"]), Headers(scope=scope)
        if headers.get("host", "").lower() not in site.hosts:
            return PlainTextResponse(f"400: unknown host name: use {' or '.join(site.names)}.\n", 400)
        if any(path == one or (one.endswith("/") and path.startswith(one)) for one in self.access.public):
            return None
        if await self.access.permits(scope):
            return None
        if self.access.has_form and scope["method"] == "GET" and "text/html" in headers.get("accept", ""):
            return RedirectResponse("/login", 303)
        return PlainTextResponse("401: not logged in. " + self.access.help, 401)
