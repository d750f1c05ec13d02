"""The page's application: its files, the feed, three orders, and the metrics.

    /                     the page, and /static/… what it is made of
    /api/snapshot         everything that the page shows, as JSON
    /api/feed             the same as server-sent events: `snapshot`, then `delta` as things change
    /api/peers            a part of all peers; ?find, group, sort, down and first say which (`peers.Wanted`)
    /api/peers/PEERID     all that is known of one
    /api/rollouts/DIGEST  the texts of one group
    /api/settings         what the node runs with
    /api/joining          the line that others join with; POST: also where it holds a secret
    /api/leave … resume   POST: what `shoal leave`, `pause` and `resume` do
    /metrics              for Prometheus

Nothing that is served names another host.
"""

from __future__ import annotations

import gzip
import importlib.resources
import mimetypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

import msgspec
import trio
from blake3 import blake3
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from shoal.node.dashboard.facts import Source
from shoal.node.dashboard.feed import Feed, TooManyViewers, server_event
from shoal.node.dashboard.peers import Fields, PeerPage, Wanted
from shoal.node.dashboard.settings import qr_code
from shoal.protocol.errors import ShoalError

ORDERS = ("leave", "pause", "resume")
FETCH_DEADLINE_S = 20.0
_DIGEST = re.compile(r"[0-9a-f]{64}")
_JSON = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Parts of the application. snapshot: everything as of now; metrics: by what the client accepts, with a type.

    peers: a part of all peers; peer: one of them, None if it is not known.
    """

    source: Source
    feed: Feed
    snapshot: Callable[[], Fields]
    peers: Callable[[Wanted], PeerPage]
    peer: Callable[[str], Fields | None]
    metrics: Callable[[str], tuple[bytes, str]]


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the page, as it is and squeezed. etag: of its contents."""

    content: bytes
    squeezed: bytes
    kind: str
    etag: str

    @staticmethod
    def of(name: str, content: bytes) -> _File:
        kind = "text/javascript" if name.endswith(".js") else mimetypes.guess_type(name)[0] or "text/plain"
        kind += "; charset=utf-8" if kind.startswith("text/") else ""
        return _File(content, gzip.compress(content, 9, mtime=0), kind, f'"{blake3(content).hexdigest()[:32]}"')

    def answer(self, request: Request) -> Response:
        headers = {"etag": self.etag, "cache-control": "no-cache", "vary": "accept-encoding"}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        if _takes_gzip(request):
            return Response(self.squeezed, media_type=self.kind, headers={**headers, "content-encoding": "gzip"})
        return Response(self.content, media_type=self.kind, headers=headers)


def page_files() -> dict[str, bytes]:
    """The files that the page is made of, by name."""
    folder = importlib.resources.files("shoal.node.dashboard") / "static"
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.startswith(".")}


def make_app(parts: Parts) -> Starlette:
    """The application. Reads its files, once."""
    files = {name: _File.of(name, content) for name, content in page_files().items()}

    async def page(request: Request) -> Response:
        return files["index.html"].answer(request)

    async def static(request: Request) -> Response:
        file = files.get(request.path_params["name"])
        return Response(status_code=HTTPStatus.NOT_FOUND) if file is None else file.answer(request)

    async def icon(request: Request) -> Response:
        return files["icon.svg"].answer(request)

    async def snapshot(request: Request) -> Response:
        return _json(request, parts.snapshot())

    async def peers(request: Request) -> Response:
        try:
            wanted = msgspec.convert(dict(request.query_params), Wanted, strict=False)
        except msgspec.ValidationError as error:
            return PlainTextResponse(f"no such question: {error}\n", HTTPStatus.BAD_REQUEST)
        return _json(request, parts.peers(wanted))

    async def peer(request: Request) -> Response:
        found = parts.peer(request.path_params["peer"])
        if found is None:
            return PlainTextResponse("this node knows no such peer any more\n", HTTPStatus.NOT_FOUND)
        return _json(request, found)

    async def group(request: Request) -> Response:
        digest = request.path_params["digest"]
        found = None
        if _DIGEST.fullmatch(digest):
            with trio.move_on_after(FETCH_DEADLINE_S):
                found = await parts.source.group(digest)
        if found is None:
            return PlainTextResponse("this node does not hold that group any more\n", HTTPStatus.NOT_FOUND)
        return _json(request, found)

    async def order(request: Request) -> Response:
        op = request.path_params["op"]
        if op not in ORDERS:
            return Response(status_code=HTTPStatus.NOT_FOUND)
        try:
            await parts.source.order(op)
        except ShoalError as error:
            return PlainTextResponse(f"{error}\n", HTTPStatus.CONFLICT)
        return Response(status_code=HTTPStatus.NO_CONTENT)

    async def settings(request: Request) -> Response:
        return _json(request, parts.source.settings())

    async def joining(request: Request) -> Response:
        found = parts.source.joining(secret=request.method == "POST")  # the guard asks these for the token
        code = None if found.line is None else await trio.to_thread.run_sync(qr_code, found.line)
        return _json(request, {**msgspec.to_builtins(found), "qr": code})

    async def metrics(request: Request) -> Response:
        content, kind = parts.metrics(request.headers.get("accept", ""))
        return _squeezed(request, content, {"content-type": kind})

    return Starlette(
        routes=[
            Route("/", page),
            Route("/favicon.ico", icon),
            Route("/static/{name}", static),
            Route("/api/snapshot", snapshot),
            Route("/api/feed", FeedAnswer(parts)),
            Route("/api/peers", peers),
            Route("/api/peers/{peer}", peer),
            Route("/api/rollouts/{digest}", group),
            Route("/api/settings", settings),
            Route("/api/joining", joining, methods=["GET", "POST"]),
            Route("/api/{op}", order, methods=["POST"]),
            Route("/metrics", metrics),
        ]
    )


class FeedAnswer:
    """The endless answer to one viewer."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the viewer goes, or is let go."""
        request = Request(scope)
        if request.method != "GET":
            await Response(status_code=HTTPStatus.METHOD_NOT_ALLOWED)(scope, receive, send)
            return
        compress = _takes_gzip(request)
        snapshot = server_event("snapshot", self._parts.snapshot())
        try:
            with self._parts.feed.joined(snapshot=snapshot, compress=compress) as viewer:
                headers = {"content-type": "text/event-stream", "cache-control": "no-store"}
                if compress:
                    headers["content-encoding"] = "gzip"
                await send(
                    {
                        "type": "http.response.start",
                        "status": HTTPStatus.OK,
                        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
                    }
                )
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_watch_gone, receive, nursery.cancel_scope)
                    while True:
                        await send({"type": "http.response.body", "body": await viewer.next(), "more_body": True})
        except TooManyViewers:
            text = "too many pages of this node are open; close one\n"
            refusal = PlainTextResponse(text, HTTPStatus.SERVICE_UNAVAILABLE, {"retry-after": "10"})
            await refusal(scope, receive, send)
            return
        with trio.move_on_after(1.0):
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _watch_gone(receive: Receive, over: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    over.cancel()


def _takes_gzip(request: Request) -> bool:
    return "gzip" in request.headers.get("accept-encoding", "")


def _json(request: Request, content: object) -> Response:
    return _squeezed(request, msgspec.json.encode(content), {"content-type": _JSON})


def _squeezed(request: Request, content: bytes, headers: dict[str, str]) -> Response:
    headers = {**headers, "cache-control": "no-store", "vary": "accept-encoding"}
    if _takes_gzip(request):
        content, headers = gzip.compress(content, 5), {**headers, "content-encoding": "gzip"}
    return Response(content, headers=headers)
