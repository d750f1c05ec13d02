"""Nodes with one key: peers keep the later one, and tell the other, whether or not it gets through to say hello."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace

import pytest
import trio
from trio.testing import MockClock

from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.peering import Welcome
from shoal.protocol.records import NodeRecord, RecordBook, open_record, seal_record
from shoal.protocol.wire import Sealer
from shoal.swarm import key_probe
from shoal.swarm.key_probe import KeyProbe
from tests.swarm.test_members import MANIFEST, Node, assert_linked, identity, running, stranger
from tests.waiting import until


def watched(node: Node) -> list[NodeRecord]:
    """What shows this node that its key is in use elsewhere."""
    seen: list[NodeRecord] = []
    node.members.on_elsewhere = seen.append
    return seen


async def test_hello_of_an_earlier_life_is_answered_with_the_record_of_the_later_one() -> None:
    here, later = Node(1), Node(2, boot=7)
    async with running(here), stranger(2, boot=3) as earlier:
        async with running(later):
            await later.join(here)
            await assert_linked(here, later)
        await until(lambda: not here.linked())
        answer = await earlier.ask(here, earlier.hello())
        assert isinstance(answer, Welcome)
        assert answer.record == b""
        (sealed,) = answer.others
        told = open_record(sealed, MANIFEST.swarm_id, 0.0).record
        assert (told.peer, told.boot) == (later.peer, 7)


async def test_node_that_was_started_less_often_learns_of_the_other_and_is_not_linked() -> None:
    here, later = Node(1), Node(2, boot=7)
    async with running(here, later) as nursery:
        await later.join(here)
        await assert_linked(here, later)
        later.kill()  # its record is still known
        await until(lambda: not here.linked())
        earlier = Node(2, boot=3)
        seen = watched(earlier)
        await nursery.start(earlier.run)
        with pytest.raises((RemoteError, NetworkError)):
            await earlier.join(here)
        await until(lambda: bool(seen))
        assert (seen[0].peer, seen[0].boot) == (earlier.peer, 7)
        assert here.linked() == frozenset()


@pytest.mark.parametrize("ahead", [True, False])
async def test_of_two_that_were_started_equally_often_the_one_that_has_said_less_learns_of_it(ahead: bool) -> None:
    here, known, copy = Node(1), Node(2, boot=4), Node(2, boot=4)
    for _ in range(1000):
        (copy if ahead else known).sealer.seal("node-record", b"")
    async with running(here, known) as nursery:
        await known.join(here)
        await assert_linked(here, known)
        known.kill()
        await until(lambda: not here.linked())
        seen = watched(copy)
        await nursery.start(copy.run)
        await copy.join(here)
        await assert_linked(here, copy)
        assert bool(seen) == (not ahead)


async def test_node_that_comes_back_is_not_taken_for_another() -> None:
    here, there = Node(1), Node(2)
    seen, also = watched(here), watched(there)
    async with running(here, there):
        await there.join(here)
        for _ in range(3):
            await assert_linked(here, there)
            here.members.links.drop(there.peer)
        await assert_linked(here, there)
        again = Node(2, boot=2)
        there.kill()
        seen_again = watched(again)
        async with running(again):
            await again.join(here)
            await assert_linked(here, again)
        assert seen == also == seen_again == []


async def test_node_that_is_shut_out_asks_under_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_probe, "PERIOD_S", 0.1)
    here, later = Node(1), Node(2, boot=7)
    async with running(here, later):
        await later.join(here)
        await assert_linked(here, later)
        earlier = Node(2, boot=3)
        seen = watched(earlier)
        async with running(earlier):
            earlier.members.probe.shut_out(["/ip4/127.0.0.1/tcp/9/p2p/" + here.peer, "no address"])
            earlier.members.probe.shut_out(here.host.addresses)
            await until(lambda: bool(seen))
            assert seen[0].boot == 7
            assert later.linked() == {here.peer}  # nobody was disturbed by that


def test_who_learns_nothing_asks_ever_less_often_and_anew_after_a_quiet_minute() -> None:
    """Machines that have too much to do let nobody through, and each question costs them handshakes more."""
    asked: list[float] = []
    probe = Node(1).members.probe

    async def ask_all(addresses: Sequence[str]) -> None:
        asked.append(trio.current_time() - began)

    async def shut_out_until(end: float) -> None:
        while trio.current_time() - began < end:
            probe.shut_out(["/ip4/192.0.2.1/tcp/1/p2p/" + identity(2).peer_id])
            await trio.sleep(1)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(probe.run)
            await shut_out_until(200)
            await trio.sleep(200)
            await shut_out_until(406)
            nursery.cancel_scope.cancel()

    probe._ask_all = ask_all  # type: ignore[method-assign]
    clock = MockClock(autojump_threshold=0)
    began = clock.current_time()
    trio.run(main, clock=clock)
    pauses = [later - earlier for earlier, later in pairwise(asked)]
    assert pauses == pytest.approx([5, 10, 20, 40, 60, 60, 60, 145, 5], abs=1.1)


@pytest.mark.parametrize("goes_on", [True, False])
async def test_node_on_a_copy_learns_that_its_earlier_life_goes_on(
    monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    monkeypatch.setattr(key_probe, "PERIOD_S", 0.1)
    monkeypatch.setattr(key_probe, "EARLIER_S", 0.5)
    here, earlier, copy = Node(1), Node(2, boot=3), Node(2, boot=4)
    seen = watched(copy)
    async with running(here, earlier) as nursery:
        await earlier.join(here)
        await assert_linked(here, earlier)
        await nursery.start(copy.host.run)
        nursery.start_soon(copy.members.probe.run)
        if not goes_on:
            earlier.kill()
        began = trio.current_time()
        while not seen and (goes_on or trio.current_time() < began + 2):
            earlier.members.announce()
            copy.members.probe.shut_out(here.host.addresses)
            await trio.sleep(0.05)
        assert [(record.peer, record.boot) for record in seen[:1]] == [(earlier.peer, 3)] * goes_on
        assert not goes_on or trio.current_time() >= began + 0.5


@pytest.mark.virtual_time
async def test_earlier_life_goes_on_only_if_it_spoke_when_it_should_be_silent() -> None:
    who, seen = identity(2), list[NodeRecord]()
    sealers = Sealer(who, MANIFEST.swarm_id, 3), Sealer(who, MANIFEST.swarm_id, 4)
    probe = KeyProbe(
        SimpleNamespace(serve=lambda *_, **__: None),  # type: ignore[arg-type]
        sealer=sealers[1],
        swarm_id=MANIFEST.swarm_id,
        book=RecordBook(MANIFEST.swarm_id),
        sealed_record=lambda: b"",
        found=seen.append,
    )
    record = NodeRecord(peer=who.peer_id, boot=3)
    first, second, third = (open_record(seal_record(sealers[0], record), MANIFEST.swarm_id, 0.0) for _ in range(3))
    probe._judge(first)
    await trio.sleep(key_probe.EARLIER_S - 1)
    probe._judge(second)  # it may have been on its way
    await trio.sleep(2)
    probe._judge(first)
    assert seen == []
    probe._judge(third)
    assert seen == [record]


async def test_nobody_is_told_of_another_than_its_own_key() -> None:
    here, there = Node(1), Node(2, boot=7)
    async with running(here, there):
        await there.join(here)
        await assert_linked(here, there)
        seen = watched(there)
        other = Node(3)
        taken = watched(other)
        async with running(other):
            await other.members.probe._ask_all(here.host.addresses)
        assert taken == seen == []
