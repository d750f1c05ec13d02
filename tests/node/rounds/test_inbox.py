"""The inbox: own inputs before those of peers, a tick however much there is, and seldom at rest.

Who is linked waits its turn in it.
"""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
import trio
import trio.testing

from shoal.node.rounds.engine import PERFORMERS, Engine
from shoal.node.rounds.inbox import (
    HEARD_LIMIT_BYTES,
    HEARD_PEER_LIMIT_BYTES,
    HEARD_PEER_LIMIT_MESSAGES,
    NEIGHBOURS_BEGIN_S,
    TICK_S,
    Inbox,
    ToHandle,
    Turn,
    in_turn,
)
from shoal.protocol import effects
from shoal.protocol.early import EARLY_PEER_LIMIT_MESSAGES
from shoal.protocol.errors import ConfigError, LocalError, RemoteError, StorageError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.inputs import Linked, Received, SetPaused, Tick
from shoal.protocol.messages import CHUNK_LIMIT, NO_HASH, ChunkResults, Held, Leave, Message, Term
from shoal.protocol.planning import OBSERVER, absent_ready
from shoal.protocol.timeouts import CROWD, RESTING_TICK_S
from shoal.protocol.wire import canonical
from shoal.swarm.links import LINK_LIMIT
from tests.node.ledger import Ledger

PEER, OTHER = (Identity.from_seed(bytes([n]) * 32).peer_id for n in (0, 1))
READY = absent_ready(OBSERVER, Ledger().chain.head, NO_HASH)


def heard(round: int) -> Received:
    return Received(PEER, Leave(term=Term(), round=round, base=NO_HASH, signature=bytes(64)))


def drained(inbox: Inbox, count: int) -> list[ToHandle]:
    async def main() -> list[ToHandle]:
        return [await inbox.next() for _ in range(count)]

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_inbox_gives_a_due_tick_then_own_inputs_then_those_of_peers_in_order() -> None:
    inbox = Inbox()
    inbox.hear(heard(1))
    inbox.hear(heard(2))
    inbox.put(SetPaused(True))
    assert drained(inbox, 4) == [Tick(), SetPaused(True), heard(1), heard(2)]


def test_inbox_ticks_in_time_however_much_peers_say() -> None:
    async def main() -> list[ToHandle]:
        inbox, given = Inbox(), []
        for _ in range(20):
            inbox.hear(heard(1))
            inbox.hear(heard(1))
            given.append(await inbox.next())
            await trio.sleep(TICK_S / 2)
        return given

    given = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert sum(isinstance(event, Tick) for event in given) == 10


def ready(peer: PeerId, round: int) -> Received:
    return Received(peer, msgspec.structs.replace(READY, round=round))


def test_neighbours_are_waited_for_until_they_announce_themselves_in_the_round() -> None:
    async def main() -> tuple[float, ToHandle]:
        inbox, began = Inbox(), trio.current_time()

        async def say() -> None:
            for one in (ready(OTHER, 1), Received(OTHER, heard(2).message), ready(OTHER, 2)):
                await trio.sleep(0.01)
                inbox.hear(one)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(say)
            await inbox.until_begun((Term(), 2), frozenset({OTHER}))
            took = trio.current_time() - began
        await inbox.next()  # a tick
        return took, await inbox.next()

    took, first = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert took == pytest.approx(0.03)
    assert first == ready(OTHER, 1), "nothing is taken out"


@pytest.mark.parametrize(("neighbours", "limit_s"), [({OTHER}, NEIGHBOURS_BEGIN_S), ({PEER}, 0), (set(), 0)])
def test_neighbours_that_say_nothing_are_not_waited_for_long(neighbours: set[PeerId], limit_s: float) -> None:
    async def main() -> float:
        inbox, began = Inbox(), trio.current_time()
        inbox.hear(ready(PEER, 2))
        await inbox.until_begun((Term(), 2), frozenset(neighbours))
        return trio.current_time() - began

    took = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert took == pytest.approx(limit_s)


class Unwritten:
    """A round machine whose messages are not on disk yet: whoever asks for them now would say them too early."""

    def current(self) -> list[Message]:
        raise AssertionError("said before it was on disk")


def test_engine_answers_a_new_link_only_in_its_turn() -> None:
    engine = Engine.__new__(Engine)
    engine._inbox = Inbox()
    engine.member = SimpleNamespace(machine=Unwritten())  # type: ignore[assignment]
    engine.linked(PEER, (Term(), 3))  # while the engine waits for an fsync, say
    assert drained(engine._inbox, 2) == [Tick(), Linked(PEER, (Term(), 3))]


def test_inbox_ticks_as_seldom_as_it_is_told_and_at_rest_at_the_next_beat() -> None:
    async def main() -> list[float]:
        inbox, ticks = Inbox(), []
        await trio.sleep(0.3)
        for tick_s in (RESTING_TICK_S, RESTING_TICK_S, TICK_S, TICK_S):
            assert await inbox.next(tick_s) == Tick()
            ticks.append(trio.current_time())
        return ticks

    ticks = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert ticks == pytest.approx([0.3, RESTING_TICK_S, RESTING_TICK_S + TICK_S, RESTING_TICK_S + 2 * TICK_S])


def test_inbox_at_rest_gives_an_input_at_once_and_the_tick_after_it_when_that_is_due() -> None:
    async def main() -> list[tuple[float, ToHandle]]:
        inbox, given = Inbox(), []
        await inbox.next()
        began = trio.current_time()

        async def say() -> None:
            await trio.sleep(RESTING_TICK_S / 2)
            inbox.hear(heard(1))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(say)
            for tick_s in (RESTING_TICK_S, TICK_S):
                event = await inbox.next(tick_s)
                given.append((trio.current_time() - began, event))
        return given

    given = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    half = pytest.approx(RESTING_TICK_S / 2)
    assert given == [(half, heard(1)), (half, Tick())], "the tick was due while it rested"


@pytest.mark.parametrize(
    ("rests", "phase", "links", "tick_s"),
    [
        (True, "train", 3, RESTING_TICK_S),
        (False, "train", 3, TICK_S),
        (True, "plan", 3, TICK_S),
        (False, "train", 3 * CROWD, 3 * TICK_S),
        (False, "train", 1000 * CROWD, RESTING_TICK_S),
    ],
)
def test_engine_ticks_seldom_when_its_member_rests_and_its_phase_is_shown(
    rests: bool, phase: str, links: int, tick_s: float
) -> None:
    engine = Engine.__new__(Engine)
    engine._shown_phase = "train"
    engine._p = SimpleNamespace(links=SimpleNamespace(linked=lambda: range(links)))  # type: ignore[assignment]
    engine.member = SimpleNamespace(rests=rests, phase=phase)  # type: ignore[assignment]
    assert engine._tick_s() == pytest.approx(tick_s)


@pytest.mark.parametrize("error", [LocalError("two values in one round"), StorageError("no room for the chain")])
async def test_who_waits_for_a_turn_that_ended_the_engine_never_goes_on_and_others_hear_its_error(
    error: Exception,
) -> None:
    async def fail(error: Exception) -> None:
        raise error

    async def seven() -> int:
        return 7

    async def take(turns: trio.MemoryReceiveChannel[Turn]) -> None:
        async for turn in turns:
            try:
                await turn.take()
            except Exception as ending:
                ended.append(ending)
                raise

    ended: list[Exception] = []
    give, turns = trio.open_memory_channel[Turn](1)
    with pytest.RaisesGroup(pytest.RaisesExc(type(error), match=str(error))):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take, turns)
            assert await in_turn(give.send_nowait, seven) == 7
            with pytest.raises(RemoteError, match="no such state"):
                await in_turn(give.send_nowait, lambda: fail(RemoteError("no such state")))
            await in_turn(give.send_nowait, lambda: fail(error))
            pytest.fail("it ends the engine, and with it who waits")
    assert ended == [error]


async def test_order_that_the_disk_does_not_take_is_refused_and_the_node_goes_on() -> None:
    """Nothing is changed by then; what fails later ends the node, as above."""

    def write(order: object) -> None:
        raise StorageError("no room for the order")

    engine = SimpleNamespace(_orders=SimpleNamespace(write=write))
    with pytest.raises(ConfigError, match="no room for the order") as refused:
        await PERFORMERS[effects.KeepOrder](engine, SimpleNamespace(order=None))  # type: ignore[arg-type]
    assert not isinstance(refused.value, StorageError)


async def test_error_of_a_turn_for_which_nobody_waits_is_the_engines() -> None:
    async def fail() -> None:
        raise RemoteError("a vector that cannot be")

    inbox = Inbox()
    inbox.put(Turn(fail))
    assert await inbox.next() == Tick()
    turn = await inbox.next()
    assert isinstance(turn, Turn)
    with pytest.raises(RemoteError, match="a vector that cannot be"):
        await turn.take()


def test_peer_that_says_too_much_loses_its_own_oldest_messages_and_nobody_anothers() -> None:
    inbox = Inbox()
    inbox.hear(ready(OTHER, 1))
    for round in range(1, HEARD_PEER_LIMIT_MESSAGES + 3):
        inbox.hear(heard(round))
    _, *given = drained(inbox, HEARD_PEER_LIMIT_MESSAGES + 2)
    assert given == [ready(OTHER, 1), *(heard(round) for round in range(3, HEARD_PEER_LIMIT_MESSAGES + 3))]
    assert inbox.is_through
    assert not len(inbox._heard)


def test_large_messages_of_one_peer_and_of_all_take_no_more_memory_than_they_may() -> None:
    results = ChunkResults.of(0, dict.fromkeys(range(CHUNK_LIMIT), NO_HASH))
    large = Held(term=Term(), round=2, base=NO_HASH, lineage=NO_HASH, evicted=(), chunks=(results,))
    size, inbox = len(canonical(large)), Inbox()
    inbox.hear(ready(OTHER, 1))
    for _ in range(2 * HEARD_PEER_LIMIT_BYTES // size):
        inbox.hear(Received(PEER, large))
    assert (len(inbox._heard) - 1) * size <= HEARD_PEER_LIMIT_BYTES < len(inbox._heard) * size
    for n in range(2 * HEARD_LIMIT_BYTES // HEARD_PEER_LIMIT_BYTES):
        for _ in range(HEARD_PEER_LIMIT_BYTES // size):
            inbox.hear(Received(PeerId(f"stranger {n}"), large))
    assert HEARD_LIMIT_BYTES - size < (len(inbox._heard) - 1) * size <= HEARD_LIMIT_BYTES
    assert drained(inbox, 2)[1] == ready(OTHER, 1)


def test_members_of_a_large_swarm_are_heard_whole_however_much_one_peer_says() -> None:
    """As many as may be linked, each with what it may say early, and an attacker in between."""
    inbox, crowd = Inbox(), [PeerId(f"member {n}") for n in range(LINK_LIMIT - 1)]
    for round in range(EARLY_PEER_LIMIT_MESSAGES):
        for peer in crowd:
            inbox.hear(ready(peer, round))
        for again in range(16):
            inbox.hear(heard(1 + 16 * round + again))
    given = drained(inbox, 1 + len(inbox._heard))
    said = [one for one in given if isinstance(one, Received) and one.peer != PEER]
    assert said == [ready(peer, round) for round in range(EARLY_PEER_LIMIT_MESSAGES) for peer in crowd]
