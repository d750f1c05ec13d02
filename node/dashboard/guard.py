"""Guard of the page: it refuses what a foreign web page, or a stranger, could have sent.

    Host          a literal address, localhost or this machine's own name: no name that somebody else can point here
    token         for orders, and where others can connect for everything: a header, or once ?token=, which becomes a
                  cookie
    POST          with a header that no foreign page can send, from a page of this very origin
    answers       run no code but the page's own, are in no frame, and tell nobody where they came from

Whoever can connect over loopback may look; an order comes from somebody who can read the token in the data folder.
Cookies are no key there: a browser sends them to every port of the machine.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Collection
from http import HTTPStatus
from urllib.parse import urlsplit

from blake3 import blake3
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.node.dashboard.token import TOKEN_NAME

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
<p>It is in the file <code>dashboard.token</code> in the data folder of the node; the link that
<code>shoal status</code> prints there holds it.</p>
<form action="/" method="get"><label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<button class="primary">Open</button></form></main></body></html>
"""


class Guard:
    """Guard in front of an application. open_to_view: whether looking takes no token; names: of this host."""

    def __init__(self, app: ASGIApp, *, token: str, open_to_view: bool, names: Collection[str] = ()) -> None:
        self._app = app
        self._token = token
        self._open_to_view = open_to_view
        own = socket.gethostname().lower()
        self._names = {"localhost", own, f"{own}.local", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass it on."""
        if scope["type"] == "websocket":
            await _refuse_websocket(send)
        if scope["type"] != "http":
            return
        refusal = self._refusal(Request(scope))
        await (refusal or self._app)(scope, receive, _with_headers(send))

    def _refusal(self, request: Request) -> Response | None:
        if not self._names_this_host(request.headers.get("host", "")):
            return PlainTextResponse(
                "this name is not the node's; open the page by its address\n", HTTPStatus.MISDIRECTED_REQUEST
            )
        looks = request.method in ("GET", "HEAD")
        if not looks and not _from_this_origin(request):
            return PlainTextResponse("only the page itself may ask this\n", HTTPStatus.FORBIDDEN)
        if looks and (self._open_to_view or _path_of(request).startswith("/static/")):
            return None
        return None if self._knows(request) else self._ask_for_token(request)

    def _names_this_host(self, host: str) -> bool:
        if not set(host).isdisjoint("/?#@\\"):
            return False
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
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _same(given.strip(), self._token):
            return True
        return not self._open_to_view and _same(request.cookies.get(COOKIE, ""), _cookie_of(self._token))

    def _ask_for_token(self, request: Request) -> Response:
        given = request.query_params.get("token")
        if request.method == "GET" and given is not None and _same(given, self._token):
            answer: Response = RedirectResponse(_path_of(request), HTTPStatus.SEE_OTHER)
            answer.set_cookie(
                COOKIE, _cookie_of(self._token), max_age=COOKIE_LIFE_S, path="/", httponly=True, samesite="strict"
            )
            return answer
        if _path_of(request) == "/":
            return HTMLResponse(_ASK_FOR_TOKEN, HTTPStatus.UNAUTHORIZED)
        return PlainTextResponse(
            f"send the token of the file {TOKEN_NAME} in the node's data folder: Authorization: Bearer …\n",
            HTTPStatus.UNAUTHORIZED,
            {"www-authenticate": "Bearer"},
        )


def _path_of(request: Request) -> str:
    """The path by which a request is routed: its URL is put together from what the sender says is the host."""
    return "/" + str(request.scope["path"]).lstrip("/")


async def _refuse_websocket(send: Send) -> None:
    """Answer the upgrade with an error: nothing here speaks anything but HTTP."""
    start = {"type": "websocket.http.response.start", "status": HTTPStatus.BAD_REQUEST, "headers": []}
    await _with_headers(send)(start)
    await send({"type": "websocket.http.response.body", "body": b"there are no websockets here\n", "more_body": False})


def _from_this_origin(request: Request) -> bool:
    """True if only a page of this origin, or no browser, can have sent it."""
    if ORDER_HEADER not in request.headers or request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return False
    origin = request.headers.get("origin")
    try:
        return origin is None or urlsplit(origin).netloc == request.headers.get("host")
    except ValueError:
        return False


def _cookie_of(token: str) -> str:
    """Value of the cookie: not the token itself, which may stand in scripts and serve elsewhere."""
    return blake3(token.encode(), derive_key_context=_COOKIE_CONTEXT).hexdigest()


def _same(given: str, known: str) -> bool:
    return hmac.compare_digest(given.encode(), known.encode())


def _with_headers(send: Send) -> Send:
    async def send_more(message: Message) -> None:
        if message["type"].endswith("http.response.start"):
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
        await send(message)

    return send_more
