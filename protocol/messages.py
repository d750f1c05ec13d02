"""The typed messages of a round, and what is signed or hashed in them.

All are frozen structs. On the wire each travels as canonical msgpack inside a signed envelope (`shoal.protocol.wire`);
`kind` of the envelope is the struct's tag. Round messages are idempotent by (term, round, view, kind, sender).

Hashes are BLAKE3-256 with a domain prefix, so that no two kinds of object can share a preimage.
Source: the certified round, docs/protocol.md.
"""

from __future__ import annotations

from typing import Annotated, NewType

import msgspec
from blake3 import blake3

from shoal.protocol import wire
from shoal.protocol.identity import Identity, PeerId, verify
from shoal.protocol.wire import HASH_BYTES, CounterField, HashField, PeerIdField, SignatureField, canonical

Round = NewType("Round", int)

MEMBER_LIMIT = 64
CHUNK_LIMIT = 1 << 14
WEIGHT_LIMIT = (1 << 24) - 1
VIEW_LIMIT = 1 << 20
NO_HASH = bytes(HASH_BYTES)

Hash = HashField
Signature = SignatureField
Peer = PeerIdField
Count = CounterField
View = Annotated[int, msgspec.Meta(ge=0, lt=VIEW_LIMIT)]
Peers = Annotated[tuple[Peer, ...], msgspec.Meta(max_length=MEMBER_LIMIT)]

VOTE_DOMAIN = b"shoal/vote"
STATEMENT_DOMAIN = b"shoal/chunk-statement"


def domain_hash(domain: str, *parts: bytes) -> bytes:
    """BLAKE3-256 over the domain and the length-prefixed parts."""
    hasher = blake3(b"shoal/" + domain.encode() + b"\0")
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


class Message(wire.Message, frozen=True, kw_only=True, tag=str.lower):
    """Base of all tagged messages; the tag is the class name in lower case."""


class Term(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True, array_like=True):
    """How often the swarm was rebased and rolled back; compared in that order, before any height."""

    rebases: Count = 0
    rollbacks: Count = 0


class RoundMessage(Message, frozen=True, kw_only=True):
    """A message of one round. `base` is the hash of the previous certificate's value."""

    term: Term
    round: Count
    base: Hash


class Ready(RoundMessage, frozen=True, kw_only=True):
    """This node's contribution is fixed; `root` commits to its encoded chunks.

    `role` is "contributor", "joiner" (no vote, weight zero) or "observer" (a paused member: it votes, weight zero).
    `state` is the digest of S(e-1) as this node holds it; a node whose state differs must heal before it takes part.
    `squares` are the per-chunk sums of squares of the decoded contribution; `upload` and `download` bytes/s.
    """

    role: str
    state: Hash
    root: Hash
    squares: Annotated[tuple[float, ...], msgspec.Meta(max_length=CHUNK_LIMIT)]
    tokens: Annotated[int, msgspec.Meta(ge=0, le=WEIGHT_LIMIT)]
    upload: Count
    download: Count
    reaches: Peers


class Participant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One place in the plan's order. Weight zero: receives the finals, sends no contribution."""

    peer: Peer
    weight: Annotated[int, msgspec.Meta(ge=0, le=WEIGHT_LIMIT)]
    tokens: Annotated[int, msgspec.Meta(ge=0, le=WEIGHT_LIMIT)]
    root: Hash


class OwnedRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Chunks `start` to `stop` (exclusive) are summed by participant number `owner`."""

    owner: Annotated[int, msgspec.Meta(ge=0, lt=MEMBER_LIMIT)]
    start: Count
    stop: Count


class Plan(RoundMessage, frozen=True, kw_only=True):
    """Who takes part with which weight, and who owns which chunks. Signed by its planner through the envelope.

    `attempt` counts re-plans within one view, each naming all those evicted so far in this round.
    """

    view: View
    attempt: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    planner: Peer
    participants: Annotated[tuple[Participant, ...], msgspec.Meta(min_length=1, max_length=MEMBER_LIMIT)]
    owners: Annotated[tuple[OwnedRange, ...], msgspec.Meta(max_length=CHUNK_LIMIT)]
    evicted: Peers = ()
    codec: str
    numel: Count
    chunk_values: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]

    @property
    def hash(self) -> bytes:
        """What values, statements and frames refer to."""
        return domain_hash("plan", canonical(self))

    @property
    def chunks(self) -> int:
        """Number of chunks on the grid."""
        return -(-self.numel // self.chunk_values)

    def number(self, peer: PeerId) -> int | None:
        """The place of `peer` in the plan's order, None if it takes no part."""
        return next((i for i, p in enumerate(self.participants) if p.peer == peer), None)

    def contributors(self) -> tuple[int, ...]:
        """Places whose weight counts, in plan order."""
        return tuple(i for i, p in enumerate(self.participants) if p.weight > 0)


class ChunkStatement(Message, frozen=True, kw_only=True):
    """An owner's signed word about one reduced chunk: which participants are in it and what came out.

    `bitmap` has bit i (little-endian) set when participant i is included; `result` is BLAKE3 of the encoded chunk.
    """

    plan: Hash
    chunk: Count
    bitmap: Annotated[bytes, msgspec.Meta(max_length=MEMBER_LIMIT // 8)]
    result: Hash
    owner: Peer
    signature: Signature

    @staticmethod
    def sign(identity: Identity, *, plan: bytes, chunk: int, bitmap: bytes, result: bytes) -> ChunkStatement:
        """The statement of `identity` over these fields."""
        signature = identity.sign(STATEMENT_DOMAIN, _statement_preimage(plan, chunk, bitmap, result))
        return ChunkStatement(
            plan=plan, chunk=chunk, bitmap=bitmap, result=result, owner=identity.peer_id, signature=signature
        )

    def valid(self) -> bool:
        """Whether the named owner signed it."""
        preimage = _statement_preimage(self.plan, self.chunk, self.bitmap, self.result)
        return verify(self.owner, STATEMENT_DOMAIN, preimage, self.signature)


def _statement_preimage(plan: bytes, chunk: int, bitmap: bytes, result: bytes) -> bytes:
    return canonical([plan, chunk, bitmap, result])


class Report(RoundMessage, frozen=True, kw_only=True):
    """The sender holds all finals of `plan` and computed this digest of S(e) from them."""

    plan: Hash
    digest: Hash
    bitmaps: Hash


class Stalled(RoundMessage, frozen=True, kw_only=True):
    """Evidence for the lead: these participants sent nothing for the stall deadline, or their lanes broke."""

    plan: Hash
    peers: Peers


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a round decides. The view is not in it: one value certified in two views is one certificate.

    `members` are the electorate of the next round, sorted; `leaves` the leaves counted in its quorum, sorted.
    `bitmaps` is the root over the per-chunk contributor bitmaps; `tokens` the sum over the participants.
    """

    swarm: Hash
    term: Term
    round: Count
    base: Hash
    plan: Hash
    planner: Peer
    members: Annotated[tuple[Peer, ...], msgspec.Meta(min_length=1, max_length=MEMBER_LIMIT)]
    leaves: Peers = ()
    bitmaps: Hash
    tokens: Count
    digest: Hash

    @property
    def hash(self) -> bytes:
        """H(C(e)): the hash of the value only."""
        return domain_hash("value", canonical(self))


class Propose(RoundMessage, frozen=True, kw_only=True):
    """The lead of `view` asks for votes on `value`; sent once per view."""

    view: View
    value: Value


class Vote(RoundMessage, frozen=True, kw_only=True):
    """A member's vote; `signature` is over (view, value hash) and goes into the certificate."""

    view: View
    value: Hash
    signature: Signature


class CastVote(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A vote that was cast, with its value in full: what a view change carries forward."""

    view: View
    value: Value


class ViewChange(RoundMessage, frozen=True, kw_only=True):
    """The sender moved to `view` and will never vote below it; carries its highest vote and its finals."""

    view: View
    highest: CastVote | None = None
    report: Report | None = None


class Leave(RoundMessage, frozen=True, kw_only=True):
    """A durable promise to sign no vote and no view change in `round`, and to report nothing in it.

    So the next certificate does not list the sender, and it is no member of later rounds either until it joins anew.
    """


class Certificate(Message, frozen=True, kw_only=True):
    """A decided value with a quorum of signatures, all from one view; `signers` and `signatures` correspond."""

    value: Value
    view: View
    signers: Peers
    signatures: Annotated[tuple[Signature, ...], msgspec.Meta(max_length=MEMBER_LIMIT)]


def vote_preimage(view: int, value_hash: bytes) -> bytes:
    """What a vote signs."""
    return canonical([view, value_hash])
