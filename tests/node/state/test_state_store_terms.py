"""The state store when a term ends: it tells of it once, and comes to the state on which the next stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.node.outcome import Notice
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH
from shoal.protocol.peering import GetHeader
from shoal.protocol.terms import make_rebase
from tests.node.donors import World
from tests.node.ledger import AUTHORITY, state_of
from tests.node.state_store_lab import GOOD, Home, home, ledger_of
from tests.protocol.test_chain_choice import invented

pytestmark = pytest.mark.virtual_time

STRANGER = PeerId("no founder")


def told(node: Home) -> list[tuple[str, str, int, int]]:
    lines = (node.store.folder / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [(e["event"], e["term"], e["round"], e["to"]) for e in events if e["event"] in ("rolled_back", "rebased")]


def notices(node: Home) -> list[str]:
    return [notice.text for notice in node.progress if isinstance(notice, Notice)]


@pytest.mark.parametrize("slept", [True, False])
async def test_terms_that_ended_elsewhere_are_logged_as_those_that_ended_here(tmp_path: Path, slept: bool) -> None:
    ledger = ledger_of(4)
    world = World(tmp_path, ledger)
    async with home(world) as node:
        if slept:
            for entry in ledger.chain.after(0, 3):
                await node.state_store.append(entry)
            await node.state_store.adopt(ledger.states[3])
        ledger.go_back(3)
        ledger.certify()
        ledger.chain.extend(make_rebase(AUTHORITY, ledger.chain.head, ledger.peers))
        world.donor(GOOD)
        await node.catch_up()
        assert node.state_store.head == ledger.chain.head
        await node.catch_up()
        assert told(node) == [("rolled_back", "0.0", 5, 3), ("rebased", "1.0", 4, 4)]
        assert [text.split(":")[1] for text in notices(node)] == [
            " going on from round 3, term 0.1",
            " going on in term 1.0",
        ] * slept


# -- back to the initial state -------------------------------------------------------------------------------


async def gone_back_to_initial(node: Home) -> None:
    """The node's swarm decided, with this node, to go back from round 3 to the initial state."""
    ledger = node.world.ledger
    ledger.go_back(0)
    for entry in ledger.chain.after(node.state_store.chain.height, 9):
        await node.state_store.append(entry)


async def test_founder_that_kept_the_initial_state_stands_on_it_again_also_after_a_restart(tmp_path: Path) -> None:
    ledger = ledger_of(3)
    world = World(tmp_path, ledger)
    initial = ledger.states[0].anchor.tobytes()
    async with home(world) as node:
        await node.state_store.adopt(ledger.states[0])
        for entry in ledger.chain.after(0, 3):
            await node.state_store.append(entry)
        for round in (1, 2, 3):
            await node.state_store.adopt(ledger.states[round])
        assert world.cache.saved_rounds() == [3, 2, 0]
        await gone_back_to_initial(node)
        assert node.state_store.current
        assert node.state_store.digest == ledger.chain.digest(0)
        assert world.cache.saved_rounds() == [0]
    world.restart()
    async with home(world) as node:
        await node.state_store.load()
        assert node.state_store.current
        assert node.state_store.state is not None
        assert node.state_store.state.anchor.tobytes() == initial


@pytest.mark.parametrize("own", ["none", "another", "damaged"])
async def test_initial_state_that_was_certified_comes_from_anyone_who_has_it(tmp_path: Path, own: str) -> None:
    ledger = ledger_of(3)
    world = World(tmp_path, ledger)
    async with home(world) as node:
        if own != "none":
            await node.state_store.adopt(state_of(0, seed=7) if own == "another" else ledger.states[0])
        if own == "damaged":
            path = node.store.folder / "state" / "0.safetensors"
            path.write_bytes(path.read_bytes()[:-4] + b"\1\2\3\4")
        for entry in ledger.chain.after(0, 3):
            await node.state_store.append(entry)
        await node.state_store.adopt(ledger.states[3])
        await gone_back_to_initial(node)
        assert node.state_store.state is None
        liar = world.donor(PeerId("liar"))
        liar.cache.put(state_of(0, seed=8), liar.cache.header(state_of(0, seed=8)))
        donor = world.donor(STRANGER)
        state = await node.fetch([PeerId("liar"), STRANGER])
        assert state is not None
        assert state.anchor.tobytes() == ledger.states[0].anchor.tobytes()
        assert world.chunks_from(PeerId("liar")) == 0
        assert [type(request) for request in donor.asked] == [GetHeader]
        await node.state_store.adopt(state)
        assert node.state_store.current


@pytest.mark.parametrize("known", [True, False])
async def test_initial_state_to_vote_for_comes_from_anyone_and_for_a_consent_from_a_founder(
    tmp_path: Path, known: bool
) -> None:
    """What was proposed names a digest; before that nobody but a founder can tell what S(0) was."""
    ledger = ledger_of(3)
    world = World(tmp_path, ledger)
    founder = PeerId(ledger.peers[1])
    for peer in (STRANGER, founder):
        world.donor(peer, rounds=0)  # they consented: S(0) is on their shelves
    digest = ledger.header(0).digest
    async with home(world) as node:
        for entry in ledger.chain.after(0, 3):
            await node.state_store.append(entry)
        value = ledger.chain.value(0)
        peers = [STRANGER] if known else [STRANGER, founder]
        state = await node.fetch_earlier(value, peers, initial=digest if known else NO_HASH)
        assert world.cache.header(state).digest == digest
        assert (world.chunks_from(STRANGER) > 0) is known


# -- another branch ------------------------------------------------------------------------------------------


async def test_member_of_another_branch_takes_the_chain_beneath_a_later_rebase(tmp_path: Path) -> None:
    ledger = ledger_of(6)
    world = World(tmp_path, ledger)
    mine = invented(ledger.chain, 2, rounds=3)  # certified by a quorum as well, and what this node has
    async with home(world) as node:
        for entry in mine.entries:
            await node.state_store.append(entry)
        await node.state_store.adopt(state_of(4, seed=9))
        donor = world.donor(GOOD)
        await node.catch_up()
        assert node.state_store.head == mine.head  # nobody has decided which one it is
        assert list(node.fork_watch._suspects) == [GOOD]
        ledger.chain.extend(make_rebase(AUTHORITY, ledger.chain.head, ledger.peers[:2]))
        donor.chain.extend(ledger.chain.entries[-1])
        await node.catch_up()
        assert node.state_store.head == ledger.chain.head
        assert node.state_store.state is None  # a state of round 4, and not the one of this chain's
        assert world.cache.saved_rounds() == []
        assert told(node) == [("rebased", "1.0", 6, 6)]
    async with home(world) as node:
        assert node.state_store.chain.entries == ledger.chain.entries  # as it is on disk
