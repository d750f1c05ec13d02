"""The inbox: own inputs before those of peers, a tick however much there is, and seldom at rest.

Who is linked waits its turn in it.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import msgspec
import pytest
import trio
import trio.testing

from shoal.node.rounds.engine import Engine
from shoal.node.rounds.inbox import NEIGHBOURS_BEGIN_S, RESTING_TICK_S, TICK_S, Inbox, ToHandle, Turn
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.inputs import Linked, Received, SetPaused, Tick
from shoal.protocol.messages import NO_HASH, Leave, Message, Term
from shoal.protocol.planning import OBSERVER, absent_ready
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


def test_inbox_ticks_as_seldom_as_it_is_told_and_once_each_time() -> None:
    async def main() -> list[float]:
        inbox, ticks = Inbox(), []
        for tick_s in (RESTING_TICK_S, RESTING_TICK_S, TICK_S, TICK_S):
            assert await inbox.next(tick_s) == Tick()
            ticks.append(trio.current_time())
        return [later - earlier for earlier, later in pairwise(ticks)]

    gaps = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert gaps == pytest.approx([RESTING_TICK_S, TICK_S, TICK_S])


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
    ("rests", "phase", "tick_s"), [(True, "train", RESTING_TICK_S), (False, "train", TICK_S), (True, "plan", TICK_S)]
)
def test_engine_ticks_seldom_when_its_member_rests_and_its_phase_is_shown(
    rests: bool, phase: str, tick_s: float
) -> None:
    engine = Engine.__new__(Engine)
    engine._shown_phase = "train"
    engine.member = SimpleNamespace(rests=rests, phase=phase)  # type: ignore[assignment]
    assert engine._tick_s() == tick_s


async def test_who_waits_for_a_turn_that_ended_the_engine_never_goes_on_and_others_hear_its_error() -> None:
    async def fail(error: Exception) -> None:
        raise error

    refused = Turn(lambda: fail(RemoteError("no such state")))
    await refused.take()
    assert (refused.over.is_set(), str(refused.error)) == (True, "no such state")
    ended = Turn(lambda: fail(LocalError("two values in one round")))
    with pytest.raises(LocalError, match="two values in one round"):
        await ended.take()  # it ends the engine, and with it who waits
    assert not ended.over.is_set()
