"""Who may use the dashboard: one token per start, a session cookie, and checks of every request.

The server listens on 127.0.0.1 only. Other users of the controller, and web pages in the user's browser, can reach that
address: hence the token, the check of the header Host, and a CSRF token in every form.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

FORM_LIMIT = 16 << 10  # bytes
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
LOGIN_HELP = "Open the URL that `trainyard dashboard` printed when it started: it contains the token.\n"


class Access:
    """The secrets of one start of the server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.token = secrets.token_urlsafe(32)
        self.session = secrets.token_urlsafe(32)
        self.cookie = f"trainyard_{port}"  # cookies do not distinguish ports
        self.csrf = hmac.new(self.session.encode(), b"csrf", hashlib.sha256).hexdigest()
        self.hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}

    @property
    def url(self) -> str:
        """The URL that logs in."""
        return f"http://127.0.0.1:{self.port}/login?token={self.token}"

    def login(self, request: Request) -> Response:
        """Set the cookie for the right token, and continue with the first page."""
        if not same(request.query_params.get("token", ""), self.token):
            return PlainTextResponse("401: wrong token. " + LOGIN_HELP, 401)
        response = RedirectResponse("/", 303)
        response.set_cookie(self.cookie, self.session, httponly=True, samesite="strict", path="/")
        return response

    def permits(self, scope: Scope) -> bool:
        """Return whether the request has the cookie of this start; /metrics also accepts the token as a bearer token."""
        request = Request(scope)
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scope["path"] == "/metrics" and scheme.lower() == "bearer" and same(given.strip(), self.token):
            return True
        return same(request.cookies.get(self.cookie, ""), self.session)

    async def read_form(self, request: Request) -> dict[str, str] | None:
        """Return the fields of a form of our own pages; None for a form that came from elsewhere, or is too large."""
        origin = request.headers.get("origin")
        if origin is not None and origin.removeprefix("http://") not in self.hosts:
            return None
        if request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return None
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > FORM_LIMIT:
                return None
        fields = {name: values[-1] for name, values in parse_qs(body.decode(errors="replace")).items()}
        return fields if same(fields.get("csrf", ""), self.csrf) else None


def same(given: str, secret: str) -> bool:
    """Compare texts in a time that says nothing about the secret."""
    return hmac.compare_digest(given.encode(), secret.encode())


class Guard:
    """Answers a request only for the right Host and, but for /login, with the right session; adds HEADERS."""

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

        refusal: Response | None = None
        if Headers(scope=scope).get("host", "") not in self.access.hosts:
            refusal = PlainTextResponse("400: unknown host name: use 127.0.0.1 or localhost.\n", 400)
        elif scope["path"] != "/login" and not self.access.permits(scope):
            refusal = PlainTextResponse("401: not logged in. " + LOGIN_HELP, 401)
        await (refusal or self.app)(scope, receive, send_with_headers)
