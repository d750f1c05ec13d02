"""Clocks that are compared with those of linked peers, and the line that comes of it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import trio

from shoal.node.discovery import clocks as clocks_module
from shoal.node.discovery.clocks import CLOCK_PROTOCOL, CLOCKS_LIMIT, Clocks, WallClock, apart_text
from shoal.node.outcome import Notice, Progress
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.wire import canonical
from shoal.swarm.members import Change
from tests.swarm.test_members import Node
from tests.waiting import running, until

NOON_S = 1_800_000_000.0
HOURS_S = 3 * 3600.0


def clock_of(node: Node, wall_s: float, told: list[Progress]) -> Clocks:
    return Clocks(node.host, node.linked, told.append, wall=lambda: wall_s)


async def compared(mine_s: float, *theirs_s: float | None) -> list[Progress]:
    """What a node is told whose peers' clocks, None for one of a peer that has no such protocol, are these."""
    me, others = Node(1), [Node(number + 2) for number in range(len(theirs_s))]
    told: list[Progress] = []
    async with running(me, *others) as nursery:
        for other, wall_s in zip(others, theirs_s, strict=True):
            if wall_s is not None:
                await nursery.start(clock_of(other, wall_s, []).run)
            await other.join(me)
        await until(lambda: me.linked() == {other.peer for other in others})
        own = clock_of(me, mine_s, told)
        done = trio.Event()
        compare = own._compare

        def then() -> None:
            compare()
            done.set()

        own._compare = then  # type: ignore[method-assign]
        await nursery.start(own.run)
        own.heard(Change("linked", others[0].peer))
        await done.wait()
    return told


@pytest.fixture
def without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks_module, "SETTLE_S", 0.0)


@pytest.mark.usefixtures("without_delay")
@pytest.mark.parametrize(
    ("mine_s", "theirs_s", "told"),
    [
        (NOON_S, (NOON_S,), None),
        (NOON_S, (NOON_S - 290,), None),  # invites bear it
        (NOON_S + HOURS_S, (NOON_S,), (HOURS_S, 1)),
        (NOON_S, (NOON_S + HOURS_S, NOON_S), None),  # the other one is wrong
        (NOON_S, (NOON_S + HOURS_S, NOON_S + HOURS_S, NOON_S), (-HOURS_S, 3)),
        (NOON_S, (None, NOON_S + HOURS_S), (-HOURS_S, 1)),
        (NOON_S, (None,), None),
    ],
)
async def test_clock_that_is_far_from_most_others_is_told_of(
    mine_s: float, theirs_s: tuple[float | None, ...], told: tuple[float, int] | None
) -> None:
    assert await compared(mine_s, *theirs_s) == ([] if told is None else [Notice(text=apart_text(*told))])


async def test_clock_is_told_to_who_is_linked_alone() -> None:
    me, stranger = Node(1), Node(2)
    async with running(me, stranger) as nursery:
        await nursery.start(clock_of(me, NOON_S, []).run)
        await stranger.host.dial(me.host.addresses[0], deadline_s=5)
        with pytest.raises(NetworkError):
            await stranger.host.request(
                me.peer, CLOCK_PROTOCOL, canonical(WallClock(at_s=0)), deadline_s=5, limit_bytes=64
            )


@pytest.mark.virtual_time
async def test_peers_that_have_no_time_for_it_are_asked_ever_less_often_whoever_is_linked_meanwhile() -> None:
    asked: list[float] = []

    async def request(*args: object, **options: object) -> NoReturn:
        asked.append(trio.current_time())
        raise NetworkError("no answer in time")

    host: Any = SimpleNamespace(serve=lambda *args, **options: None, request=request)
    peer = PeerId("12D3KooWB")
    own = Clocks(host, lambda: {peer}, lambda progress: None)
    async with trio.open_nursery() as nursery:
        await nursery.start(own.run)
        while len(asked) < 8:
            own.heard(Change("linked", peer))
            await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
    gaps = [later - at for at, later in itertools.pairwise(asked)]
    assert all(gap >= least for gap, least in zip(gaps, (4, 8, 16, 32, 60, 60, 60), strict=True)), gaps


@pytest.mark.parametrize(
    ("ahead_s", "peers", "said"),
    [
        (HOURS_S, CLOCKS_LIMIT, "3 hours ahead of those of most of 5 members: invites expire by it"),
        (-7 * 60.0, 1, "7 minutes behind the one member's that was asked: invites"),
    ],
)
def test_user_reads_how_far_and_what_to_do(ahead_s: float, peers: int, said: str) -> None:
    text = apart_text(ahead_s, peers)
    assert text.startswith(f"this machine's clock is {said}")
    assert text.endswith("set the one that is wrong, for example with `timedatectl set-ntp true`")
