"""Catching up from several donors at once: none that dies, lies or hangs costs the transfer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest
import trio

from shoal.collectives.finals import FinalChunk, FinalFormat
from shoal.collectives.state import StateAssembly
from shoal.node.outcome import StateFetched
from shoal.protocol.donors import BAN_S
from shoal.protocol.errands import HEADER_TIMEOUT_S
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.peering import FetchAnswer, FetchRequest, FinalsAnswer, GetFinals, GetHeader, HeaderAnswer
from shoal.protocol.wire import canonical
from shoal.swarm.lanes.frame import FrameHeader
from tests.node.donors import Line, World, flipped
from tests.node.ledger import GRID
from tests.node.state.catchup_lab import (
    BAD,
    FINE,
    GOOD,
    PEERS,
    STATE_BYTES,
    advance,
    assert_fine,
    assert_state,
    fine_world,
    ledger_of,
    small_windows,
)

pytestmark = [pytest.mark.virtual_time, pytest.mark.usefixtures("no_threads")]

__all__ = ["small_windows"]

Result = TypeVar("Result")


@pytest.mark.usefixtures("small_windows")
async def test_donors_serve_at_once_each_by_its_bandwidth(tmp_path: Path) -> None:
    world = fine_world(tmp_path, 2)
    line = Line(world, rates={PEERS[0]: 60_000.0, PEERS[1]: 30_000.0, PEERS[2]: 10_000.0})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.run)
        began = trio.current_time()
        state = await advance(world, None, PEERS)
        took = trio.current_time() - began
        nursery.cancel_scope.cancel()
    assert_fine(state, world, 2)
    assert took == pytest.approx(STATE_BYTES / 100_000, rel=0.2)  # all lines are full
    donated = world.catchup.donated
    assert sum(donated.values()) == STATE_BYTES
    assert donated[PEERS[0]] == pytest.approx(0.6 * STATE_BYTES, rel=0.2)
    assert donated[PEERS[1]] == pytest.approx(0.3 * STATE_BYTES, rel=0.3)
    assert 0 < donated[PEERS[2]] < 0.2 * STATE_BYTES


@pytest.mark.usefixtures("small_windows")
async def test_donor_killed_in_mid_transfer_costs_what_it_owed(tmp_path: Path) -> None:
    world = fine_world(tmp_path, 2)
    line = Line(world, rates=dict.fromkeys(PEERS, 30_000.0))
    began = trio.current_time()

    async def kill_when_half_is_here(fetched: StateFetched) -> None:
        if fetched.done_chunks == fetched.total_chunks // 2:
            world.kill(PEERS[0])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(line.run)
        state = await world.advance(None, world.ledger.chain, PEERS, kill_when_half_is_here)
        nursery.cancel_scope.cancel()
    assert_fine(state, world, 2)
    assert trio.current_time() - began < 1.1 * STATE_BYTES / 2 * (1 / 90_000 + 1 / 60_000) + 1
    donated = world.catchup.donated
    assert 0 < donated[PEERS[0]] < STATE_BYTES / 4
    assert sum(donated.values()) == STATE_BYTES


@pytest.mark.usefixtures("small_windows")
async def test_donor_that_lies_in_the_middle_is_dropped_and_not_asked_the_next_time(tmp_path: Path) -> None:
    world = fine_world(tmp_path, 2)
    honest = 0

    def lie_later(header: FrameHeader, data: bytes) -> bytes:
        nonlocal honest
        honest += 1
        return data if honest <= 10 else flipped(data)

    world.donors[PEERS[1]].spoil = lie_later
    assert_fine(await advance(world, None, PEERS), world, 2)
    assert world.catchup.donated.get(PEERS[1], 0) <= 10 * 4000
    assert sum(world.catchup.donated.values()) == STATE_BYTES
    asked = len(world.donors[PEERS[1]].asked)
    world.cache = world._cache("another")
    assert_fine(await advance(world, None, PEERS), world, 2)
    assert len(world.donors[PEERS[1]].asked) == asked
    with pytest.raises(NetworkError, match="no peer has the state"):
        await advance(world, None, [PEERS[1]])
    await trio.sleep(BAN_S)
    world.donors[PEERS[1]].spoil = lambda header, data: data
    assert_fine(await advance(world, None, [PEERS[1]]), world, 2)


async def test_donor_that_does_not_answer_keeps_nobody_waiting(tmp_path: Path) -> None:
    world = fine_world(tmp_path, 2)
    ask = world.catchup._ask

    async def hang(peer: PeerId, request: bytes) -> bytes:
        if peer == PEERS[0]:
            await trio.sleep(10)
            raise NetworkError(f"{peer} did not answer within 10 s")
        return await ask(peer, request)

    world.catchup._ask = hang
    began = trio.current_time()
    assert_fine(await advance(world, None, PEERS), world, 2)
    assert trio.current_time() - began <= HEADER_TIMEOUT_S


@pytest.mark.usefixtures("small_windows")
async def test_finals_come_from_several_donors_and_a_liar_among_them_is_dropped(tmp_path: Path) -> None:
    world = fine_world(tmp_path, 1)
    world.donors[PEERS[1]].spoil = lambda header, data: flipped(data)
    plan = world.ledger.finals[1].plan
    finals = await world.catchup.finals(plan.hash, PEERS)
    assert finals.concatenated() == world.ledger.finals[1].concatenated()
    donated = world.catchup.donated
    assert set(donated) <= {PEERS[0], PEERS[2]}
    assert sum(donated.values()) == sum(chunk.payload.nbytes for chunk in finals.chunks)


@pytest.mark.usefixtures("small_windows")
async def test_some_finals_are_copied_from_who_has_them_and_a_liar_among_those_is_dropped(tmp_path: Path) -> None:
    world = fine_world(tmp_path, 1)
    world.donors[PEERS[1]].spoil = lambda header, data: flipped(data)
    want, wanted = world.ledger.finals[1], range(5, FINE.chunks, 3)
    got: dict[int, FinalChunk] = {}

    def take(final: FinalChunk) -> None:
        assert final.sound
        assert final.chunk not in got
        got[final.chunk] = final

    brought = await world.catchup.copy_finals(FinalFormat(want.plan), wanted, PEERS, take)
    assert {chunk: final.payload.tobytes() for chunk, final in got.items()} == {
        chunk: want.chunks[chunk].payload.tobytes() for chunk in wanted
    }
    assert set(brought) <= {PEERS[0], PEERS[2]}
    assert sum(brought.values()) == sum(want.chunks[chunk].payload.nbytes for chunk in wanted)


async def test_finals_that_nobody_has_are_not_copied(tmp_path: Path) -> None:
    """Whoever says that it has them."""
    world = World(tmp_path, ledger_of(1))
    world.donor(GOOD, rounds=0)
    got: list[FinalChunk] = []
    with pytest.raises(NetworkError):
        await world.catchup.copy_finals(FinalFormat(world.ledger.finals[1].plan), [0], [GOOD, BAD], got.append)
    assert got == []


async def test_finals_are_fetched_once_however_many_want_them(tmp_path: Path) -> None:
    world = fine_world(tmp_path, 1)
    plan, found = world.ledger.finals[1].plan, []

    async def fetch() -> None:
        found.append(await world.catchup.finals(plan.hash, PEERS))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(fetch)
    assert [finals.concatenated() for finals in found] == [world.ledger.finals[1].concatenated()] * 3
    assert sum(world.chunks_from(peer) for peer in PEERS) == FINE.chunks
    assert not world.catchup._fetching_finals


# -- which state ---------------------------------------------------------------------------------------------


async def test_the_newest_state_that_most_hold_is_fetched_and_the_rest_replayed(tmp_path: Path) -> None:
    ledger = ledger_of(3)
    world = World(tmp_path, ledger)
    names = [PeerId(name) for name in ("behind0", "behind1", "behind2", "newest")]
    donors = [world.donor(name, rounds=2 if n < 3 else 3) for n, name in enumerate(names)]
    assert_state(await advance(world, None, names), ledger, 3)
    assert sum(isinstance(request, GetFinals) for request in donors[3].asked) == 1
    assert world.chunks_from(names[3]) == GRID.chunks  # the finals; the state came from the many
    assert sum(world.chunks_from(name) for name in names[:3]) == 2 * GRID.chunks


async def test_state_of_a_round_that_only_one_holds_is_taken_from_it(tmp_path: Path) -> None:
    ledger = ledger_of(3)
    world = World(tmp_path, ledger)
    world.donor(GOOD)
    world.donor(PeerId("empty"), rounds=0)
    assert_state(await advance(world, None, [PeerId("empty"), GOOD]), ledger, 3)
    assert world.catchup.donated == {GOOD: 8 * GRID.numel}


async def test_state_is_received_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(*args: object) -> bool:
        raise AssertionError("a chunk was copied")

    world = fine_world(tmp_path, 2)
    monkeypatch.setattr(StateAssembly, "_write", copy)
    assert_fine(await advance(world, None, PEERS), world, 2)


# -- many that claim much and hold nothing -------------------------------------------------------------------


async def until_it_comes(get: Callable[[], Awaitable[Result]], attempts: int) -> Result:
    """As a node asks: again and again."""
    for _ in range(attempts - 1):
        with suppress(NetworkError):
            return await get()
        await trio.sleep(1.0)
    return await get()


@pytest.mark.parametrize(("strangers", "attempts"), [(16, 1), (40, 2), (80, 3)])
async def test_strangers_without_a_state_keep_nobody_from_it(strangers: int, attempts: int, tmp_path: Path) -> None:
    """However many say that they are ahead, and so come first."""
    world = fine_world(tmp_path, 3)
    first = [PeerId(f"stranger{number}") for number in range(strangers)]
    for peer in first:
        world.donor(peer, rounds=0)
    state = await until_it_comes(lambda: advance(world, None, [*first, *PEERS]), attempts)
    assert_fine(state, world, 3)


@pytest.mark.parametrize("holds", ["nothing", "a state that is not to be had"])
async def test_those_who_say_that_they_have_it_and_bring_nothing_are_asked_last_the_next_time(
    holds: str, tmp_path: Path
) -> None:
    world = fine_world(tmp_path, 3)
    finals = world.ledger.finals[3]
    liars = [PeerId(f"liar{number}") for number in range(20)]
    for liar in liars:
        donor = world.donor(liar, rounds=0)

        def answer(
            request: FetchRequest, honestly: Callable[[FetchRequest], FetchAnswer | bytes] = donor.answer
        ) -> FetchAnswer | bytes:
            if isinstance(request, GetFinals):
                return FinalsAnswer(plan=finals.plan)
            if request == GetHeader(round=3) and holds != "nothing":
                return HeaderAnswer(header=canonical(world.ledger.header(3)))
            return honestly(request)

        donor.answer = answer
    found = await until_it_comes(lambda: world.catchup.finals(finals.plan.hash, [*liars, *PEERS]), 6)
    assert [bytes(chunk.payload) for chunk in found.chunks] == [bytes(chunk.payload) for chunk in finals.chunks]
    assert_fine(await until_it_comes(lambda: advance(world, None, [*liars, *PEERS]), 3), world, 3)
