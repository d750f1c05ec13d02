"""Messages of audits between nodes: evidence, owners' statements, and contributors' signed commitments.

One request and one answer on a stream of /shoal/audit/1. What is longer than a part is asked for part by part.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.protocol.commitments import Commitment
from shoal.protocol.messages import MEMBER_LIMIT, Count, Hash, Message, Peer, Place, Signature, Term
from shoal.protocol.peering import Refusal

AUDIT_PROTOCOL = "/shoal/audit/1"
PART_LIMIT_BYTES = 1 << 19  # of what is asked for in parts
CHARGES_LIMIT = 256
STATEMENTS_LIMIT = 2048
"""Of one answer."""
COMMITMENTS_LIMIT = 4 * MEMBER_LIMIT


class Charge(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Charge by a piece of evidence that `peer` did something in that term and round."""

    digest: Hash
    peer: Peer
    term: Term
    round: Count


class EvidenceHeld(Message, frozen=True, kw_only=True):
    """The sender holds evidence of these charges, and verified it. The answer is its counterpart."""

    charges: Annotated[tuple[Charge, ...], msgspec.Meta(max_length=CHARGES_LIMIT)]


class GetEvidence(Message, frozen=True, kw_only=True):
    """Asks for the bytes of a piece of evidence from `offset` on."""

    digest: Hash
    offset: Count = 0


class GetStatements(Message, frozen=True, kw_only=True):
    """Asks for what the owners stated about the chunks of a plan, from chunk `first` on."""

    plan: Hash
    first: Count = 0


class GetCommitments(Message, frozen=True, kw_only=True):
    """Asks for what contributors committed to in the round after that value, as the one asked heard it."""

    base: Hash


class Commitments(Message, frozen=True, kw_only=True):
    """Signed commitments of contributors, one for each of a contributor's lives."""

    commitments: Annotated[tuple[Commitment, ...], msgspec.Meta(max_length=COMMITMENTS_LIMIT)]


class Part(Message, frozen=True, kw_only=True):
    """Some of `total` bytes, from the offset that was asked for."""

    total: Count
    data: Annotated[bytes, msgspec.Meta(max_length=PART_LIMIT_BYTES)]


class Stated(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Statement of participant number `owner` about a chunk."""

    owner: Place
    bitmap: Annotated[bytes, msgspec.Meta(max_length=MEMBER_LIMIT // 8)]
    result: Hash
    signature: Signature


class StatementsPart(Message, frozen=True, kw_only=True):
    """Statements about consecutive chunks, in order, from the one that was asked for."""

    statements: Annotated[tuple[Stated, ...], msgspec.Meta(max_length=STATEMENTS_LIMIT)]


AuditRequest = EvidenceHeld | GetEvidence | GetStatements | GetCommitments
AuditAnswer = EvidenceHeld | Part | StatementsPart | Commitments | Refusal
