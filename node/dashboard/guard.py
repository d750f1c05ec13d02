"""Who may use the page: nothing comes past here that a foreign web page, or a stranger, could have sent.

    Host          a literal address, localhost or this machine's own name: no name that somebody else can point here
    token         where others can connect: a header, or once ?token=, which becomes a cookie
    POST          with a header that no foreign page can send, from a page of this very origin
    answers       run no code but the page's own, are in no frame, and tell nobody where they came from

A request that passes has been asked for by the node's user, or by something that has the user's token.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Collection
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from blake3 import blake3
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.node.store import disk_errors, write_atomically

TOKEN_NAME = "dashboard.token"
TOKEN_BYTES = 24
TOKEN_LIMIT_CHARS = 256
COOKIE = "shoal_page"
COOKIE_LIFE_S = 30 * 24 * 3600
ORDER_HEADER = "x-shoal-order"
_COOKIE_CONTEXT = "shoal dashboard cookie v1"

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}

_ASK_FOR_TOKEN = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Shoal: token</title><link rel="stylesheet" href="/static/style.css"></head>
<body class="token"><main><h1>This page wants a token</h1>
<p>It is in the file <code>dashboard.token</code> in the data folder of the node.</p>
<form action="/" method="get"><label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<button class="primary">Open</button></form></main></body></html>
"""


def load_token(folder: Path) -> str:
    """The token of a data folder, made at its first use; readable by its user alone. Raises StorageError."""
    path = folder / TOKEN_NAME
    with disk_errors(folder):
        if path.exists():
            known = path.read_text(encoding="ascii", errors="replace").strip()
            if 16 <= len(known) <= TOKEN_LIMIT_CHARS:
                return known
        token = secrets.token_urlsafe(TOKEN_BYTES)
        write_atomically(path, token.encode() + b"\n")
        path.chmod(0o600)
        return token


class Guard:
    """Stands before an application. token: None where none is asked for; names: of this host, beside its addresses."""

    def __init__(self, app: ASGIApp, *, token: str | None, names: Collection[str] = ()) -> None:
        self._app = app
        self._token = token
        own = socket.gethostname().lower()
        self._names = {"localhost", own, f"{own}.local", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass it on."""
        if scope["type"] != "http":
            return  # nothing here speaks anything else; the server closes it
        refusal = self._refusal(Request(scope))
        await (refusal or self._app)(scope, receive, _with_headers(send))

    def _refusal(self, request: Request) -> Response | None:
        if not self._names_this_host(request.headers.get("host", "")):
            return PlainTextResponse(
                "this name is not the node's; open the page by its address\n", HTTPStatus.MISDIRECTED_REQUEST
            )
        if request.method not in ("GET", "HEAD") and not _from_this_origin(request):
            return PlainTextResponse("only the page itself may ask this\n", HTTPStatus.FORBIDDEN)
        if self._token is None or request.url.path.startswith("/static/"):
            return None
        if self._knows(request):
            return None
        return self._ask_for_token(request, self._token)

    def _names_this_host(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        if name is None:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True

    def _knows(self, request: Request) -> bool:
        assert self._token is not None
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _same(given.strip(), self._token):
            return True
        return _same(request.cookies.get(COOKIE, ""), _cookie_of(self._token))

    def _ask_for_token(self, request: Request, token: str) -> Response:
        given = request.query_params.get("token")
        if request.method == "GET" and given is not None and _same(given, token):
            answer: Response = RedirectResponse(request.url.path, HTTPStatus.SEE_OTHER)
            answer.set_cookie(
                COOKIE, _cookie_of(token), max_age=COOKIE_LIFE_S, path="/", httponly=True, samesite="strict"
            )
            return answer
        if request.url.path == "/":
            return HTMLResponse(_ASK_FOR_TOKEN, HTTPStatus.UNAUTHORIZED)
        return PlainTextResponse(
            "send the token of the node's data folder: Authorization: Bearer …\n",
            HTTPStatus.UNAUTHORIZED,
            {"www-authenticate": "Bearer"},
        )


def _from_this_origin(request: Request) -> bool:
    """Whether only a page of this origin, or no browser, can have sent it."""
    if ORDER_HEADER not in request.headers or request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return False
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host")


def _cookie_of(token: str) -> str:
    """What the cookie holds: not the token itself, which may stand in scripts and serve elsewhere."""
    return blake3(token.encode(), derive_key_context=_COOKIE_CONTEXT).hexdigest()


def _same(given: str, known: str) -> bool:
    return hmac.compare_digest(given.encode(), known.encode())


def _with_headers(send: Send) -> Send:
    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
        await send(message)

    return send_more
