"""Catching up after an interruption: what came is kept, and what stands on disk is not fetched again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from shoal.collectives.commitment import chunk_hash
from shoal.collectives.state import frozen, header_of
from shoal.node.outcome import StateFetched
from shoal.node.state.transfer_files import KEEP_AFTER_S, TransferFolder
from shoal.protocol.errors import NetworkError, StorageError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Term
from shoal.protocol.peering import (
    GetFinals,
    GetHeader,
    Refusal,
)
from shoal.protocol.wire import canonical
from shoal.swarm.lanes.chunks import ChunkSpace
from shoal.swarm.lanes.frame import FrameKind
from tests.node.donors import ME, World
from tests.node.ledger import Ledger, state_of
from tests.node.state.catchup_lab import (
    FINE,
    PEERS,
    STATE_BYTES,
    advance,
    assert_fine,
    fine_world,
    small_windows,
)

pytestmark = [pytest.mark.virtual_time, pytest.mark.usefixtures("no_threads")]

__all__ = ["small_windows"]


# -- what is here is not fetched -----------------------------------------------------------------------------


async def interrupted(world: World, peers: Sequence[PeerId], *, after: int) -> None:
    """A transfer that ends in the middle, as when the node is stopped: `after` of all chunks are here by then."""
    with trio.CancelScope() as scope:

        async def stop(fetched: StateFetched) -> None:
            if fetched.done_chunks >= after:
                await trio.sleep(2 * KEEP_AFTER_S)  # what is here gets to the disk
                unfinished = world.catchup._unfinished
                assert unfinished is not None
                while unfinished.partial_download.behind:  # what is here gets to the disk, in a thread
                    await trio.lowlevel.checkpoint()
                scope.cancel()
                await trio.lowlevel.checkpoint()

        await world.advance(None, world.ledger.chain, peers, stop)
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
async def test_restarted_joiner_asks_only_for_what_is_missing_or_bad(tmp_path: Path) -> None:
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


@pytest.mark.usefixtures("small_windows")
async def test_state_that_came_in_part_is_gone_on_with_while_donors_hold_it_whatever_rounds_passed(
    tmp_path: Path,
) -> None:
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


async def test_attempt_that_failed_goes_on_where_it_was(tmp_path: Path) -> None:
    world = fine_world(tmp_path, 2)
    world.donors[PEERS[0]].spoil = lambda header, data: data if header.chunk < 40 else None
    with pytest.raises(NetworkError, match=r"no peer has the state of round 2 \(one: sent nothing for 5 s\)"):
        await advance(world, None, PEERS[:1])
    assert world.chunks_from(PEERS[0]) == 2 * FINE.chunks
    assert_fine(await advance(world, None, PEERS[1:]), world, 2)
    assert sum(world.catchup.donated.values()) == 2 * 20 * 4000


FOUR = PeerId("four")


def go_another_way(world: World) -> None:
    """The swarm goes back, and certifies round 2 again, in the next term; one more donor has that, others do not."""
    world.ledger.go_back(1)
    world.ledger.certify()
    world.donor(FOUR)


async def test_attempt_that_failed_is_not_gone_on_with_for_the_same_round_of_another_term(tmp_path: Path) -> None:
    world = fine_world(tmp_path, 2)
    world.donors[PEERS[0]].spoil = lambda header, data: data if header.chunk < 40 else None
    with pytest.raises(NetworkError, match="no peer has the state of round 2"):
        await advance(world, None, PEERS[:1])
    go_another_way(world)
    state = await advance(world, None, [FOUR])
    assert_fine(state, world, 2)
    assert state.term == world.ledger.chain.value(2).term == Term(0, 1)


async def test_what_is_kept_of_transfers_goes_when_the_state_is_on_disk(tmp_path: Path) -> None:
    world = fine_world(tmp_path, 2)
    await interrupted(world, PEERS, after=60)
    assert chunks_file(world).exists()
    await advance(world, None, PEERS)
    world.catchup.arrived()
    assert not (world.folder / "me" / "transfer").exists()


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("damage", ["no header", "another header", "no chunks", "a file", "cut short"])
async def test_damaged_transfer_costs_what_it_held_and_nothing_more(tmp_path: Path, damage: str) -> None:
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


async def test_full_disk_does_not_keep_the_state_from_arriving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: TransferFolder, header: object) -> None:
        raise StorageError("the disk is full; free some space")

    monkeypatch.setattr(TransferFolder, "begin", full)
    world = fine_world(tmp_path, 2)

    async def dawdle(fetched: StateFetched) -> None:
        await trio.sleep(KEEP_AFTER_S)

    assert_fine(await world.advance(None, world.ledger.chain, PEERS, dawdle), world, 2)
    assert "is not kept for a restart: the disk is full" in caplog.text


async def test_node_that_missed_rounds_pulls_only_the_chunks_that_differ(tmp_path: Path) -> None:
    """Rounds that touched some chunks only, and whose finals are gone: what is alike is not fetched."""
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
