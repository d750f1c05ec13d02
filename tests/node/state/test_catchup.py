"""Catching up from donors of every sort: what is taken is what was certified, whoever brought it."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock

from shoal.collectives.commitment import chunk_hash
from shoal.collectives.finals import Finals
from shoal.collectives.grid import Grid
from shoal.collectives.state import CertifiedState, StateAssembly, frozen, header_of
from shoal.node.state import librarian as librarian_module
from shoal.node.state import states as states_module
from shoal.node.state import transfer as transfer_module
from shoal.node.state.catchup import HEADER_PATIENCE_S, KEEP_AFTER_S, replay_limit_rounds
from shoal.node.state.states import PIN_S, PINS_LIMIT_STATES, STATES_KEPT
from shoal.node.state.transfer import BAN_S, STALL_S
from shoal.node.state.transfer_files import TransferFolder
from shoal.protocol.errors import NetworkError, RemoteError, StorageError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Plan
from shoal.protocol.peering import (
    ChainPart,
    FetchAnswer,
    FinalsAnswer,
    GetChain,
    GetFinals,
    GetHeader,
    HeaderAnswer,
    Refusal,
)
from shoal.protocol.wire import canonical
from shoal.swarm.lanes.chunks import ChunkSpace
from shoal.swarm.lanes.frame import FrameHeader, FrameKind
from tests.node.donors import ME, Line, World, flipped
from tests.node.ledger import GRID, Ledger, finals_of, identity, plan_of, save_finals, state_of

GOOD, BAD = PeerId("good"), PeerId("bad")
REPLAY_LIMIT = replay_limit_rounds("int8", GRID.numel, GRID.chunk_values)


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time would run on while a thread works."""

    async def run_here(work: Callable[..., object], *arguments: object) -> object:
        await trio.lowlevel.checkpoint()
        return work(*arguments)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_here)


def run(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=MockClock(autojump_threshold=0), strict_exception_groups=True)


def ledger_of(rounds: int) -> Ledger:
    ledger = Ledger()
    if rounds:
        ledger.certify(rounds)
    return ledger


class Watch:
    """Remembers what was said of the chunks that came."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    async def __call__(self, done: int, total: int) -> None:
        self.seen.append((done, total))


def assert_state(state: CertifiedState, ledger: Ledger, round: int) -> None:
    want = ledger.states[round]
    assert state.round == round
    assert header_of(state, GRID).digest == header_of(want, GRID).digest
    assert state.anchor.tobytes() == want.anchor.tobytes()
    assert state.momentum.tobytes() == want.momentum.tobytes()
    assert (state.tokens, state.layout_hash, state.term) == (want.tokens, want.layout_hash, want.term)


async def advance(world: World, state: CertifiedState | None, peers: Sequence[PeerId]) -> CertifiedState:
    return await world.catchup.advance(state, world.ledger.chain, peers, Watch())


# -- whole states --------------------------------------------------------------------------------------------


def test_state_is_fetched_whole_and_is_the_certified_one(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path, ledger_of(3))
        world.donor(GOOD)
        watch = Watch()
        state = await world.catchup.advance(None, world.ledger.chain, [GOOD], watch)
        assert_state(state, world.ledger, 3)
        assert watch.seen == [(done, 6) for done in range(7)]
        assert world.chunks_from(GOOD) == 2 * GRID.chunks

    run(main)


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
def test_corrupt_donor_is_left_for_the_next_and_nothing_of_it_stays(tmp_path: Path, spoil: str) -> None:
    async def main() -> None:
        world = World(tmp_path, ledger_of(2))
        world.donor(BAD).spoil = SPOILS[spoil]
        world.donor(GOOD)
        state = await advance(world, None, [BAD, GOOD])
        assert_state(state, world.ledger, 2)
        assert sum(world.catchup.donated.values()) == 8 * GRID.numel
        assert world.catchup.donated[GOOD] >= 4 * GRID.length(2)
        assert not world.exchanges[PeerId("me")]._incoming

    run(main)


@pytest.mark.parametrize("spoil", SPOILS)
def test_corrupt_donor_alone_brings_nothing(tmp_path: Path, spoil: str) -> None:
    async def main() -> None:
        world = World(tmp_path, ledger_of(2))
        world.donor(BAD).spoil = SPOILS[spoil]
        began = trio.current_time()
        with pytest.raises(NetworkError, match="no peer has the state of round 2"):
            await advance(world, None, [BAD])
        assert trio.current_time() - began <= 2 * STALL_S
        assert world.shelf.newest_round() is None
        assert world.shelf.saved_rounds() == []

    run(main)


def test_donors_that_cannot_help_are_passed_over(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path, ledger_of(3))
        gone, behind, unreachable = PeerId("gone"), PeerId("behind"), PeerId("unreachable")
        world.donor(behind, rounds=2)
        world.donor(unreachable).has_lane = False
        with pytest.raises(NetworkError, match="no peer has the state"):
            await advance(world, None, [gone, behind, unreachable])
        world.donor(GOOD)
        assert_state(await advance(world, None, [gone, behind, unreachable, GOOD]), world.ledger, 3)
        assert world.chunks_from(behind) == world.chunks_from(unreachable) == 0

    run(main)


def header_answers(ledger: Ledger) -> dict[str, FetchAnswer | bytes]:
    right = ledger.header(2)
    other_grid = header_of(ledger.states[2], Grid(GRID.numel, 5000))
    return {
        "of another round": HeaderAnswer(header=canonical(ledger.header(1))),
        "renamed": HeaderAnswer(header=canonical(msgspec.structs.replace(ledger.header(1), round=2))),
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
def test_header_that_is_not_the_certified_one_is_not_followed(tmp_path: Path, what: str) -> None:
    async def main() -> None:
        world = World(tmp_path, ledger_of(2))
        world.donor(BAD).answer = lambda request: header_answers(world.ledger)[what]
        with pytest.raises(NetworkError, match="no peer has the state"):
            await advance(world, None, [BAD])
        assert world.frames == []  # not a chunk was asked for
        world.donor(GOOD)
        assert_state(await advance(world, None, [BAD, GOOD]), world.ledger, 2)

    run(main)


def test_initial_state_comes_from_a_founder_only(tmp_path: Path) -> None:
    async def main() -> None:
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

    run(main)


def test_founder_cannot_pass_another_state_for_the_initial_one(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = ledger_of(0)
        world = World(tmp_path, ledger)
        founder = ledger.peers[0]
        later = header_of(state_of(5), GRID)
        world.donor(founder).answer = lambda request: HeaderAnswer(header=canonical(later))
        with pytest.raises(NetworkError, match="no peer has the state of round 0"):
            await advance(world, None, [founder])
        assert world.frames == []

    run(main)


# -- replay --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missed", [1, 2, REPLAY_LIMIT])
def test_few_missed_rounds_are_replayed_to_the_same_digest(tmp_path: Path, missed: int) -> None:
    async def main() -> None:
        ledger = ledger_of(missed)
        world = World(tmp_path, ledger)
        donor = world.donor(GOOD)
        state = await advance(world, ledger.states[0], [GOOD])
        assert_state(state, ledger, missed)
        assert [type(request) for request in donor.asked] == [GetFinals] * missed
        # What was fetched is kept: it says whether a contribution was counted, and others may ask for it.
        for finals in ledger.finals.values():
            held = world.shelf.held_finals(finals.plan.hash)
            assert held is not None
            assert held.concatenated() == finals.concatenated()

    run(main)


def test_many_missed_rounds_are_not_replayed(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = ledger_of(REPLAY_LIMIT + 1)
        world = World(tmp_path, ledger)
        donor = world.donor(GOOD)
        assert_state(await advance(world, ledger.states[0], [GOOD]), ledger, REPLAY_LIMIT + 1)
        assert [type(request) for request in donor.asked] == [GetHeader]

    run(main)


def test_finals_on_disk_are_replayed_without_asking(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = ledger_of(2)
        world = World(tmp_path, ledger)
        for finals in ledger.finals.values():
            save_finals(world.shelf, finals)
        assert_state(await advance(world, ledger.states[0], []), ledger, 2)

    run(main)


def test_replay_that_leads_elsewhere_is_not_taken(tmp_path: Path) -> None:
    """An owner signed other finals for the same plan: the certificate's digest tells."""

    async def main() -> None:
        ledger = ledger_of(1)
        world = World(tmp_path, ledger)
        donor = world.donor(BAD)
        other = finals_of(ledger.finals[1].plan, ledger.founders, seed=999)
        donor.shelf.put_finals(other)
        state = await advance(world, ledger.states[0], [BAD])
        assert_state(state, ledger, 1)  # from the state's chunks, after the replay was given up
        assert [type(request) for request in donor.asked] == [GetFinals, GetHeader]
        donor.answer = lambda request: (
            FinalsAnswer(plan=other.plan) if isinstance(request, GetFinals) else Refusal(reason="no")
        )
        with pytest.raises(NetworkError, match="no peer has the state of round 1"):
            await advance(world, ledger.states[0], [BAD])

    run(main)


def test_replay_from_a_state_that_is_none_of_the_chain_is_not_taken(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = ledger_of(1)
        world = World(tmp_path, ledger)
        world.donor(GOOD)
        stray = state_of(0, seed=5)
        assert_state(await advance(world, stray, [GOOD]), ledger, 1)

    run(main)


@pytest.mark.parametrize("spoil", [name for name in SPOILS if name != "momentum only"])
def test_corrupt_finals_are_left_for_those_of_the_next(tmp_path: Path, spoil: str) -> None:
    async def main() -> None:
        ledger = ledger_of(1)
        world = World(tmp_path, ledger)
        world.donor(BAD).spoil = SPOILS[spoil]
        with pytest.raises(NetworkError, match="no peer has the finals"):
            await world.catchup.finals(ledger.finals[1].plan.hash, [BAD])
        assert world.shelf.held_finals(ledger.finals[1].plan.hash) is None
        world.donor(GOOD)
        finals = await world.catchup.finals(ledger.finals[1].plan.hash, [BAD, GOOD])
        assert finals.concatenated() == ledger.finals[1].concatenated()

    run(main)


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
def test_plan_that_cannot_be_followed_is_its_donors_fault(tmp_path: Path, what: str) -> None:
    """A lead may propose the hash of any plan, and a donor who is in with it may show that plan."""

    async def main() -> None:
        ledger = ledger_of(1)
        world = World(tmp_path, ledger)
        strange = strange_plans(ledger.finals[1].plan)[what]
        world.donor(BAD).answer = lambda request: FinalsAnswer(plan=strange)
        with pytest.raises(NetworkError, match="no peer has the finals"):
            await world.catchup.finals(strange.hash, [BAD])
        assert world.frames == []

    run(main)


@pytest.mark.parametrize("what", ["another plan", "a refusal", "another answer", "nonsense"])
def test_answer_without_the_finals_asked_for_is_not_taken(tmp_path: Path, what: str) -> None:
    async def main() -> None:
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

    run(main)


def test_finals_signed_by_another_than_the_owner_are_not_taken(tmp_path: Path) -> None:
    async def main() -> None:
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
        donor.shelf.put_finals(swapped)
        with pytest.raises(NetworkError, match="no peer has the finals"):
            await world.catchup.finals(plan.hash, [BAD])

    run(main)


# -- certificates --------------------------------------------------------------------------------------------


def test_certificates_come_in_parts(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = ledger_of(3)
        world = World(tmp_path, ledger)
        donor = world.donor(GOOD)
        part = await world.catchup.certificates(1, GOOD)
        assert part == ChainPart(certificates=ledger.chain.after(1, 10), head=3)
        assert await world.catchup.certificates(3, GOOD) == ChainPart(certificates=(), head=3)
        assert await world.catchup.certificates(2**62, GOOD) == ChainPart(certificates=(), head=3)
        assert donor.asked == [GetChain(after=1), GetChain(after=3), GetChain(after=2**62)]

    run(main)


def test_librarian_answers_no_more_certificates_than_a_message_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(librarian_module, "CERTIFICATES_IN_ANSWER_LIMIT", 4)
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
def test_answer_that_is_no_certificates_is_the_peers_fault(tmp_path: Path, answer: FetchAnswer | bytes) -> None:
    async def main() -> None:
        world = World(tmp_path, ledger_of(1))
        world.donor(BAD).answer = lambda request: answer
        with pytest.raises(RemoteError) as caught:
            await world.catchup.certificates(0, BAD)
        assert caught.value.peer == BAD

    run(main)


# -- the librarian -------------------------------------------------------------------------------------------


def test_librarian_refuses_what_it_does_not_hold(tmp_path: Path) -> None:
    world = World(tmp_path, ledger_of(4))
    donor = world.donor(GOOD)
    held = [isinstance(donor.answer(GetHeader(round=round)), HeaderAnswer) for round in range(7)]
    assert held == [False, False, False, True, True, False, False]
    assert donor.answer(GetHeader(round=2**63 - 1)) == Refusal(reason="not held here")
    assert donor.answer(GetFinals(plan=bytes(32))) == Refusal(reason="not held here")
    plan = world.ledger.finals[4].plan
    assert donor.answer(GetFinals(plan=plan.hash)) == FinalsAnswer(plan=plan)


# -- several donors at once ----------------------------------------------------------------------------------

FINE = Grid(60_000, 1000)
"""Sixty chunks of each vector: enough for several windows."""
COARSE = Grid(60_000, 8192)
STATE_BYTES = 8 * FINE.numel
PEERS = tuple(PeerId(name) for name in ("one", "two", "three"))


def fine_world(folder: Path, rounds: int, *, grid: Grid = FINE, codec: str = "int8") -> World:
    ledger = Ledger(grid=grid, codec=codec)
    ledger.certify(rounds)
    world = World(folder, ledger)
    for peer in PEERS:
        world.donor(peer)
    return world


def assert_fine(state: CertifiedState, world: World, round: int) -> None:
    want = world.ledger.states[round]
    assert state.round == round
    assert header_of(state, world.ledger.grid).digest == world.ledger.chain.value(round).digest
    assert state.anchor.tobytes() == want.anchor.tobytes()
    assert state.momentum.tobytes() == want.momentum.tobytes()


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if chunks were megabytes: a donor is asked for four at first."""
    monkeypatch.setattr(transfer_module, "WINDOW_FIRST_BYTES", 16_000)


@pytest.mark.usefixtures("small_windows")
def test_donors_serve_at_once_each_by_its_bandwidth(tmp_path: Path) -> None:
    async def main() -> None:
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

    run(main)


@pytest.mark.usefixtures("small_windows")
def test_donor_killed_in_mid_transfer_costs_what_it_owed(tmp_path: Path) -> None:
    async def main() -> None:
        world = fine_world(tmp_path, 2)
        line = Line(world, rates=dict.fromkeys(PEERS, 30_000.0))
        began = trio.current_time()

        async def kill_when_half_is_here(done: int, total: int) -> None:
            if done == total // 2:
                world.kill(PEERS[0])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(line.run)
            state = await world.catchup.advance(None, world.ledger.chain, PEERS, kill_when_half_is_here)
            nursery.cancel_scope.cancel()
        assert_fine(state, world, 2)
        assert trio.current_time() - began < 1.1 * STATE_BYTES / 2 * (1 / 90_000 + 1 / 60_000) + 1
        donated = world.catchup.donated
        assert 0 < donated[PEERS[0]] < STATE_BYTES / 4
        assert sum(donated.values()) == STATE_BYTES

    run(main)


@pytest.mark.usefixtures("small_windows")
def test_donor_that_lies_in_the_middle_is_dropped_and_not_asked_the_next_time(tmp_path: Path) -> None:
    async def main() -> None:
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
        world.shelf = world._shelf("another")
        assert_fine(await advance(world, None, PEERS), world, 2)
        assert len(world.donors[PEERS[1]].asked) == asked
        with pytest.raises(NetworkError, match="no peer has the state"):
            await advance(world, None, [PEERS[1]])
        await trio.sleep(BAN_S)
        world.donors[PEERS[1]].spoil = lambda header, data: data
        assert_fine(await advance(world, None, [PEERS[1]]), world, 2)

    run(main)


def test_donor_that_does_not_answer_keeps_nobody_waiting(tmp_path: Path) -> None:
    async def main() -> None:
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
        assert trio.current_time() - began <= HEADER_PATIENCE_S

    run(main)


@pytest.mark.usefixtures("small_windows")
def test_finals_come_from_several_donors_and_a_liar_among_them_is_dropped(tmp_path: Path) -> None:
    async def main() -> None:
        world = fine_world(tmp_path, 1)
        world.donors[PEERS[1]].spoil = lambda header, data: flipped(data)
        plan = world.ledger.finals[1].plan
        finals = await world.catchup.finals(plan.hash, PEERS)
        assert finals.concatenated() == world.ledger.finals[1].concatenated()
        donated = world.catchup.donated
        assert set(donated) <= {PEERS[0], PEERS[2]}
        assert sum(donated.values()) == sum(chunk.payload.nbytes for chunk in finals.chunks)

    run(main)


def test_finals_are_fetched_once_however_many_want_them(tmp_path: Path) -> None:
    async def main() -> None:
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

    run(main)


# -- which state ---------------------------------------------------------------------------------------------


def test_the_newest_state_that_most_hold_is_fetched_and_the_rest_replayed(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = ledger_of(3)
        world = World(tmp_path, ledger)
        names = [PeerId(name) for name in ("behind0", "behind1", "behind2", "newest")]
        donors = [world.donor(name, rounds=2 if n < 3 else 3) for n, name in enumerate(names)]
        assert_state(await advance(world, None, names), ledger, 3)
        assert sum(isinstance(request, GetFinals) for request in donors[3].asked) == 1
        assert world.chunks_from(names[3]) == GRID.chunks  # the finals; the state came from the many
        assert sum(world.chunks_from(name) for name in names[:3]) == 2 * GRID.chunks

    run(main)


def test_state_of_a_round_that_only_one_holds_is_taken_from_it(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = ledger_of(3)
        world = World(tmp_path, ledger)
        world.donor(GOOD)
        world.donor(PeerId("empty"), rounds=0)
        assert_state(await advance(world, None, [PeerId("empty"), GOOD]), ledger, 3)
        assert world.catchup.donated == {GOOD: 8 * GRID.numel}

    run(main)


def test_state_is_received_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(*args: object) -> bool:
        raise AssertionError("a chunk was copied")

    async def main() -> None:
        world = fine_world(tmp_path, 2)
        monkeypatch.setattr(StateAssembly, "_write", copy)
        assert_fine(await advance(world, None, PEERS), world, 2)

    run(main)


# -- what is here is not fetched -----------------------------------------------------------------------------


async def interrupted(world: World, peers: Sequence[PeerId], *, after: int) -> None:
    """A transfer that ends in the middle, as when the node is stopped: `after` of all chunks are here by then."""
    with trio.CancelScope() as scope:

        async def stop(done: int, total: int) -> None:
            if done >= after:
                await trio.sleep(2 * KEEP_AFTER_S)  # what is here gets to the disk
                unfinished = world.catchup._unfinished
                assert unfinished is not None
                while unfinished.keeper.behind:  # what is here gets to the disk, in a thread
                    await trio.lowlevel.checkpoint()
                scope.cancel()
                await trio.lowlevel.checkpoint()

        await world.catchup.advance(None, world.ledger.chain, peers, stop)
    assert scope.cancelled_caught


def chunks_file(world: World) -> Path:
    (path,) = (world.folder / "me" / "transfer").glob("*/chunks")
    return path


def asked_of_others(world: World) -> set[tuple[int, int]]:
    """Space and number of every chunk that was asked for."""
    return {
        (header.flags, chunk)
        for _, to, header in world.frames
        if header.kind is FrameKind.REQUEST and to != ME
        for chunk in range(header.chunk, header.chunk + 1 + header.total)
    }


@pytest.mark.usefixtures("small_windows")
def test_restarted_joiner_asks_only_for_what_is_missing_or_bad(tmp_path: Path) -> None:
    async def main() -> None:
        world = fine_world(tmp_path, 2)
        await interrupted(world, PEERS, after=60)
        before = sum(world.chunks_from(peer) for peer in PEERS)
        assert 60 <= before < 2 * FINE.chunks
        data = bytearray(chunks_file(world).read_bytes())
        header = world.ledger.header(2)
        good = [
            kind * FINE.chunks + chunk
            for kind, hashes in enumerate((header.anchor, header.momentum))
            for chunk in range(FINE.chunks)
            if chunk_hash(data[4000 * (kind * FINE.chunks + chunk) :][:4000]) == hashes[32 * chunk : 32 * (chunk + 1)]
        ]
        assert len(good) == before  # all of it was written
        for chunk in good[:5]:
            data[4000 * chunk + 17] ^= 1  # the disk forgets
        chunks_file(world).write_bytes(data)
        world.restart()
        world.frames.clear()
        assert_fine(await advance(world, None, PEERS), world, 2)
        asked = {chunk + FINE.chunks * space for space, chunk in asked_of_others(world)}
        assert asked == set(range(2 * FINE.chunks)) - set(good[5:])

    run(main)


@pytest.mark.usefixtures("small_windows")
def test_state_that_came_in_part_is_gone_on_with_while_donors_hold_it_whatever_rounds_passed(tmp_path: Path) -> None:
    async def main() -> None:
        world = fine_world(tmp_path, 2)
        await interrupted(world, PEERS, after=60)
        for _ in range(3):
            world.certify()
        world.restart()
        world.frames.clear()
        assert_fine(await advance(world, None, PEERS), world, 5)
        asked = [request for donor in world.donors.values() for request in donor.asked]
        assert {request.round for request in asked if isinstance(request, GetHeader)} == {2}
        chunks = sum(world.chunks_from(peer) for peer in PEERS)
        assert 3 * FINE.chunks < chunks <= 60 + 3 * FINE.chunks  # the missing half, and the finals of three rounds

    run(main)


def test_attempt_that_failed_goes_on_where_it_was(tmp_path: Path) -> None:
    async def main() -> None:
        world = fine_world(tmp_path, 2)
        world.donors[PEERS[0]].spoil = lambda header, data: data if header.chunk < 40 else None
        with pytest.raises(NetworkError, match=r"no peer has the state of round 2 \(one: sent nothing for 5 s\)"):
            await advance(world, None, PEERS[:1])
        assert world.chunks_from(PEERS[0]) == 2 * FINE.chunks
        assert_fine(await advance(world, None, PEERS[1:]), world, 2)
        assert sum(world.catchup.donated.values()) == 2 * 20 * 4000

    run(main)


def test_what_is_kept_of_transfers_goes_when_the_state_is_on_disk(tmp_path: Path) -> None:
    async def main() -> None:
        world = fine_world(tmp_path, 2)
        await interrupted(world, PEERS, after=60)
        assert chunks_file(world).exists()
        await advance(world, None, PEERS)
        world.catchup.arrived()
        assert not (world.folder / "me" / "transfer").exists()

    run(main)


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("damage", ["no header", "another header", "no chunks", "a file", "cut short"])
def test_damaged_transfer_costs_what_it_held_and_nothing_more(tmp_path: Path, damage: str) -> None:
    async def main() -> None:
        world = fine_world(tmp_path, 2)
        await interrupted(world, PEERS, after=60)
        path = chunks_file(world)
        if damage == "no header":
            path.with_name("header").write_bytes(b"")
        elif damage == "another header":
            path.with_name("header").write_bytes(canonical(header_of(state_of(2, seed=9, grid=FINE), FINE)))
        elif damage == "no chunks":
            path.unlink()
        elif damage == "a file":
            (path.parent.parent / "notes.txt").write_text("not a transfer")
        else:
            path.write_bytes(path.read_bytes()[:5000])
        world.restart()
        assert_fine(await advance(world, None, PEERS), world, 2)
        fetched = sum(world.catchup.donated.values())
        expected = {"a file": range(1, STATE_BYTES // 2 + 1), "cut short": range(STATE_BYTES - 4000, STATE_BYTES + 1)}
        assert fetched in expected.get(damage, range(STATE_BYTES, STATE_BYTES + 1))

    run(main)


def test_full_disk_does_not_keep_the_state_from_arriving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: TransferFolder, header: object) -> None:
        raise StorageError("the disk is full; free some space")

    monkeypatch.setattr(TransferFolder, "begin", full)

    async def main() -> None:
        world = fine_world(tmp_path, 2)

        async def dawdle(done: int, total: int) -> None:
            await trio.sleep(KEEP_AFTER_S)

        assert_fine(await world.catchup.advance(None, world.ledger.chain, PEERS, dawdle), world, 2)
        assert "is not kept for a restart: the disk is full" in caplog.text

    run(main)


def test_node_that_missed_rounds_pulls_only_the_chunks_that_differ(tmp_path: Path) -> None:
    """Rounds that touched some chunks only, and whose finals are gone: what is alike is not fetched."""

    async def main() -> None:
        ledger = Ledger(grid=FINE)
        ledger.certify(2)
        world = World(tmp_path, ledger)
        for peer in PEERS:
            world.donor(peer)
        old = ledger.states[2]
        anchor = old.anchor.copy()
        anchor[5000:8000] += 1.0  # chunks 5, 6 and 7
        old = replace(old, round=1, anchor=frozen(anchor))
        for donor in world.donors.values():
            answer = donor.answer
            donor.answer = lambda request, answer=answer: (  # type: ignore[misc]
                Refusal(reason="gone") if isinstance(request, GetFinals) else answer(request)
            )
        assert_fine(await advance(world, old, PEERS), world, 2)
        assert sum(world.catchup.donated.values()) == 3 * 4000
        assert asked_of_others(world) == {(ChunkSpace.ANCHOR, chunk) for chunk in (5, 6, 7)}

    run(main)


# -- rounds that go on ---------------------------------------------------------------------------------------


async def rounds_go_on(world: World, period_s: float) -> None:
    while True:
        await trio.sleep(period_s)
        world.certify()


async def join(world: World, *, bytes_per_s: float, period_s: float, limit_s: float) -> tuple[float, int]:
    """Join while rounds go on, as custody does: extend the chain, and go after its head. When, and in which round."""
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
                state = await world.catchup.advance(state, chain, PEERS, Watch())
        nursery.cancel_scope.cancel()
    assert_fine(state, world, state.round)
    return trio.current_time(), state.round


@pytest.mark.usefixtures("small_windows")
def test_joiner_at_a_tenth_of_the_rounds_pace_arrives(tmp_path: Path) -> None:
    """A state takes ten rounds to come, so that ten rounds have passed; their finals, of half a byte per value, take
    six; and so on. The one state that it began with is held for it until it has it."""

    async def main() -> None:
        world = fine_world(tmp_path, 3, grid=COARSE, codec="int4")
        period_s = 1.0
        arrived_at, round = await join(
            world, bytes_per_s=STATE_BYTES / (10 * period_s), period_s=period_s, limit_s=60 * period_s
        )
        finals = world.ledger.finals[3]
        share = (
            sum(chunk.payload.nbytes for chunk in finals.chunks) / STATE_BYTES * 10
        )  # of a round, to fetch one's finals
        assert 0.5 < share < 0.8
        # Of the eight chunks of a round's finals two may come twice.
        assert 10 * period_s / (1 - share) <= arrived_at + period_s
        assert arrived_at <= 10 * period_s / (1 - 10 / 8 * share) + period_s
        assert round >= 3 + arrived_at / period_s - 2
        headers = [
            request for donor in world.donors.values() for request in donor.asked if isinstance(request, GetHeader)
        ]
        assert {request.round for request in headers} == {3}  # it never began another
        sent = sum(world.chunks_from(peer) for peer in PEERS)
        assert sent <= 10 / 8 * (2 + round - 3) * COARSE.chunks

    run(main)


@pytest.mark.usefixtures("small_windows")
def test_donors_let_go_of_a_state_when_nobody_asks_for_it(tmp_path: Path) -> None:
    async def main() -> None:
        world = fine_world(tmp_path, 3, grid=COARSE, codec="int4")
        await join(world, bytes_per_s=STATE_BYTES / 4, period_s=1.0, limit_s=100)
        for donor in world.donors.values():
            assert 3 in donor.shelf.held_rounds()
        await trio.sleep(PIN_S)
        world.certify()
        newest = world.ledger.chain.head.round
        for donor in world.donors.values():
            assert donor.shelf.held_rounds() == [newest - 1, newest]

    run(main)


@pytest.mark.usefixtures("small_windows")
def test_state_that_is_gone_everywhere_is_given_up_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Donors that hold nothing for those who fetch: the joiner takes what it can get of the newest."""
    monkeypatch.setattr(states_module, "PINS_LIMIT_BYTES", 0)

    async def main() -> None:
        world = fine_world(tmp_path, 3, grid=COARSE)
        line = Line(world, bytes_per_s=STATE_BYTES / 10)
        chain = world.ledger.chain_to(3)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(line.run)
            nursery.start_soon(rounds_go_on, world, 2.0)
            with pytest.raises(NetworkError, match="does not hold it"):
                await world.catchup.advance(None, chain, PEERS, Watch())
            nursery.cancel_scope.cancel()
        world.line = None
        world.frames.clear()
        assert_fine(await advance(world, None, PEERS), world, world.ledger.chain.head.round)

    run(main)


def test_rounds_whose_finals_are_only_on_the_donors_disk_are_replayed(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = ledger_of(4)
        world = World(tmp_path, ledger)
        donor = world.donor(GOOD)
        for finals in ledger.finals.values():
            save_finals(donor.shelf, finals)
        donor.shelf._finals.clear()
        assert_state(await advance(world, ledger.states[0], [GOOD]), ledger, 4)
        assert [type(request) for request in donor.asked] == [GetFinals] * 4
        path = next(path for round, _, path in donor.shelf._finals_files() if round == 4)
        data = path.read_bytes()
        donor.shelf._files.clear()
        path.write_bytes(data[:-2000] + bytes(2000))  # bit rot in the last chunk: it is not passed on
        world.restart()
        with pytest.raises(NetworkError, match="does not hold it"):
            await world.catchup.finals(ledger.finals[4].plan.hash, [GOOD])
        assert not world.catchup._fetcher.scores.banned(GOOD, trio.current_time())

    run(main)


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("apart_s", [0.0, 0.7])
def test_ten_who_join_all_arrive_while_rounds_go_on(tmp_path: Path, apart_s: float) -> None:
    """At once, or in different rounds; donors hold two states and a few more: the same shelves serve all."""

    async def main() -> None:
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
                        state = await world.catchup.advance(state, chain, PEERS, Watch())
                nursery.cancel_scope.cancel()
            assert_fine(state, world, state.round)
            arrived.append(number)

        async def rounds() -> None:
            nonlocal most_held
            while True:
                await trio.sleep(1.0)
                worlds[0].certify()
                for donor in worlds[0].donors.values():
                    most_held = max(most_held, len(donor.shelf.held_rounds()))

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

    run(main)


@pytest.mark.usefixtures("small_windows")
def test_joiner_that_leaves_in_mid_transfer_leaves_nothing_behind(tmp_path: Path) -> None:
    async def main() -> None:
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
        assert world.shelf.newest_round() is None
        for _ in range(3):
            world.certify()
        await trio.sleep(PIN_S)
        world.certify()
        assert all(donor.shelf.held_rounds() == [5, 6] for donor in world.donors.values())

    run(main)
