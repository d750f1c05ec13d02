"""States of earlier rounds: found where they are, believed only where certified, and kept for a rollback."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import trio

from shoal.collectives.state import StateHeader
from shoal.node.state.earlier_states import EarlierStates
from shoal.node.state.state_files import write_state
from shoal.node.state.state_server import StateServer
from shoal.protocol.messages import Term
from shoal.protocol.peering import GetHeader, HeaderAnswer, Refusal
from shoal.protocol.terms import make_rebase
from shoal.protocol.wire import decode
from tests.node.donors import World
from tests.node.ledger import AUTHORITY, OUTER, Ledger, save_finals, state_of
from tests.node.state_store_lab import GOOD, home, ledger_of

pytestmark = pytest.mark.virtual_time


def on_disk(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.glob("*/*.safetensors"))


class CacheFull:
    """A data folder in which some rounds of a ledger are on disk."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self.ledger = ledger
        world = World(folder, ledger)
        self.folder, self.cache = folder / "me", world.cache
        self.earlier = EarlierStates(self.folder, chain=ledger.chain, cache=world.cache, outer=OUTER)

    def save(self, round: int, where: str) -> Path:
        path = self.folder / where
        path.parent.mkdir(parents=True, exist_ok=True)
        write_state(path, self.ledger.states[round])
        return path

    def find(self, round: int) -> bytes | None:
        found = trio.run(self.earlier.find, round)
        return None if found is None else found.anchor.tobytes()

    def truth(self, round: int) -> bytes:
        return self.ledger.states[round].anchor.tobytes()


def test_states_are_found_in_checkpoints_saved_and_by_the_finals_that_follow(tmp_path: Path) -> None:
    here = CacheFull(tmp_path, ledger_of(8))
    assert here.earlier.rounds() == []
    assert here.find(3) is None
    here.save(2, "checkpoints/0.0-2/state.safetensors")
    here.save(5, "state/5.safetensors")
    here.save(8, "state/8.safetensors")
    for round in (6, 8):  # not those of round 7
        save_finals(here.cache, here.ledger.finals[round])
    here.save(4, "checkpoints/0.1-4/state.safetensors")  # of a term that was abandoned
    assert here.earlier.rounds() == [2, 5, 6]  # the newest is no earlier one
    assert {round for round in range(1, 9) if here.find(round) == here.truth(round)} == {2, 5, 6, 8}
    assert {round for round in range(1, 9) if here.find(round) is None} == {1, 3, 4, 7}


def test_a_state_that_is_not_the_certified_one_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    here = CacheFull(tmp_path, ledger_of(5))
    write_state(here.folder / "state" / "3.safetensors", state_of(3, seed=7))
    damaged = here.save(2, "checkpoints/0.0-2/state.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-50])
    with caplog.at_level(logging.WARNING):
        assert here.find(3) is None
        assert here.find(2) is None
    assert "is not readable" in caplog.text
    here.save(3, "checkpoints/0.0-3/state.safetensors")
    assert here.find(3) == here.truth(3)


def test_a_state_is_kept_until_it_is_forgotten_and_a_damaged_copy_is_written_again(tmp_path: Path) -> None:
    here = CacheFull(tmp_path, ledger_of(5))
    for round in (2, 3):
        assert trio.run(here.earlier.keep, here.ledger.states[round]) == here.ledger.chain.value(round).digest
    assert on_disk(here.folder) == ["rollback/2.safetensors", "rollback/3.safetensors"]
    header = here.cache.begin_serving(3)
    assert header is not None  # peers may ask for it
    assert header.digest == here.ledger.chain.value(3).digest
    (here.folder / "rollback" / "3.safetensors").write_bytes(b"torn")
    trio.run(here.earlier.keep, here.ledger.states[3])
    assert here.find(3) == here.truth(3)
    trio.run(here.earlier.forget, {3})
    assert on_disk(here.folder) == ["rollback/3.safetensors"]
    trio.run(here.earlier.forget, ())
    assert on_disk(here.folder) == []


async def test_a_state_that_is_kept_is_served_when_the_cache_has_long_let_go_of_it(tmp_path: Path) -> None:
    here = CacheFull(tmp_path, ledger_of(8))
    server = StateServer(chain=here.ledger.chain, cache=here.cache, earlier=here.earlier)
    await here.earlier.keep(here.ledger.states[2])
    for round in (6, 7, 8):
        here.cache.put(here.ledger.states[round], here.cache.header(here.ledger.states[round]))
    assert here.cache.held_rounds() == [7, 8]
    answer = await server.look_up(GetHeader(round=2))
    assert isinstance(answer, HeaderAnswer)
    assert decode(answer.header, StateHeader).digest == here.ledger.chain.value(2).digest
    assert here.cache.held_rounds() == [2, 8]
    assert isinstance(await server.look_up(GetHeader(round=3)), Refusal)  # it is not kept
    assert isinstance(await server.look_up(GetHeader(round=9)), Refusal)  # there is none


async def test_rollback_lets_go_of_what_it_abandoned_and_stands_on_what_was_kept(tmp_path: Path) -> None:
    ledger = ledger_of(6)
    world = World(tmp_path, ledger)
    third = ledger.states[3]
    async with home(world) as node:
        for entry in ledger.chain.after(0, 6):
            await node.state_store.append(entry)
        await node.state_store.adopt(ledger.states[5])
        await node.state_store.adopt(ledger.states[6])
        await node.state_store.earlier.keep(third)
        assert await node.state_store.append(ledger.go_back(3))
        assert node.state_store.current
        assert node.state_store.digest == ledger.chain.standing.digest == ledger.chain.head.digest
        assert on_disk(node.store.folder) == ["rollback/3.safetensors", "state/3.safetensors"]
        ledger.certify()
        assert ledger.state.term == Term(0, 1)
    async with home(world) as node:  # the power went before anything of the next term was there
        await node.state_store.load()
        assert node.state_store.current
        assert node.state_store.state is not None
        assert (node.state_store.state.term, node.state_store.state.round) == (Term(), 3)


async def test_power_that_goes_between_the_decision_and_the_state_loses_nothing(tmp_path: Path) -> None:
    ledger = ledger_of(6)
    world = World(tmp_path, ledger)
    async with home(world) as node:
        for entry in ledger.chain.after(0, 6):
            await node.state_store.append(entry)
        await node.state_store.adopt(ledger.states[6])
        await node.state_store.earlier.keep(ledger.states[3])
        node.store.append_certificate(ledger.go_back(3))  # and nothing more
    async with home(world) as node:
        await node.state_store.load()
        assert node.state_store.current
        assert node.state_store.digest == ledger.chain.standing.digest


async def test_node_that_slept_through_a_rollback_fetches_the_state_of_the_next_term(tmp_path: Path) -> None:
    ledger = ledger_of(6)
    world = World(tmp_path, ledger)
    async with home(world) as node:
        for entry in ledger.chain.after(0, 6):
            await node.state_store.append(entry)
        await node.state_store.adopt(ledger.states[6])
        ledger.go_back(3)
        ledger.certify(2)
        world.donor(GOOD)
        peers = await node.catch_up()
        assert node.state_store.head == ledger.chain.head
        assert not node.state_store.current
        state = await node.fetch(peers)
        assert state is not None
        await node.state_store.adopt(state)
        assert node.state_store.current
        assert (state.term, state.round) == (Term(0, 1), 5)
        assert state.anchor.tobytes() == ledger.state.anchor.tobytes()


async def test_an_earlier_state_comes_from_peers_where_it_is_not_here(tmp_path: Path) -> None:
    ledger = ledger_of(6)
    world = World(tmp_path, ledger)
    donor = world.donor(GOOD)
    third = ledger.states[3]
    donor.cache.put(third, donor.cache.header(third))
    async with home(world) as node:
        await node.catch_up()
        state = await node.fetch_earlier(ledger.chain.value(3), [GOOD])
        assert state.anchor.tobytes() == third.anchor.tobytes()
        assert node.state_store.head.round == 6


async def test_rebase_keeps_the_state_that_it_stands_on_and_lets_go_of_later_ones(tmp_path: Path) -> None:
    ledger = ledger_of(6)
    world = World(tmp_path, ledger)
    fourth = ledger.chain.value(4)
    rebase = make_rebase(AUTHORITY, fourth, ledger.peers[:1])
    async with home(world) as node:
        for entry in ledger.chain.after(0, 4):
            await node.state_store.append(entry)
        await node.state_store.adopt(ledger.states[4])
        assert await node.state_store.append(rebase)
        assert not await node.state_store.append(rebase)
        assert node.state_store.current
        assert node.state_store.digest == fourth.digest
    async with home(world) as node:
        assert node.state_store.chain.head == rebase.value
        await node.state_store.load()
        assert node.state_store.current


async def test_certified_rounds_that_a_rebase_abandons_go_with_their_states(tmp_path: Path) -> None:
    ledger = ledger_of(6)
    world = World(tmp_path, ledger)
    rebase = make_rebase(AUTHORITY, ledger.chain.value(4), ledger.peers[:1])
    async with home(world) as node:
        for entry in ledger.chain.after(0, 6):
            await node.state_store.append(entry)
        await node.state_store.adopt(ledger.states[6])
        assert await node.state_store.append(rebase)
        assert node.state_store.state is None
        assert on_disk(node.store.folder) == []
        assert node.state_store.chain.standing == ledger.chain.value(4)
    async with home(world) as node:
        assert node.state_store.chain.head == rebase.value


async def test_states_of_an_abandoned_term_do_not_crowd_out_those_of_the_next(tmp_path: Path) -> None:
    ledger = ledger_of(6)
    world = World(tmp_path, ledger)
    folder = tmp_path / "me"
    for round in (5, 6):
        write_state(folder / "state" / f"{round}.safetensors", ledger.states[round])
    ledger.go_back(2)
    ledger.certify()
    async with home(world) as node:  # its chain was lost, so that it does not know of what these states are
        await node.state_store.load()
        assert not node.state_store.current
        for entry in ledger.chain.after(0, 99):
            await node.state_store.append(entry)
        await node.state_store.adopt(ledger.state)
        assert on_disk(folder) == ["state/3.safetensors"]
    async with home(world) as node:
        await node.state_store.load()
        assert node.state_store.current
