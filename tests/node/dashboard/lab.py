"""Requests to the page's application without a server between, and a made-up swarm to serve."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import trio
from starlette.types import ASGIApp, Message, Scope

from shoal.lab.synthetic_swarm import SyntheticSwarm
from shoal.node.dashboard.site import Site

NOW = 1_800_000_000.0
HOST = "127.0.0.1:8420"


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Answer:
    """What came back."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        return json.loads(self.body)


def scope_of(path: str, *, method: str = "GET", headers: Mapping[str, str] | None = None) -> Scope:
    """An HTTP request from this machine as a server hands it on."""
    path, _, query = path.partition("?")
    given = {"host": HOST, **(headers or {})}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 50_000),
        "server": ("127.0.0.1", 8420),
    }


async def ask(app: ASGIApp, path: str, *, method: str = "GET", headers: Mapping[str, str] | None = None) -> Answer:
    """One request, answered whole."""
    answer = Answer()
    requests: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        if not requests:
            await trio.sleep_forever()
        return requests.pop()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            answer.body += message.get("body", b"")

    await app(scope_of(path, method=method, headers=headers), receive, send)
    return answer


class Reader:
    """A viewer's end of the feed: `pieces` as they come; what it does not take, the other end waits for."""

    def __init__(self, app: ASGIApp, *, headers: Mapping[str, str] | None = None, takes: int | None = None) -> None:
        self.start: Answer = Answer()
        self.ended = False
        self._app = app
        self._headers = headers or {}
        self._gone = trio.Event()
        self._takes = takes
        self._send, self.pieces = trio.open_memory_channel[bytes](1000)

    async def run(self) -> None:
        async def receive() -> Message:
            await self._gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.start.status = message["status"]
                self.start.headers = {name.decode(): value.decode() for name, value in message["headers"]}
                return
            if self._takes == 0:
                await trio.sleep_forever()
            if self._takes is not None:
                self._takes -= 1
            await self._send.send(message.get("body", b""))

        await self._app(scope_of("/api/feed", headers=self._headers), receive, send)
        self.ended = True

    def go(self) -> None:
        """Close the page."""
        self._gone.set()


def event_of(piece: bytes) -> tuple[str, Any]:
    """The name and the content of a server-sent event."""
    name, data, *rest = piece.decode().split("\n")
    assert name.startswith("event: ")
    assert data.startswith("data: ")
    assert rest == ["", ""]
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def site_of(swarm: SyntheticSwarm, clock: Clock | None = None) -> Site:
    """The page of a made-up swarm."""
    return Site(source=swarm, events=swarm.waiting, clock=clock or Clock())
