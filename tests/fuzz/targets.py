"""Every place where bytes of others become something: what is fed there, and which errors may come out.

A target takes bytes and raises nothing but what it names. `COVERS` says which functions of the source each group of
targets reaches; `tests.fuzz.test_fuzz` finds all that decode, and all that serve, and asserts that none is left out.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np

from shoal.collectives import codecs
from shoal.collectives.commitment import bitmap_indices
from shoal.collectives.finals import Finals
from shoal.collectives.policy_image import apply_changes, encode_changes, image_of
from shoal.collectives.proofs import verify_evidence
from shoal.collectives.spans import Undecodable
from shoal.collectives.state import ImageHeader, StateAssembly, StateHeader
from shoal.lab.signed import certified
from shoal.node import control_client, pipe
from shoal.node.card import Card, parse_card
from shoal.node.loops import loop_messages
from shoal.node.reporting import events
from shoal.node.reporting.event_log import line_of, parse_event
from shoal.node.sapo import agent_messages, completion_server, completions, sandbox, sandbox_process
from shoal.node.sapo.char_policy import END, CharModelSettings, CharPolicy
from shoal.node.sapo.higher_lower import HigherLower
from shoal.node.sapo.turns import encoded, given_in
from shoal.node.state import image_exchange
from shoal.node.training import rank_messages, trainer_messages
from shoal.protocol import address as addresses
from shoal.protocol import amending, audit_messages, evidence, invites, peering, rollouts, swarm_link, wire
from shoal.protocol.certificate import genesis
from shoal.protocol.chain import Chain
from shoal.protocol.errors import ConfigError, LocalError, NetworkError, RemoteError
from shoal.protocol.identity import parse_peer_id
from shoal.protocol.manifest import (
    Manifest,
    SwarmSection,
    parse_manifest,
    render_manifest,
)
from shoal.protocol.messages import Certificate, Entry, Value
from shoal.protocol.records import NODE_RECORD_KIND, NodeRecord, RecordBook, open_record, seal_record
from shoal.swarm.address_book import AddressBook, KnownPeer
from shoal.swarm.lanes import hello as lane_hello
from shoal.swarm.lanes import seal
from shoal.swarm.lanes.frame import HEADER_BYTES, FrameHeader, FrameKind
from tests.collectives.reduce_lab import CODECS, GRID, Mesh, encode, make_plan
from tests.fuzz.samples import example, identity
from tests.manifests import manifest_of

EXAMPLES = 3
LAYERS = ("protocol", "swarm", "collectives", "node")

Take = Callable[[bytes], Any]


@dataclass(frozen=True)
class Target:
    """One place. `take` may return an awaitable; what it raises beside `allowed` is a finding."""

    name: str
    samples: tuple[bytes, ...]
    take: Take
    allowed: tuple[type[Exception], ...] = (RemoteError,)


MANIFEST = manifest_of([identity(n).peer_id for n in range(4)], name="fuzz", authority=identity(3).peer_id)
SWARM = MANIFEST.swarm_id
START = genesis(SWARM, MANIFEST.swarm.founders)
ME, PEER = identity(0).peer_id, identity(1).peer_id


def sealer(n: int = 1) -> wire.Sealer:
    return wire.Sealer(identity(n), SWARM, 1)


def import_messages() -> None:
    """Load every module that defines messages, so that all of them exist."""
    for layer in LAYERS:
        folder = Path(importlib.import_module(f"shoal.{layer}").__path__[0])
        for path in sorted(folder.rglob("*.py")):
            if re.search(r"^class \w+\((wire\.)?(Round)?Message,", path.read_text(), re.MULTILINE):
                importlib.import_module(".".join(("shoal", layer, *path.relative_to(folder).with_suffix("").parts)))


def messages() -> list[type[wire.Message]]:
    """Every message that a peer can send, as its class."""
    import_messages()

    def below(cls: type) -> Iterator[type]:
        for one in cls.__subclasses__():
            yield one
            yield from below(one)

    found = {cls for cls in below(wire.Message) if cls.__module__.startswith("shoal.")}
    return sorted(found, key=lambda cls: (cls.__module__, cls.__qualname__))


HAND_MADE: dict[Any, Any] = {Manifest: MANIFEST, SwarmSection: MANIFEST.swarm}
"""Where fields must fit together in a way that no draw meets."""


def examples(of: Any, rng: random.Random, count: int = EXAMPLES) -> list[Any]:
    return [HAND_MADE[of]] if of in HAND_MADE else [example(of, rng) for _ in range(count)]


# -- decoders of messages ------------------------------------------------------------------------------------

UNIONS: dict[str, Any] = {
    "link message": peering.LinkMessage,
    "swarm message": peering.SwarmMessage,
    "fetch request": peering.FetchRequest,
    "fetch answer": peering.FetchAnswer,
    "audit answer": audit_messages.AuditAnswer,
    "hello answer": peering.HelloAnswer,
    "manifest reply": peering.ManifestReply,
    "entry": Entry,
}


def message_targets(rng: random.Random) -> Iterator[Target]:
    """Each message, and each union of them that is decoded as one."""
    kinds: dict[str, Any] = {f"message {cls.__qualname__}": cls for cls in messages()} | UNIONS
    for name, of in kinds.items():
        samples = [wire.canonical(one) for one in examples(of, rng, 12 if name in UNIONS else EXAMPLES)]
        yield Target(name, tuple(samples), lambda data, of=of: wire.decode(data, of))


def signed_targets(rng: random.Random) -> Iterator[Target]:
    """Envelopes, and what is signed in them or by itself."""
    said = [wire.canonical(one) for one in examples(peering.LinkMessage, rng, 6)]
    sealed = tuple(sealer().seal("link", one) for one in said)
    yield Target("envelope", sealed, lambda data: wire.open_envelope(data, SWARM, peer=PEER))
    record = seal_record(sealer(), NodeRecord(peer=PEER, boot=1, phase="training"))
    yield Target("record", (record,), lambda data: open_record(data, SWARM, 0.0, peer=PEER))
    book = RecordBook(SWARM)
    yield Target("record book", (record,), lambda data: book.receive(data, 0.0, peer=PEER))
    inside = wire.canonical(NodeRecord(peer=PEER, boot=1, phase="training", control_addresses=("/ip4/1.2.3.4/tcp/1",)))
    yield Target(
        "record inside", (inside,), lambda data: book.receive(sealer().seal(NODE_RECORD_KIND, data), 1.0, peer=PEER)
    )
    listed = invites.make_revocations(identity(3), SWARM, None, [identity(2).peer_id])
    yield Target("revocations", (wire.canonical(listed),), _take_revocations)
    invite = invites.make_invite(identity(3), SWARM, holder=PEER, expires=2**33)
    credential = invites.Credential(invite=invite)
    yield Target("credential", (wire.canonical(credential),), _take_credential)

    def extend(data: bytes) -> None:
        chain = Chain(START, MANIFEST.swarm.authority, manifest=MANIFEST)
        chain.extend(wire.decode(data, Entry))  # type: ignore[arg-type]

    yield Target("chain", (wire.canonical(certificate()),), extend)


def _take_revocations(data: bytes) -> None:
    wire.decode(data, invites.Revocations).check(SWARM, MANIFEST.swarm.authority, peer=PEER)


def _take_credential(data: bytes) -> None:
    credential = wire.decode(data, invites.Credential)
    invites.reason_not_valid(credential, peer=PEER, swarm=SWARM, authority=MANIFEST.swarm.authority)
    invites.reason_expired(credential.invite, 1e9)


def certificate() -> Certificate:
    """Of round 1, by all four founders."""
    members = tuple(sorted(MANIFEST.swarm.founders))
    value = Value(
        swarm=SWARM,
        term=START.term,
        round=1,
        base=START.hash,
        plan=bytes(32),
        planner=members[0],
        members=members,
        bitmaps=bytes(32),
        tokens=9,
        digest=bytes(32),
    )
    return certified(value, *(identity(n) for n in range(4)))


def rollout_targets(rng: random.Random) -> Iterator[Target]:
    """What nodes that share rollouts say."""
    of = {
        "rollout group": (rollouts.RolloutGroup, rollouts.decode_group),
        "rollout batch": (rollouts.AnnouncementBatch, _message_of(rollouts.AnnouncementBatch)),
        "rollout catch-up": (rollouts.CatchUpRequest, _message_of(rollouts.CatchUpRequest)),
        "rollout news request": (rollouts.NewsRequest, _message_of(rollouts.NewsRequest)),
        "rollout news": (rollouts.News, _message_of(rollouts.News)),
        "rollout request": (rollouts.GroupRequest, _message_of(rollouts.GroupRequest)),
        "rollout chunk": (rollouts.GroupChunk, _message_of(rollouts.GroupChunk)),
    }
    for name, (kind, take) in of.items():
        yield Target(name, tuple(wire.canonical(one) for one in examples(kind, rng)), take)
    told = [wire.canonical(_assigned(one)) for one in examples(rollouts.Announcement, rng)]
    sealed = tuple(sealer().seal(rollouts.ANNOUNCEMENT_KIND, one) for one in told)
    yield Target("announcement", sealed, lambda data: rollouts.open_announcement(data, SWARM, peer=PEER))
    yield Target(
        "announcement inside",
        tuple(told),
        lambda data: rollouts.open_announcement(sealer().seal(rollouts.ANNOUNCEMENT_KIND, data), SWARM, peer=PEER),
    )


def _message_of(kind: type) -> Callable[[bytes], object]:
    return lambda data: rollouts.decode_message(data, kind)


def _assigned(told: rollouts.Announcement) -> rollouts.Announcement:
    seed = rollouts.assigned_seed(SWARM, PEER, told.round, told.task.index)
    return msgspec.structs.replace(told, task=msgspec.structs.replace(told.task, seed=seed))


def engine_targets(rng: random.Random) -> Iterator[Target]:
    """What an engine answers, and what one is asked."""
    asked = completions.CompletionsRequest(
        prompt="1+2=", max_tokens=4, temperature=1.0, top_p=1.0, seed=7, n=2, logprobs=1, return_token_ids=True
    )
    drawn = {"logprobs": {"token_logprobs": [-0.5, -1.0]}, "token_ids": [3, 1]}
    metadata = {"weight_version": "3-00", "vocabulary": 9}
    reply = {"choices": [{"text": "3", "finish_reason": "stop", **drawn}] * 2, "model": "m", "metadata": metadata}
    yield Target("engine reply", (msgspec.json.encode(reply),), lambda data: completions.read_reply(data, asked))
    refusals = tuple(msgspec.json.encode(one) for one in ({"error": {"message": "no"}}, {"detail": "no"}))
    yield Target("engine refusal", refusals, completions.refusal_in, ())
    of = {
        "completions request": (completion_server.Asked, msgspec.json.encode(asked)),
        "load request": (completion_server.Load, b'{"model": "/models/one", "version": 3}'),
    }
    for name, (kind, sample) in of.items():
        yield Target(
            name, (sample,), lambda data, kind=kind: completion_server.decoded(data, kind), (completion_server.Refused,)
        )


# -- texts ---------------------------------------------------------------------------------------------------


def text_targets(rng: random.Random) -> Iterator[Target]:
    """What users are given by others, and paste."""
    bearer = invites.make_invite(identity(3), SWARM, holder=identity(5).peer_id, bearer=True, expires=2**31)
    where = tuple(f"/{kind}/tcp/4001/p2p/{PEER}" for kind in ("ip4/10.0.0.1", "ip6/::1", "dns4/example.org"))
    link = swarm_link.SwarmLink(
        swarm=SWARM, addresses=where, invite=swarm_link.LinkInvite(invite=bearer, key=identity(5))
    )
    plain = swarm_link.SwarmLink(swarm=SWARM, addresses=where[:1])
    of: dict[str, tuple[Callable[[str], Any], list[str]]] = {
        "swarm link": (swarm_link.parse_link, [swarm_link.format_link(one) for one in (link, plain)]),
        "address": (addresses.parse_address, list(where)),
        "listen address": (addresses.parse_listen_address, ["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/4001"]),
        "lane address": (seal.parse_address, ["10.0.0.1:4001", "[::1]:1", "example.org:80"]),
        "peer id": (parse_peer_id, [PEER]),
        "holder": (invites.parse_holder, [PEER]),
        "settings": (lambda text: amending.parse_settings(text.split("\n")), ["round.grace_s=3\nsync.inner_steps=4"]),
        "manifest text": (parse_manifest, [render_manifest(MANIFEST)]),
    }
    for name, (take, texts) in of.items():
        samples = tuple(text.encode() for text in texts)
        allowed = (RemoteError, ConfigError)
        yield Target(name, samples, lambda data, take=take: take(data.decode("utf-8", "surrogateescape")), allowed)
    agreed = MANIFEST.to_canonical()
    yield Target("manifest", (agreed,), lambda data: Manifest.from_canonical(data, SWARM, peer=PEER))
    book = AddressBook([KnownPeer(peer=PEER, addresses=where[:1])]).to_bytes()
    yield Target("address book", (book,), AddressBook.parse, (ValueError,))


# -- lanes ---------------------------------------------------------------------------------------------------


def lane_targets(rng: random.Random) -> Iterator[Target]:
    """Frames, and how lanes are agreed on."""
    header = FrameHeader(kind=FrameKind.CONTRIBUTION, length=100, chunk=3, offset=0, total=100, scope=b"scopescp")
    yield Target("frame header", (header.encode(),), FrameHeader.decode)
    proposal = seal.LaneProposal(me=PEER, peer=ME, swarm_id=SWARM)
    offer = seal.encode_handshake(proposal.offer)
    summons = seal.encode_handshake(seal.LaneSummons(lanes=3))
    answer, keys = seal.accept_offer(proposal.offer, me=ME, peer=PEER, swarm_id=SWARM, addresses=("127.0.0.1:4001",))

    def accept(data: bytes) -> None:
        asked = seal.decode_request(data, peer=PEER)
        if isinstance(asked, seal.LaneOffer):
            seal.accept_offer(asked, me=ME, peer=PEER, swarm_id=SWARM, addresses=("127.0.0.1:4001",))

    yield Target("lane request", (offer, summons), accept)
    yield Target(
        "lane answer",
        (seal.encode_handshake(answer),),
        lambda data: proposal.keys(seal.decode_answer(data, peer=ME)),
    )
    hello = lane_hello.seal_hello(seal.Sealer(proposal.keys(answer).send_key), proposal.keys(answer))

    def greet(data: bytes) -> None:
        wire_bytes = data[: lane_hello.HELLO_WIRE_BYTES].ljust(lane_hello.HELLO_WIRE_BYTES, b"\0")
        lane_hello.open_hello(seal.Opener(keys.receive_key, peer=PEER), keys, wire_bytes)

    yield Target("lane hello", (hello,), greet)

    def sealed_frame(data: bytes) -> None:
        """What a member with good keys may send as a frame: the header is its own to choose."""
        head = FrameHeader.decode(data[:HEADER_BYTES], peer=PEER)
        body = data[HEADER_BYTES:][: head.length + seal.TAG_BYTES].ljust(head.length + seal.TAG_BYTES, b"\0")
        seal.Opener(keys.receive_key, peer=PEER).open_into(
            data[:HEADER_BYTES], memoryview(body), memoryview(bytearray(head.length))
        )

    yield Target("sealed frame", (header.encode() + bytes(116),), sealed_frame)


# -- contributions and states --------------------------------------------------------------------------------


def evidence_targets(rng: random.Random) -> Iterator[Target]:
    """What is said to prove that somebody lied, with all that it takes to check it."""
    for name, of in evidence_kinds().items():
        samples = tuple(evidence.pack(one, b"\x01" * 64) for one in examples(of, rng))
        yield Target(f"evidence {name}", samples, _take_evidence)
    contributions = [encode(n, "int8") for n in range(2)]
    plan = make_plan(contributions, [1, 2], base=START.hash)
    mesh = Mesh(plan, contributions)
    mesh.start()
    mesh.run(1)
    statement = mesh.finals()[0].chunks[0].statement
    attached = b"".join(bytes(one.payload(0)) for one in contributions)
    right = evidence.pack(evidence.WrongSum(base=START, plan=plan, statement=statement), attached)

    def verify(data: bytes) -> None:
        """The signed sample is of a sum that is right: what is made of it proves nothing either."""
        with contextlib.suppress(RemoteError):
            verify_evidence(data, SWARM)
            raise AssertionError("this convicts an honest owner")

    yield Target("evidence of a right sum", (right,), verify)


def _take_evidence(data: bytes) -> None:
    """Whatever can be read is checked as well; what is made at random proves nothing."""
    evidence.unpack(data)
    with contextlib.suppress(RemoteError):
        verify_evidence(data, SWARM)


def evidence_kinds() -> dict[str, Any]:
    """Each kind of evidence by its name."""
    return {cls.__name__: cls for cls in get_args(evidence.Evidence)}


def tensor_targets(rng: random.Random) -> Iterator[Target]:
    """What is summed, and what is fetched."""
    for name in CODECS:
        contribution = encode(0, name)
        how, n = codecs.codec(name), GRID.length(0)
        out = np.empty(n, np.float32)

        def decode(data: bytes, how: Any = how, n: int = n, out: Any = out) -> None:
            how.check(np.frombuffer(data, np.uint8), n)
            how.decode_into(np.frombuffer(data, np.uint8), out)

        allowed = (Undecodable,)
        yield Target(f"codec {name}", (contribution.encoded(0).tobytes(),), decode, allowed)
    contributions = [encode(n, "int8") for n in range(2)]
    mesh = Mesh(make_plan(contributions, [1, 2]), contributions)
    mesh.start()
    mesh.run(1)
    finals = mesh.finals()[0]
    final_format = next(iter(mesh.reductions.values())).final_format
    payload = finals.chunks[0].payload.tobytes()
    yield Target("final", (payload,), lambda data: final_format.open(0, data))
    rest = [one.payload for one in finals.chunks[1:]]
    yield Target("finals", (payload,), lambda data: Finals.open(mesh.plan, [np.frombuffer(data, np.uint8), *rest]))
    yield Target("bitmap", (b"\x03",), lambda data: bitmap_indices(data, 2))
    header = example(StateHeader, rng)

    def assemble(data: bytes) -> None:
        taken = wire.decode(data, StateHeader, limit_bytes=1 << 22)
        if taken.numel <= 1 << 20:  # the layout of the model built here bounds it in a node
            StateAssembly(taken, digest=taken.digest)

    yield Target("state header", (wire.canonical(header),), assemble)
    image = msgspec.structs.replace(example(ImageHeader, rng), numel=12, chunk_values=12, image=bytes(32))
    head = (wire.canonical(image),)
    yield Target("image header", head, lambda data: wire.decode(data, ImageHeader, limit_bytes=1 << 20).digest)
    sizes = np.array([25], "<u4").tobytes()
    yield Target("lengths of changes", (sizes, b""), lambda data: image_exchange._sizes(data, image, PEER))
    before, after = (image_of(np.array([scale, 2.0, -3.0] * 4, np.float32)) for scale in (1.0, 1.1))
    after[:8] = before[:8]
    changes = encode_changes(before, after, 12), encode_changes(before, before, 12), b"\x01" + after.tobytes()
    yield Target("changes of an image", changes, lambda data: apply_changes(before, data, 12), (Undecodable,))


# -- this machine's own processes ----------------------------------------------------------------------------


def pipe_targets(rng: random.Random) -> Iterator[Target]:
    """Pipes and sockets between processes of one user: a damaged one is an error that is foreseen, and no other."""
    allowed = (LocalError,)
    of: dict[str, tuple[Any, Callable[[bytes], Any]]] = {
        "trainer command": (trainer_messages.Command, trainer_messages.unpack_command),
        "trainer report": (trainer_messages.Report, trainer_messages.unpack_report),
        "loop attaching": (loop_messages.Attaching, loop_messages.unpack_attaching),
        "loop answer": (loop_messages.Accepted | loop_messages.TurnedAway, loop_messages.unpack_answer),
        "rank order": (rank_messages.RankOrder, rank_messages.unpack_order),
        "agent order": (agent_messages.Order, agent_messages.unpack_order),
        "agent report": (agent_messages.AgentReport, agent_messages.unpack_agent_report),
        "sandbox reply": (sandbox_process.Reply, sandbox.unpack_reply),
    }
    for name, (kind, take) in of.items():
        samples = tuple(msgspec.msgpack.encode(one) for one in examples(kind, rng, 12))
        yield Target(name, samples, take, allowed)
    frames = pipe.frame_of(example(trainer_messages.Command, rng)) * 2

    def feed(data: bytes) -> None:
        framing = pipe.Framing()
        for start in range(0, len(data), 700):
            for frame in framing.feed(data[start : start + 700]):
                trainer_messages.unpack_command(frame)

    yield Target("pipe framing", (frames,), feed, allowed)
    lines = (events.Started(peer_id=PEER, pid=1, boot=1), events.Evaluated(round=3, loss=0.5), events.Died(peer=PEER))
    yield Target("event", tuple(map(line_of, lines)), parse_event, ())
    here = {"rounds": 1, "first": 1, "last": 1, "gave_rounds": 1, "tokens": 1}
    card = Card(swarm="ab" * 32, name="fuzz", peer=PEER, certificate="cd" * 32, since=None, **here)
    yield Target("card", (msgspec.json.encode(card),), lambda data: parse_card(data, Path("card")), (ConfigError,))
    reply = msgspec.json.encode({"ok": True, "peer_id": PEER, "members": [{"peer_id": PEER}]})
    refused = msgspec.json.encode({"ok": False, "error": "no"})
    yield Target(
        "control reply",
        (reply, refused),
        lambda data: control_client._parse_reply(data, Path("folder")),
        (NetworkError, control_client.ControlRefused),
    )


def dialogue_targets(rng: random.Random) -> Iterator[Target]:
    """A stranger's transcript as it is scored and read into tokens, and tokens that are said to be its."""
    family = HigherLower()
    policy = CharPolicy(CharModelSettings(width=16, layers=1, heads=2, completion_tokens=48), seed=1)
    task = family.make({}, 3, 0)
    solution = family.solution(task)
    assert solution is not None
    taken = encoded(policy, task, solution)
    assert taken is not None

    def read(data: bytes) -> None:
        text = data.decode(errors="replace")
        assert 0.0 <= family.score(task, text) <= 1.0
        sample = encoded(policy, task, text)
        if sample is not None:
            assert 0 < sample.drawn <= len(sample.completion) <= 48

    def split(data: bytes) -> None:
        tokens = [byte % policy.vocabulary for byte in data]
        given = given_in(policy, task, solution, tokens, end=END)
        for start, stop in given or ():
            assert tuple(tokens[start:stop]) in {taken.completion[one:other] for one, other in taken.given}

    yield Target("transcript", (solution.encode(), b"50", b""), read, ())
    yield Target("tokens of a transcript", (bytes(taken.completion),), split, ())


GROUPS = (
    dialogue_targets,
    message_targets,
    signed_targets,
    rollout_targets,
    engine_targets,
    text_targets,
    lane_targets,
    evidence_targets,
    tensor_targets,
    pipe_targets,
)


def decoder_targets(seed: int = 1) -> list[Target]:
    """All targets that need nothing running."""
    rng = random.Random(seed)
    return [target for group in GROUPS for target in group(rng)]
