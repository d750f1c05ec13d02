"""Custody: certificates are checked before they are kept, and only the certified state is ever adopted from others."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import trio
from trio.testing import MockClock

from shoal.node import librarian as librarian_module
from shoal.node.config import Hold
from shoal.node.custody import PURSUE_AFTER_S, Custody, CustodyParts
from shoal.node.earlier_states import EarlierStates
from shoal.node.events import EventLog
from shoal.node.holds import Holds
from shoal.node.outcome import Progress, StateFetched
from shoal.node.store import Store
from shoal.protocol.agreement import DurableRecord
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Certificate, Term
from shoal.protocol.peering import ChainPart, FetchAnswer, FetchRequest, GetChain, GetFinals, GetHeader, Refusal
from tests.node.donors import ME, Donor, World, flipped
from tests.node.ledger import OUTER, SWARM, Ledger, certificate_of, forged, identity, save_finals, state_of
from tests.node.ledger import finals_of as other_finals

GOOD, BAD = PeerId("good"), PeerId("bad")


def run(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=MockClock(autojump_threshold=0), strict_exception_groups=True)


class Home:
    """My custody, over my own folder, in a world of donors."""

    def __init__(self, world: World, store: Store, holds: tuple[Hold, ...] = ()) -> None:
        self.world = world
        self.store = store
        self.events = EventLog(store.folder / "events.jsonl")
        self.progress: list[Progress] = []
        self.holds = Holds(holds, self.events)
        chain = world.ledger.empty_chain()
        self.custody = Custody(
            CustodyParts(
                store=store,
                chain=chain,
                shelf=world.shelf,
                catchup=world.catchup,
                earlier=EarlierStates(store.folder, chain=chain, shelf=world.shelf, outer=OUTER),
                links=SimpleNamespace(linked=lambda: frozenset(world.donors)),  # type: ignore[arg-type]
                holds=self.holds,
                on_progress=self.progress.append,
            )
        )
        for certificate in store.certificates():
            self.custody.chain.extend(certificate)

    async def catch_up(self, *first: PeerId) -> list[PeerId]:
        return await self.custody.extend(set(first), others=True)


@asynccontextmanager
async def home(world: World, *holds: Hold) -> AsyncIterator[Home]:
    with Store(world.folder / str(ME)) as store:
        made = Home(world, store, holds)
        try:
            yield made
        finally:
            made.events.close()


def ledger_of(rounds: int) -> Ledger:
    ledger = Ledger()
    if rounds:
        ledger.certify(rounds)
    return ledger


def liar(donor: Donor, change: Callable[[ChainPart], FetchAnswer | bytes]) -> None:
    """Have a donor change the certificates it gives."""
    honest = donor.answer

    def answer(request: FetchRequest) -> FetchAnswer | bytes:
        given = honest(request)
        return change(given) if isinstance(given, ChainPart) else given

    donor.answer = answer


# -- certificates --------------------------------------------------------------------------------------------


def test_certificates_are_checked_kept_and_still_there_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path, ledger_of(5))
        world.donor(GOOD)
        async with home(world) as node:
            assert not node.custody.current
            assert await node.catch_up() == [GOOD]
            assert node.custody.head == world.ledger.chain.head
        async with home(world) as node:
            assert node.custody.head.round == 5
            assert node.custody.chain.after(0, 9) == world.ledger.chain.after(0, 9)

    run(main)


def test_long_chain_comes_in_parts_each_asked_for_after_the_last_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(librarian_module, "CERTIFICATES_IN_ANSWER_LIMIT", 3)

    async def main() -> None:
        ledger = ledger_of(7)
        world = World(tmp_path, ledger)
        donor = world.donor(GOOD)
        async with home(world) as node:
            await node.catch_up()
            assert node.custody.head == ledger.chain.head
            assert donor.asked == [GetChain(after=0), GetChain(after=3), GetChain(after=6)]

    run(main)


def unsigned(certificate: Certificate) -> Certificate:
    return msgspec.structs.replace(certificate, signers=(), signatures=())


def by_strangers(certificate: Certificate) -> Certificate:
    return certificate_of(certificate.value, [identity(n) for n in (7, 8, 9)])


def by_one(certificate: Certificate) -> Certificate:
    return certificate_of(certificate.value, [identity(2)])


def one_twice(certificate: Certificate) -> Certificate:
    return certificate_of(certificate.value, [identity(2), identity(2)])


def another_digest(certificate: Certificate) -> Certificate:
    value = msgspec.structs.replace(certificate.value, digest=flipped(certificate.value.digest))
    return msgspec.structs.replace(certificate, value=value)


def another_view(certificate: Certificate) -> Certificate:
    return msgspec.structs.replace(certificate, view=certificate.view + 1)


def another_swarm(certificate: Certificate) -> Certificate:
    value = msgspec.structs.replace(certificate.value, swarm=flipped(SWARM))
    return certificate_of(value, [identity(n) for n in (1, 2, 3)])


FORGERIES = [forged, unsigned, by_strangers, by_one, one_twice, another_digest, another_view, another_swarm]


@pytest.mark.parametrize("forge", FORGERIES)
def test_forged_certificate_is_refused_and_the_chain_stays(
    tmp_path: Path, forge: Callable[[Certificate], Certificate]
) -> None:
    async def main() -> None:
        ledger = ledger_of(3)
        world = World(tmp_path, ledger)
        bad = world.donor(BAD)
        second = ledger.chain.after(1, 1)[0]
        liar(bad, lambda part: ChainPart(
            certificates=tuple(forge(c) if c == second else c for c in part.certificates), head=part.head
        ))  # fmt: skip
        async with home(world) as node:
            await node.catch_up()
            assert node.custody.head == ledger.chain.value(1)
            assert node.store.certificates() == []
        async with home(world) as node:
            assert node.store.certificates() == list(ledger.chain.after(0, 1))
            world.donor(GOOD)
            await node.catch_up(BAD)
            assert node.custody.head == ledger.chain.head

    run(main)


def test_certificates_out_of_order_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = ledger_of(3)
        world = World(tmp_path, ledger)
        liar(world.donor(BAD), lambda part: ChainPart(certificates=part.certificates[::-1], head=part.head))
        async with home(world) as node:
            await node.catch_up()
            assert node.custody.head.round == 0
            for certificate in ledger.chain.after(1, 2):
                with pytest.raises(RemoteError, match="does not follow"):
                    await node.custody.append(certificate)
            assert node.custody.head.round == 0

    run(main)


@pytest.mark.parametrize("head", [0, 3, 2**62])
def test_peer_that_claims_to_have_ever_more_is_not_asked_for_ever(tmp_path: Path, head: int) -> None:
    async def main() -> None:
        ledger = ledger_of(3)
        world = World(tmp_path, ledger)
        repeating, empty = world.donor(BAD), world.donor(PeerId("empty"))

        def once_more(part: ChainPart) -> ChainPart:
            assert len(repeating.asked) < 10
            return ChainPart(certificates=ledger.chain.after(0, 1), head=head)

        def never_any(part: ChainPart) -> ChainPart:
            assert len(empty.asked) < 10
            return ChainPart(certificates=(), head=head)

        liar(repeating, once_more)
        liar(empty, never_any)
        async with home(world) as node:
            await node.catch_up(BAD)
            assert node.custody.head.round == 1
            assert len(repeating.asked) <= 2
            assert len(empty.asked) == 1

    run(main)


def test_certificates_are_taken_from_those_named_first(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path, ledger_of(2))
        others = [world.donor(PeerId(f"other{n}")) for n in range(3)]
        chosen = world.donor(GOOD)
        async with home(world) as node:
            peers = await node.custody.extend({GOOD}, others=False)
            assert peers[0] == GOOD
            assert set(peers) == set(world.donors)
            assert node.custody.head.round == 2
            assert [donor.asked for donor in others] == [[]] * 3
            assert chosen.asked == [GetChain(after=0)]

    run(main)


def test_decided_rounds_are_taken_off_the_agreement_log(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path, ledger_of(2))
        async with home(world) as node:
            for round in (1, 2, 3):
                node.store.persist(DurableRecord(kind="vote", term=Term(), round=round))
            for certificate in world.ledger.chain.after(0, 2):
                await node.custody.append(certificate)
            assert [record.round for record in node.store.durable_records()] == [3]

    run(main)


# -- state ---------------------------------------------------------------------------------------------------


def test_newcomer_fetches_adopts_serves_and_keeps_the_state(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = ledger_of(6)
        world = World(tmp_path, ledger)
        world.donor(GOOD)
        async with home(world) as node:
            peers = await node.catch_up()
            state = await node.custody.fetch(peers)
            assert state is not None
            await node.custody.adopt(state)
            assert node.custody.current
            assert node.custody.digest == ledger.chain.head.digest
            assert world.shelf.newest_round() == 6
            assert node.progress[-1] == StateFetched(done_chunks=6, total_chunks=6)
        async with home(world) as node:
            await node.custody.load()
            assert node.custody.current
            assert node.custody.digest == ledger.chain.head.digest

    run(main)


def test_corrupt_donor_first_and_good_donor_second_lead_to_the_certified_state(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = ledger_of(6)
        world = World(tmp_path, ledger)
        world.donor(BAD).spoil = lambda header, data: flipped(data)
        world.donor(GOOD)
        async with home(world) as node:
            await node.catch_up()
            state = await node.custody.fetch([BAD, GOOD])
            assert state is not None
            assert state.anchor.tobytes() == ledger.state.anchor.tobytes()

    run(main)


def test_corrupt_donor_alone_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        ledger = ledger_of(6)
        world = World(tmp_path, ledger)
        world.donor(BAD).spoil = lambda header, data: flipped(data)
        async with home(world) as node:
            with caplog.at_level(logging.INFO):
                assert await node.custody.fetch(await node.catch_up()) is None
            assert node.custody.state is None
            assert not node.custody.current
            assert list((world.folder / str(ME) / "state").iterdir()) == []
        assert "is not the certified one" in caplog.text

    run(main)


def test_member_that_missed_two_rounds_replays_them(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = ledger_of(5)
        world = World(tmp_path, ledger)
        donor = world.donor(GOOD)
        async with home(world) as node:
            for certificate in ledger.chain.after(0, 3):
                await node.custody.append(certificate)
            await node.custody.adopt(ledger.states[3])
            state = await node.custody.fetch(await node.catch_up())
            assert state is not None
            await node.custody.adopt(state)
            assert node.custody.digest == ledger.chain.head.digest
            assert [type(request) for request in donor.asked] == [GetChain, GetFinals, GetFinals]

    run(main)


def test_state_on_disk_counts_only_with_its_certificate(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = ledger_of(4)
        world = World(tmp_path, ledger)
        async with home(world) as node:
            for certificate in ledger.chain.after(0, 4):
                await node.custody.append(certificate)
            world.shelf.save_state(ledger.states[3])
            world.shelf.save_state(state_of(4, seed=66))  # of the right round, and another
            await node.custody.load()
            assert node.custody.state is not None
            assert node.custody.state.round == 3
            assert not node.custody.current
            assert node.custody.digest == ledger.chain.value(3).digest

    run(main)


def test_state_ahead_of_the_chain_is_not_taken_from_disk(tmp_path: Path) -> None:
    """The chain's tail was cut by a crash, and the state was written after it."""

    async def main() -> None:
        ledger = ledger_of(3)
        world = World(tmp_path, ledger)
        async with home(world) as node:
            for certificate in ledger.chain.after(0, 2):
                await node.custody.append(certificate)
            world.shelf.save_state(ledger.states[3])
            await node.custody.load()
            assert node.custody.state is None

    run(main)


# -- crashes: what is on disk, at whatever instant the power went ---------------------------------------------


async def rounds_done(node: Home, ledger: Ledger, *, finals_of: Sequence[int], states: Sequence[int]) -> None:
    """All certificates are on disk, and of finals and states those of the given rounds."""
    for certificate in ledger.chain.after(node.custody.head.round, 99):
        await node.custody.append(certificate)
    for round in finals_of:
        save_finals(node.world.shelf, ledger.finals[round])
    for round in states:
        node.world.shelf.save_state(ledger.states[round])


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def finals_path(world: World, round: int) -> Path:
    return world.folder / str(ME) / "finals" / f"{round}-{world.ledger.finals[round].plan.hash.hex()}"


def state_path(world: World, round: int) -> Path:
    return world.folder / str(ME) / "state" / f"{round}.safetensors"


async def reloaded(world: World, node: Home) -> int | None:
    """The round that a new process comes to, with the certified digest, from nothing but this disk."""
    again = Home(World(world.folder, world.ledger), node.store)
    for certificate in node.custody.chain.after(again.custody.head.round, 99):
        again.custody.chain.extend(certificate)
    await again.custody.load()
    again.events.close()
    state = again.custody.state
    if state is None:
        return None
    assert again.custody.digest == world.ledger.header(state.round).digest
    assert state.anchor.tobytes() == world.ledger.states[state.round].anchor.tobytes()
    assert again.world.shelf.newest_round() == state.round
    return state.round


def before_the_rename(world: World) -> None:
    state_path(world, 3).rename(state_path(world, 3).with_name("3.safetensors.partial"))


def in_the_middle_of_the_write(world: World) -> None:
    before_the_rename(world)
    cut(state_path(world, 3).with_name("3.safetensors.partial"), 20_000)


def renamed_and_never_synced(world: World) -> None:
    """What no file system should do to a file synced before it was renamed; it is recognised all the same."""
    cut(state_path(world, 3), 20_000)


def old_finals_torn(world: World) -> None:
    cut(finals_path(world, 2), 1000)


def last_finals_torn(world: World) -> None:
    cut(finals_path(world, 5), 1000)


def a_chunk_of_the_last_finals_never_written(world: World) -> None:
    path = finals_path(world, 5)
    data = path.read_bytes()
    path.write_bytes(data[:-2000] + bytes(2000))


def last_finals_unfinished(world: World) -> None:
    path = finals_path(world, 5)
    path.rename(path.with_name(path.name + ".partial"))


def finals_in_the_middle_lost(world: World) -> None:
    finals_path(world, 4).unlink()


def nothing_lost(world: World) -> None:
    pass


@pytest.mark.parametrize(
    ("crash", "comes_to"),
    [
        (nothing_lost, 5),
        (in_the_middle_of_the_write, 5),
        (before_the_rename, 5),
        (renamed_and_never_synced, 5),
        (old_finals_torn, 5),
        (last_finals_torn, 4),
        (a_chunk_of_the_last_finals_never_written, 4),
        (last_finals_unfinished, 4),
        (finals_in_the_middle_lost, 3),
    ],
)
def test_node_that_crashed_while_saving_round_3_comes_back(
    tmp_path: Path, crash: Callable[[World], None], comes_to: int
) -> None:
    """Round 5 is certified, the state of 1 is on disk, that of 3 was being written: finals lead to the head."""

    async def main() -> None:
        world = World(tmp_path, ledger_of(5))
        async with home(world) as node:
            await rounds_done(node, world.ledger, finals_of=range(1, 6), states=[1, 3])
            crash(world)
            assert await reloaded(world, node) == comes_to

    run(main)
    assert not list(tmp_path.rglob("*.partial"))


def test_finals_ahead_of_the_chain_lead_nowhere(tmp_path: Path) -> None:
    """They were kept for a report; whether the round was certified this node did not learn."""

    async def main() -> None:
        ledger = ledger_of(3)
        world = World(tmp_path, ledger)
        async with home(world) as node:
            for certificate in ledger.chain.after(0, 2):
                await node.custody.append(certificate)
            for finals in ledger.finals.values():
                save_finals(world.shelf, finals)
            world.shelf.save_state(ledger.states[1])
            assert await reloaded(world, node) == 2

    run(main)


def test_swarm_killed_before_any_state_was_saved_goes_on_from_the_initial_one(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path, ledger_of(3))
        async with home(world) as node:
            await node.custody.adopt(world.ledger.states[0])
            await rounds_done(node, world.ledger, finals_of=[1, 2, 3], states=[])
            assert world.shelf.saved_rounds() == [0]
            assert await reloaded(world, node) == 3

    run(main)


@pytest.mark.parametrize("finals", [[], [1, 2]])
def test_initial_state_counts_only_with_what_follows_from_it(tmp_path: Path, finals: list[int]) -> None:
    async def main() -> None:
        world = World(tmp_path, ledger_of(2))
        async with home(world) as node:
            await node.custody.adopt(state_of(0, seed=7))  # another than the swarm went on from
            await rounds_done(node, world.ledger, finals_of=finals, states=[])
            assert await reloaded(world, node) is None

    run(main)


def test_finals_that_lead_elsewhere_are_not_followed(tmp_path: Path) -> None:
    """The owners signed two results for one plan; this disk has the one that was not certified."""

    async def main() -> None:
        ledger = ledger_of(2)
        world = World(tmp_path, ledger)
        async with home(world) as node:
            await rounds_done(node, ledger, finals_of=[], states=[1])
            save_finals(world.shelf, other_finals(ledger.finals[2].plan, ledger.founders, seed=999))
            assert await reloaded(world, node) == 1

    run(main)


def test_state_computed_here_is_saved_beside_the_rounds_and_at_the_latest_at_the_end(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = ledger_of(4)
        world = World(tmp_path, ledger)
        async with home(world) as node:
            await rounds_done(node, ledger, finals_of=[], states=[])
            await node.custody.adopt(ledger.states[0])
            async with trio.open_nursery() as nursery:
                for round in (1, 2, 3, 4):
                    await node.custody.follow(ledger.states[round], ledger.header(round))
                    assert node.custody.state is ledger.states[round]
                    assert world.shelf.saved_rounds() == [0]
                nursery.start_soon(node.custody.run)
                nursery.cancel_scope.cancel()
            assert world.shelf.saved_rounds() == [4, 0]
            assert await reloaded(world, node) == 4

    run(main)


def test_initial_state_comes_from_a_founder_and_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = ledger_of(0)
        world = World(tmp_path, ledger)
        founder = ledger.peers[0]
        world.donor(founder)
        world.donor(BAD)
        async with home(world) as node:
            assert await node.custody.fetch_initial(BAD) is None
            state = await node.custody.fetch_initial(founder)
            assert state is not None
            await node.custody.adopt(state)
            assert node.custody.current
            assert world.shelf.saved_rounds() == [0]

    run(main)


def test_transfer_can_be_held(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = ledger_of(6)
        world = World(tmp_path, ledger)
        world.donor(GOOD)
        async with home(world, Hold(round=7, phase="transfer", progress=0.5)) as node:
            await node.catch_up()
            fetched = []

            async def fetch() -> None:
                fetched.append(await node.custody.fetch([GOOD]))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(fetch)
                log = node.store.folder / "events.jsonl"
                while "holding" not in log.read_text():
                    await trio.lowlevel.checkpoint()
                assert node.progress[-1] == StateFetched(done_chunks=3, total_chunks=6)
                node.holds.release()
            assert fetched[0] is not None

    run(main)


def test_nobody_to_help_is_no_error(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path, ledger_of(2))
        world.donor(BAD).answer = lambda request: Refusal(reason="no")
        async with home(world) as node:
            for certificate in world.ledger.chain.after(0, 2):
                await node.custody.append(certificate)
            assert await node.custody.fetch([]) is None
            assert await node.custody.fetch([BAD, PeerId("gone")]) is None
            with pytest.raises(NetworkError):
                await node.custody.finals(2, [BAD])

    run(main)


def test_rounds_certified_while_a_state_is_on_its_way_are_followed_before_it_is_adopted(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path, ledger_of(9))
        donor = world.donor(GOOD)
        async with home(world) as node:
            peers = await node.catch_up()
            answer = donor.answer
            rounds = iter(range(3))

            def busy(request: FetchRequest) -> FetchAnswer | bytes:
                given = answer(request)
                if isinstance(request, GetHeader | GetFinals) and next(rounds, None) is not None:
                    world.certify()
                return given

            async def dawdle(done: int, total: int) -> None:
                await trio.sleep(PURSUE_AFTER_S)

            donor.answer = busy
            node.custody._on_chunk = dawdle  # type: ignore[method-assign]
            state = await node.custody.fetch(peers)
            assert state is not None
            assert state.round == node.custody.head.round
            assert state.round > 9
            assert state.anchor.tobytes() == world.ledger.states[state.round].anchor.tobytes()
            assert sum(isinstance(request, GetHeader) for request in donor.asked) == 1

    run(main)


def test_state_short_of_the_head_is_returned_if_the_rest_is_not_to_be_had(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = ledger_of(9)
        world = World(tmp_path, ledger)
        world.donor(GOOD, rounds=8)
        head = world.donor(BAD)
        answer = head.answer
        head.answer = lambda request: answer(request) if isinstance(request, GetChain) else Refusal(reason="no")
        async with home(world) as node:
            peers = await node.catch_up()
            assert node.custody.head.round == 9
            state = await node.custody.fetch(peers)
            assert state is not None
            assert state.round == 8

            await node.custody.adopt(state)
            assert not node.custody.current
            head.answer = answer
            state = await node.custody.fetch(peers)
            assert state is not None
            assert state.round == 9
            assert sum(isinstance(request, GetHeader) for request in head.asked) <= 4  # refused, and not asked for ever

    run(main)


def test_adopting_a_state_ends_what_is_kept_of_transfers(tmp_path: Path) -> None:
    async def main() -> None:
        world = World(tmp_path, ledger_of(9))
        world.donor(GOOD)
        kept = world.folder / str(ME) / "transfer" / "0.0-9-0000000000000000"
        async with home(world) as node:
            state = await node.custody.fetch(await node.catch_up())
            assert state is not None
            kept.mkdir(parents=True)
            await node.custody.adopt(state)
            assert not kept.parent.exists()

    run(main)
