"""Messages between two peers outside a round: hello, signs of life, requests for certificates and state."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.protocol.amending import AmendConsent
from shoal.protocol.gossip_messages import AskStanding, Decline, Offer, Standing, Taken, Withdraw
from shoal.protocol.invites import Revocations
from shoal.protocol.messages import (
    Certificate,
    Consent,
    Count,
    Entry,
    Evict,
    Hash,
    Held,
    Leave,
    Message,
    Peer,
    Peers,
    Plan,
    Prepare,
    Propose,
    Ready,
    Rebase,
    Relayed,
    Report,
    Stalled,
    ViewChange,
    Vote,
)

RECORDS_IN_WELCOME_LIMIT = 64  # records of others in a Welcome
RECORD_LIMIT_BYTES = 16 * 1024
CERTIFICATES_IN_ANSWER_LIMIT = 64
"""Entries of the chain in one answer."""
REASON_LIMIT_CHARS = 300

Nonce = Count
RecordBytes = Annotated[bytes, msgspec.Meta(max_length=RECORD_LIMIT_BYTES)]
_PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*\Z"
"""A stranger's words go to the user's terminal: no control characters."""
Reason = Annotated[str, msgspec.Meta(max_length=REASON_LIMIT_CHARS, pattern=_PRINTABLE)]
Software = Annotated[str, msgspec.Meta(max_length=64, pattern=_PRINTABLE)]


class Hello(Message, frozen=True, kw_only=True):
    """The first words on a connection, sent by whoever dialled. `record` is the sender's sealed NodeRecord."""

    wire: Count
    swarm: Hash
    software: Software
    record: RecordBytes


class Welcome(Message, frozen=True, kw_only=True):
    """Admitted: the answerer's sealed NodeRecord, and those of others it knows.

    With an empty `record` the asker is not admitted: `others` has a record of its own key that is of a later life.
    """

    record: RecordBytes
    others: Annotated[tuple[RecordBytes, ...], msgspec.Meta(max_length=RECORDS_IN_WELCOME_LIMIT)]


class AskNewest(Message, frozen=True, kw_only=True):
    """Request for the newest record of the key that signed this one, by who is not let through to say hello."""

    record: RecordBytes


class Newest(Message, frozen=True, kw_only=True):
    """The newest record of that key, sealed; empty if none is known."""

    record: RecordBytes


class Refusal(Message, frozen=True, kw_only=True):
    """Not admitted, or not to be had; `reason` is for the other's user to read."""

    reason: Reason


class Full(Message, frozen=True, kw_only=True):
    """Welcome, were there a place left; `others` are records of peers to try meanwhile, as in a Welcome."""

    others: Annotated[tuple[RecordBytes, ...], msgspec.Meta(max_length=RECORDS_IN_WELCOME_LIMIT)]


HelloAnswer = Welcome | Refusal | Full


class Ping(Message, frozen=True, kw_only=True):
    """Are you there? `incarnation` is the sender's own."""

    nonce: Nonce
    incarnation: Count


class Ack(Message, frozen=True, kw_only=True):
    """Here I am; or, when `about` is set, that peer answered the ping you asked me to send."""

    nonce: Nonce
    incarnation: Count
    about: Peer | None = None


class PingRequest(Message, frozen=True, kw_only=True):
    """Please ping `target` for me."""

    target: Peer
    nonce: Nonce


class Nack(Message, frozen=True, kw_only=True):
    """You asked me to ping `target`: I cannot reach it either."""

    target: Peer
    nonce: Nonce


class Reach(Message, frozen=True, kw_only=True):
    """The live peers that the sender does not reach itself; replaces what it said before.

    Whoever is linked to both of such a pair may pass on what the one broadcasts to the other.
    """

    lacks: Peers


class Suspicion(Message, frozen=True, kw_only=True):
    """The sender hears nothing of `peer` in this incarnation; it may refute."""

    peer: Peer
    incarnation: Count


SignOfLife = Ping | Ack | PingRequest | Nack | Reach | Suspicion
"""Messages that show that a peer lives; who says nothing else counts as silent."""


class GetManifest(Message, frozen=True, kw_only=True):
    """Asks for the manifest of a swarm, before any hello."""

    swarm: Hash


class ManifestAnswer(Message, frozen=True, kw_only=True):
    """The agreed sections in their one encoding, to be checked against the SwarmId."""

    manifest: bytes


ManifestReply = ManifestAnswer | Refusal


class Announce(Message, frozen=True, kw_only=True):
    """The sender's own record, said to its neighbours directly: gossip may take its time."""

    record: RecordBytes


SwarmMessage = (
    Ready
    | Plan
    | Report
    | Stalled
    | Relayed
    | Evict
    | Held
    | Propose
    | Prepare
    | Vote
    | ViewChange
    | Leave
    | Consent
    | AmendConsent
    | Certificate
    | Rebase
)
"""Messages that are said to everyone, and hold whoever passes them on."""

LinkMessage = (
    SwarmMessage | SignOfLife | Announce | Revocations | Offer | Decline | Withdraw | Taken | AskStanding | Standing
)
"""Everything that travels on a message link between members."""


class GetChain(Message, frozen=True, kw_only=True):
    """Asks for the entries of the chain after the first `after`, or after those that a rebase left standing of which
    the asker, who knows of `rebases`, has not heard."""

    after: Count
    rebases: Count = 0


class ChainPart(Message, frozen=True, kw_only=True):
    """Entries in order; empty when there are none newer. `head` is how many the answerer has in all."""

    certificates: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=CERTIFICATES_IN_ANSWER_LIMIT)]
    head: Count


class GetHeader(Message, frozen=True, kw_only=True):
    """Asks for the header of the state of `round`."""

    round: Count


class HeaderAnswer(Message, frozen=True, kw_only=True):
    """An encoded state header (collectives.state), to be checked against the certificate's digest."""

    header: Annotated[bytes, msgspec.Meta(max_length=1 << 21)]


class GetFinals(Message, frozen=True, kw_only=True):
    """Asks for a plan whose finals the answerer holds."""

    plan: Hash


class FinalsAnswer(Message, frozen=True, kw_only=True):
    """The plan in full; its finals, which carry their owners' signatures, are then fetched over a lane."""

    plan: Plan


class GetImage(Message, frozen=True, kw_only=True):
    """Asks for the header of the image of the state with this digest, and for how long changes are since another."""

    state: Hash
    since: Hash


class ImageAnswer(Message, frozen=True, kw_only=True):
    """An encoded header of an image (collectives.state), to be checked against the certified digest.

    changes: bytes of the changes of each chunk since the state that was named, as u4, little-endian; none where that
    is not held. They, and the image, are then fetched over a lane.
    """

    header: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    changes: Annotated[bytes, msgspec.Meta(max_length=1 << 18)]


class LookAtChain(Message, frozen=True, kw_only=True):
    """Asks for the same without a hello, under a key made for that: `record` is of who may join and would like to."""

    record: RecordBytes
    after: Count
    rebases: Count = 0


LookAnswer = ChainPart | Refusal

FetchRequest = GetChain | GetHeader | GetFinals
FetchAnswer = ChainPart | HeaderAnswer | FinalsAnswer | Refusal
