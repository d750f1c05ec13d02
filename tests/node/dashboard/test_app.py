"""What the page's application answers, and to whom."""

from __future__ import annotations

import gzip
import re
import stat
from pathlib import Path

import pytest
import trio
from starlette.types import ASGIApp, Message

from shoal.lab.synthetic_swarm import SyntheticSwarm
from shoal.node.dashboard.app import page_files
from shoal.node.dashboard.facts import Facts
from shoal.node.dashboard.guard import COOKIE
from shoal.node.dashboard.peers import PAGE_LIMIT
from shoal.node.dashboard.service import is_loopback
from shoal.node.dashboard.token import TOKEN_NAME, link_of, load_token
from tests.node.dashboard.lab import HOST, NOW, Clock, ask, scope_of, site_of

TOKEN = "an-unguessable-token-of-a-test"
TRANSFER_LIMIT_BYTES = 300_000
ORDER = {"x-shoal-order": "1", "origin": f"http://{HOST}"}
KEY = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def swarm() -> SyntheticSwarm:
    return SyntheticSwarm(peers=5, now=NOW, rounds=3, rollouts=True)


@pytest.fixture
def app(swarm: SyntheticSwarm) -> ASGIApp:
    return site_of(swarm).app(token=TOKEN, host="127.0.0.1")


@pytest.fixture
def closed(swarm: SyntheticSwarm) -> ASGIApp:
    """One that others can connect to."""
    return site_of(swarm).app(token=TOKEN, host="192.0.2.7")


# -- peers on demand ------------------------------------------------------------------------------------------------


async def test_peers_are_found_sorted_and_given_a_part_at_a_time() -> None:
    swarm = SyntheticSwarm(peers=1000, now=NOW, rounds=3)
    app = site_of(swarm).app(token=TOKEN, host="127.0.0.1")
    rows = {peer.peer: peer for peer in swarm.look().peers}

    async def found(query: str) -> tuple[int, list[str]]:
        answer = (await ask(app, f"/api/peers?{query}")).json()
        return answer["total"], [peer["peer"] for peer in answer["peers"]]

    total, first = await found("")
    assert (total, len(first), first[0]) == (1001, PAGE_LIMIT, swarm.look().status.peer_id)
    _, second = await found(f"first={PAGE_LIMIT}")
    assert first[1:] + second == sorted(peer for peer, row in rows.items() if row.member and row.reach != "self")[:59]
    assert (await found("first=2000")) == (1001, [])
    wanted = second[7]
    assert await found(f"find={wanted[-8:]}") == (1, [wanted])
    paused = {peer for peer, row in rows.items() if row.phase == "paused"}
    total, names = await found("group=paused&sort=speed&down=true")
    assert total == len(paused)
    assert set(names) <= paused
    following = sorted(peer for peer, row in rows.items() if not row.member)
    assert await found("group=following") == (len(following), following[:PAGE_LIMIT])
    _, fastest = await found("sort=speed&down=true")
    assert fastest == sorted(rows, key=lambda peer: (-rows[peer].speed, peer))[:PAGE_LIMIT]
    total, behind = await found("group=behind")
    assert total == sum(rows[peer].round < 2 for peer in rows if rows[peer].state == "training")
    assert len(behind) == min(total, PAGE_LIMIT)


@pytest.mark.parametrize("query", ["sort=phase", "group=x", "first=-1", "first=x", f"find={'x' * 200}", "what=1"])
async def test_a_question_for_peers_that_makes_no_sense_is_refused(app: ASGIApp, query: str) -> None:
    answer = await ask(app, f"/api/peers?{query}")
    assert (answer.status, answer.body.count(b"\n")) == (400, 1)


async def test_one_peer_is_told_with_its_record_and_what_happened_to_it(app: ASGIApp, swarm: SyntheticSwarm) -> None:
    (killed,) = swarm.kill()
    swarm.advance(NOW + 1)
    found = (await ask(app, f"/api/peers/{killed}")).json()
    assert (found["peer"], found["state"], found["reach"], found["speed"]) == (killed, "gone", "gone", 0)
    assert found["record"]["lane_addresses"] == ["/ip4/192.0.2.1/tcp/4002"]
    assert [known["kind"] for known in found["happenings"]][-2:] == ["lost", "died"]
    for unknown in ("12D3KooWnobody", "..%2f..%2fnode.key"):
        assert (await ask(app, f"/api/peers/{unknown}")).status == 404


async def test_no_peer_is_read_while_nobody_looks() -> None:
    """A node at rest counts its bytes; what a swarm of a thousand costs, it costs who looks at it."""
    looks = 0

    class Counting(SyntheticSwarm):
        def look(self) -> Facts:
            nonlocal looks
            looks += 1
            return super().look()

    swarm, clock = Counting(peers=3, now=NOW, rounds=3), Clock()
    site = site_of(swarm, clock)
    for _ in range(60):
        clock.now += 1.0
        swarm.advance(swarm.now + 1.0)
        site.tick()
    assert looks == 0
    assert len(site.model.bandwidth) == 11
    for _ in range(3):
        assert len(site.snapshot()["peers"]) == 4
    assert looks == 1, "answers within a second are of one look"
    with site.feed.joined(snapshot=b"", compress=False):
        for _ in range(8):
            clock.now += 0.25
            site.tick()
    assert looks == 3


async def test_who_may_not_look_learns_of_no_peer(closed: ASGIApp) -> None:
    for path in ("/api/peers", "/api/peers/12D3KooWnobody"):
        assert (await ask(closed, path)).status == 401


# -- the page -------------------------------------------------------------------------------------------------------


async def test_the_page_and_all_it_is_made_of_are_served_squeezed_and_from_this_node_alone(app: ASGIApp) -> None:
    total = 0
    page = await ask(app, "/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    named = set(re.findall(r'(?:src|href)="(/[^"]*)"', page.body.decode()))
    assert "/static/page.js" in named
    for path in ("/", *sorted(named)):
        answer = await ask(app, path, headers={"accept-encoding": "gzip"})
        assert (answer.status, answer.headers["content-encoding"]) == (200, "gzip"), path
        content = gzip.decompress(answer.body)
        assert content == (await ask(app, path)).body
        total += len(answer.body)
        again = await ask(app, path, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status, again.body) == (304, b"")
    assert total < TRANSFER_LIMIT_BYTES / 3


def test_the_page_names_no_other_host_and_makes_no_text_into_markup() -> None:
    files = {name: content.decode() for name, content in page_files().items()}
    own = {name: text for name, text in files.items() if "uPlot" not in name}
    assert {"index.html", "style.css", "page.js"} <= own.keys()
    for name, text in own.items():
        links = set(re.findall(r"https?://[^\s\"')]+", text)) - {"http://www.w3.org/2000/svg"}
        assert links == set(), name
        for sink in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "srcdoc",
        ):
            assert sink not in text, (name, sink)
    assert "<script>" not in own["index.html"]
    assert not re.search(r"\son\w+=|\sstyle=", own["index.html"])  # the policy would forbid what stands in line
    imported = set(re.findall(r'from "\./(\w+\.js)"', "".join(own.values())))
    assert imported <= own.keys()
    assert "MIT License" in files["uPlot.LICENSE"] or "Permission is hereby granted" in files["uPlot.LICENSE"]


async def test_every_answer_forbids_foreign_code_frames_and_referrers(app: ASGIApp, closed: ASGIApp) -> None:
    for asked, path in ((app, "/"), (app, "/api/snapshot"), (app, "/nothing"), (closed, "/"), (closed, "/metrics")):
        headers = (await ask(asked, path)).headers
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers


async def test_the_snapshot_is_what_the_page_shows(app: ASGIApp, swarm: SyntheticSwarm) -> None:
    answer = await ask(app, "/api/snapshot", headers={"accept-encoding": "gzip"})
    assert answer.headers["cache-control"] == "no-store"
    answer.body = gzip.decompress(answer.body)
    found = answer.json()
    assert found["node"]["round"] == 3
    assert len(found["peers"]) == 6
    assert [point[0] for point in found["curves"]["reward"]] == [1, 2, 3]
    assert found["summary"]["known"] == 6
    group = found["groups"][-2]
    text = (await ask(app, f"/api/rollouts/{group['digest']}")).json()
    assert text["question"] == "What is 37 + 58 - 12?"
    assert text["rewards"] == [1.0, 0.0, 0.0, 1.0]
    for unknown in ("0" * 64, "..%2f..%2fnode.key", "node.key"):
        assert (await ask(app, f"/api/rollouts/{unknown}")).status == 404


# -- who may ask ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1:8420", "localhost:1", "[::1]:8420", "192.0.2.7", "LOCALHOST"])
def test_the_page_answers_under_addresses_and_its_own_names(app: ASGIApp, host: str) -> None:
    assert trio.run(lambda: ask(app, "/api/snapshot", headers={"host": host})).status == 200


OTHERS = ("evil.example", "evil.example:8420", "127.0.0.1.evil.example", "", "[", "local host", "127.0.0.1/static/x")


@pytest.mark.parametrize("host", OTHERS)
async def test_a_name_that_somebody_else_points_here_is_refused(app: ASGIApp, swarm: SyntheticSwarm, host: str) -> None:
    for path, method in (("/", "GET"), ("/api/snapshot", "GET"), ("/metrics", "GET"), ("/api/leave", "POST")):
        answer = await ask(app, path, method=method, headers={**ORDER, **KEY, "host": host})
        assert answer.status == 421
        assert b"12D3Koo" not in answer.body
    assert swarm.orders == []


async def test_the_page_orders_and_no_foreign_page_does(app: ASGIApp, swarm: SyntheticSwarm) -> None:
    foreign = (
        {},
        {"origin": f"http://{HOST}"},
        {"x-shoal-order": "1", "origin": "http://evil.example"},
        {"x-shoal-order": "1", "origin": "http://127.0.0.1:9999"},
        {"x-shoal-order": "1", "origin": "null"},
        {"x-shoal-order": "1", "origin": "http://["},
        {"x-shoal-order": "1", "sec-fetch-site": "cross-site"},
        {"x-shoal-order": "1", "sec-fetch-site": "same-site"},
    )
    for headers in foreign:
        assert (await ask(app, "/api/leave", method="POST", headers={**headers, **KEY})).status == 403
    assert (await ask(app, "/api/leave", headers={**ORDER, **KEY})).status == 405
    assert (await ask(app, "/api/rebase", method="POST", headers={**ORDER, **KEY})).status == 404
    assert swarm.orders == []
    for op in ("pause", "resume", "leave"):
        assert (await ask(app, f"/api/{op}", method="POST", headers={**ORDER, **KEY})).status == 204
    assert swarm.orders == ["pause", "resume", "leave"]


async def test_on_this_machine_everybody_may_look_and_who_has_the_token_orders(
    app: ASGIApp, swarm: SyntheticSwarm
) -> None:
    cookie = (await ask(app, f"/?token={TOKEN}")).headers.get("set-cookie")
    assert cookie is None  # a browser would send it to every port of this machine
    guesses: tuple[dict[str, str], ...] = (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Bearer {TOKEN[:-1]}"},
        {"authorization": f"Basic {TOKEN}"},
        {"cookie": f"{COOKIE}={TOKEN}"},
    )
    for headers in guesses:
        for path in ("/", "/api/snapshot", "/metrics"):
            assert (await ask(app, path, headers=headers)).status == 200
        for op in ("pause", "resume", "leave"):
            answer = await ask(app, f"/api/{op}?token={TOKEN}", method="POST", headers={**ORDER, **headers})
            assert answer.status == 401
            assert TOKEN_NAME in answer.body.decode()
    assert swarm.orders == []
    assert (await ask(app, "/api/pause", method="POST", headers={**ORDER, **KEY})).status == 204
    assert swarm.orders == ["pause"]


async def test_the_cookie_of_the_open_page_is_no_key_on_loopback(app: ASGIApp, closed: ASGIApp) -> None:
    cookie = (await ask(closed, f"/?token={TOKEN}")).headers["set-cookie"].split(";")[0]
    answer = await ask(app, "/api/leave", method="POST", headers={**ORDER, "cookie": cookie})
    assert answer.status == 401


def test_a_link_keeps_the_token_from_the_wire_where_it_can() -> None:
    assert link_of("http://127.0.0.1:8420/", "abc", open_to_view=True) == "http://127.0.0.1:8420/#token=abc"
    assert link_of("http://192.0.2.7:8420/", "abc", open_to_view=False) == "http://192.0.2.7:8420/?token=abc"


async def test_beyond_this_machine_nothing_is_told_without_the_token(closed: ASGIApp, swarm: SyntheticSwarm) -> None:
    guesses: tuple[dict[str, str], ...] = (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": "Bearer é"},
        {"cookie": f"{COOKIE}={TOKEN}"},  # the token is not the cookie
        {"cookie": f"{COOKIE}="},
    )
    for headers in guesses:
        for path in (
            "/",
            "/api/snapshot",
            "/api/feed",
            "/metrics",
            "/?token=",
            f"/api/snapshot?token={TOKEN[:-1]}",
        ):
            answer = await ask(closed, path, headers=headers)
            assert answer.status == 401
            assert b"12D3Koo" not in answer.body
        assert (await ask(closed, "/api/leave", method="POST", headers={**ORDER, **headers})).status == 401
    assert swarm.orders == []
    assert (await ask(closed, "/metrics", headers={"authorization": f"Bearer {TOKEN}"})).status == 200


async def test_the_token_in_a_link_becomes_a_cookie_that_no_script_reads(closed: ASGIApp) -> None:
    entered = await ask(closed, f"/?token={TOKEN}")
    assert (entered.status, entered.headers["location"]) == (303, "/")
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    given = {"cookie": cookie.split(";")[0]}
    assert (await ask(closed, "/api/snapshot", headers=given)).status == 200
    assert (await ask(closed, "/api/leave", method="POST", headers={**given, **ORDER})).status == 204
    assert (await ask(closed, "/api/leave", method="POST", headers=given)).status == 403


def test_a_token_is_made_once_and_is_its_users_alone(tmp_path: Path) -> None:
    token = load_token(tmp_path)
    assert len(token) >= 32
    assert load_token(tmp_path) == token
    assert stat.S_IMODE((tmp_path / TOKEN_NAME).stat().st_mode) == 0o600
    (tmp_path / TOKEN_NAME).chmod(0o644)
    assert load_token(tmp_path) == token
    assert stat.S_IMODE((tmp_path / TOKEN_NAME).stat().st_mode) == 0o600
    (tmp_path / TOKEN_NAME).write_text("short\n")
    assert len(load_token(tmp_path)) >= 32


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *((host, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "192.0.2.7", "node.example", "localhost.evil.example")),
    ],
)
def test_only_this_machine_can_connect_to_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


async def test_what_is_not_http_reaches_no_application(app: ASGIApp) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await app({**scope_of("/api/feed"), "type": "websocket"}, receive, send)
    assert [message["type"] for message in sent] == [
        "websocket.http.response.start",
        "websocket.http.response.body",
    ]
    assert sent[0]["status"] == 400
    sent.clear()
    await app({**scope_of("/api/feed"), "type": "lifespan"}, receive, send)
    assert sent == []
