"""What a node comes back to from its disk alone, at whatever instant the power went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import trio

from tests.node.donors import ME, World
from tests.node.ledger import Ledger, save_finals, state_of
from tests.node.ledger import finals_of as other_finals
from tests.node.state_store_lab import Home, home, ledger_of

pytestmark = pytest.mark.virtual_time


async def rounds_done(node: Home, ledger: Ledger, *, finals_of: Sequence[int], states: Sequence[int]) -> None:
    """All certificates are on disk, and of finals and states those of the given rounds."""
    for certificate in ledger.chain.after(node.state_store.head.round, 99):
        await node.state_store.append(certificate)
    for round in finals_of:
        save_finals(node.world.cache, ledger.finals[round])
    for round in states:
        node.world.cache.save_state(ledger.states[round])


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def finals_path(world: World, round: int) -> Path:
    return world.folder / str(ME) / "finals" / f"{round}-{world.ledger.finals[round].plan.hash.hex()}"


def state_path(world: World, round: int) -> Path:
    return world.folder / str(ME) / "state" / f"{round}.safetensors"


async def reloaded(world: World, node: Home) -> int | None:
    """The round that a new process comes to, with the certified digest, from nothing but this disk."""
    again = Home(World(world.folder, world.ledger), node.store)
    for certificate in node.state_store.chain.after(again.state_store.head.round, 99):
        again.state_store.chain.extend(certificate)
    await again.state_store.load()
    again.events.close()
    state = again.state_store.state
    if state is None:
        return None
    assert again.state_store.digest == world.ledger.header(state.round).digest
    assert state.anchor.tobytes() == world.ledger.states[state.round].anchor.tobytes()
    assert again.world.cache.newest_round() == state.round
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
async def test_node_that_crashed_while_saving_round_3_comes_back(
    tmp_path: Path, crash: Callable[[World], None], comes_to: int
) -> None:
    """Round 5 is certified, the state of 1 is on disk, that of 3 was being written: finals lead to the head."""
    world = World(tmp_path, ledger_of(5))
    async with home(world) as node:
        await rounds_done(node, world.ledger, finals_of=range(1, 6), states=[1, 3])
        crash(world)
        assert await reloaded(world, node) == comes_to
    assert not list(tmp_path.rglob("*.partial"))  # noqa: ASYNC240


async def test_finals_ahead_of_the_chain_lead_nowhere(tmp_path: Path) -> None:
    """They were kept for a report; whether the round was certified this node did not learn."""
    ledger = ledger_of(3)
    world = World(tmp_path, ledger)
    async with home(world) as node:
        for certificate in ledger.chain.after(0, 2):
            await node.state_store.append(certificate)
        for finals in ledger.finals.values():
            save_finals(world.cache, finals)
        world.cache.save_state(ledger.states[1])
        assert await reloaded(world, node) == 2


async def test_swarm_killed_before_any_state_was_saved_goes_on_from_the_initial_one(tmp_path: Path) -> None:
    world = World(tmp_path, ledger_of(3))
    async with home(world) as node:
        await node.state_store.adopt(world.ledger.states[0])
        await rounds_done(node, world.ledger, finals_of=[1, 2, 3], states=[])
        assert world.cache.saved_rounds() == [0]
        assert await reloaded(world, node) == 3


@pytest.mark.parametrize("finals", [[], [1, 2]])
async def test_initial_state_counts_only_with_what_follows_from_it(tmp_path: Path, finals: list[int]) -> None:
    world = World(tmp_path, ledger_of(2))
    async with home(world) as node:
        await node.state_store.adopt(state_of(0, seed=7))  # another than the swarm went on from
        await rounds_done(node, world.ledger, finals_of=finals, states=[])
        assert await reloaded(world, node) is None


async def test_finals_that_lead_elsewhere_are_not_followed(tmp_path: Path) -> None:
    """The owners signed two results for one plan; this disk has the one that was not certified."""
    ledger = ledger_of(2)
    world = World(tmp_path, ledger)
    async with home(world) as node:
        await rounds_done(node, ledger, finals_of=[], states=[1])
        save_finals(world.cache, other_finals(ledger.finals[2].plan, ledger.founders, seed=999))
        assert await reloaded(world, node) == 1


async def test_state_computed_here_is_saved_beside_the_rounds_and_at_the_latest_at_the_end(tmp_path: Path) -> None:
    ledger = ledger_of(4)
    world = World(tmp_path, ledger)
    async with home(world) as node:
        await rounds_done(node, ledger, finals_of=[], states=[])
        await node.state_store.adopt(ledger.states[0])
        async with trio.open_nursery() as nursery:
            for round in (1, 2, 3, 4):
                await node.state_store.follow(ledger.states[round], ledger.header(round))
                assert node.state_store.state is ledger.states[round]
                assert world.cache.saved_rounds() == [0]
            nursery.start_soon(node.state_store.run)
            nursery.cancel_scope.cancel()
        assert world.cache.saved_rounds() == [4, 0]
        assert await reloaded(world, node) == 4
