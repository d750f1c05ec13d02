"""Catching up with rounds that go on meanwhile, by one who is slow or by many at once."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import trio

from shoal.collectives.grid import Grid
from shoal.node.state import states as states_module
from shoal.node.state.states import PIN_S, PINS_LIMIT_STATES, STATES_KEPT
from shoal.protocol.errors import NetworkError
from shoal.protocol.peering import (
    GetFinals,
    GetHeader,
)
from tests.node.donors import ME, Line, World
from tests.node.ledger import Ledger, save_finals
from tests.node.state.catchup_lab import (
    GOOD,
    PEERS,
    STATE_BYTES,
    Watch,
    advance,
    assert_fine,
    assert_state,
    fine_world,
    ledger_of,
    small_windows,
)

pytestmark = [pytest.mark.virtual_time, pytest.mark.usefixtures("no_threads")]

__all__ = ["small_windows"]


# -- several donors at once ----------------------------------------------------------------------------------


COARSE = Grid(60_000, 8192)


# -- rounds that go on ---------------------------------------------------------------------------------------


async def rounds_go_on(world: World, period_s: float) -> None:
    while True:
        await trio.sleep(period_s)
        world.certify()


async def join(world: World, *, bytes_per_s: float, period_s: float, limit_s: float) -> tuple[float, int]:
    """Join while rounds go on: extend the chain, and go after its head. When, and in which round."""
    line, chain, state = Line(world, bytes_per_s=bytes_per_s), world.ledger.empty_chain(), None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.run)
        nursery.start_soon(rounds_go_on, world, period_s)
        with trio.fail_after(limit_s):
            while True:
                part = await world.catchup.certificates(chain.height, PEERS[0])
                for certificate in part.certificates:
                    chain.extend(certificate)
                if state is not None and state.round == chain.head.round:
                    break
                state = await world.advance(state, chain, PEERS, Watch())
        nursery.cancel_scope.cancel()
    assert_fine(state, world, state.round)
    return trio.current_time(), state.round


@pytest.mark.usefixtures("small_windows")
async def test_joiner_at_a_tenth_of_the_rounds_pace_arrives(tmp_path: Path) -> None:
    """A state takes ten rounds to come, so that ten rounds have passed; their finals, of half a byte per value, take
    six; and so on. The one state that it began with is held for it until it has it."""
    world = fine_world(tmp_path, 3, grid=COARSE, codec="int4")
    period_s = 1.0
    arrived_at, round = await join(
        world, bytes_per_s=STATE_BYTES / (10 * period_s), period_s=period_s, limit_s=60 * period_s
    )
    finals = world.ledger.finals[3]
    share = sum(chunk.payload.nbytes for chunk in finals.chunks) / STATE_BYTES * 10  # of a round, to fetch one's finals
    assert 0.5 < share < 0.8
    # Of the eight chunks of a round's finals two may come twice.
    assert 10 * period_s / (1 - share) <= arrived_at + period_s
    assert arrived_at <= 10 * period_s / (1 - 10 / 8 * share) + period_s
    assert round >= 3 + arrived_at / period_s - 2
    headers = [request for donor in world.donors.values() for request in donor.asked if isinstance(request, GetHeader)]
    assert {request.round for request in headers} == {3}  # it never began another
    sent = sum(world.chunks_from(peer) for peer in PEERS)
    assert sent <= 10 / 8 * (2 + round - 3) * COARSE.chunks


@pytest.mark.usefixtures("small_windows")
async def test_donors_let_go_of_a_state_when_nobody_asks_for_it(tmp_path: Path) -> None:
    world = fine_world(tmp_path, 3, grid=COARSE, codec="int4")
    await join(world, bytes_per_s=STATE_BYTES / 4, period_s=1.0, limit_s=100)
    for donor in world.donors.values():
        assert 3 in donor.cache.held_rounds()
    await trio.sleep(PIN_S)
    world.certify()
    newest = world.ledger.chain.head.round
    for donor in world.donors.values():
        assert donor.cache.held_rounds() == [newest - 1, newest]


@pytest.mark.usefixtures("small_windows")
async def test_state_that_is_gone_everywhere_is_given_up_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Donors that hold nothing for those who fetch: the joiner takes what it can get of the newest."""
    monkeypatch.setattr(states_module, "PINS_LIMIT_BYTES", 0)
    world = fine_world(tmp_path, 3, grid=COARSE)
    line = Line(world, bytes_per_s=STATE_BYTES / 10)
    chain = world.ledger.chain_to(3)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.run)
        nursery.start_soon(rounds_go_on, world, 2.0)
        with pytest.raises(NetworkError, match="does not hold it"):
            await world.advance(None, chain, PEERS, Watch())
        nursery.cancel_scope.cancel()
    world.line = None
    world.frames.clear()
    assert_fine(await advance(world, None, PEERS), world, world.ledger.chain.head.round)


async def test_rounds_whose_finals_are_only_on_the_donors_disk_are_replayed(tmp_path: Path) -> None:
    ledger = ledger_of(4)
    world = World(tmp_path, ledger)
    donor = world.donor(GOOD)
    for finals in ledger.finals.values():
        save_finals(donor.cache, finals)
    donor.cache._finals.clear()
    assert_state(await advance(world, ledger.states[0], [GOOD]), ledger, 4)
    assert [type(request) for request in donor.asked] == [GetFinals] * 4
    path = next(path for round, _, path in donor.cache._finals_files() if round == 4)
    data = path.read_bytes()
    donor.cache._files.clear()
    path.write_bytes(data[:-2000] + bytes(2000))  # bit rot in the last chunk: it is not passed on
    world.restart()
    with pytest.raises(NetworkError, match="does not hold it"):
        await world.catchup.finals(ledger.finals[4].plan.hash, [GOOD])
    assert not world.catchup.scores.banned(GOOD, trio.current_time())


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("apart_s", [0.0, 0.7])
async def test_ten_who_join_all_arrive_while_rounds_go_on(tmp_path: Path, apart_s: float) -> None:
    """At once, or in different rounds; donors hold two states and a few more: the same shelves serve all."""
    ledger = Ledger(grid=COARSE, codec="int4")
    ledger.certify(3)
    worlds = [World(tmp_path / str(n), ledger) for n in range(10)]
    for peer in PEERS:
        donor = worlds[0].donor(peer)
        for world in worlds[1:]:
            world.share(donor)
    most_held, arrived = 0, []

    async def one(number: int) -> None:
        await trio.sleep(apart_s * number)
        world = worlds[number]
        line, chain, state = Line(world, bytes_per_s=STATE_BYTES / 3), ledger.empty_chain(), None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(line.run)
            while state is None or state.round < chain.head.round:
                part = await world.catchup.certificates(chain.height, PEERS[number % 3])
                for certificate in part.certificates:
                    chain.extend(certificate)
                if state is not None and state.round == chain.head.round:
                    break
                with contextlib.suppress(NetworkError):  # a state that is held no longer: the next
                    state = await world.advance(state, chain, PEERS, Watch())
            nursery.cancel_scope.cancel()
        assert_fine(state, world, state.round)
        arrived.append(number)

    async def rounds() -> None:
        nonlocal most_held
        while True:
            await trio.sleep(1.0)
            worlds[0].certify()
            for donor in worlds[0].donors.values():
                most_held = max(most_held, len(donor.cache.held_rounds()))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rounds)
            async with trio.open_nursery() as joiners:
                for number in range(10):
                    joiners.start_soon(one, number)
            nursery.cancel_scope.cancel()
    assert sorted(arrived) == list(range(10))
    assert STATES_KEPT < most_held <= STATES_KEPT + PINS_LIMIT_STATES
    for world in worlds:
        assert sum(world.chunks_from(peer) for peer in PEERS) <= 20 * COARSE.chunks


@pytest.mark.usefixtures("small_windows")
async def test_joiner_that_leaves_in_mid_transfer_leaves_nothing_behind(tmp_path: Path) -> None:
    world = fine_world(tmp_path, 2)
    line = Line(world, bytes_per_s=STATE_BYTES / 10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.run)
        with trio.move_on_after(3) as scope:
            await advance(world, None, PEERS)
        assert scope.cancelled_caught
        assert not world.exchanges[ME]._incoming
        assert not world.exchanges[ME]._fetches
        await trio.sleep(10)  # what was on its way is dropped
        nursery.cancel_scope.cancel()
    assert world.cache.newest_round() is None
    for _ in range(3):
        world.certify()
    await trio.sleep(PIN_S)
    world.certify()
    assert all(donor.cache.held_rounds() == [5, 6] for donor in world.donors.values())
