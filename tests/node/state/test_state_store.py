"""Certificates are checked before they are kept, and only the certified state is ever adopted from others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import trio

from shoal.node.options import Hold
from shoal.node.outcome import StateFetched
from shoal.protocol import chain as chain_module
from shoal.protocol.agreement import DurableRecord
from shoal.protocol.catching_up import PURSUE_AFTER_S
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Certificate, Term
from shoal.protocol.peering import ChainPart, FetchAnswer, FetchRequest, GetChain, GetFinals, GetHeader, Refusal
from tests.node.donors import ME, World, flipped
from tests.node.ledger import GRID, SWARM, certificate_of, forged, identity, state_of
from tests.node.state_store_lab import BAD, GOOD, home, ledger_of, liar

pytestmark = pytest.mark.virtual_time

# -- certificates --------------------------------------------------------------------------------------------


async def test_certificates_are_checked_kept_and_still_there_after_a_restart(tmp_path: Path) -> None:
    world = World(tmp_path, ledger_of(5))
    world.donor(GOOD)
    async with home(world) as node:
        assert not node.state_store.current
        assert await node.catch_up() == [GOOD]
        assert node.state_store.head == world.ledger.chain.head
    async with home(world) as node:
        assert node.state_store.head.round == 5
        assert node.state_store.chain.after(0, 9) == world.ledger.chain.after(0, 9)


async def test_long_chain_comes_in_parts_each_asked_for_after_the_last_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain_module, "CERTIFICATES_IN_ANSWER_LIMIT", 3)
    ledger = ledger_of(7)
    world = World(tmp_path, ledger)
    donor = world.donor(GOOD)
    async with home(world) as node:
        await node.catch_up()
        assert node.state_store.head == ledger.chain.head
        assert donor.asked == [GetChain(after=0), GetChain(after=3), GetChain(after=6)]


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
async def test_forged_certificate_is_refused_and_the_chain_stays(
    tmp_path: Path, forge: Callable[[Certificate], Certificate]
) -> None:
    ledger = ledger_of(3)
    world = World(tmp_path, ledger)
    bad = world.donor(BAD)
    second = ledger.chain.after(1, 1)[0]
    liar(bad, lambda part: ChainPart(
        certificates=tuple(forge(c) if c == second else c for c in part.certificates), head=part.head
    ))  # fmt: skip
    async with home(world) as node:
        await node.catch_up()
        assert node.state_store.head == ledger.chain.value(0)  # of a chain that does not hold a newcomer takes nothing
        await node.state_store.append(ledger.chain.after(0, 1)[0])
        await node.catch_up()
        assert node.state_store.head == ledger.chain.value(1)
        assert node.store.certificates() == []
    async with home(world) as node:
        assert node.store.certificates() == list(ledger.chain.after(0, 1))
        world.donor(GOOD)
        await node.catch_up(BAD)
        assert node.state_store.head == ledger.chain.head


async def test_certificates_out_of_order_are_refused(tmp_path: Path) -> None:
    ledger = ledger_of(3)
    world = World(tmp_path, ledger)
    liar(world.donor(BAD), lambda part: ChainPart(certificates=part.certificates[::-1], head=part.head))
    async with home(world) as node:
        await node.catch_up()
        assert node.state_store.head.round == 0
        for certificate in ledger.chain.after(1, 2):
            with pytest.raises(RemoteError, match="does not follow"):
                await node.state_store.append(certificate)
        assert node.state_store.head.round == 0


@pytest.mark.parametrize("head", [0, 3, 2**62])
async def test_peer_that_claims_to_have_ever_more_is_not_asked_for_ever(tmp_path: Path, head: int) -> None:
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
        assert node.state_store.head.round == 1
        assert len(repeating.asked) <= 2
        assert len(empty.asked) == 1


async def test_decided_rounds_are_taken_off_the_agreement_log(tmp_path: Path) -> None:
    world = World(tmp_path, ledger_of(2))
    async with home(world) as node:
        for round in (1, 2, 3):
            node.store.persist(DurableRecord(kind="vote", term=Term(), round=round))
        for certificate in world.ledger.chain.after(0, 2):
            await node.state_store.append(certificate)
        assert [record.round for record in node.store.durable_records()] == [3]


# -- state ---------------------------------------------------------------------------------------------------


async def test_newcomer_fetches_adopts_serves_and_keeps_the_state(tmp_path: Path) -> None:
    ledger = ledger_of(6)
    world = World(tmp_path, ledger)
    world.donor(GOOD)
    async with home(world) as node:
        peers = await node.catch_up()
        state = await node.fetch(peers)
        assert state is not None
        await node.state_store.adopt(state)
        assert node.state_store.current
        assert node.state_store.digest == ledger.chain.head.digest
        assert world.cache.newest_round() == 6
        size = 2 * 4 * GRID.numel
        done = StateFetched(done_chunks=6, total_chunks=6, done_bytes=size, total_bytes=size)
        assert node.progress[-1] == done
        assert node.state_store.fetched is None
    async with home(world) as node:
        await node.state_store.load()
        assert node.state_store.current
        assert node.state_store.digest == ledger.chain.head.digest


async def test_member_that_missed_two_rounds_replays_them(tmp_path: Path) -> None:
    ledger = ledger_of(5)
    world = World(tmp_path, ledger)
    donor = world.donor(GOOD)
    async with home(world) as node:
        for certificate in ledger.chain.after(0, 3):
            await node.state_store.append(certificate)
        await node.state_store.adopt(ledger.states[3])
        state = await node.fetch(await node.catch_up())
        assert state is not None
        await node.state_store.adopt(state)
        assert node.state_store.digest == ledger.chain.head.digest
        assert [type(request) for request in donor.asked] == [GetChain, GetFinals, GetFinals]


async def test_state_on_disk_counts_only_with_its_certificate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledger = ledger_of(4)
    world = World(tmp_path, ledger)
    async with home(world) as node:
        for certificate in ledger.chain.after(0, 4):
            await node.state_store.append(certificate)
        world.cache.save_state(ledger.states[3])
        world.cache.save_state(state_of(4, seed=66))  # of the right round, and another
        path = world.cache.state_file(4)
        before = path.read_bytes()
        await node.state_store.load()
        assert f"{path} is not the state that round 4 certified and is ignored" in caplog.text
        assert path.read_bytes() == before
        assert node.state_store.state is not None
        assert node.state_store.state.round == 3
        assert not node.state_store.current
        assert node.state_store.digest == ledger.chain.value(3).digest


async def test_state_ahead_of_the_chain_is_not_taken_from_disk(tmp_path: Path) -> None:
    """The chain's tail was cut by a crash, and the state was written after it."""
    ledger = ledger_of(3)
    world = World(tmp_path, ledger)
    async with home(world) as node:
        for certificate in ledger.chain.after(0, 2):
            await node.state_store.append(certificate)
        world.cache.save_state(ledger.states[3])
        await node.state_store.load()
        assert node.state_store.state is None


async def test_initial_state_comes_from_a_founder_and_is_kept(tmp_path: Path) -> None:
    ledger = ledger_of(0)
    world = World(tmp_path, ledger)
    founder = ledger.peers[0]
    world.donor(founder)
    world.donor(BAD)
    async with home(world) as node:
        assert await node.fetch_initial(BAD) is None
        state = await node.fetch_initial(founder)
        assert state is not None
        await node.state_store.adopt(state)
        assert node.state_store.current
        assert world.cache.saved_rounds() == [0]


async def test_transfer_can_be_held(tmp_path: Path) -> None:
    ledger = ledger_of(6)
    world = World(tmp_path, ledger)
    world.donor(GOOD)
    async with home(world, Hold(round=7, phase="transfer", progress=0.5)) as node:
        await node.catch_up()
        fetched = []

        async def fetch() -> None:
            fetched.append(await node.fetch([GOOD]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch)
            log = node.store.folder / "events.jsonl"
            while "holding" not in log.read_text():
                await trio.lowlevel.checkpoint()
            here = node.state_store.fetched
            assert here is node.progress[-1]
            assert here is not None
            assert (here.done_chunks, here.total_chunks, here.total_bytes) == (3, 6, 2 * 4 * GRID.numel)
            assert 0 < here.done_bytes < here.total_bytes
            node.holds.release()
        assert fetched[0] is not None


async def test_nobody_to_help_is_no_error(tmp_path: Path) -> None:
    world = World(tmp_path, ledger_of(2))
    world.donor(BAD).answer = lambda request: Refusal(reason="no")
    async with home(world) as node:
        for certificate in world.ledger.chain.after(0, 2):
            await node.state_store.append(certificate)
        assert await node.fetch([]) is None
        assert await node.fetch([BAD, PeerId("gone")]) is None
        with pytest.raises(NetworkError):
            await node.state_store.finals(2, [BAD])


async def test_rounds_certified_while_a_state_is_on_its_way_are_followed_before_it_is_adopted(tmp_path: Path) -> None:
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

        async def dawdle(fetched: StateFetched) -> None:
            await trio.sleep(PURSUE_AFTER_S)

        donor.answer = busy
        node.state_store.on_chunk = dawdle  # type: ignore[method-assign]
        state = await node.fetch(peers)
        assert state is not None
        assert state.round == node.state_store.head.round
        assert state.round > 9
        assert state.anchor.tobytes() == world.ledger.states[state.round].anchor.tobytes()
        assert sum(isinstance(request, GetHeader) for request in donor.asked) == 1


async def test_state_short_of_the_head_is_returned_if_the_rest_is_not_to_be_had(tmp_path: Path) -> None:
    ledger = ledger_of(9)
    world = World(tmp_path, ledger)
    world.donor(GOOD, rounds=8)
    head = world.donor(BAD)
    answer = head.answer
    head.answer = lambda request: answer(request) if isinstance(request, GetChain) else Refusal(reason="no")
    async with home(world) as node:
        peers = await node.catch_up()
        assert node.state_store.head.round == 9
        state = await node.fetch(peers)
        assert state is not None
        assert state.round == 8

        await node.state_store.adopt(state)
        assert not node.state_store.current
        head.answer = answer
        state = await node.fetch(peers)
        assert state is not None
        assert state.round == 9
        assert sum(isinstance(request, GetHeader) for request in head.asked) <= 4  # refused, and not asked for ever


async def test_adopting_a_state_ends_what_is_kept_of_transfers(tmp_path: Path) -> None:
    world = World(tmp_path, ledger_of(9))
    world.donor(GOOD)
    kept = world.folder / str(ME) / "transfer" / "0.0-9-0000000000000000"
    async with home(world) as node:
        state = await node.fetch(await node.catch_up())
        assert state is not None
        kept.mkdir(parents=True)
        await node.state_store.adopt(state)
        assert not kept.parent.exists()
