"""The service on real sockets: its port, its history, and clients that misbehave."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio

from shoal.lab.synthetic_swarm import SyntheticSwarm
from shoal.node.dashboard import server
from shoal.node.dashboard.service import PageService, bound, url_of
from shoal.node.dashboard.site import read_history
from shoal.node.options import PageAddress
from shoal.node.reporting.event_log import EventLog
from shoal.node.reporting.events import Evaluated, Linked
from shoal.protocol.errors import ConfigError
from tests.node.dashboard.lab import NOW
from tests.waiting import running

DEADLINE_S = 60.0


@asynccontextmanager
async def serving(page: PageService) -> AsyncIterator[tuple[str, int]]:
    """The page, and where it is."""
    async with running(page):
        assert page.url is not None
        host, _, port = page.url.removeprefix("http://").rstrip("/").partition(":")
        with trio.fail_after(DEADLINE_S):
            yield host, int(port)


def page_of(swarm: SyntheticSwarm, folder: Path, *, history: Path | None = None) -> PageService:
    return PageService(swarm, PageAddress(port=0), folder=folder, history=history)


async def get(place: tuple[str, int], path: str) -> tuple[int, bytes]:
    """One request over a connection of its own."""
    async with await trio.open_tcp_stream(*place) as stream:
        await stream.send_all(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode())
        whole = b"".join([piece async for piece in stream])
    head, _, body = whole.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head.lower():
        pieces, rest = [], body
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            pieces.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        body = b"".join(pieces)
    return int(head.split()[1]), body


async def test_the_service_shows_what_it_hears_and_what_its_log_tells_of_earlier_lives(tmp_path: Path) -> None:
    swarm = SyntheticSwarm(peers=2, now=NOW, rounds=6)
    log = EventLog(tmp_path / "events.jsonl")
    for record in swarm.waiting:
        if isinstance(record, Evaluated):
            log.write(record)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"at": 1.0, "event": "certified", "rou\n[]\nnull\n')  # cut short, and no events
    page = page_of(swarm, tmp_path, history=tmp_path / "events.jsonl")
    log.listen(page.hear)
    log.write(Evaluated(round=7, loss=1.0, metric="bits per byte"))  # before the page runs: in both
    log.write(Linked(peer="12D3KooWearly"))
    async with serving(page) as place:
        log.write(Evaluated(round=8, loss=0.5, metric="bits per byte"))
        status, body = await get(place, "/api/snapshot")
        assert status == 200
        found = json.loads(body)
        assert [happening["peer"] for happening in found["happenings"]] == ["12D3KooWearly"]
        curve = found["curves"]["held_out"]
        assert [x for x, _ in curve] == list(range(1, 9))
        assert [y for _, y in curve[-2:]] == [1.0, 0.5]
    log.close()


def test_a_port_that_is_taken_is_replaced_only_where_nobody_named_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with bound(PageAddress(port=port, or_free=True)) as listening:
            url = url_of(listening)
            assert url.startswith("http://127.0.0.1:")
            assert url != f"http://127.0.0.1:{port}/"
        with (
            pytest.raises(
                ConfigError, match=rf"--dashboard: cannot listen on 127\.0\.0\.1:{port}: .*choose another port"
            ),
            bound(PageAddress(port=port, or_free=False)),
        ):
            pass
    with (
        pytest.raises(ConfigError, match=r"--dashboard: no\.such\.name\.invalid is no address"),
        bound(PageAddress(host="no.such.name.invalid")),
    ):
        pass


async def test_a_client_that_does_not_read_neither_stays_nor_holds_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SEND_DEADLINE_S", 0.2)
    swarm = SyntheticSwarm(peers=200, now=NOW, rounds=60)
    with trio.fail_after(DEADLINE_S):
        async with serving(page_of(swarm, tmp_path)) as place:
            assert (await get(place, "/api/snapshot"))[0] == 200
            sock = trio.socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await sock.connect(place)
            async with trio.SocketStream(sock) as stream:
                asked = b"GET /api/snapshot HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 200
                await stream.send_all(asked)
                ended = trio.Event()

                async def until_broken() -> None:
                    try:
                        while True:  # it takes requests as long as it lives
                            await stream.send_all(asked)
                    except trio.BrokenResourceError:
                        ended.set()

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(until_broken)
                    await ended.wait()


async def test_a_page_that_ends_while_somebody_does_not_read_ends_at_once(tmp_path: Path) -> None:
    swarm = SyntheticSwarm(peers=200, now=NOW, rounds=60)
    async with trio.open_nursery() as outer:
        sock = trio.socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        async with serving(page_of(swarm, tmp_path)) as place:
            await sock.connect(place)
            await sock.send(b"GET /api/snapshot HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 100)
            assert (await get(place, "/api/snapshot"))[0] == 200
            ended_at = trio.current_time()
        assert trio.current_time() - ended_at < server.SEND_DEADLINE_S * 0.9
        sock.close()
        outer.cancel_scope.cancel()


HALVES = 70
"""More than there may be connections."""


@pytest.mark.parametrize(
    "half",
    [b"", b"G", b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx-shoal: ", b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"],
    ids=["nothing", "a letter", "half a head", "a whole request, and then nothing"],
)
async def test_the_page_is_served_beside_many_who_do_not_finish_their_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: bytes
) -> None:
    monkeypatch.setattr(server, "IDLE_DEADLINE_S", 10 * DEADLINE_S)  # nobody is let go for being silent
    swarm = SyntheticSwarm(peers=1, now=NOW, rounds=1)
    async with serving(page_of(swarm, tmp_path)) as place:
        viewer = await trio.open_tcp_stream(*place)
        await viewer.send_all(b"GET /api/feed HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert (await viewer.receive_some(15)).startswith(b"HTTP/1.1 200")
        held = []
        for number in range(HALVES):
            held.append(await trio.open_tcp_stream(*place))
            if half:
                await held[-1].send_all(half)
            if number % 10 == 9:
                assert (await get(place, "/"))[0] == 200
        await _until_closed(held[0])  # who came first gave way; who watches did not
        assert await viewer.receive_some()
        for stream in (*held, viewer):
            await trio.aclose_forcefully(stream)


async def _until_closed(stream: trio.SocketStream) -> None:
    with suppress(trio.BrokenResourceError):
        while await stream.receive_some():
            pass


HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NO_WINDOW = bytes.fromhex("000006 04 00 00000000 0004 00000000")
"""Settings of HTTP/2 by which a client takes nothing of an answer yet."""
ASKS_FOR_THE_PAGE = bytes.fromhex("00000e 01 05 00000001 828684 41 09") + b"127.0.0.1"
UPGRADE = (
    b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    b"http2-settings: AAQAAAAA\r\n\r\n"
)


@pytest.mark.parametrize("begin", [HTTP2 + NO_WINDOW + ASKS_FOR_THE_PAGE, UPGRADE], ids=["at once", "by an upgrade"])
async def test_nobody_takes_a_connection_to_http_2_and_keeps_it_without_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    monkeypatch.setattr(server, "CONNECTION_LIMIT", 3)
    swarm = SyntheticSwarm(peers=1, now=NOW, rounds=1)
    async with serving(page_of(swarm, tmp_path)) as place:
        held = [await trio.open_tcp_stream(*place) for _ in range(3)]
        for stream in held:
            await stream.send_all(begin)
            assert (await stream.receive_some(9)) == b"HTTP/1.1 "
            assert not (await stream.receive_some(4)).startswith(b"101")
        assert (await get(place, "/"))[0] == 200
        for stream in held:
            await trio.aclose_forcefully(stream)


@pytest.mark.parametrize("path", ["/", "/api/feed"])
async def test_an_upgrade_to_a_websocket_is_answered_with_an_error(tmp_path: Path, path: str) -> None:
    swarm = SyntheticSwarm(peers=1, now=NOW, rounds=1)
    async with serving(page_of(swarm, tmp_path)) as place:
        async with await trio.open_tcp_stream(*place) as stream:
            await stream.send_all(
                f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
                "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
            )
            answer = b"".join([piece async for piece in stream])
        assert answer.startswith(b"HTTP/1.1 400 "), answer
        assert b"x-frame-options: DENY" in answer
        assert (await get(place, "/"))[0] == 200


async def test_so_many_connections_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTION_LIMIT", 3)
    swarm = SyntheticSwarm(peers=1, now=NOW, rounds=1)
    async with serving(page_of(swarm, tmp_path)) as place:
        assert (await get(place, "/"))[0] == 200
        held = [await trio.open_tcp_stream(*place) for _ in range(3)]
        for stream in held:
            await stream.send_all(b"GET /api/feed HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            assert (await stream.receive_some(15)).startswith(b"HTTP/1.1 200")
        async with await trio.open_tcp_stream(*place) as late:
            try:
                await late.send_all(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
                assert await late.receive_some() == b""
            except trio.BrokenResourceError:
                pass
        for stream in held:
            await stream.aclose()


async def test_what_is_no_http_is_answered_with_an_error_and_the_page_goes_on(tmp_path: Path) -> None:
    swarm = SyntheticSwarm(peers=1, now=NOW, rounds=1)
    async with serving(page_of(swarm, tmp_path)) as place:
        for junk in (b"\x00\xff" * 400 + b"\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 40_000):
            async with await trio.open_tcp_stream(*place) as stream:
                try:
                    await stream.send_all(junk)
                    answer = await stream.receive_some()
                except trio.BrokenResourceError:
                    answer = b""
            assert not answer.startswith(b"HTTP/1.1 2")
        assert (await get(place, "/"))[0] == 200


def test_of_a_long_log_only_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.node.dashboard import site

    path = tmp_path / "events.jsonl"
    path.write_text("".join(f'{{"at": {i}.0, "event": "linked", "peer": "p{i}"}}\n' for i in range(100)))
    monkeypatch.setattr(site, "HISTORY_LIMIT_BYTES", 100)
    assert read_history(path) == [Linked(at=98.0, peer="p98"), Linked(at=99.0, peer="p99")]
    assert read_history(tmp_path / "none") == []
