"""A node full of strangers, on real hosts: who belongs to the swarm gets in at every stage, and others are told."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection, Sequence
from itertools import pairwise

import msgspec
import pytest
import trio
import trio.testing

from shoal.protocol.identity import PeerId
from shoal.protocol.membership import Suspected
from shoal.protocol.messages import Leave, Term
from shoal.protocol.peering import LinkMessage, Suspicion, Welcome
from shoal.protocol.records import open_record, seal_record
from shoal.protocol.wire import decode, open_envelope
from shoal.swarm import dialling as dialling_module
from shoal.swarm import links as links_module
from shoal.swarm import members as members_module
from shoal.swarm import transport
from shoal.swarm.host import Host
from shoal.swarm.limits import Door
from shoal.swarm.links import ENVELOPE_KIND, NoPlaceLeft
from tests.swarm.quiet import Quiet
from tests.swarm.test_members import (
    Firewall,
    Node,
    Stranger,
    assert_linked,
    assert_talking_through_others,
    identity,
    running,
    stranger,
)
from tests.waiting import until

PLACES = 4
SOON_S = 30.0
"""A few seconds, on a loaded machine."""
FOUNDER = 1
"""The one that `MANIFEST` names."""


@pytest.fixture(autouse=True)
def _small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "LINK_LIMIT", PLACES)
    monkeypatch.setattr(dialling_module, "DIAL_PERIOD_S", 0.02)
    monkeypatch.setattr(dialling_module, "DIAL_DEFERRAL_S", 0.1)


def open_door(node: Node) -> None:
    """Rates are not what is tried here, and all strangers of a test share an address."""
    node.host._door = Door(node.host.refusals, per_s=(1e3, 1e3), address_per_s=(1e3, 1e3), newcomers_per_s=(1e3, 1e3))


@contextlib.asynccontextmanager
async def full_of_strangers(node: Node, seeds: Sequence[int]) -> AsyncIterator[list[Quiet]]:
    """As many of them as there are seeds, linked in this order."""
    quiet = [Quiet(seed) for seed in seeds]
    async with trio.open_nursery() as nursery:
        for one in quiet:
            await nursery.start(one.host.run)
            assert isinstance(await one.ask_at(node.host.addresses[0], node.peer, one.hello()), Welcome)
            await until(lambda one=one: one.peer in node.linked())  # type: ignore[misc]
        yield quiet
        nursery.cancel_scope.cancel()


def peers(nodes: Collection[Node | Stranger]) -> set[str]:
    return {node.peer for node in nodes}


async def assert_heard(speaker: Node, listener: Node) -> None:
    """What it says of a round arrives; said until it does, since no end knows at once that a link is lost."""
    word = Leave(term=Term(), round=len(listener.heard) + 1, base=bytes(32), signature=bytes(64))
    while (speaker.peer, word) not in listener.heard:
        speaker.members.links.broadcast(word)
        await trio.sleep(0.02)


async def test_restarted_founder_gets_into_a_node_full_of_silent_strangers() -> None:
    node, founder = Node(2), Node(FOUNDER)
    open_door(node)
    async with running(node) as nursery:
        await nursery.start(founder.run)
        await founder.join(node)
        await assert_linked(node, founder)
        founder.kill()
        await until(lambda: founder.peer not in node.linked())
        async with full_of_strangers(node, range(20, 20 + PLACES)) as silent:
            again = Node(FOUNDER, boot=2)
            await nursery.start(again.run)
            with trio.fail_after(SOON_S):
                await again.join(node)
                await until(lambda: again.peer in node.linked() and node.peer in again.linked())
            await assert_heard(node, again)
            await assert_heard(again, node)
            assert len(node.linked()) <= PLACES
            assert peers(silent) & node.linked(), "one gave way, not all"


async def test_newcomer_that_is_told_full_finds_a_place_with_the_others_that_it_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dialling_module, "DIAL_DEFERRAL_S", 1e6)
    full, other, newcomer = Node(2), Node(4), Node(3)
    assert other.peer < newcomer.peer  # whom it would else wait for
    open_door(full)
    async with running(full, other, newcomer):
        full.members.book.receive(seal_record(other.sealer, other.record()), trio.current_time())
        monkeypatch.setattr(full.members._dialling, "_dial_when_due", lambda peer, now: None)
        async with full_of_strangers(full, range(20, 20 + PLACES)):
            with pytest.raises(NoPlaceLeft, match=f"{full.peer} is full"):
                await newcomer.join(full)
            await until(lambda: newcomer.linked() == {other.peer})
            assert newcomer.peer not in full.linked()


def test_node_that_is_full_names_members_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "RECORDS_IN_WELCOME_LIMIT", 2)
    node = Node(2)
    crowd = [Stranger(seed) for seed in (FOUNDER, *range(30, 60))]
    for one in crowd:
        node.members.book.receive(one.sealed(), 0.0)
    assert min(one.peer for one in crowd) != identity(FOUNDER).peer_id
    named = [open_record(data, node.manifest.swarm_id, 0.0).record.peer for data in node.members._others(node.peer)]
    assert (named[0], len(named)) == (identity(FOUNDER).peer_id, 2)


async def test_member_is_dialled_however_many_strangers_are_where_nobody_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Records cost nothing: all that a node dials by itself could be taken up with them."""
    monkeypatch.setattr(links_module, "LINK_LIMIT", 256)
    monkeypatch.setattr(dialling_module, "DIAL_DEADLINE_S", 1e6)  # so that none of those dials is ever over
    monkeypatch.setattr(links_module, "DIAL_HANDSHAKE_DEADLINE_S", 1e6)
    monkeypatch.setattr(transport, "CONNECTION_HANDSHAKE_DEADLINE_S", 1e6)
    node, founder = Node(2), Node(FOUNDER)
    hung = await trio.open_tcp_listeners(0, host="127.0.0.1")  # takes connections, and says nothing
    port = hung[0].socket.getsockname()[1]
    async with running(node, founder):
        for seed in range(30, 30 + 3 * dialling_module.DIALS_AT_ONCE_LIMIT):
            one = Stranger(seed)
            address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{one.peer}"
            record = msgspec.structs.replace(one.record(), control_addresses=(address,))
            node.members.book.receive(seal_record(one.sealer, record), trio.current_time())
        places = node.members._dialling._windows[False].places
        await until(lambda: places.borrowed_tokens == dialling_module.DIALS_AT_ONCE)
        founder.members._dialling._dial_when_due = lambda peer, now: None  # it waits to be dialled
        node.members.book.receive(seal_record(founder.sealer, founder.record()), trio.current_time())
        await until(lambda: founder.peer in node.linked())
        assert places.borrowed_tokens == dialling_module.DIALS_AT_ONCE
    await hung[0].aclose()


def test_found_addresses_of_whom_comes_first_are_kept_and_of_others_the_last() -> None:
    node = Node(2)
    dialling = node.members._dialling
    peers = [Stranger(seed).peer for seed in range(30, 36)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dialling_module, "FOUND_LIMIT_PEERS", 3)
        for peer in (identity(FOUNDER).peer_id, *peers):
            dialling.found(peer, ["/ip4/192.0.2.1/tcp/1/p2p/" + peer])
    assert dialling.known() == {identity(FOUNDER).peer_id, *peers[-2:]}


async def test_addresses_of_strangers_are_not_members_addresses() -> None:
    """Whoever is linked in an open swarm could else take what is kept for members' addresses."""
    node, founder = Node(2), Node(FOUNDER)
    async with running(node, founder), stranger(9) as other:
        await other.ask(node, other.hello())
        await until(lambda: other.peer in node.linked())
        assert not node.host.is_known("127.0.0.1")
        await founder.join(node)
        await until(lambda: founder.peer in node.linked())
        assert node.host.is_known("127.0.0.1")


def test_addresses_at_which_members_were_are_members_addresses_from_the_start() -> None:
    node = Node(2)
    relay, peer = (identity(seed).peer_id for seed in (FOUNDER, 9))
    node.members.expect_from(
        [f"/ip4/192.0.2.7/tcp/4001/p2p/{peer}", f"/ip4/192.0.2.8/tcp/1/p2p/{relay}/p2p-circuit/p2p/{peer}", "nonsense"]
    )
    assert [node.host.is_known(f"192.0.2.{n}") for n in (7, 8)] == [True, False]


async def test_member_that_is_heard_through_others_alone_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "LINK_LIMIT", 256)
    monkeypatch.setattr("shoal.swarm.last_seen.LONG_SILENCE_S", 3.0)
    one, two, between = Node(4), Node(2), Node(3)
    async with running(one, two, between):
        Firewall(one, two)
        await one.join(between)
        await two.join(between)
        ends_at = trio.current_time() + 2 * 3.0
        while trio.current_time() < ends_at:
            await assert_talking_through_others(one, two)
            assert one.members.long_silent([two.peer]) == []
        two.kill()
        await until(lambda: one.members.long_silent([two.peer, between.peer]) == [two.peer])
        with monkeypatch.context() as offline:
            offline.setattr(Host, "is_cut_off", True)
            assert one.members.long_silent([two.peer]) == [], "it may be well where there is a network"
        one.members.moved(())
        assert one.members.long_silent([two.peer]) == [two.peer], "it was silent while others were heard"
        between.kill()
        await until(lambda: one.linked() == frozenset())
        one.members.moved(())
        assert one.members.long_silent([two.peer, between.peer]) == [], "this machine may have had no network"


async def test_suspicion_of_a_stranger_is_told_to_who_comes_first_and_itself_alone() -> None:
    """Else the work of a node full of strangers that say nothing would grow with the square of their number."""
    node, founder = Node(2), Node(FOUNDER)
    heard: list[PeerId] = []
    take = founder.members.message

    def message(peer: PeerId, message: LinkMessage) -> None:
        if isinstance(message, Suspicion):
            heard.append(message.peer)
        take(peer, message)

    founder.members.message = message  # type: ignore[method-assign]
    async with running(node, founder), stranger(20) as one, stranger(21) as other:
        await founder.join(node)
        for mute in (one, other):
            await mute.ask(node, mute.hello())
        await until(lambda: peers([one, other]) <= node.linked())
        for mute in (one, other):
            mute.hang()
        await until(lambda: not peers([one, other]) & node.linked())
        await until(lambda: peers([one, other]) <= set(heard))
        assert [suspected_in(mute) for mute in (one, other)] == [{one.peer}, {other.peer}]


def suspected_in(mute: Stranger) -> set[PeerId]:
    """Of whom a stranger was told that they are suspected."""
    envelopes = (open_envelope(data, mute.swarm_id) for data in mute.got)
    said = (decode(one.payload, LinkMessage) for one in envelopes if one.kind == ENVELOPE_KIND)  # type: ignore[arg-type, var-annotated]
    return {one.peer for one in said if isinstance(one, Suspicion)}


class Flapping:
    """Stands for the failure detector: of two peers, linked with this node, now one is silent and now the other."""

    def __init__(self, *peers: PeerId) -> None:
        self.peers = peers
        self.looks = 0

    def alive(self) -> list[PeerId]:
        return []

    def silent(self, now: float) -> frozenset[PeerId]:
        self.looks += 1
        return frozenset({self.peers[self.looks % 2]})


def test_who_is_silent_is_told_to_all_seldom_where_it_is_a_stranger_and_at_once_where_it_comes_first() -> None:
    node = Node(2)
    told: list[frozenset[PeerId]] = []
    links = node.members.links

    def lack(peers: frozenset[PeerId]) -> None:
        told.append(peers)
        links.message_relay.lack(peers)

    links.lack = lack  # type: ignore[method-assign]
    one, other, founder = (identity(seed).peer_id for seed in (20, 21, FOUNDER))
    node.members.machine = Flapping(one, other)  # type: ignore[assignment]
    ticks = [0.1 * number for number in range(1, 601)]
    for now in ticks:
        node.members._tell_reach(now)
    assert len(told) == ticks[-1] / members_module.STRANGERS_REACH_PERIOD_S
    node.members.machine = Flapping(founder, founder)  # type: ignore[assignment]
    node.members._tell_reach(ticks[-1] + members_module.REACH_PERIOD_S)
    assert told[-1] == {founder}


def test_words_of_others_do_not_grow_with_a_crowd_and_who_is_suspected_is_always_told() -> None:
    """In a crowd that has too much to do all suspect and lack others all the while, and each word is one to everybody.

    Of few a word is a message to few, and each is told.
    """
    assert words_told(linked=4, seconds=120) > 12
    crowd_told = words_told(linked=48, seconds=120)
    assert 4 <= crowd_told <= (members_module.WORDS_BURST + 120 * members_module.WORDS_PER_S) / 48


def words_told(*, linked: int, seconds: int) -> int:
    """How many words a node says to all of as many, of whom now one is silent and now another is suspected."""
    node, told, alone, suspected = Node(2), list[object](), list[PeerId](), 0
    crowd = [identity(seed).peer_id for seed in range(3, 3 + linked)]
    links, founder = node.members.links, identity(FOUNDER).peer_id
    links.linked = lambda: frozenset(crowd)  # type: ignore[method-assign]
    links.lack = told.append  # type: ignore[method-assign]
    links.tell_of = lambda peer, message: told.append(message)  # type: ignore[method-assign]
    links.send = lambda peer, message: alone.append(peer)  # type: ignore[method-assign]
    node.members.machine = Flapping(founder, founder)  # type: ignore[assignment]
    clock = trio.testing.MockClock()

    async def told_all_the_while() -> None:
        nonlocal suspected
        for second in range(seconds):
            node.members._tell_reach(trio.current_time())
            if second % 10 == 0:
                suspected += 1
                node.members._carry_out([Suspected(peer=crowd[0], incarnation=0)])
            clock.jump(1.0)

    trio.run(told_all_the_while, clock=clock)
    assert len(alone) + sum(isinstance(one, Suspicion) for one in told) == suspected
    assert set(alone) <= {crowd[0]}
    return len(told)


def test_who_lacks_members_all_the_while_says_so_ever_less_often_until_it_is_calm() -> None:
    """In a swarm that is starting all lack others all the while, and all tell all."""
    node, told, now = Node(2), list[float](), 0.0
    node.members.links.lack = lambda peers: told.append(now)  # type: ignore[method-assign]
    founder = identity(FOUNDER).peer_id
    node.members.machine = Flapping(founder, founder)  # type: ignore[assignment]
    for tick in range(1, 330):
        now = tick / 10
        node.members._tell_reach(now)
    pauses = [later - earlier for earlier, later in pairwise(told)]
    assert pauses == pytest.approx([1.0, 2.0, 4.0, 8.0, 8.0, 8.0], abs=0.11)
    now += members_module.REACH_CALM_S + members_module.REACH_PERIOD_LIMIT_S
    calm = now
    for tick in range(20):
        now = calm + tick / 10
        node.members._tell_reach(now)
    assert [at for at in told if at >= calm] == pytest.approx([calm, calm + 1.0], abs=0.11)
