"""Catching up from donors of every sort: what is taken is what was certified, whoever brought it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import trio

from shoal.collectives.finals import Finals
from shoal.collectives.grid import Grid
from shoal.collectives.state import CertifiedState, StateHeader, frozen, header_of
from shoal.node.state.catchup import replay_limit_rounds
from shoal.node.state.chunk_requests import STALL_S
from shoal.protocol import chain as chain_module
from shoal.protocol.errors import ConfigError, NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Plan, Term
from shoal.protocol.peering import (
    ChainPart,
    FetchAnswer,
    FetchRequest,
    FinalsAnswer,
    GetChain,
    GetFinals,
    GetHeader,
    HeaderAnswer,
    Refusal,
)
from shoal.protocol.wire import canonical
from shoal.swarm.lanes.chunks import ChunkSpace
from shoal.swarm.lanes.frame import FrameHeader
from tests.node.donors import World, flipped
from tests.node.ledger import GRID, Ledger, finals_of, identity, plan_of, save_finals, state_of, vector
from tests.node.state.catchup_lab import BAD, GOOD, Watch, advance, assert_state, ledger_of

NO_INT4 = 0x88
"""Two values of -8, which int4 does not have."""

pytestmark = [pytest.mark.virtual_time, pytest.mark.usefixtures("no_threads")]


REPLAY_LIMIT = replay_limit_rounds("int8", GRID.numel, GRID.chunk_values)


# -- whole states --------------------------------------------------------------------------------------------


async def test_state_is_fetched_whole_and_is_the_certified_one(tmp_path: Path) -> None:
    world = World(tmp_path, ledger_of(3))
    world.donor(GOOD)
    watch = Watch()
    state = await world.advance(None, world.ledger.chain, [GOOD], watch)
    assert_state(state, world.ledger, 3)
    assert watch.seen == [(done, 6) for done in range(7)]
    assert world.chunks_from(GOOD) == 2 * GRID.chunks


Spoiler = Callable[[FrameHeader, bytes], bytes | None]
SPOILS: dict[str, Spoiler] = {
    "first bit of all": lambda header, data: flipped(data),
    "last bit of the last chunk": lambda header, data: flipped(data, len(data) - 1) if header.chunk == 2 else data,
    "momentum only": lambda header, data: flipped(data, 7) if header.flags == ChunkSpace.MOMENTUM else data,
    "zeros": lambda header, data: bytes(len(data)),
    "cut short": lambda header, data: data[:-4],
    "lost": lambda header, data: None if header.chunk == 1 else data,
}


@pytest.mark.parametrize("spoil", SPOILS)
async def test_corrupt_donor_is_left_for_the_next_and_nothing_of_it_stays(tmp_path: Path, spoil: str) -> None:
    world = World(tmp_path, ledger_of(2))
    world.donor(BAD).spoil = SPOILS[spoil]
    world.donor(GOOD)
    state = await advance(world, None, [BAD, GOOD])
    assert_state(state, world.ledger, 2)
    assert sum(world.catchup.donated.values()) == 8 * GRID.numel
    assert world.catchup.donated[GOOD] >= 4 * GRID.length(2)
    assert not world.exchanges[PeerId("me")]._incoming


@pytest.mark.parametrize("spoil", SPOILS)
async def test_corrupt_donor_alone_brings_nothing(tmp_path: Path, spoil: str) -> None:
    world = World(tmp_path, ledger_of(2))
    world.donor(BAD).spoil = SPOILS[spoil]
    began = trio.current_time()
    with pytest.raises(NetworkError, match="no peer has the state of round 2"):
        await advance(world, None, [BAD])
    assert trio.current_time() - began <= 2 * STALL_S
    assert world.cache.newest_round() is None
    assert world.cache.saved_rounds() == []


async def test_donors_that_cannot_help_are_passed_over(tmp_path: Path) -> None:
    world = World(tmp_path, ledger_of(3))
    gone, behind, unreachable = PeerId("gone"), PeerId("behind"), PeerId("unreachable")
    world.donor(behind, rounds=2)
    world.donor(unreachable).has_lane = False
    with pytest.raises(NetworkError, match="no peer has the state"):
        await advance(world, None, [gone, behind, unreachable])
    world.donor(GOOD)
    assert_state(await advance(world, None, [gone, behind, unreachable, GOOD]), world.ledger, 3)
    assert world.chunks_from(behind) == world.chunks_from(unreachable) == 0


def header_answers(ledger: Ledger) -> dict[str, FetchAnswer | bytes]:
    right = ledger.header(2)
    other_grid = header_of(ledger.states[2], Grid(GRID.numel, 5000))
    return {
        "of another round": HeaderAnswer(header=canonical(ledger.header(1))),
        "renamed": HeaderAnswer(header=canonical(msgspec.structs.replace(ledger.header(1), round=2))),
        "of another branch": HeaderAnswer(header=canonical(msgspec.structs.replace(right, term=Term(rollbacks=1)))),
        "of another state": HeaderAnswer(header=canonical(header_of(state_of(2, seed=77), GRID))),
        "of another grid": HeaderAnswer(header=canonical(other_grid)),
        "of more tokens": HeaderAnswer(header=canonical(msgspec.structs.replace(right, tokens=right.tokens + 1))),
        "of another hash": HeaderAnswer(header=canonical(msgspec.structs.replace(right, anchor=flipped(right.anchor)))),
        "huge": HeaderAnswer(header=canonical(msgspec.structs.replace(right, tokens=0)).replace(b"numel", b"mumel")),
        "empty": HeaderAnswer(header=b""),
        "no header": HeaderAnswer(header=canonical([1, 2])),
        "a refusal": Refusal(reason="not held here"),
        "another answer": ChainPart(certificates=(), head=0),
        "nonsense": b"\xc1",
        "nothing": b"",
    }


@pytest.mark.parametrize("what", header_answers(ledger_of(2)))
async def test_header_that_is_not_the_certified_one_is_not_followed(tmp_path: Path, what: str) -> None:
    world = World(tmp_path, ledger_of(2))
    world.donor(BAD).answer = lambda request: header_answers(world.ledger)[what]
    with pytest.raises(NetworkError, match="no peer has the state"):
        await advance(world, None, [BAD])
    assert world.frames == []  # not a chunk was asked for
    world.donor(GOOD)
    assert_state(await advance(world, None, [BAD, GOOD]), world.ledger, 2)


@pytest.mark.parametrize("what", ["of another round", "of another state", "nonsense"])
async def test_who_offers_another_header_is_not_asked_again(tmp_path: Path, what: str) -> None:
    world = World(tmp_path, ledger_of(2))
    world.donor(BAD).answer = lambda request: header_answers(world.ledger)[what]
    for asked in (True, False):
        world.donors[BAD].asked.clear()
        with pytest.raises(NetworkError, match="no peer has the state"):
            await advance(world, None, [BAD])
        assert bool(world.donors[BAD].asked) is asked


async def test_who_has_no_state_or_finals_is_told_of_in_plain_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shoal.node.state.catchup")
    world = World(tmp_path, ledger_of(2))
    world.donor(BAD).answer = lambda request: Refusal(reason="not held here")
    with pytest.raises(NetworkError):
        await advance(world, None, [BAD])
    with pytest.raises(NetworkError):
        await world.catchup.finals(world.ledger.finals[1].plan.hash, [BAD])
    assert f"{BAD}: it has no state of round 2" in caplog.messages
    assert caplog.messages[-1] == f"{BAD}: it has not the finals that this node lacks"


async def test_donor_that_went_back_has_another_state_of_that_round_and_is_asked_again(tmp_path: Path) -> None:
    world = World(tmp_path, ledger_of(2))
    donor = world.donor(GOOD)
    once_there = donor.answer

    def still_elsewhere(request: FetchRequest) -> FetchAnswer | bytes:
        asked_for_it = request == GetHeader(round=2)
        return header_answers(world.ledger)["of another branch"] if asked_for_it else Refusal(reason="not held here")

    donor.answer = still_elsewhere
    with pytest.raises(NetworkError, match="no peer has the state"):
        await advance(world, None, [GOOD])
    donor.answer = once_there
    assert_state(await advance(world, None, [GOOD]), world.ledger, 2)


async def test_initial_state_comes_from_a_founder_only(tmp_path: Path) -> None:
    ledger = ledger_of(0)
    world = World(tmp_path, ledger)
    world.donor(BAD)
    with pytest.raises(NetworkError, match="no peer has the state of round 0"):
        await advance(world, None, [BAD])
    assert world.frames == []
    founder = ledger.peers[1]
    world.donor(founder)
    state = await advance(world, None, [BAD, founder])
    assert_state(state, ledger, 0)


async def test_founder_cannot_pass_another_state_for_the_initial_one(tmp_path: Path) -> None:
    ledger = ledger_of(0)
    world = World(tmp_path, ledger)
    founder = ledger.peers[0]
    later = header_of(state_of(5), GRID)
    world.donor(founder).answer = lambda request: HeaderAnswer(header=canonical(later))
    with pytest.raises(NetworkError, match="no peer has the state of round 0"):
        await advance(world, None, [founder])
    assert world.frames == []


def initial_headers(ledger: Ledger) -> dict[str, StateHeader]:
    right, huge = ledger.header(0), 16_000
    small = CertifiedState.initial(frozen(vector(1, 1000)), right.layout)
    return {
        "fewer values": header_of(small, Grid(small.numel, GRID.chunk_values)),
        "other chunks": header_of(ledger.states[0], Grid(GRID.numel, 5000)),
        "hundreds of gigabytes": msgspec.structs.replace(
            right, numel=huge * right.chunk_values, anchor=bytes(32 * huge), momentum=bytes(32 * huge)
        ),
        "another model": msgspec.structs.replace(right, layout=b"X" * 32),
    }


@pytest.mark.parametrize("what", initial_headers(ledger_of(0)))
async def test_initial_state_of_another_model_is_not_taken_of_a_founder_that_did_not_draw_it(
    tmp_path: Path, what: str
) -> None:
    ledger = ledger_of(0)
    world, header = World(tmp_path, ledger), initial_headers(ledger)[what]

    def accept(header: StateHeader) -> None:
        if header.layout != ledger.states[0].layout_hash:
            raise ConfigError("the swarm trains another model")

    world.catchup.accepts = accept
    first = ledger.chain.head.planner
    liar, *others = (peer for peer in ledger.peers if peer != first)
    world.donor(liar).answer = lambda request: HeaderAnswer(header=canonical(header))
    with pytest.raises(NetworkError, match="no peer has the state of round 0"):
        await advance(world, None, [liar])
    assert world.frames == []
    world.donor(others[0])
    assert_state(await advance(world, None, [liar, others[0]]), ledger, 0)


async def test_first_founder_may_say_that_the_swarm_trains_another_model(tmp_path: Path) -> None:
    ledger = ledger_of(0)
    world, first = World(tmp_path, ledger), ledger.chain.head.planner

    def accept(header: StateHeader) -> None:
        raise ConfigError("the swarm trains another model")

    world.catchup.accepts = accept
    world.donor(first)
    with pytest.raises(ConfigError, match="the swarm trains another model"):
        await advance(world, None, [first])


# -- replay --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missed", [1, 2, REPLAY_LIMIT])
async def test_few_missed_rounds_are_replayed_to_the_same_digest(tmp_path: Path, missed: int) -> None:
    ledger = ledger_of(missed)
    world = World(tmp_path, ledger)
    donor = world.donor(GOOD)
    state = await advance(world, ledger.states[0], [GOOD])
    assert_state(state, ledger, missed)
    assert [type(request) for request in donor.asked] == [GetFinals] * missed
    # What was fetched is kept: it says whether a contribution was counted, and others may ask for it.
    for finals in ledger.finals.values():
        held = world.cache.held_finals(finals.plan.hash)
        assert held is not None
        assert held.concatenated() == finals.concatenated()


async def test_many_missed_rounds_are_not_replayed(tmp_path: Path) -> None:
    ledger = ledger_of(REPLAY_LIMIT + 1)
    world = World(tmp_path, ledger)
    donor = world.donor(GOOD)
    assert_state(await advance(world, ledger.states[0], [GOOD]), ledger, REPLAY_LIMIT + 1)
    assert [type(request) for request in donor.asked] == [GetHeader]


async def test_finals_on_disk_are_replayed_without_asking(tmp_path: Path) -> None:
    ledger = ledger_of(2)
    world = World(tmp_path, ledger)
    for finals in ledger.finals.values():
        save_finals(world.cache, finals)
    assert_state(await advance(world, ledger.states[0], []), ledger, 2)


@pytest.mark.parametrize("bits", [NO_INT4, 0x01])
async def test_finals_that_their_disk_changes_after_they_were_read_are_fetched_anew(tmp_path: Path, bits: int) -> None:
    """A damaged value is another value, or, as -8 in int4, none at all: neither ends who replays it."""
    ledger, written = (Ledger(grid=GRID, codec="int4") for _ in range(2))
    for one in (ledger, written):
        one.certify(2)
    world = World(tmp_path, ledger)
    plan = ledger.finals[1].plan
    for finals in written.finals.values():  # they lie in their files from then on
        save_finals(world.cache, finals)
    world.restart()
    mapped = world.cache.finals(plan.hash)
    assert mapped is not None
    [path] = world.folder.glob(f"me/finals/1-{plan.hash.hex()}")
    values = mapped.chunks[0].encoded
    at = path.read_bytes().index(values.tobytes()) + values.size // 2
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([bits if bits == NO_INT4 else values[values.size // 2] ^ bits]))
    assert not mapped.chunks[0].intact
    with pytest.raises(NetworkError, match="no peer has the state"):
        await advance(world, ledger.states[0], [])
    assert not path.exists()
    donor = world.donor(GOOD)
    assert_state(await advance(world, ledger.states[0], [GOOD]), ledger, 2)
    assert [type(request) for request in donor.asked] == [GetFinals]  # of round 1 alone, and no state


async def test_replay_that_leads_elsewhere_is_not_taken(tmp_path: Path) -> None:
    """An owner signed other finals for the same plan: the certificate's digest tells."""
    ledger = ledger_of(1)
    world = World(tmp_path, ledger)
    donor = world.donor(BAD)
    other = finals_of(ledger.finals[1].plan, ledger.founders, seed=999)
    donor.cache.put_finals(other)
    state = await advance(world, ledger.states[0], [BAD])
    assert_state(state, ledger, 1)  # from the state's chunks, after the replay was given up
    assert [type(request) for request in donor.asked] == [GetFinals, GetHeader]
    donor.answer = lambda request: (
        FinalsAnswer(plan=other.plan) if isinstance(request, GetFinals) else Refusal(reason="no")
    )
    with pytest.raises(NetworkError, match="no peer has the state of round 1"):
        await advance(world, ledger.states[0], [BAD])


async def test_replay_from_a_state_that_is_none_of_the_chain_is_not_taken(tmp_path: Path) -> None:
    ledger = ledger_of(1)
    world = World(tmp_path, ledger)
    world.donor(GOOD)
    stray = state_of(0, seed=5)
    assert_state(await advance(world, stray, [GOOD]), ledger, 1)


@pytest.mark.parametrize("since", [0, 2])
async def test_replay_ends_where_the_chain_went_back_while_finals_were_awaited(tmp_path: Path, since: int) -> None:
    """The rounds to go are no more, or are others, which do not follow from the state that the replay has come to."""
    ledger = ledger_of(4)
    world = World(tmp_path, ledger)
    donor = world.donor(GOOD)
    answer = donor.answer
    abandoned = ledger.states[2]

    def answer_late(request: FetchRequest) -> FetchAnswer | bytes:
        found = answer(request)
        if isinstance(request, GetFinals) and len(donor.asked) == 2:
            ledger.go_back(1)
            if since:
                ledger.certify(since)
        return found

    donor.answer = answer_late
    state = await world.catchup.replay(ledger.states[0], ledger.chain, [GOOD])
    assert len(donor.asked) == 2
    assert (state.round, state.term) == (2, abandoned.term)
    assert state.anchor.tobytes() == abandoned.anchor.tobytes()


@pytest.mark.parametrize("spoil", [name for name in SPOILS if name != "momentum only"])
async def test_corrupt_finals_are_left_for_those_of_the_next(tmp_path: Path, spoil: str) -> None:
    ledger = ledger_of(1)
    world = World(tmp_path, ledger)
    world.donor(BAD).spoil = SPOILS[spoil]
    with pytest.raises(NetworkError, match="no peer has the finals"):
        await world.catchup.finals(ledger.finals[1].plan.hash, [BAD])
    assert world.cache.held_finals(ledger.finals[1].plan.hash) is None
    world.donor(GOOD)
    finals = await world.catchup.finals(ledger.finals[1].plan.hash, [BAD, GOOD])
    assert finals.concatenated() == ledger.finals[1].concatenated()


def strange_plans(plan: Plan) -> dict[str, Plan]:
    change = msgspec.structs.replace
    return {
        "another codec": change(plan, codec="fp3"),
        "no values": change(plan, numel=0),
        "values without end": change(plan, numel=2**62, chunk_values=1 << 24),
        "another grid": change(plan, chunk_values=5000),
        "no owners": change(plan, owners=()),
        "an owner that is nobody": change(
            plan, owners=tuple(msgspec.structs.replace(owned, owner=60) for owned in plan.owners)
        ),
    }


@pytest.mark.parametrize("what", strange_plans(ledger_of(1).finals[1].plan))
async def test_plan_that_cannot_be_followed_is_its_donors_fault(tmp_path: Path, what: str) -> None:
    """A lead may propose the hash of any plan, and a donor who is in with it may show that plan."""
    ledger = ledger_of(1)
    world = World(tmp_path, ledger)
    strange = strange_plans(ledger.finals[1].plan)[what]
    world.donor(BAD).answer = lambda request: FinalsAnswer(plan=strange)
    with pytest.raises(NetworkError, match="no peer has the finals"):
        await world.catchup.finals(strange.hash, [BAD])
    assert world.frames == []


@pytest.mark.parametrize("what", ["another plan", "a refusal", "another answer", "nonsense"])
async def test_answer_without_the_finals_asked_for_is_not_taken(tmp_path: Path, what: str) -> None:
    ledger = ledger_of(2)
    answers: dict[str, FetchAnswer | bytes] = {
        "another plan": FinalsAnswer(plan=ledger.finals[2].plan),
        "a refusal": Refusal(reason="not held here"),
        "another answer": HeaderAnswer(header=b""),
        "nonsense": b"\xc1",
    }
    world = World(tmp_path, ledger)
    world.donor(BAD).answer = lambda request: answers[what]
    with pytest.raises(NetworkError, match="no peer has the finals"):
        await world.catchup.finals(ledger.finals[1].plan.hash, [BAD])
    assert world.frames == []


async def test_finals_signed_by_another_than_the_owner_are_not_taken(tmp_path: Path) -> None:
    ledger = ledger_of(1)
    world = World(tmp_path, ledger)
    plan = ledger.finals[1].plan
    usurpers = tuple(identity(n) for n in (7, 8, 9))
    with pytest.raises(RemoteError, match="not what its owner signed"):
        finals_of(plan, usurpers, seed=101)
    # Right signatures, of the owners of another plan.
    similar = plan_of(ledger.founders, ledger.chain.value(0), codec="int8")
    other = finals_of(msgspec.structs.replace(similar, attempt=1), ledger.founders, seed=101)
    donor = world.donor(BAD)
    donor.answer = lambda request: FinalsAnswer(plan=plan)
    swapped = Finals(plan=plan, chunks=other.chunks)
    donor.cache.put_finals(swapped)
    with pytest.raises(NetworkError, match="no peer has the finals"):
        await world.catchup.finals(plan.hash, [BAD])


# -- certificates --------------------------------------------------------------------------------------------


async def test_certificates_come_in_parts(tmp_path: Path) -> None:
    ledger = ledger_of(3)
    world = World(tmp_path, ledger)
    donor = world.donor(GOOD)
    part = await world.catchup.certificates(1, GOOD)
    assert part == ChainPart(certificates=ledger.chain.after(1, 10), head=3)
    assert await world.catchup.certificates(3, GOOD) == ChainPart(certificates=(), head=3)
    assert await world.catchup.certificates(2**62, GOOD) == ChainPart(certificates=(), head=3)
    assert donor.asked == [GetChain(after=1), GetChain(after=3), GetChain(after=2**62)]


def test_state_server_answers_no_more_certificates_than_a_message_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain_module, "CERTIFICATES_IN_ANSWER_LIMIT", 4)
    ledger = ledger_of(6)
    world = World(tmp_path, ledger)
    donor = world.donor(GOOD)
    answer = donor.answer(GetChain(after=0))
    assert isinstance(answer, ChainPart)
    assert [certificate.value.round for certificate in answer.certificates] == [1, 2, 3, 4]
    assert answer.head == 6
    rest = donor.answer(GetChain(after=4))
    assert isinstance(rest, ChainPart)
    assert [certificate.value.round for certificate in rest.certificates] == [5, 6]


@pytest.mark.parametrize("answer", [Refusal(reason="no"), HeaderAnswer(header=b""), b"", b"\xc1", b"\x90"])
async def test_answer_that_is_no_certificates_is_the_peers_fault(tmp_path: Path, answer: FetchAnswer | bytes) -> None:
    world = World(tmp_path, ledger_of(1))
    world.donor(BAD).answer = lambda request: answer
    with pytest.raises(RemoteError) as caught:
        await world.catchup.certificates(0, BAD)
    assert caught.value.peer == BAD


# -- the state server ----------------------------------------------------------------------------------------


def test_state_server_refuses_what_it_does_not_hold(tmp_path: Path) -> None:
    world = World(tmp_path, ledger_of(4))
    donor = world.donor(GOOD)
    held = [isinstance(donor.answer(GetHeader(round=round)), HeaderAnswer) for round in range(7)]
    assert held == [False, False, False, True, True, False, False]
    assert donor.answer(GetHeader(round=2**63 - 1)) == Refusal(reason="not held here")
    assert donor.answer(GetFinals(plan=bytes(32))) == Refusal(reason="not held here")
    plan = world.ledger.finals[4].plan
    assert donor.answer(GetFinals(plan=plan.hash)) == FinalsAnswer(plan=plan)
