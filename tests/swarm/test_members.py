"""Members on real hosts on loopback: admission, records, the mesh that grows by itself, restarts and deaths."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

import msgspec
import pytest
import trio

from shoal.protocol.errors import LocalError, NetworkError, RemoteError
from shoal.protocol.followers import FOLLOWS
from shoal.protocol.gossip_messages import AskStanding
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.lateness import WAITED_TIMES
from shoal.protocol.manifest import Manifest
from shoal.protocol.membership import TICK_S, Effect, MembershipMachine, State
from shoal.protocol.messages import Leave, Message, Term
from shoal.protocol.peering import Announce, Hello, Ping, Refusal, Suspicion, SwarmMessage, Welcome
from shoal.protocol.records import NODE_RECORD_KIND, NodeRecord, Phase, seal_record, step_capability
from shoal.protocol.timeouts import RESTING_TICK_S
from shoal.protocol.wire import WIRE_VERSION, Sealer, SwarmId, canonical, decode
from shoal.swarm import dialling as dialling_module
from shoal.swarm import members as members_module
from shoal.swarm import strangers as strangers_module
from shoal.swarm.host import Host, NotReached
from shoal.swarm.links import ENVELOPE_KIND, HELLO_PROTOCOL, MESSAGES_PROTOCOL, Refused
from shoal.swarm.members import REDIAL_DEADLINE_S, REDIALS_BURST, STRANGERS_REACH_PERIOD_S, Change, Members
from shoal.swarm.streams import MessageStream
from tests.manifests import manifest_of
from tests.waiting import WAIT_S, running, until

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
TEST_DEADLINE_S = 300


def identity(n: int) -> Identity:
    return Identity.from_seed(bytes([n]) * 32 if n < 256 else n.to_bytes(32, "big"))


def manifest(name: str = "test", *, allowed: Sequence[int] | None = None) -> Manifest:
    admission, allow = "open" if allowed is None else "allowlist", [identity(n).peer_id for n in allowed or ()]
    return manifest_of([identity(1).peer_id], name=name, admission=admission, allow=allow)


MANIFEST = manifest()


@dataclass
class Node:
    """One node's members on its own host; `kill` ends both at once, as a kill ends a process."""

    seed: int
    boot: int = 1
    manifest: Manifest = MANIFEST
    phase: Phase = "training"
    tokens_per_s: float = 0.0
    step_tokens: float = 0.0
    follows: bool = False
    outside: Callable[[PeerId], bool] | None = None
    heard: list[tuple[PeerId, Message]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    host: Host = field(init=False)
    sealer: Sealer = field(init=False)
    members: Members = field(init=False)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    def __post_init__(self) -> None:
        who = identity(self.seed)
        self.host = Host(identity=who, listen=LOOPBACK)
        self.sealer = Sealer(who, self.manifest.swarm_id, self.boot)
        self.members = Members(
            host=self.host,
            sealer=self.sealer,
            swarm_id=self.manifest.swarm_id,
            manifest=self.manifest,
            record=self.record,
            follows=self.follows,
            outside=self.outside,
        )
        self.members.register(
            dict.fromkeys(get_args(SwarmMessage), lambda peer, message: self.heard.append((peer, message)))
        )

    @property
    def peer(self) -> PeerId:
        return self.host.peer_id

    def record(self) -> NodeRecord:
        return NodeRecord(
            peer=self.peer,
            boot=self.boot,
            incarnation=self.members.machine.incarnation,
            control_addresses=self.host.addresses,
            software="test",
            phase=self.phase,
            tokens_per_s=self.tokens_per_s,
            capabilities=(*((FOLLOWS,) if self.follows else ()), *step_capability(self.step_tokens)),
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.host.run)
                await nursery.start(self.members.run)
                task_status.started()
                async for change in self.members.changes:
                    self.changes.append(change)

    def kill(self) -> None:
        self.scope.cancel()

    def record_of(self, other: Node) -> NodeRecord:
        record = self.members.book.get(other.peer)
        assert record is not None
        return record

    def linked(self) -> frozenset[PeerId]:
        return self.members.links.linked()

    async def join(self, other: Node) -> None:
        await self.members.links.join(other.host.addresses[0], deadline_s=WAIT_S)

    def says(self, kind: str, other: Node) -> bool:
        return Change(kind, other.peer) in self.changes


@pytest.fixture(autouse=True)
def _dial_without_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling_module, "DIAL_PERIOD_S", 0.02)
    monkeypatch.setattr(dialling_module, "DIAL_DEFERRAL_S", 0.1)


@pytest.fixture
def _no_silence_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The detector waits for every answer for ever: what becomes known is known by another way."""
    for name in ("ACK_DEADLINE_S", "INDIRECT_DEADLINE_S"):
        monkeypatch.setattr(f"shoal.protocol.membership.{name}", math.inf)


async def test_message_goes_to_who_registered_for_it_and_nobody_may_register_twice() -> None:
    node, other = Node(1), identity(2).peer_id
    goodbye = Leave(term=Term(), round=1, base=bytes(32), signature=bytes(64))
    node.members.message(other, goodbye)
    node.members.message(other, AskStanding())  # of rounds that are not this node's
    assert node.heard == [(other, goodbye)]
    node.members.register({AskStanding: lambda peer, message: node.heard.append((peer, message))})
    node.members.message(other, AskStanding())
    assert node.heard[1:] == [(other, AskStanding())]
    for kind in (Leave, Ping):
        with pytest.raises(LocalError, match=kind.__name__):
            node.members.register({kind: lambda peer, message: None})


async def assert_linked(*nodes: Node) -> None:
    """All of them to all others, and messages pass in every direction.

    A message is lost with the link it was sent on, and not every end knows at once that a link is lost; so each is
    sent until it is heard.
    """
    word = Leave(term=Term(), round=len(nodes[0].heard) + 1, base=bytes(32), signature=bytes(64))

    def settled() -> bool:
        for node in nodes:
            others = {other.peer for other in nodes} - {node.peer}
            if node.linked() != others or not {(other, word) for other in others} <= set(node.heard):
                return False
        return True

    while not settled():
        for node in nodes:
            node.members.links.broadcast(word)
        await trio.sleep(0.02)


class Stranger:
    """A host without members, which says what the test wants."""

    def __init__(self, seed: int, *, swarm_id: SwarmId = MANIFEST.swarm_id, boot: int = 1) -> None:
        self.identity = identity(seed)
        self.swarm_id = swarm_id
        self.boot = boot
        self.host = Host(identity=self.identity, listen=LOOPBACK)
        self.sealer = Sealer(self.identity, swarm_id, boot)
        self.got: list[bytes] = []
        self.host.serve(MESSAGES_PROTOCOL, self._read)

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    async def _read(self, stream: MessageStream) -> None:
        with contextlib.suppress(NetworkError):
            while True:
                self.got.append(await stream.receive(deadline_s=None))

    def record(self) -> NodeRecord:
        return NodeRecord(peer=self.peer, boot=self.boot, control_addresses=self.host.addresses, phase="training")

    def sealed(self) -> bytes:
        return seal_record(self.sealer, self.record())

    def hello(self, **changes: object) -> Hello:
        hello = Hello(wire=WIRE_VERSION, swarm=self.swarm_id, software="test", record=self.sealed())
        return msgspec.structs.replace(hello, **changes)

    async def ask(self, node: Node, hello: Hello) -> Welcome | Refusal:
        await self.host.dial(node.host.addresses[0], deadline_s=WAIT_S)
        reply = await self.host.request(node.peer, HELLO_PROTOCOL, canonical(hello), deadline_s=WAIT_S)
        return decode(reply, Welcome | Refusal)  # type: ignore[arg-type]

    async def say(self, node: Node, message: Message) -> None:
        stream = await self.host.open(node.peer, MESSAGES_PROTOCOL, deadline_s=WAIT_S)
        await stream.send(self.sealer.seal(ENVELOPE_KIND, canonical(message)), deadline_s=WAIT_S)

    def hang(self) -> None:
        """Answer no ping from now on, as a process that hangs."""
        for connection in self.host._network.get_connections():
            connection.muxed_conn._owe = lambda frame: None

    def welcomes(self, others: tuple[bytes, ...] = ()) -> list[PeerId]:
        """From now on answer every hello with a welcome; who said hello is in the list."""
        came: list[PeerId] = []

        async def answer(stream: MessageStream) -> None:
            await stream.receive(deadline_s=WAIT_S)
            came.append(stream.peer)
            await stream.send(canonical(Welcome(record=self.sealed(), others=others)), deadline_s=WAIT_S)
            await stream.aclose()

        self.host.serve(HELLO_PROTOCOL, answer)
        return came


@contextlib.asynccontextmanager
async def stranger(seed: int, *, swarm_id: SwarmId = MANIFEST.swarm_id, boot: int = 1) -> AsyncIterator[Stranger]:
    made = Stranger(seed, swarm_id=swarm_id, boot=boot)
    async with running(made.host):
        yield made


# -- admission -----------------------------------------------------------------------------------------------


async def test_members_admit_each_other_and_know_each_others_records() -> None:
    one, two = Node(1), Node(2)
    async with running(one, two):
        await one.join(two)
        await assert_linked(one, two)
        for node, other in ((one, two), (two, one)):
            assert node.members.record_of(other.peer) == other.record()
            assert node.members.alive() == {other.peer}
            assert node.changes == [Change("linked", other.peer)]


async def test_peer_of_another_swarm_is_refused_with_the_reason() -> None:
    here, there = Node(1), Node(2, manifest=manifest("another"))
    async with running(here, there):
        with pytest.raises(Refused) as caught:
            await there.join(here)
        ours, theirs = here.manifest.swarm_id.hex()[:16], there.manifest.swarm_id.hex()[:16]
        assert f"this node is in swarm {ours}…, yours is {theirs}…; use the same swarm.toml" in str(caught.value)
        assert caught.value.peer == here.peer
        assert here.linked() == there.linked() == frozenset()
        assert here.members.record_of(there.peer) is None


async def test_peer_of_another_wire_version_is_refused_with_the_reason() -> None:
    node = Node(1)
    async with running(node), stranger(9) as old:
        answer = await old.ask(node, old.hello(wire=WIRE_VERSION + 1))
        assert isinstance(answer, Refusal)
        want = f"this node speaks wire version {WIRE_VERSION}, yours {WIRE_VERSION + 1}; install the same version"
        assert answer.reason.startswith(want)
        assert node.linked() == frozenset()


async def test_allowlist_admits_founders_and_the_allowed_and_nobody_else() -> None:
    closed = manifest(allowed=[2])
    founder, allowed, outsider = (Node(n, manifest=closed) for n in (1, 2, 3))
    async with running(founder, allowed, outsider):
        await allowed.join(founder)
        with pytest.raises(Refused, match=f"admission is allowlist and {outsider.peer} is not on the list"):
            await outsider.join(founder)
        with pytest.raises(Refused, match="allowlist"):
            await outsider.join(allowed)
        await assert_linked(founder, allowed)


async def test_allowlist_binds_the_one_who_dials_as_well() -> None:
    """A member that finds an outsider, say by discovery, must not admit it because it was the one to call."""
    closed = manifest(allowed=[2])
    founder, allowed = Node(1, manifest=closed), Node(2, manifest=closed)
    async with running(founder, allowed), stranger(9, swarm_id=closed.swarm_id) as outsider:
        came = outsider.welcomes()
        await allowed.join(founder)
        founder.members.found(outsider.peer, outsider.host.addresses)
        with pytest.raises(RemoteError, match="not on the list"):
            await founder.members.links.join(outsider.host.addresses[0], deadline_s=WAIT_S)
        assert founder.linked() == {allowed.peer}
        assert outsider.peer not in founder.members.alive()
        assert set(came) <= {founder.peer}
        await assert_linked(founder, allowed)


# -- records -------------------------------------------------------------------------------------------------


def forged(by: Sealer, record: NodeRecord) -> bytes:
    return by.seal(NODE_RECORD_KIND, canonical(record))


async def test_hello_with_a_record_that_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers_module, "REFUSED_STAY_S", 10.0 * TEST_DEADLINE_S)
    monkeypatch.setattr(strangers_module, "REFUSALS_LIMIT", 100)
    node, other = Node(1), Node(2)
    async with running(node, other), stranger(9) as odd:
        await node.join(other)
        await until(lambda: node.members.record_of(other.peer))
        known = node.members.record_of(other.peer)
        about_another = NodeRecord(peer=other.peer, boot=99, phase="leaving")
        bad = [
            b"",
            b"\xc1",
            odd.sealed()[:-1],
            forged(odd.sealer, about_another),
            Sealer(odd.identity, SwarmId(bytes(32)), 1).seal(NODE_RECORD_KIND, canonical(odd.record())),
            odd.sealer.seal("link", canonical(odd.record())),
            seal_record(other.sealer, other.record()),  # true, but not its own
        ]
        for record in bad:
            answer = await odd.ask(node, odd.hello(record=record))
            assert isinstance(answer, Refusal), record
            assert "record" in answer.reason
        assert node.linked() == {other.peer}
        assert node.members.record_of(other.peer) in (known, other.record())
        assert node.members.record_of(odd.peer) is None
        assert isinstance(await odd.ask(node, odd.hello()), Welcome)


async def test_welcome_with_a_record_that_does_not_hold_makes_no_link() -> None:
    node = Node(1)
    async with running(node), stranger(9) as odd:

        async def answer(stream: MessageStream) -> None:
            await stream.receive(deadline_s=WAIT_S)
            record = forged(odd.sealer, NodeRecord(peer=node.peer, boot=9))
            await stream.send(canonical(Welcome(record=record, others=())), deadline_s=WAIT_S)
            await stream.aclose()

        odd.host.serve(HELLO_PROTOCOL, answer)
        with pytest.raises(RemoteError, match="a record about"):
            await node.members.links.join(odd.host.addresses[0], deadline_s=WAIT_S)
        assert node.linked() == frozenset()
        assert len(node.members.book) == 0


async def test_replayed_and_forged_records_are_dropped_wherever_they_come_from() -> None:
    node, other = Node(1), Node(2)
    async with running(node, other), stranger(9) as odd:
        await node.join(other)
        old = seal_record(other.sealer, msgspec.structs.replace(other.record(), phase="leaving"))
        newer = seal_record(other.sealer, msgspec.structs.replace(other.record(), round=7))
        about_another = forged(odd.sealer, NodeRecord(peer=other.peer, boot=99, phase="leaving"))
        other.members.announce()
        good = Sealer(identity(50), MANIFEST.swarm_id, 1)
        third = seal_record(good, NodeRecord(peer=identity(50).peer_id, boot=1, phase="leaving"))
        odd.welcomes((newer, old, about_another, b"\xc1", third))
        await node.members.links.join(odd.host.addresses[0], deadline_s=WAIT_S)

        # By gossip too, signed for by the one who sends it on.
        topic = f"shoal/{MANIFEST.swarm_id.hex()}/records"
        odd_later = msgspec.structs.replace(odd.record(), round=3)
        await odd.host.subscribe(topic)
        await until(lambda: node.peer in odd.host.gossip_peers(topic))
        while node.members.record_of(odd.peer) != odd_later:
            for data in (old, about_another, b"", b"\xc1" * 100, bytes(100_000)):
                await odd.host.publish(topic, data)
            await odd.host.publish(topic, seal_record(odd.sealer, odd_later))
            await trio.sleep(0.05)

        theirs = node.members.record_of(other.peer)
        assert theirs is not None
        assert (theirs.phase, theirs.boot) == ("training", 1)
        assert node.members.record_of(identity(50).peer_id) is not None
        assert node.linked() == {other.peer, odd.peer}
        assert not node.says("lost", other)


async def test_welcome_with_the_most_and_largest_records_fits_into_an_answer() -> None:
    node = Node(1)
    async with running(node), stranger(9) as newcomer:
        address = "/" + "x" * 255
        for n in range(100):
            sealer = Sealer(identity(100 + n), MANIFEST.swarm_id, 1)
            record = NodeRecord(
                peer=sealer.peer_id,
                boot=1,
                phase="leaving",
                control_addresses=(address,) * 16,
                lane_addresses=(address,) * 16,
                software="x" * 64,
                capabilities=("x" * 32,) * 16,
            )
            node.members.book.receive(seal_record(sealer, record), trio.current_time())
        answer = await newcomer.ask(node, newcomer.hello())
        assert isinstance(answer, Welcome)
        assert len(answer.others) == 64


# -- the mesh ------------------------------------------------------------------------------------------------


async def test_addresses_learned_through_a_welcome_lead_to_a_full_mesh() -> None:
    nodes = [Node(n) for n in (1, 2, 3, 4)]
    hub, *others = nodes
    async with running(*nodes):
        for node in others:
            await node.join(hub)
        await assert_linked(*nodes)


async def test_newcomer_dials_everyone_as_soon_as_the_first_has_welcomed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling_module, "DIAL_PERIOD_S", 10.0 * TEST_DEADLINE_S)  # nobody looks whom else there is
    *members, newcomer = nodes = [Node(n) for n in (1, 2, 3, 4)]
    async with running(*nodes):
        for number, node in enumerate(members):
            for other in members[:number]:
                if other.peer not in node.linked():
                    await node.join(other)
        await assert_linked(*members)
        await newcomer.join(members[0])
        await assert_linked(*nodes)


async def test_peer_found_by_discovery_is_dialled() -> None:
    one, two = Node(1), Node(2)
    async with running(one, two):
        one.members.found(two.peer, ("nonsense", *two.host.addresses))
        one.members.found(one.peer, one.host.addresses)
        await assert_linked(one, two)


async def test_peer_that_leaves_is_dead_at_once_and_not_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling_module, "DIAL_DEFERRAL_S", 0.0)
    stays, leaves = Node(1), Node(2)
    async with running(stays, leaves):
        await leaves.join(stays)
        await assert_linked(stays, leaves)
        leaves.phase = "leaving"
        leaves.members.announce()
        await until(lambda: stays.members.book.get(leaves.peer).phase == "leaving")  # type: ignore[union-attr]
        # Its links go, its host stays: were it dialled, it would answer.
        leaves.members.links.drop(stays.peer)
        await until(lambda: stays.says("died", leaves))
        assert stays.members.alive() == frozenset()
        assert [change.kind for change in stays.changes] == ["linked", "lost", "died"]
        leaves.members.machine.connection_lost(stays.peer, trio.current_time(), confirmed=True)
        dials: list[PeerId] = []

        async def meet(peer: PeerId, addresses: Sequence[str], *, deadline_s: float) -> None:
            dials.append(peer)

        stays.members.links.meet = meet  # type: ignore[method-assign]
        third = Node(3)
        async with running(third):
            third.members.links.drop(stays.peer)
            stays.members.found(third.peer, third.host.addresses)
            await until(lambda: third.peer in dials)  # the dialler went round since
        assert leaves.peer not in dials


@pytest.mark.usefixtures("_no_silence_is_noticed")
async def test_link_lost_between_the_living_is_made_again_and_nobody_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "REDIAL_DEADLINE_S", WAIT_S)
    nodes = one, two, three = Node(1), Node(2), Node(3)
    async with running(*nodes):
        await one.join(two)
        await three.join(two)
        await assert_linked(*nodes)
        for ending, other in [(one, two), (two, one), (two, three), (three, one)]:
            ending.members.links.drop(other.peer)
            await until(lambda o=other, e=ending: o.says("lost", e))  # type: ignore[misc]
            await assert_linked(*nodes)
        for node in nodes:
            assert not {"suspected", "died"} & {change.kind for change in node.changes}


async def test_links_from_an_address_that_is_gone_are_made_again_and_who_rested_is_dialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members_module, "REDIAL_DEADLINE_S", WAIT_S)
    monkeypatch.setattr(dialling_module, "DIAL_DEFERRAL_S", 1e6)
    nodes = mover, gone, rests, stays = Node(3), Node(1), Node(2), Node(4)
    assert max(gone.peer, rests.peer, stays.peer) < mover.peer, "which would else wait for them"
    async with running(*nodes):
        for other in (gone, rests, stays):
            await mover.join(other)
        await until(lambda: len(mover.linked()) == 3)
        own = {gone.peer: "192.0.2.1", rests.peer: "192.0.2.2", stays.peer: "192.0.2.2"}
        with monkeypatch.context() as before:
            before.setattr(mover.host, "own_host_of", own.get)
            mover.members.links.rest(rests.peer)
            mover.members.moved({"192.0.2.1"})
        for other in (gone, rests):
            await until(lambda o=other: mover.changes.count(Change("linked", o.peer)) == 2)  # type: ignore[misc]
        lost = [(one.peer, one.why) for one in mover.changes if one.kind == "lost"]
        assert lost == [(rests.peer, "it is dead of silence"), (gone.peer, members_module.OWN_ADDRESS_GONE)]


async def test_peer_that_is_linked_from_another_address_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "PLACES_LIMIT_PEERS", 1)
    one, two, three = Node(1), Node(2), Node(3)
    hosts = {two.peer: "192.0.2.1", three.peer: "192.0.2.9"}
    monkeypatch.setattr(one.host, "host_of", hosts.get)
    moves: list[tuple[PeerId, str]] = []
    one.members.on_moved = lambda peer, host: moves.append((peer, host))
    async with running(one, two, three):
        await two.join(one)
        await until(lambda: one.says("linked", two))
        hosts[two.peer] = "192.0.2.2"
        one.members.links.drop(two.peer)
        await until(lambda: moves != [])
        await three.join(one)
        await until(lambda: one.says("linked", three))
        assert moves == [(two.peer, "192.0.2.1")]
        assert one.members._places == {three.peer: "192.0.2.9"}, "bounded, who was linked last stays"


# -- restarts and deaths -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_no_silence_is_noticed")
async def test_killed_peer_is_dead_by_its_broken_links_alone() -> None:
    nodes = one, two, victim = Node(1), Node(2), Node(3)
    async with running(*nodes):
        await two.join(one)
        await victim.join(one)
        await assert_linked(*nodes)
        victim.kill()
        for node in (one, two):
            await until(lambda n=node: n.says("died", victim))  # type: ignore[misc]
            assert victim.peer not in node.linked()
            assert node.members.machine.state_of(victim.peer) is State.DEAD
        await assert_linked(one, two)


async def test_killed_peer_that_comes_back_is_linked_and_alive_again() -> None:
    one, victim = Node(1), Node(2)
    async with running(one, victim) as nursery:
        await victim.join(one)
        await assert_linked(one, victim)
        victim.kill()
        await until(lambda: one.says("died", victim))
        again = Node(2, boot=2)
        await nursery.start(again.run)
        await again.join(one)
        await assert_linked(one, again)
        assert one.says("revived", again)
        assert one.members.alive() == {again.peer}
        assert one.members.record_of(again.peer) == again.record()


@pytest.mark.usefixtures("_no_silence_is_noticed")
@pytest.mark.parametrize("gossiped", [False, True], ids=["new record by hello", "new record by gossip first"])
async def test_restarted_peer_replaces_its_stale_link(gossiped: bool) -> None:
    """Its old connection did not break: the machine vanished, and nothing told us yet."""
    one, before = Node(1), Node(2)
    async with running(one) as nursery:
        await nursery.start(before.run)
        await before.join(one)
        await assert_linked(one, before)
        after = Node(2, boot=2)
        await nursery.start(after.run)
        if gossiped:
            one.members.book.receive(seal_record(after.sealer, after.record()), trio.current_time())
        before.members.links.meet = _unable_to_meet  # type: ignore[method-assign]
        with contextlib.suppress(NetworkError, RemoteError):
            await after.join(one)
        await until(lambda: one.peer in after.linked() and after.peer in one.linked())
        word = Leave(term=Term(), round=5, base=bytes(32), signature=bytes(64))
        while (after.peer, word) not in one.heard or (one.peer, word) not in after.heard:
            after.members.links.send(one.peer, word)
            one.members.links.send(after.peer, word)
            await trio.sleep(0.02)
        assert (one.peer, word) not in before.heard
        assert one.says("lost", after)


async def _unable_to_meet(peer: PeerId, addresses: Sequence[str], *, deadline_s: float) -> None:
    raise NetworkError("the network is gone")


async def test_speeds_are_those_of_the_peers_asked_for_that_live_and_train() -> None:
    one, fast, new = Node(1, tokens_per_s=5.0, step_tokens=1), Node(2, tokens_per_s=100.0, step_tokens=4), Node(3)
    async with running(one, fast, new):
        await one.join(fast)
        await one.join(new)
        await assert_linked(one, fast, new)
        asked = [one.peer, fast.peer, new.peer, identity(9).peer_id]
        assert sorted(one.members.speeds(asked)) == [0.0, 25.0]
        assert one.members.speeds([one.peer, fast.peer]) == [25.0]
        fast.tokens_per_s = 50.0
        fast.members.announce()
        await until(lambda: one.members.speeds([fast.peer]) == [12.5])
        fast.phase = "paused"
        fast.members.announce()
        await until(lambda: one.members.speeds(asked) == [0.0])
        new.kill()
        await until(lambda: one.says("died", new))
        assert one.members.speeds(asked) == []


async def test_record_is_told_over_links_when_it_says_something_new_and_else_repeated_by_gossip_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members_module, "RECORD_PERIOD_S", 0.05)

    one, other = Node(1, tokens_per_s=6.0), Node(2)
    looks, told, published = [0], list[Message](), list[bytes]()
    record, broadcast, publish = one.members._record, one.members.links.broadcast, one.host.publish

    def looked() -> NodeRecord:
        looks[0] += 1
        return record()

    def noted(message: Message) -> None:
        told.extend([message] if isinstance(message, Announce) else [])
        broadcast(message)  # type: ignore[arg-type]

    async def published_too(topic: str, data: bytes) -> None:
        published.append(data)
        await publish(topic, data)

    async def look_again() -> None:
        since = looks[0]
        await until(lambda: looks[0] >= since + 4)

    monkeypatch.setattr(one.members, "_record", looked)
    monkeypatch.setattr(one.members.links, "broadcast", noted)
    monkeypatch.setattr(one.host, "publish", published_too)
    async with running(one, other):
        await one.join(other)
        await assert_linked(one, other)
        await look_again()
        before = len(told), len(published)
        one.tokens_per_s = 7.0
        await look_again()
        assert (len(told), len(published)) == before, "rates change all the time"
        one.phase = "paused"
        await until(lambda: other.record_of(one).phase == "paused")
        await until(lambda: (len(told), len(published)) == (before[0] + 1, before[1] + 1))
        link = other.members.links._links[one.peer]
        said_at = link.said_at
        monkeypatch.setattr("shoal.protocol.records.RENEWAL_S", 0.2)
        await until(lambda: link.said_at > said_at)
        assert len(told) == before[0] + 1
        assert other.record_of(one).tokens_per_s == 7.0


async def test_gossip_has_what_is_new_seldom_where_many_are_known_and_a_leave_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members_module, "RECORD_PERIOD_S", 0.05)
    monkeypatch.setattr(members_module, "GOSSIPED_PER_S", 2 / TEST_DEADLINE_S)

    one, other = Node(1), Node(2)
    phases: list[Phase] = []
    told: list[bytes] = []
    publish, broadcast = one.host.publish, one.members.links.broadcast

    async def noted(topic: str, data: bytes) -> None:
        phases.append(one.phase)
        assert data in told, "what is known already costs nobody a look at its signature"
        await publish(topic, data)

    def heard(message: Message) -> None:
        told.extend([message.record] if isinstance(message, Announce) else [])
        broadcast(message)  # type: ignore[arg-type]

    monkeypatch.setattr(one.members.links, "broadcast", heard)

    monkeypatch.setattr(one.host, "publish", noted)
    async with running(one, other):
        await one.join(other)
        await assert_linked(one, other)
        await until(lambda: phases == ["training"])
        steps: tuple[Phase, ...] = ("paused", "training", "paused")
        for phase in steps:
            one.phase = phase
            await until(lambda phase=phase: other.record_of(one).phase == phase)  # type: ignore[misc]
        assert phases == ["training"], "who is linked was told, and of others there are none"
        one.phase = "leaving"
        with trio.move_on_after(30.0):
            await until(lambda: len(phases) > 1)
    assert phases == ["training", "leaving"]


async def test_others_are_told_at_once_whom_a_node_lacks_and_later_whom_it_reaches_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever is silent now and then, as among nodes that have too much to do, is told of once."""
    silent: set[PeerId] = set()
    told: list[frozenset[PeerId]] = []
    monkeypatch.setattr(MembershipMachine, "silent", lambda machine, now: frozenset(silent))

    node, founder = Node(2), identity(1).peer_id
    lack = node.members.links.lack
    monkeypatch.setattr(node.members.links, "lack", lambda peers: (told.append(peers), lack(peers)))
    silent.add(founder)
    node.members._tell_reach(10.0)
    assert told == [{founder}]
    for at in (11.0, 12.0, 13.0):
        silent.symmetric_difference_update({founder})
        node.members._tell_reach(at)
    assert told == [{founder}]
    node.members._tell_reach(10.0 + STRANGERS_REACH_PERIOD_S)
    assert told == [{founder}, frozenset()]


async def test_suspicion_of_a_living_peer_is_refuted_by_it() -> None:
    node, accused = Node(1), Node(2)
    async with running(node, accused), stranger(9) as liar:
        await node.join(accused)
        await assert_linked(node, accused)
        assert isinstance(await liar.ask(accused, liar.hello()), Welcome)
        await liar.say(accused, Suspicion(peer=accused.peer, incarnation=0))
        await until(lambda: accused.members.machine.incarnation == 1)
        # The new incarnation is announced at once, not at the next period.
        await until(lambda: node.members.book.get(accused.peer).incarnation == 1)  # type: ignore[union-attr]
        assert accused.peer in node.members.alive()


async def test_messages_of_the_detector_are_not_passed_on_and_others_are() -> None:
    node = Node(1)
    async with running(node), stranger(9) as other:
        assert isinstance(await other.ask(node, other.hello()), Welcome)
        word = Leave(term=Term(), round=3, base=bytes(32), signature=bytes(64))
        await other.say(node, Ping(nonce=5, incarnation=0))
        await until(lambda: other.got)
        await other.say(node, word)
        await until(lambda: node.heard)
        assert node.heard == [(other.peer, word)]
        assert node.members.machine.state_of(other.peer) is State.ALIVE


async def test_ping_of_a_connection_is_a_sign_of_life_of_who_is_linked_and_of_nobody_else() -> None:
    node = Node(1)
    async with running(node), stranger(8) as unknown, stranger(9) as other:
        pings: list[PeerId] = []
        take = node.host.pinged

        def noted(peer: PeerId, number: int | None) -> None:
            take(peer, number)
            pings.append(peer)

        node.host.pinged = noted
        assert isinstance(await other.ask(node, other.hello()), Welcome)
        await until(lambda: other.peer in node.linked())
        await unknown.host.dial(node.host.addresses[0], deadline_s=5)
        machine = node.members.machine
        heard_at = machine._peers[other.peer].heard_at
        for one in (unknown, other):
            seen = pings.count(one.peer)
            one.host.ping(node.peer, 5)
            await until(lambda one=one, seen=seen: pings.count(one.peer) > seen)
        assert machine._peers[other.peer].heard_at > heard_at
        assert machine.state_of(unknown.peer) is None


async def test_answer_over_a_connection_ends_the_wait_of_the_detector_for_it() -> None:
    one, two = Node(1), Node(2)
    async with running(one, two):
        await two.join(one)
        await assert_linked(one, two)
        machine = one.members.machine
        (say,) = machine._ping(two.peer, machine._peers[two.peer], trio.current_time())
        assert machine._peers[two.peer].probe is not None
        one.members._carry_out([say])
        with trio.fail_after(20):
            await until(lambda: machine._peers[two.peer].probe is None and not machine._peers[two.peer].asked)
        assert machine.silent(trio.current_time() + 60.0) == frozenset()


async def test_dials_of_peers_that_are_forgotten_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.protocol.records.RECORD_TTL_S", 3.0)  # enough to look at all of them once
    node = Node(1)
    async with running(node):
        for n in range(20):
            sealer = Sealer(identity(100 + n), MANIFEST.swarm_id, 1)
            record = NodeRecord(peer=sealer.peer_id, boot=1, phase="training")
            node.members.book.receive(seal_record(sealer, record), trio.current_time())
        await until(lambda: len(node.members._dialling._dials) == 20)
        await until(lambda: len(node.members.book) == 0)
        await until(lambda: len(node.members._dialling._dials) == 0)


# -- two that do not reach each other ------------------------------------------------------------------------


class Firewall:
    """Between two nodes that run in this process: what they dial of each other times out, or is refused."""

    def __init__(self, one: Node, other: Node, *, refuses: bool = False) -> None:
        self._nodes = (one, other)
        self._refuses = refuses
        self._dial_peers = {node.peer: node.host.dial_peer for node in self._nodes}
        for me, far in ((one, other), (other, one)):
            me.host.dial_peer = partial(self._dial, me, far.peer)  # type: ignore[method-assign]

    async def _dial(
        self,
        me: Node,
        far: PeerId,
        peer: PeerId,
        addresses: Sequence[str],
        *,
        deadline_s: float,
        handshake_s: float | None = None,
    ) -> None:
        if peer != far:
            await self._dial_peers[me.peer](peer, addresses, deadline_s=deadline_s)
            return
        hosts = frozenset({"127.0.0.1"})
        if not self._refuses:
            await trio.sleep(deadline_s)
        refused, silent = (hosts, frozenset[str]()) if self._refuses else (frozenset[str](), hosts)
        raise NotReached("a firewall", refused=refused, silent=silent)

    def close(self) -> None:
        """Break what there is between the two."""
        one, other = self._nodes
        one.members.links.drop(other.peer)
        other.members.links.drop(one.peer)

    def open(self) -> None:
        """Let them reach each other again."""
        for node in self._nodes:
            node.host.dial_peer = self._dial_peers[node.peer]  # type: ignore[method-assign]
            node.members._dialling._dials.clear()


async def assert_talking_through_others(one: Node, other: Node) -> None:
    """What each says to the swarm, and to the other, reaches the other though they have no link."""
    assert other.peer not in one.linked()
    assert one.peer not in other.linked()
    await until(lambda: one.says("detoured", other) and other.says("detoured", one))
    for me, far in ((one, other), (other, one)):
        await assert_reaches(me, far, me.members.links.broadcast)
        await assert_reaches(me, far, partial(me.members.links.send, far.peer))


ROUNDS = itertools.count(1000)
"""Of words that are told apart by them."""


async def assert_reaches(me: Node, far: Node, say: Callable[[Leave], None]) -> None:
    """What is said comes once, and as the one's who said it; said anew until it comes, as in `assert_linked`."""
    words: list[Leave] = []
    while not any((me.peer, word) in far.heard for word in words):
        words.append(Leave(term=Term(), round=next(ROUNDS), base=bytes(32), signature=bytes(64)))
        say(words[-1])
        await trio.sleep(0.02)
    came = [(peer, word) for peer, word in far.heard if word in words]
    assert {peer for peer, _ in came} == {me.peer}
    assert [word for _, word in came] == [word for word in words if (me.peer, word) in came]


async def test_pair_that_loses_its_link_lives_on_through_others_until_it_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members_module, "REDIAL_DEADLINE_S", 0.8)
    nodes = one, two, three, four = Node(1), Node(2), Node(3), Node(4)
    async with running(*nodes):
        for node in nodes[1:]:
            await node.join(one)
        await assert_linked(*nodes)
        firewall = Firewall(one, two)
        firewall.close()
        await assert_talking_through_others(one, two)
        await trio.sleep(2.0)  # both attempts to re-make it have failed
        await assert_talking_through_others(one, two)
        assert one.members.alive() == {two.peer, three.peer, four.peer}
        firewall.open()
        await assert_linked(*nodes)
        await until(lambda: not any(node.members.links.message_relay.needed for node in nodes))
        for node in nodes:
            assert "died" not in {change.kind for change in node.changes}


async def test_links_beyond_the_budget_are_not_made_again_at_once_and_who_runs_late_dials_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deadlines: list[float] = []

    async def meet(peer: PeerId, addresses: Sequence[str], *, deadline_s: float) -> None:
        deadlines.append(deadline_s)

    one, two = Node(1), Node(2)
    async with running(one, two):
        monkeypatch.setattr(one.members.links, "meet", meet)
        for _ in range(3):
            await one.members._remake(two.peer)
        one.members.machine.lag.note(2.0, trio.current_time())
        for _ in range(2 * int(REDIALS_BURST)):
            await one.members._remake(two.peer)
    assert deadlines[:3] == [REDIAL_DEADLINE_S] * 3
    assert deadlines[3:] == pytest.approx([REDIAL_DEADLINE_S + WAITED_TIMES * 2.0] * len(deadlines[3:]), abs=0.5)
    assert REDIALS_BURST <= len(deadlines) <= REDIALS_BURST + 2


async def test_peer_that_is_busy_is_dialled_once_and_not_held_for_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all have too much to do nobody is done with a handshake in time: that is no evidence of anybody's end."""
    busy = NotReached("busy", refused=frozenset(), silent=frozenset({"127.0.0.1"}), is_busy=True)
    silent = NotReached("silent", refused=frozenset(), silent=frozenset({"127.0.0.1"}))
    outcomes: list[tuple[int, int]] = []
    one, two = Node(1), Node(2)
    async with running(one, two):
        for error in (busy, NetworkError("no answer to hello"), silent):
            dials, cut = list[float](), list[PeerId]()

            async def meet(
                peer: PeerId,
                addresses: Sequence[str],
                *,
                deadline_s: float,
                error: NetworkError = error,
                dials: list[float] = dials,
            ) -> None:
                dials.append(deadline_s)
                raise error

            monkeypatch.setattr(one.members.links, "meet", meet)
            monkeypatch.setattr(
                MembershipMachine, "unreachable", lambda machine, peer, now, cut=cut: cut.append(peer) or []
            )
            await one.members._remake(two.peer)
            outcomes.append((len(dials), len(cut)))
    assert outcomes == [(1, 0), (1, 0), (2, 1)]


async def test_pair_that_never_had_a_link_finds_each_other_through_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "STRANGER_SETTLE_S", 0.2)
    one, two, between = Node(4), Node(2), Node(3)
    async with running(one, two, between):
        Firewall(one, two)
        await one.join(between)
        await two.join(between)
        await assert_talking_through_others(one, two)
        assert one.members.alive() == {two.peer, between.peer}
        assert one.says("revived", two)


async def test_firewall_that_refuses_is_found_out_by_asking_others() -> None:
    """A refusal is taken for a death at once; whom others still reach is back as soon as they say so."""
    one, two, between = nodes = Node(1), Node(2), Node(3)
    async with running(*nodes):
        await one.join(between)
        await two.join(between)
        await assert_linked(*nodes)
        Firewall(one, two, refuses=True).close()
        await until(lambda: one.says("died", two) and two.says("died", one))
        await until(lambda: one.says("revived", two) and two.says("revived", one))
        await assert_talking_through_others(one, two)


@pytest.mark.usefixtures("_no_silence_is_noticed")
async def test_killed_peer_behind_a_firewall_is_found_dead_through_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members_module, "REDIAL_DEADLINE_S", 0.2)
    one, two, between = nodes = Node(4), Node(2), Node(3)
    async with running(*nodes):
        await one.join(between)
        await two.join(between)
        await assert_linked(*nodes)
        Firewall(one, two).close()
        await assert_talking_through_others(one, two)
        await trio.sleep(0.6)  # both attempts to re-make the link have failed
        two.kill()
        await until(lambda: between.says("died", two))
        await until(lambda: one.says("died", two))
        assert one.members.alive() == {between.peer}


@pytest.mark.parametrize(
    ("host", "refused", "silent", "ended"),
    [
        ("10.0.0.1", {"10.0.0.1"}, set(), True),
        ("10.0.0.1", {"10.0.0.1"}, {"172.17.0.1"}, True),  # where it was reached nobody listens
        ("10.0.0.1", {"172.17.0.1"}, {"10.0.0.1"}, False),  # one's own container network refuses what is not its own
        ("10.0.0.1", set(), {"10.0.0.1"}, False),
        ("10.0.0.1", set(), set(), False),
        (None, {"10.0.0.1", "172.17.0.1"}, set(), True),
        (None, {"172.17.0.1"}, {"10.0.0.1"}, False),
    ],
)
def test_only_a_refusal_where_a_peer_was_reached_proves_its_end(
    host: str | None, refused: set[str], silent: set[str], ended: bool
) -> None:
    error = NotReached("", refused=frozenset(refused), silent=frozenset(silent))
    assert error.proves_end(host) is ended


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.name.startswith("shoal.")]
    return [record.getMessage() for record in records if record.levelno >= logging.ERROR]


@pytest.mark.virtual_time
@pytest.mark.parametrize("is_unlinked", [False, True])
async def test_node_at_rest_looks_who_is_there_as_seldom_as_its_detector_says(
    monkeypatch: pytest.MonkeyPatch, is_unlinked: bool
) -> None:
    """Beside a peer that has no link others wait to be told of it."""
    looks: list[float] = []
    tick = MembershipMachine.tick

    def noted(machine: MembershipMachine, now: float) -> list[Effect]:
        looks.append(now)
        return tick(machine, now)

    monkeypatch.setattr(MembershipMachine, "tick", noted)
    members = Node(1).members
    if is_unlinked:
        members.machine.peer_seen(identity(2).peer_id, 0, trio.current_time())
    await trio.sleep(0.3)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(members._tick)
        await trio.sleep(4.0)
        nursery.cancel_scope.cancel()
    if is_unlinked:
        assert len(looks) == pytest.approx(4.0 / TICK_S, abs=4.5), "and at each beat"
    else:
        assert looks == pytest.approx([0.3, *(beat * RESTING_TICK_S for beat in range(1, 5))])
