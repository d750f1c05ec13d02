"""The typed messages of a round, and what is signed or hashed in them.

All are frozen structs. On the wire each travels as canonical msgpack inside a signed envelope (`shoal.protocol.wire`);
`kind` of the envelope is the struct's tag. Round messages are idempotent by (term, round, view, kind, sender).

Hashes are BLAKE3-256 with a domain prefix, so that no two kinds of object can share a preimage.
Source: docs/agreement.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, NewType, Self

import msgspec
from blake3 import blake3

from shoal.protocol import wire
from shoal.protocol.identity import SIGNATURE_BYTES, Identity, PeerId, verify
from shoal.protocol.wire import HASH_BYTES, CounterField, HashField, PeerIdField, SignatureField, canonical

Round = NewType("Round", int)

MEMBER_LIMIT = 64  # members, participants, signers
CHUNK_LIMIT = 1 << 14  # chunks of a plan
WEIGHT_LIMIT = (1 << 24) - 1  # tokens and weight of one participant
CLIP_UNIT = 1 << 16
"""A clip of this much changes nothing."""
AGGREGATE_LIMIT_CHARS = 32
SQUARES_LIMIT = 2.0**160
"""More than any chunk's sum of squares can be; and few enough to be added up without overflow."""
VIEW_LIMIT = 1 << 20  # views of a round
RELAY_LIMIT = MEMBER_LIMIT * (MEMBER_LIMIT - 1) // 2
ENLISTED_LIMIT = 256
"""Enlistments of one value: of those counted before, of newcomers, and anew of those whose seats are near."""
CHANGE_LIMIT = 32
"""Settings that one amendment may change."""
SETTING_LIMIT_CHARS = 64  # of a setting's key or text
NO_HASH = bytes(HASH_BYTES)

Hash = HashField
Signature = SignatureField
Peer = PeerIdField
Count = CounterField
View = Annotated[int, msgspec.Meta(ge=0, lt=VIEW_LIMIT)]
Attempt = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
Clip = Annotated[int, msgspec.Meta(ge=0, le=CLIP_UNIT)]
Squares = Annotated[float, msgspec.Meta(ge=0, le=SQUARES_LIMIT)]
Place = Annotated[int, msgspec.Meta(ge=0, lt=MEMBER_LIMIT)]
Peers = Annotated[tuple[Peer, ...], msgspec.Meta(max_length=MEMBER_LIMIT)]
Signatures = Annotated[tuple[Signature, ...], msgspec.Meta(max_length=MEMBER_LIMIT)]
SettingText = Annotated[str, msgspec.Meta(max_length=SETTING_LIMIT_CHARS)]

PROPOSE_DOMAIN = b"shoal/propose"
PREPARE_DOMAIN = b"shoal/prepare"
VOTE_DOMAIN = b"shoal/vote/2"
FIRST_VOTE_DOMAIN = b"shoal/vote"
"""Of 0.1.0, whose certificates had one step."""
VIEW_CHANGE_DOMAIN = b"shoal/view-change"
LEAVE_DOMAIN = b"shoal/leave"
REPORT_DOMAIN = b"shoal/report"
STATEMENT_DOMAIN = b"shoal/chunk-statement"
CONSENT_DOMAIN = b"shoal/rollback-consent"
REBASE_DOMAIN = b"shoal/rebase"
ENLIST_DOMAIN = b"shoal/enlist"


def domain_hash(domain: str, *parts: bytes) -> bytes:
    """BLAKE3-256 over the domain and the length-prefixed parts."""
    preimage = [b"shoal/", domain.encode(), b"\0"]
    for part in parts:
        preimage += len(part).to_bytes(8, "little"), part
    return blake3(b"".join(preimage)).digest()


class Message(wire.Message, frozen=True, kw_only=True, tag=str.lower):
    """Base of all tagged messages; the tag is the class name in lower case."""


class Term(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True, array_like=True):
    """Numbers of rebases and rollbacks of the swarm so far; compared in that order, before any height."""

    rebases: Count = 0
    rollbacks: Count = 0

    def __str__(self) -> str:
        return f"{self.rebases}.{self.rollbacks}"


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
    `life` is drawn by who says it, at random, when it begins the round: who was restarted has another. `seal` and
    `signature` are a contributor's, for third parties (commitments.py). `delegate`, of an observer where sites are
    together, is the member that has its contribution in its own, and from which it will have the finals (sites.py).
    """

    role: str
    state: Hash
    root: Hash
    squares: Annotated[tuple[Squares, ...], msgspec.Meta(max_length=CHUNK_LIMIT)]
    tokens: Annotated[int, msgspec.Meta(ge=0, le=WEIGHT_LIMIT)]
    upload: Count
    download: Count
    reaches: Peers
    life: Hash = NO_HASH
    seal: Hash = NO_HASH
    signature: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)] = b""
    delegate: Peer | msgspec.UnsetType = msgspec.UNSET


class Participant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One place in the plan's order. Weight zero: receives the finals, sends no contribution.

    `upload` and `download` are what it can be expected to move, in bytes/s; 0 is unknown. `life` is that of its Ready.
    """

    peer: Peer
    weight: Annotated[int, msgspec.Meta(ge=0, le=WEIGHT_LIMIT)]
    tokens: Annotated[int, msgspec.Meta(ge=0, le=WEIGHT_LIMIT)]
    root: Hash
    upload: Count = 0
    download: Count = 0
    life: Hash = NO_HASH


class ChunkResults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Some final chunks: bit c of `chunks` (little-endian) for chunk c; `results` their BLAKE3 hashes in chunk order.

    `place` is a participant's number: in a Held who signed them, in a plan from whom they are to be had.
    """

    place: Place
    chunks: Annotated[bytes, msgspec.Meta(max_length=CHUNK_LIMIT // 8)]
    results: Annotated[bytes, msgspec.Meta(max_length=CHUNK_LIMIT * HASH_BYTES)]

    def __post_init__(self) -> None:
        if int.from_bytes(self.chunks, "little").bit_count() * HASH_BYTES != len(self.results):
            raise ValueError("chunks without exactly one result each")

    @classmethod
    def of(cls, place: int, results: Mapping[int, bytes]) -> Self:
        """Pack a table of result hashes by chunk."""
        order = sorted(results)
        bits = sum(1 << chunk for chunk in order)
        return cls(place, bits.to_bytes((bits.bit_length() + 7) // 8, "little"), b"".join(results[c] for c in order))

    def by_chunk(self) -> dict[int, bytes]:
        """The result hash of each chunk."""
        bits = int.from_bytes(self.chunks, "little")
        order = [chunk for chunk in range(bits.bit_length()) if bits >> chunk & 1]
        return {chunk: self.results[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i, chunk in enumerate(order)}


class Relay(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Relay `via` for the frames between participants `one` and `other`, which cannot reach each other."""

    one: Place
    other: Place
    via: Place


class Delegated(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Participant `place`, of weight zero, takes the finals from participant `delegate`, of its own site."""

    place: Place
    delegate: Place


class OwnedRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Chunks `start` to `stop` (exclusive) are summed and signed by participant number `owner`."""

    owner: Place
    start: Count
    stop: Count


class Moved(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Signed claim of `peer`'s ViewChange: the view `prepared` of its highest prepare certificate, and the value there;
    -1 and NO_HASH if it has none.
    """

    peer: Peer
    prepared: Annotated[int, msgspec.Meta(ge=-1, lt=VIEW_LIMIT)]
    value: Hash
    signature: Signature


class Moves(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The ViewChanges of one quorum to a view, and the leaves that this quorum does not need."""

    changes: Annotated[tuple[Moved, ...], msgspec.Meta(max_length=MEMBER_LIMIT)]
    leaves: Peers = ()
    leave_signatures: Signatures = ()


class Plan(RoundMessage, frozen=True, kw_only=True, dict=True):
    """Plan of a round. Who takes part with which weight, and who owns which chunks.

    It is signed by its planner through the envelope.

    `attempt` counts re-plans within one view, each naming all those evicted so far in this round. A plan with an
    `origin` revises the one of that hash, or another revision of it: same participants in the same places, whoever
    was evicted since among them; what is final stands. `standing` names, by the participant to copy them from, the
    finals that stand although their owner may be gone. `clips`, only in a swarm that clips norms, has for every
    participant what its contribution is multiplied by in the sum, in 1/65536. `aggregate`, only where it is not the
    mean, says how contributions are combined. `moves`, in a later view than the first, shows that the view was entered.
    `delegated`, only where sites are together and somebody has a delegate, says who, by their places.
    """

    view: View
    attempt: Attempt
    planner: Peer
    participants: Annotated[tuple[Participant, ...], msgspec.Meta(min_length=1, max_length=MEMBER_LIMIT)]
    owners: Annotated[tuple[OwnedRange, ...], msgspec.Meta(max_length=CHUNK_LIMIT)]
    evicted: Peers = ()
    codec: str
    numel: Count
    chunk_values: Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
    origin: Hash = NO_HASH
    standing: Annotated[tuple[ChunkResults, ...], msgspec.Meta(max_length=MEMBER_LIMIT)] = ()
    relays: Annotated[tuple[Relay, ...], msgspec.Meta(max_length=RELAY_LIMIT)] = ()
    clips: Annotated[tuple[Clip, ...], msgspec.Meta(max_length=MEMBER_LIMIT)] | msgspec.UnsetType = msgspec.UNSET
    aggregate: Annotated[str, msgspec.Meta(max_length=AGGREGATE_LIMIT_CHARS)] | msgspec.UnsetType = msgspec.UNSET
    moves: Moves | msgspec.UnsetType = msgspec.UNSET
    delegated: (
        Annotated[tuple[Delegated, ...], msgspec.Meta(min_length=1, max_length=MEMBER_LIMIT)] | msgspec.UnsetType
    ) = msgspec.UNSET

    def __post_init__(self) -> None:
        if not isinstance(self.clips, msgspec.UnsetType) and len(self.clips) != len(self.participants):
            raise ValueError("clips of others than the participants")

    @cached_property
    def hash(self) -> bytes:
        """Hash that values and reports refer to: the plan, whichever quorum shows that its view was entered."""
        return domain_hash("plan", canonical(msgspec.structs.replace(self, moves=msgspec.UNSET)))

    @cached_property
    def delegates(self) -> Mapping[PeerId, PeerId]:
        """From whom those take the finals who have a delegate that is not evicted, by PeerId."""
        pairs = () if isinstance(self.delegated, msgspec.UnsetType) else self.delegated
        named = ((self.participants[one.place].peer, self.participants[one.delegate].peer) for one in pairs)
        return {peer: delegate for peer, delegate in named if delegate not in self.evicted}

    @cached_property
    def relayed(self) -> Mapping[tuple[PeerId, PeerId], PeerId]:
        """Through whom each pair is led that is relayed, the lower first: it is asked with every look at who stalls."""
        peers = [p.peer for p in self.participants] if self.relays else []
        ends = ((peers[r.one], peers[r.other], peers[r.via]) for r in self.relays)
        return {(min(one, other), max(one, other)): via for one, other, via in ends}

    @property
    def lineage(self) -> bytes:
        """The hash of the plan that all revisions have in common: what frames and chunk statements refer to."""
        return self.hash if self.origin == NO_HASH else self.origin

    @property
    def chunks(self) -> int:
        """Number of chunks on the grid."""
        return -(-self.numel // self.chunk_values)

    def clip(self, place: int) -> int:
        """Factor on the contribution of participant number `place` in the sum, in 1/65536."""
        return CLIP_UNIT if isinstance(self.clips, msgspec.UnsetType) else self.clips[place]

    def number(self, peer: PeerId) -> int | None:
        """The place of `peer` in the plan's order, None if it takes no part."""
        return next((i for i, p in enumerate(self.participants) if p.peer == peer), None)

    def contributors(self) -> tuple[int, ...]:
        """Places whose weight counts, in plan order, those of the evicted among them."""
        return tuple(i for i, p in enumerate(self.participants) if p.weight > 0)

    @cached_property
    def remaining(self) -> tuple[PeerId, ...]:
        """The participants that have not been evicted."""
        return tuple(p.peer for p in self.participants if p.peer not in self.evicted)


class ChunkStatement(Message, frozen=True, kw_only=True):
    """Signed statement of an owner about one reduced chunk: which participants are in it and what came out.

    `plan` is the lineage: an owner signs a chunk once, whatever revisions follow. `bitmap` has bit i (little-endian)
    set when participant i is included; `result` is BLAKE3 of the encoded chunk.
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
        """Check that the named owner signed it."""
        preimage = _statement_preimage(self.plan, self.chunk, self.bitmap, self.result)
        return verify(self.owner, STATEMENT_DOMAIN, preimage, self.signature)


def _statement_preimage(plan: bytes, chunk: int, bitmap: bytes, result: bytes) -> bytes:
    return canonical([plan, chunk, bitmap, result])


class Report(RoundMessage, frozen=True, kw_only=True):
    """The sender holds all finals of `plan` and computed this digest of S(e) from them.

    `tokens`: trained on by those whose contribution is in at least one chunk. `signature` is over all of it, for the
    value that makes a newcomer a member, and for a lead that has not heard it.
    """

    plan: Hash
    digest: Hash
    bitmaps: Hash
    tokens: Count = 0
    signature: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)] = b""


class Stalled(RoundMessage, frozen=True, kw_only=True):
    """Report to the lead, under one plan, of participants that do not send or take what they owe.

    `peers` owe the sender contributions, or have to take what it sends, and have not moved enough for the stall
    deadline. `late` are owners whose finals it misses; they may be waiting for somebody themselves, as the
    sender is if it is among them.
    """

    plan: Hash
    peers: Peers
    late: Peers = ()


class RelayedWay(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Report of a relay on what participant number `sender` sends `receiver` through it.

    Not `came`: for the stall deadline too little came of what the one owes the other. Not `taken`: the other took too
    little of what came. Both: all contributions came and were taken, and with `finals` all finals.
    """

    sender: Place
    receiver: Place
    came: bool
    taken: bool
    finals: bool


class Relayed(RoundMessage, frozen=True, kw_only=True):
    """Reports of the sender, a relay under `plan`, on ways between two participants of whom one accuses the other."""

    plan: Hash
    ways: Annotated[tuple[RelayedWay, ...], msgspec.Meta(max_length=2 * RELAY_LIMIT)]


class Evict(RoundMessage, frozen=True, kw_only=True):
    """The lead of `view` decided that a reduction goes on without `evicted`: close their lanes, then say what is held.

    `lineage` names the reduction, `attempt` the revised plan that is to come.
    """

    view: View
    attempt: Attempt
    lineage: Hash
    evicted: Peers
    moves: Moves | msgspec.UnsetType = msgspec.UNSET


class Held(RoundMessage, frozen=True, kw_only=True):
    """The sender takes nothing more from `evicted`, and holds these finals, by the place of who signed them.

    Those of owners that remain may be left out: they stand anyhow.
    """

    lineage: Hash
    evicted: Peers
    chunks: Annotated[tuple[ChunkResults, ...], msgspec.Meta(max_length=MEMBER_LIMIT)]


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Point that a rollback goes back to: `round` k of the chain and the hash of C(k)."""

    round: Count
    certificate: Hash


class Rollback(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Decision of a round to go back; `consenting` and `signatures` correspond, and are a quorum of its electorate."""

    target: Target
    consenting: Peers
    signatures: Signatures


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A setting of the manifest, as section.key, and what it becomes."""

    key: SettingText
    value: bool | Count | float | SettingText


class Amendment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Settings that take the place of those in force, sorted by key. `since` says of which (amending.py)."""

    since: Hash
    changes: Annotated[tuple[Change, ...], msgspec.Meta(min_length=1, max_length=CHANGE_LIMIT)]

    @property
    def hash(self) -> bytes:
        """Hash that consents and the authority sign."""
        return domain_hash("amendment", canonical(self))


class Amended(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Decision of a round to amend; `consenting` and `signatures` correspond, and are a quorum of its electorate."""

    amendment: Amendment
    consenting: Peers
    signatures: Signatures


class Ban(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Decision of a round to go on without `peer`; `evidence` is the digest of what proves why (evidence.py)."""

    peer: Peer
    evidence: Hash


class Enlisted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Wish of `peer` for a seat (enlisting.py), over `since`: the hash of the value on which it stood."""

    peer: Peer
    since: Hash
    signature: Signature


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """Decision of a round. The view is not in it: one value certified in two views is one certificate.

    `members` are those whose work counts in the next round, sorted, who vote in it where no voters are named; `leaves`
    the leaves counted in its quorum, sorted.
    `bitmaps` is the root over the per-chunk contributor bitmaps; `tokens` the sum over those in at least one chunk.
    `leave_signatures` has the promise of each of the leaves; `report_signatures`, for each of the members that was none
    before, in order, what it signed as its Report of this result.

    With a `rollback` the round has no result: plan and bitmaps are NO_HASH, tokens 0, and `digest` is that of S(k),
    on which the next term stands. With `amended`, which a result may have, other settings are in force from the next
    round on. With `bans`, which a result may have too, these peers are members of no later round as long as the ban
    lasts. With `counted`, in a swarm of few seats (seats.py), it names whose contribution is in at least one chunk,
    sorted. With `enlisted`, where who has no seat waits outside (enlisting.py), these peers stand in the line from here
    on, sorted. Without them the fields are left out of the encoding.
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
    rollback: Rollback | msgspec.UnsetType = msgspec.UNSET
    amended: Amended | msgspec.UnsetType = msgspec.UNSET
    bans: Annotated[tuple[Ban, ...], msgspec.Meta(min_length=1, max_length=MEMBER_LIMIT)] | msgspec.UnsetType = (
        msgspec.UNSET
    )
    counted: Annotated[tuple[Peer, ...], msgspec.Meta(min_length=1, max_length=MEMBER_LIMIT)] | msgspec.UnsetType = (
        msgspec.UNSET
    )
    leave_signatures: Signatures | msgspec.UnsetType = msgspec.UNSET
    report_signatures: Signatures | msgspec.UnsetType = msgspec.UNSET
    enlisted: (
        Annotated[tuple[Enlisted, ...], msgspec.Meta(min_length=1, max_length=ENLISTED_LIMIT)] | msgspec.UnsetType
    ) = msgspec.UNSET

    @cached_property
    def hash(self) -> bytes:
        """H(C(e)): the hash of the value only."""
        return domain_hash("value", canonical(self))

    @property
    def state_round(self) -> int:
        """The round whose state stands after this value: its own, or the one that it goes back to."""
        return self.rollback.target.round if self.rollback else self.round

    @property
    def next_round(self) -> int:
        """The round that comes after this value in the chain."""
        return self.state_round + 1

    @property
    def next_term(self) -> Term:
        """The term of the round that comes after."""
        return Term(self.term.rebases, self.term.rollbacks + 1) if self.rollback else self.term


class Prepared(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A prepare certificate: a quorum's Prepares of one value in one view; `signers` and `signatures` correspond."""

    view: View
    signers: Peers
    signatures: Signatures


class PreparedValue(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A value in full with its prepare certificate: what a view change carries forward."""

    value: Value
    prepared: Prepared


class Propose(RoundMessage, frozen=True, kw_only=True):
    """The lead of `view` proposes `value`, once per view; `signature` is over (view, value hash).

    In a later view than the first, `moves` are the ViewChanges of a quorum, and `prepared` is the highest prepare
    certificate among them, if there is one: then `value` is the one that it is of.
    """

    view: View
    value: Value
    signature: Signature
    moves: Moves | msgspec.UnsetType = msgspec.UNSET
    prepared: Prepared | msgspec.UnsetType = msgspec.UNSET


class Prepare(RoundMessage, frozen=True, kw_only=True):
    """A member accepts what the lead of `view` proposed; `signature` is over (view, value hash)."""

    view: View
    value: Hash
    signature: Signature


class Vote(RoundMessage, frozen=True, kw_only=True):
    """The vote of a member that has the prepare certificate of (view, value), over which `signature` is.

    It goes into the certificate of the round.
    """

    view: View
    value: Hash
    signature: Signature


class ViewChange(RoundMessage, frozen=True, kw_only=True):
    """The sender moved to `view` and signs nothing below it any more; carries its highest prepare certificate.

    `signature` is over the view and what a `Moved` says of it. `report` is that of its finals; `left_out` and
    `left_out_signatures` are those who signed the same Report and were left out of a proposal that the sender refused.
    """

    view: View
    prepared: PreparedValue | None = None
    signature: Signature
    report: Report | None = None
    left_out: Peers = ()
    left_out_signatures: Signatures = ()


class Leave(RoundMessage, frozen=True, kw_only=True):
    """A durable promise to sign nothing in `round` and after it; `signature` is over `base`, which names the round.

    So the next certificate does not list the sender, and it is no member of later rounds either until it joins anew.
    """

    signature: Signature


class Consent(RoundMessage, frozen=True, kw_only=True):
    """The sender wants round `round` to decide on going back to `target`; binds it to nothing.

    `asked`: its own user ordered it; otherwise it agrees with others, by its user's policy.
    """

    target: Target
    asked: bool
    signature: Signature


class Enlist(Message, frozen=True, kw_only=True):
    """A peer that follows and trains wants a seat; who hears it passes it on to the voters."""

    wish: Enlisted


class Certificate(Message, frozen=True, kw_only=True):
    """A decided value with a quorum of signatures, all from one view; `signers` and `signatures` correspond."""

    value: Value
    view: View
    signers: Peers
    signatures: Signatures


class Rebase(Message, frozen=True, kw_only=True):
    """Order of the authority: the chain goes on from C(k) in another term, with another electorate.

    `value` stands for C(k) in that term: its round and digest are those of the state after C(k), its base is H(C(k)),
    its members are the electorate of the round that follows.
    """

    value: Value
    signature: Signature


Entry = Certificate | Rebase
"""Entry of a chain."""


def step_preimage(view: int, value_hash: bytes) -> bytes:
    """Return the bytes that a Propose, a Prepare and a Vote sign, each in a domain of its own."""
    return canonical([view, value_hash])


def move_preimage(base: bytes, view: int, prepared: int, value_hash: bytes) -> bytes:
    """Return the bytes that a ViewChange signs; `base`, the hash of C(e-1), names swarm, term and round."""
    return canonical([base, view, prepared, value_hash])


def report_preimage(base: bytes, plan: bytes, digest: bytes, bitmaps: bytes, tokens: int) -> bytes:
    """Return the bytes that a Report signs; `base`, the hash of C(e-1), names swarm, term and round."""
    return canonical([base, plan, digest, bitmaps, tokens])


def consent_preimage(base: bytes, target: Target) -> bytes:
    """Return the bytes that a consent signs; `base`, the hash of C(e-1), names term and round."""
    return canonical([base, target.round, target.certificate])
