"""Handlers of a node, each as it stands in one, fed with bytes of peers, of strangers, and of this user's processes."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import trio

from shoal.collectives import traffic as traffic_module
from shoal.collectives.proofs import verify_evidence
from shoal.collectives.traffic import PlanTraffic, Routes
from shoal.node.audits.audit_exchange import AuditServer
from shoal.node.audits.evidence_store import EvidenceStore
from shoal.node.control import ControlServer
from shoal.node.discovery.chain_places import ChainLooks
from shoal.node.discovery.clocks import Clocks, WallClock
from shoal.node.rounds.enlist_exchange import EnlistExchange
from shoal.node.rounds.relay_room import AskLetGo, RelayRoom
from shoal.node.rounds.site_exchange import OfferedWork, SiteExchange
from shoal.node.sapo.store import GroupStore
from shoal.node.state.chain_waits import ChainWaits
from shoal.node.state.image_exchange import ImageExchange
from shoal.node.state.state_server import StateServer
from shoal.node.state.states import StateCache
from shoal.node.training.layouts import GetLayout, Layouts
from shoal.node.training.trainer_messages import Layout
from shoal.protocol import audit_messages, peering, rollouts, wire
from shoal.protocol.audit_messages import AuditRequest
from shoal.protocol.chain import Chain
from shoal.protocol.errors import LocalError, NetworkError, RemoteError
from shoal.protocol.evidence import Evidence, pack
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Certificate, Enlist
from shoal.protocol.records import NodeRecord, seal_record
from shoal.protocol.sites import SiteRequest, capability_of
from shoal.swarm.gossip import GossipMessage
from shoal.swarm.host import Host
from shoal.swarm.key_probe import KeyProbe
from shoal.swarm.lanes.chunks import ChunkExchange
from shoal.swarm.lanes.frame import BULK_KINDS, HEADER_BYTES, SCOPE_BYTES, FrameHeader, FrameKind
from shoal.swarm.lanes.pool import LanePool
from shoal.swarm.lanes.requests import LaneRequests
from shoal.swarm.lanes.seal import LaneProposal, encode_handshake
from shoal.swarm.lanes.shared import SharedOffer
from shoal.swarm.links import ENVELOPE_KIND, SWARM_KIND
from shoal.swarm.manifest_exchange import ManifestServer
from shoal.swarm.members import Members
from shoal.swarm.net_stream import VarintFrames
from shoal.swarm.reaching.circuits import read_message
from shoal.swarm.reaching.dial_back import AskDialBack, DialBackServer
from shoal.swarm.reaching.direct_upgrade import DirectUpgrade, Straighten
from shoal.swarm.reaching.observed_addresses import AddressRequest, ObservedAddressServer
from shoal.swarm.reaching.punching import Puncher
from shoal.swarm.reaching.reach import Everywhere, Reach
from shoal.swarm.reaching.relayed_lanes import AskPassage, RelayedLaneServer
from shoal.swarm.rendezvous.kademlia import Kademlia
from shoal.swarm.rendezvous.meeting_points import keys_of, open_point, pack_points, sign_point, unpack_points
from shoal.swarm.rollouts import RolloutExchange
from shoal.swarm.streams import MessageStream, RawStream
from tests.collectives.reduce_lab import Mesh, make_plan
from tests.collectives.reduce_lab import encode as encode_contribution
from tests.collectives.reduce_lab import peer as reduce_peer
from tests.fuzz.machines import CHUNK_VALUES, PEERS, Renewed, round_targets
from tests.fuzz.network import listening, network_targets
from tests.fuzz.samples import identity
from tests.fuzz.targets import MANIFEST, ME, PEER, START, SWARM, Target, examples, sealer

# Below this line libp2p was imported already, with its warnings silenced, by shoal.swarm.transport.
from libp2p.kad_dht.pb.kademlia_pb2 import Message as KadMessage  # isort: skip
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage  # isort: skip

FOREIGN = (RemoteError, NetworkError)


class Bytes:
    """A peer's stream that holds some bytes and then ends; what is said to it is dropped."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self, limit_bytes: int) -> bytes:
        taken, self._data = self._data[:limit_bytes], self._data[limit_bytes:]
        await trio.lowlevel.checkpoint()
        return taken

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()

    async def finish(self) -> None:
        await trio.lowlevel.checkpoint()

    async def reset(self) -> None:
        await trio.lowlevel.checkpoint()


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(4, "big") + message


def on_stream(
    handler: Callable[[MessageStream], Any],
    *,
    raw: bool = False,
    framing: Callable[[RawStream], RawStream] | None = None,
) -> Callable[[bytes], Any]:
    """A taker that has one message, or with `raw` whatever the bytes are, arrive on a stream of its own."""

    async def take(data: bytes) -> None:
        below: RawStream = Bytes(data if raw else framed(data))
        stream = MessageStream(below if framing is None else framing(below), peer=PEER)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.run)
            try:
                await handler(stream)
            finally:
                await stream.abort()

    async def unwrapped(data: bytes) -> None:
        try:
            await take(data)
        except BaseExceptionGroup as group:
            raise _first(group) from None

    return unwrapped


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


# -- links ---------------------------------------------------------------------------------------------------


def fresh_members(host: Host) -> Members:
    mine = sealer(0)
    members: Members

    def record() -> NodeRecord:
        return NodeRecord(peer=ME, boot=1, incarnation=members.machine.incarnation, phase="training")

    members = Members(host=host, sealer=mine, swarm_id=SWARM, manifest=MANIFEST, record=record)
    members.register(dict.fromkeys(get_args(peering.SwarmMessage), lambda peer, message: None))
    members.book.receive(seal_record(sealer(), NodeRecord(peer=PEER, boot=1, phase="training")), trio.current_time())
    members.linked(PEER)
    return members


def link_targets(host: Host, rng: Any) -> Iterator[Target]:
    """What a peer can say at hello, on its link, through others and by gossip."""
    current = Renewed(lambda: fresh_members(host))
    sealing = sealer()
    plain = [wire.canonical(one) for one in examples(peering.LinkMessage, rng, 60)]
    enveloped = [sealing.seal(ENVELOPE_KIND, one) for one in plain]
    enveloped += [sealing.seal(SWARM_KIND, wire.canonical(one)) for one in examples(peering.SwarmMessage, rng, 10)]
    yield Target("link", tuple(enveloped), lambda data: current.get().links._hear(PEER, data))
    yield Target(
        "link inside",
        tuple(plain),
        lambda data: current.get().links._hear(PEER, sealing.seal(ENVELOPE_KIND, data[: 1 << 19])),
    )
    others = sealer(2)
    yield Target(
        "link passed on",
        tuple(plain),
        lambda data: current.get().links._hear(PEER, others.seal(SWARM_KIND, data[: 1 << 19])),
    )
    record = seal_record(sealer(), NodeRecord(peer=PEER, boot=1, phase="training"))
    hello = peering.Hello(wire=wire.WIRE_VERSION, swarm=SWARM, software="fuzz", record=record)
    welcome = peering.Welcome(record=record, others=(record, seal_record(sealer(2), NodeRecord(peer=PEERS[2], boot=1))))
    yield Target(
        "hello",
        (wire.canonical(hello),),
        on_stream(lambda stream: current.get().links._answer_hello(stream)),
        FOREIGN,
    )

    def welcomed(data: bytes) -> None:
        answer: Any = wire.decode(data, peering.HelloAnswer, peer=PEER)  # type: ignore[arg-type]
        if isinstance(answer, peering.Welcome):
            current.get().welcomed(PEER, answer)
        elif isinstance(answer, peering.Full):
            current.get().turned_away(PEER, answer)

    full = peering.Full(others=welcome.others)
    yield Target("welcome", (wire.canonical(welcome), wire.canonical(full)), welcomed)
    yield Target("gossiped record", (record,), lambda data: current.get()._take_record(data, blame=PEER), ())


# -- requests ------------------------------------------------------------------------------------------------


def _site(host: Host) -> SiteExchange:
    """Of one site with the peer that asks."""
    record = NodeRecord(peer=PEER, boot=1, capabilities=(capability_of("here", SWARM, PEER),))
    fetcher: Any = SimpleNamespace()
    return SiteExchange(
        host,
        OfferedWork(lambda ref: None),
        fetcher,
        name="here",
        swarm=SWARM,
        linked=lambda: frozenset({PEER}),
        record_of=lambda peer: record,
    )


def request_targets(host: Host, lanes: LanePool, folder: Path, rng: Any) -> Iterator[Target]:
    """What is asked of a node on streams of their own."""
    layouts = Layouts(host=host, linked=lambda: frozenset({PEER}), on_progress=lambda progress: None)
    layouts.know(Layout(names=("a", "b"), shapes=((2, 3), (4,)), numel=10))
    (folder / "finals").mkdir()
    state_server = StateServer(
        chain=Chain(START, MANIFEST.swarm.authority, manifest=MANIFEST), cache=StateCache(folder, CHUNK_VALUES)
    )
    exchange = RolloutExchange(
        host=host, sealer=sealer(0), swarm_id=SWARM, holdings=GroupStore(folder / "groups"), round_number=lambda: 1
    )
    certified = tuple(examples(Certificate, rng, 1))  # of whatever is asked there is more, so nobody waits
    part = peering.ChainPart(certificates=certified, head=1)
    chain: Any = SimpleNamespace(after=lambda after, limit, rebases: certified, part=lambda after, rebases: part)
    states: Any = SimpleNamespace(chain=chain, current=True)
    waits = ChainWaits(host, states, lambda: frozenset({PEER}))
    images = ImageExchange(
        host,
        StateCache(folder, CHUNK_VALUES),
        SimpleNamespace(),
        lambda: frozenset({PEER}),  # type: ignore[arg-type]
    )
    server = AuditServer(EvidenceStore(folder, SWARM), lambda plan: None, lambda base: (), lambda: frozenset({PEER}))
    of: dict[str, tuple[Callable[[MessageStream], Any], Any]] = {
        "audit request": (server.serve, audit_messages.AuditRequest),
        "enlist": (EnlistExchange(host, lambda: frozenset({PEER}), lambda peer, message: None)._serve, Enlist),
        "site": (_site(host)._serve, SiteRequest),
        "clock": (Clocks(host, lambda: frozenset({PEER}), lambda progress: None)._serve, WallClock),
        "manifest request": (ManifestServer(host, MANIFEST)._serve, peering.GetManifest),
        "layout request": (layouts.serve, GetLayout),
        "fetch": (state_server.serve, peering.FetchRequest),
        "wait for the chain": (waits._serve, peering.GetChain),
        "image request": (images._serve, peering.GetImage),
        "rollout fetch": (exchange._answer_stream, rollouts.GroupRequest),
        "rollout catch up": (exchange._catch_up._answer, rollouts.CatchUpRequest),
        "rollout news handler": (exchange._answer_news, rollouts.NewsRequest),
    }
    for name, (handler, kind) in of.items():
        samples = tuple(wire.canonical(one) for one in examples(kind, rng, 6))
        yield Target(name, samples, on_stream(handler), FOREIGN)

    async def read_all(stream: MessageStream) -> None:
        for _ in range(100):
            await stream.receive(deadline_s=5)

    messages = b"".join(framed(bytes(size)) for size in (0, 1, 100, 5000))
    yield Target("stream", (messages,), on_stream(read_all, raw=True), FOREIGN)
    batches = [wire.canonical(one) for one in examples(rollouts.AnnouncementBatch, rng, 6)]
    yield Target(
        "rollout gossip", tuple(batches), lambda data: exchange._collect(GossipMessage(origin=PEER, data=data)), ()
    )
    proposal = LaneProposal(me=PEER, peer=ME, swarm_id=SWARM)

    async def lane(data: bytes) -> None:
        await lanes.answer(PEER, data)
        lanes.drop(PEER)

    yield Target("lane handshake", (encode_handshake(proposal.offer),), lane, FOREIGN)

    async def greet(data: bytes) -> None:
        async with _connection(data) as stream:
            await lanes._listener._greet(stream, "127.0.0.1")

    yield Target("lane stranger", (bytes(16) + bytes(160),), greet, ())


@asynccontextmanager
async def _connection(data: bytes) -> AsyncIterator[trio.SocketStream]:
    """The far end of a connection on which `data` was sent, and then its end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        near.settimeout(5)
        near.sendall(data[: 1 << 16])
        near.shutdown(socket.SHUT_WR)
        yield trio.SocketStream(trio.socket.from_stdlib_socket(far))


def stranger_targets(host: Host, rng: Any) -> Iterator[Target]:
    """What strangers and members ask for beside the swarm's own business: meeting points, knocks, passages, relays."""
    kademlia = Kademlia(host, SWARM, keeps=lambda peer: True)
    point = sign_point(identity(1), SWARM, addresses=[f"/ip4/10.0.0.1/tcp/4001/p2p/{PEER}"], sequence=1)
    (key, *_) = keys_of(open_point(point))
    put = KadMessage(type=KadMessage.PUT_VALUE, key=key)
    put.record.key, put.record.value = key, pack_points([point])
    questions = [KadMessage(type=kind, key=key) for kind in (KadMessage.FIND_NODE, KadMessage.GET_VALUE)]
    named = [question.SerializeToString() for question in (*questions, put)]

    async def ask(stream: MessageStream) -> None:
        kademlia._hosts.forget("")  # how much there is for a host is not what is tried here
        await kademlia._serve(stream)

    yield Target("kademlia", tuple(named), on_stream(ask), FOREIGN)

    async def read_all(stream: MessageStream) -> None:
        for _ in range(100):
            await stream.receive(deadline_s=5)

    frames = b"\x00\x01a\x80\x01" + bytes(128)
    yield Target("varint frames", (frames,), on_stream(read_all, raw=True, framing=VarintFrames), FOREIGN)
    yield Target("meeting point", (point,), lambda data: open_point(data, swarm=SWARM, blame=PEER))
    yield Target("meeting points", (pack_points([point]),), lambda data: unpack_points(data, blame=PEER))
    relayed_lanes = RelayedLaneServer(host)
    relayed_lanes.admits = lambda peer: True
    dial_back_probes = DialBackServer(host, lambda peer: True)
    observed_addresses = ObservedAddressServer(host, call_deadline_s=0.01)
    observed_addresses.admits = lambda peer: True
    pool = LanePool(me=ME, swarm_id=SWARM, sink=Nowhere(), listen=("127.0.0.1", 0), request=_nobody)
    puncher = Puncher(host, Reach(host.peer_id, Everywhere()), frozenset)
    of: dict[str, tuple[Callable[[MessageStream], Any], Any]] = {
        "passage": (relayed_lanes._serve, AskPassage),
        "dial back": (dial_back_probes._serve, AskDialBack),
        "sighting": (observed_addresses._serve, AddressRequest),
        "let go": (RelayRoom(host, _idle_traffic(), lambda: {PEER}, trio.sleep_forever)._serve, AskLetGo),
        "shared memory": (LaneRequests(host, pool, lambda: {PEER})._serve_memory, SharedOffer),
        "straightening": (DirectUpgrade(host, puncher, list)._serve, Straighten),
    }
    for name, (handler, kind) in of.items():
        samples = tuple(wire.canonical(one) for one in examples(kind, rng))
        yield Target(name, samples, on_stream(handler), FOREIGN)
    hops = [HopMessage(type=kind).SerializeToString() for kind in (HopMessage.RESERVE, HopMessage.CONNECT)]
    yield Target(
        "relay message",
        tuple(bytes([len(hop)]) + hop for hop in hops),
        lambda data: read_message(Bytes(data), HopMessage),
        FOREIGN,
    )


def _idle_traffic() -> PlanTraffic:
    return PlanTraffic(post=lambda peer, header, payload: None, waiting=lambda to, scope: ())


def newcomer_targets(host: Host) -> Iterator[Target]:
    """What those ask who are shut out, or have not said hello, and what they are told."""
    members = fresh_members(host)
    record = seal_record(sealer(), NodeRecord(peer=PEER, boot=1, phase="training"))
    later = seal_record(wire.Sealer(identity(0), SWARM, boot=9), NodeRecord(peer=ME, boot=9, phase="training"))
    probe = KeyProbe(
        host,
        sealer=sealer(0),
        swarm_id=SWARM,
        book=members.book,
        sealed_record=lambda: record,
        found=lambda found: None,
    )
    asked = wire.canonical(peering.AskNewest(record=record))
    yield Target("key in use", (asked,), on_stream(probe._serve), FOREIGN)
    answers = tuple(wire.canonical(peering.Newest(record=one)) for one in (record, later, b""))

    async def told(data: bytes) -> None:
        await probe._ask(Told(data), f"/ip4/10.0.0.1/tcp/4001/p2p/{PEER}")  # type: ignore[arg-type]

    yield Target("key in use answer", answers, told, ())
    chain = Chain(START, MANIFEST.swarm.authority, manifest=MANIFEST)
    looks = ChainLooks(host, SWARM, members, chain)
    looked = tuple(wire.canonical(peering.LookAtChain(record=record, after=after)) for after in (0, 1, 1 << 40))
    yield Target("look at chain", looked, on_stream(looks._serve), FOREIGN)


class Told:
    """A host whom everyone gives the same answer."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def dial(self, address: str, *, deadline_s: float) -> None:
        await trio.lowlevel.checkpoint()

    async def request(self, *asked: Any, **limits: Any) -> bytes:
        await trio.lowlevel.checkpoint()
        return self._data


def evidence_targets(folder: Path, rng: Any) -> Iterator[Target]:
    """What is brought against others, and what is asked about it."""
    evidence_store = EvidenceStore(folder, SWARM)
    evidence_store.load()
    server = AuditServer(evidence_store, lambda plan: None, lambda base: (), lambda: frozenset({PEER}))
    asked = tuple(wire.canonical(one) for one in examples(AuditRequest, rng, 8))
    yield Target("audit", asked, on_stream(server.serve), FOREIGN)
    brought = tuple(pack(_of_this_swarm(one), rng.randbytes(40)) for one in examples(Evidence, rng, 24))
    yield Target("evidence", brought, lambda data: verify_evidence(data, SWARM))


def _of_this_swarm(evidence: Any) -> Any:
    return msgspec.structs.replace(evidence, base=msgspec.structs.replace(evidence.base, swarm=SWARM))


def control_targets(folder: Path) -> Iterator[Target]:
    """The control socket, which is this user's own."""

    async def told(arguments: Any = ()) -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        return {"told": list(arguments)}

    server = ControlServer(folder, {"status": told}, {"rollback": told})

    async def ask(data: bytes) -> None:
        async with _connection(data) as stream:
            await server._serve(stream)

    lines = [msgspec.json.encode({"op": "status"}) + b"\n", b'{"op":"rollback","arguments":["3"]}\n' * 2]
    yield Target("control request", tuple(lines), ask, ())


# -- frames --------------------------------------------------------------------------------------------------


def frame_targets(rng: Any) -> Iterator[Target]:
    """Frames of a member with good keys, as the sinks of its lanes see them."""
    contributions = [encode_contribution(n, "int8") for n in range(3)]
    plan = make_plan(contributions, [1, 2, 3])
    me, them = reduce_peer(0), reduce_peer(1)

    def begun() -> PlanTraffic:
        mesh = Mesh(plan, contributions)
        mesh.start()
        traffic = _idle_traffic()
        traffic.begin(mesh.reductions[me], Routes(plan, me))
        return traffic

    exchange = ChunkExchange(post=lambda peer, header, payload: None, lookup=lambda ref: memoryview(b"held"))
    current = Renewed(begun)
    plan_order = {"round": plan.round, "scope": plan.lineage[:SCOPE_BYTES]}
    heads = [
        FrameHeader(kind=kind, length=100, chunk=1, total=100 if kind in BULK_KINDS else 0, **plan_order)  # type: ignore[arg-type]
        for kind in FrameKind
        if kind not in (FrameKind.HELLO, FrameKind.CLOSE)
    ]
    heads.append(FrameHeader(kind=FrameKind.REQUEST, length=0, flags=1, chunk=1, scope=b"12345678"))

    def sunk(data: bytes) -> None:
        header = FrameHeader.decode(data[:HEADER_BYTES], peer=them)
        payload = data[HEADER_BYTES:][: header.length].ljust(header.length, b"\0")
        for sink in (current.get(), exchange):
            region = sink.region(them, header) if header.kind in BULK_KINDS else memoryview(bytearray(payload))
            if region is None:
                continue
            region[:] = payload
            if isinstance(sink, ChunkExchange):
                if header.kind in (FrameKind.STATE, FrameKind.REQUEST, FrameKind.REFUSED):
                    sink.received(them, header)
            elif header.kind in traffic_module.KINDS:
                sink.received(them, header, region)

    yield Target("frames", tuple(head.encode() + rng.randbytes(head.length) for head in heads), sunk)


@asynccontextmanager
async def handler_targets(seed: int = 1) -> AsyncIterator[list[Target]]:
    """All of them, with what they need running."""
    import random

    rng = random.Random(seed)
    waited = traffic_module.PLAN_WAIT_S
    traffic_module.PLAN_WAIT_S = 0.0  # a lane's thread would wait for a plan that does not come
    try:
        with tempfile.TemporaryDirectory() as folder:
            async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
                host = Host(identity=identity(0), listen=("/ip4/127.0.0.1/tcp/0",))
                lanes = LanePool(me=ME, swarm_id=SWARM, sink=Nowhere(), listen=("127.0.0.1", 0), request=_nobody)
                await nursery.start(lanes.run)
                running = await stack.enter_async_context(listening())
                yield [
                    *link_targets(host, rng),
                    *request_targets(host, lanes, Path(folder), rng),
                    *stranger_targets(host, rng),
                    *newcomer_targets(host),
                    *evidence_targets(Path(folder), rng),
                    *control_targets(Path(folder)),
                    *round_targets(rng),
                    *frame_targets(rng),
                    *network_targets(running, _connection),
                ]
                nursery.cancel_scope.cancel()
    finally:
        traffic_module.PLAN_WAIT_S = waited


async def _nobody(peer: PeerId, data: bytes) -> bytes:
    raise NetworkError("nobody is asked for anything here")


class Nowhere:
    """A sink of lanes that there are none of."""

    def region(self, peer: PeerId, header: FrameHeader) -> memoryview | None:
        return None

    def received(self, peer: PeerId, header: FrameHeader, payload: memoryview) -> None:
        raise LocalError("a frame where there is no lane")

    def lane_closed(self, peer: PeerId, error: NetworkError | RemoteError | None) -> None:
        """There is none."""
