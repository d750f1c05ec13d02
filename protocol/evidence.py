"""Evidence: signed statements that a node which follows the rules cannot have made. Anyone who has it can check it.

    double vote            two votes of one member in one view of one round; or two Prepares, or proposals
    hidden prepare         a view change that hides the prepare certificate that its sender voted by
    broken leave           anything else of agreement that somebody signed in a round that it promised to leave
    double result          two statements of one owner about one chunk of one plan
    double commitment      two contributions, or norms of one, that a node announced in one life of one round
    copied commitment      a root whose seal shows that who signed it did not know what is under it
    unsound contribution   bytes under a signed root that do not decode, or have not the sum of squares that was signed
    wrong sum              a signed result that is not what the plan makes of the contributions that its bitmap names

Each holds `base`, the value of C(e-1), whose hash is in everything that was signed. It names the swarm and the round,
so nothing but the manifest is needed to check one, and none serves in another swarm. What the signatures say is checked
here; what takes decoding and adding up is in collectives/proofs.py.

    evidence = u32 (little-endian) length of header ‖ header (canonical, tagged) ‖ attachment (contributed payloads)

There is one encoding of a header, and its name is `digest_of`. Nobody needs to sign the whole: what counts in it is
signed by the accused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self

import msgspec

from shoal.protocol.bans import Moment
from shoal.protocol.certificate import verify_leave, verify_step
from shoal.protocol.commitments import Commitment
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import SIGNATURE_BYTES, PeerId
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import (
    CHUNK_LIMIT,
    PREPARE_DOMAIN,
    PROPOSE_DOMAIN,
    VOTE_DOMAIN,
    ChunkStatement,
    Count,
    Hash,
    Message,
    Moved,
    Peer,
    Plan,
    Signature,
    Squares,
    Value,
    View,
    domain_hash,
)
from shoal.protocol.planning import RoundSettings, split_codec
from shoal.protocol.view_change import verify_move
from shoal.protocol.wire import canonical, decode

HEADER_LIMIT_BYTES = 1 << 20
EVIDENCE_LIMIT_BYTES = 1 << 27
"""Of one piece: 64 contributions to a chunk of 2 MiB each."""
STEP_LIMIT_CHARS = 16
_LENGTH_BYTES = 4


class _About(Message, frozen=True, kw_only=True):
    """`base`: the value of C(e-1), of the round e in which it was done."""

    base: Value

    @property
    def done(self) -> Moment:
        """The term and round in which it was done."""
        return self.base.next_term, self.base.next_round


STEPS = {"propose": PROPOSE_DOMAIN, "prepare": PREPARE_DOMAIN, "vote": VOTE_DOMAIN}
"""Domains of the steps that a member may sign once in a view."""


class DoubleVote(_About, frozen=True, kw_only=True):
    """`peer` voted for both `values` in `view`, or prepared or proposed both; the lower hash first."""

    peer: Peer
    view: View
    values: tuple[Value, Value]
    signatures: tuple[Signature, Signature]
    step: Annotated[str, msgspec.Meta(max_length=STEP_LIMIT_CHARS)] = "vote"

    @property
    def accused(self) -> PeerId:
        """The peer that cast both votes."""
        return self.peer

    def check_words(self) -> None:
        """Raises RemoteError unless both are votes in one view of the round after `base`, for two values."""
        first, second = self.values
        if self.step not in STEPS:
            raise RemoteError("a step that there is not")
        if not first.hash < second.hash:
            raise RemoteError("votes for one value, or in another order")
        for value, signature in zip(self.values, self.signatures, strict=True):
            if (value.base, value.swarm) != (self.base.hash, self.base.swarm):
                raise RemoteError("a vote in another round")
            if not verify_step(STEPS[self.step], self.peer, self.view, value.hash, signature):
                raise RemoteError("a vote that the accused did not sign")


class HiddenPrepare(_About, frozen=True, kw_only=True):
    """Vote in `view`, by a prepare certificate, which its voter hid in its ViewChange to `later`."""

    view: View
    value: Value
    vote: Signature
    later: View
    move: Moved

    @property
    def accused(self) -> PeerId:
        """The voter whose ViewChange hid the higher prepare certificate."""
        return self.move.peer

    def check_words(self) -> None:
        """Raises RemoteError unless the accused signed both, in the round after `base`."""
        if (self.value.base, self.value.swarm) != (self.base.hash, self.base.swarm):
            raise RemoteError("a vote in another round")
        if not self.move.prepared < self.view < self.later:
            raise RemoteError("a view change that hides nothing")
        if not verify_step(VOTE_DOMAIN, self.accused, self.view, self.value.hash, self.vote):
            raise RemoteError("a vote that the accused did not sign")
        if not verify_move(self.base.hash, self.later, self.move):
            raise RemoteError("a view change that the accused did not sign")


class BrokenLeave(_About, frozen=True, kw_only=True):
    """`peer` promised to sign nothing in the round, and signed something in `view`: a step for `value`, or a `move`."""

    peer: Peer
    leave: Signature
    view: View
    step: Annotated[str, msgspec.Meta(max_length=STEP_LIMIT_CHARS)] = ""
    value: Value | None = None
    signature: Annotated[bytes, msgspec.Meta(max_length=SIGNATURE_BYTES)] = b""
    move: Moved | None = None

    @property
    def accused(self) -> PeerId:
        """The peer that promised to leave and signed all the same."""
        return self.peer

    def check_words(self) -> None:
        """Raises RemoteError unless the accused signed both, in the round after `base`."""
        if not verify_leave(self.peer, self.base.hash, self.leave):
            raise RemoteError("a leave that the accused did not sign")
        if self.move is not None:
            if self.value is not None or self.step or self.signature or self.move.peer != self.peer:
                raise RemoteError("a view change of another, or beside something else")
            if not verify_move(self.base.hash, self.view, self.move):
                raise RemoteError("a view change that the accused did not sign")
            return
        if self.value is None or (self.value.base, self.value.swarm) != (self.base.hash, self.base.swarm):
            raise RemoteError("a vote in another round")
        if self.step not in STEPS:
            raise RemoteError("a step that there is not")
        if not verify_step(STEPS[self.step], self.peer, self.view, self.value.hash, self.signature):
            raise RemoteError("a vote that the accused did not sign")


class DoubleResult(_About, frozen=True, kw_only=True):
    """An owner stated two things about one chunk of `plan`, the plan that began the reduction."""

    plan: Plan
    statements: tuple[ChunkStatement, ChunkStatement]

    @property
    def accused(self) -> PeerId:
        """The owner that stated two results of one chunk."""
        return self.statements[0].owner

    def check_words(self) -> None:
        """Raises RemoteError unless both are of one owner about one chunk, and differ."""
        first, second = self.statements
        if (first.owner, first.chunk) != (second.owner, second.chunk):
            raise RemoteError("statements of two owners, or about two chunks")
        if not (first.result, first.bitmap) < (second.result, second.bitmap):
            raise RemoteError("statements that agree, or in another order")
        for statement in self.statements:
            _check_statement(statement, self.plan, self.base)


def _announced(commitment: Commitment) -> tuple[bytes, bytes, bytes]:
    """Return what a node may announce only once in a life: root, seal and hash of its squares."""
    return commitment.root, commitment.seal, commitment.squares


class DoubleCommitment(_About, frozen=True, kw_only=True):
    """A node announced two contributions in one life, or two norms of one; ordered by root, seal and squares."""

    commitments: tuple[Commitment, Commitment]

    @classmethod
    def of(cls, base: Value, one: Commitment, other: Commitment) -> Self | None:
        """Return the evidence in two commitments of one node in one life; None if they agree."""
        first, second = sorted((one, other), key=_announced)
        return cls(base=base, commitments=(first, second)) if _announced(first) < _announced(second) else None

    @property
    def accused(self) -> PeerId:
        """The contributor that signed both commitments."""
        return self.commitments[0].peer

    def check_words(self) -> None:
        """Raises RemoteError unless one node signed both in one life."""
        first, second = self.commitments
        if (first.peer, first.life) != (second.peer, second.life):
            raise RemoteError("commitments of two nodes, or of one that was restarted")
        if not _announced(first) < _announced(second):
            raise RemoteError("commitments that agree, or in another order")
        for commitment in self.commitments:
            _check_commitment(commitment, self.base)


class CopiedCommitment(_About, frozen=True, kw_only=True):
    """A node committed to a root, and not to the `top` under it: it took the root from somebody else."""

    commitment: Commitment
    top: Hash

    @property
    def accused(self) -> PeerId:
        """The contributor that committed to another's root."""
        return self.commitment.peer

    def check_words(self) -> None:
        """Raises RemoteError unless the accused signed it; whether the seal is wrong is checked elsewhere."""
        _check_commitment(self.commitment, self.base)


class UnsoundContribution(_About, frozen=True, kw_only=True):
    """A node committed to bytes that no encoder makes; the attachment is the payload of `chunk`.

    squares: what it told per chunk; may be empty where the bytes do not decode.
    """

    commitment: Commitment
    chunk: Count
    squares: Annotated[tuple[Squares, ...], msgspec.Meta(max_length=CHUNK_LIMIT)] = ()

    @property
    def accused(self) -> PeerId:
        """The contributor that committed to the chunk."""
        return self.commitment.peer

    def check_words(self) -> None:
        """Raises RemoteError unless the accused signed it; the bytes are checked elsewhere."""
        _check_commitment(self.commitment, self.base)


class WrongSum(_About, frozen=True, kw_only=True):
    """An owner signed a result that is none; the attachment has the payloads of the bitmap's contributors in order."""

    plan: Plan
    statement: ChunkStatement

    @property
    def accused(self) -> PeerId:
        """The owner that stated the wrong sum."""
        return self.statement.owner

    def check_words(self) -> None:
        """Raises RemoteError unless the accused signed it; the sum is checked elsewhere."""
        _check_statement(self.statement, self.plan, self.base)


Evidence = (
    DoubleVote
    | HiddenPrepare
    | BrokenLeave
    | DoubleResult
    | DoubleCommitment
    | CopiedCommitment
    | UnsoundContribution
    | WrongSum
)


def _check_statement(statement: ChunkStatement, plan: Plan, base: Value) -> None:
    if (plan.base, statement.plan) != (base.hash, plan.hash) or plan.lineage != plan.hash:
        raise RemoteError("a statement about another plan")
    if statement.chunk >= plan.chunks:
        raise RemoteError("a statement about a chunk that there is not")
    if not statement.valid():
        raise RemoteError("a statement that the accused did not sign")


def _check_commitment(commitment: Commitment, base: Value) -> None:
    if commitment.base != base.hash:
        raise RemoteError("a commitment in another round")
    if not commitment.valid():
        raise RemoteError("a commitment that the accused did not sign")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Finding that a piece of evidence proves: who did what, in which term and round. digest: its name."""

    digest: bytes
    kind: str
    accused: PeerId
    done: Moment


def digest_of(data: bytes | memoryview) -> bytes:
    """The name of a piece of evidence."""
    return domain_hash("evidence", bytes(data))


def pack(evidence: Evidence, attachment: bytes = b"") -> bytes:
    """The bytes of a piece of evidence."""
    header = canonical(evidence)
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header + attachment


def unpack(data: bytes) -> tuple[Evidence, memoryview]:
    """The header and the attachment of a piece of evidence; nothing that it says is checked.

    Raises RemoteError for bytes that are none.
    """
    if len(data) > EVIDENCE_LIMIT_BYTES:
        raise RemoteError(f"evidence of {len(data)} bytes; the limit is {EVIDENCE_LIMIT_BYTES}")
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if not 0 < length <= min(HEADER_LIMIT_BYTES, len(data) - _LENGTH_BYTES):
        raise RemoteError("evidence without a header")
    end = _LENGTH_BYTES + length
    header = bytes(data[_LENGTH_BYTES:end])
    evidence: Evidence = decode(header, Evidence, limit_bytes=HEADER_LIMIT_BYTES)  # type: ignore[arg-type]
    if canonical(evidence) != header:
        raise RemoteError("evidence in another encoding than its one")
    return evidence, memoryview(data)[end:]


def fits(evidence: Evidence, manifest: Manifest, shape: tuple[int, int] | None) -> bool:
    """True if the vectors in it have the codec and the grid of its round: those of others were in no plan.

    manifest: the settings in force in that round. shape: the number of values and the chunks of buffers that a vector
    had in it; None where that is not known, and the two are taken for what the evidence says.
    """
    for one in _vectors(evidence):
        settings = RoundSettings.of(manifest, *(shape or (one.numel, split_codec(one.codec)[1])))
        if (one.codec, one.numel, one.chunk_values) != (settings.codec, settings.numel, settings.chunk_values):
            return False
    return True


def _vectors(evidence: Evidence) -> tuple[Plan | Commitment, ...]:
    if isinstance(evidence, DoubleResult | WrongSum):
        return (evidence.plan,)
    if isinstance(evidence, CopiedCommitment | UnsoundContribution):
        return (evidence.commitment,)
    return evidence.commitments if isinstance(evidence, DoubleCommitment) else ()


def describe(kind: str) -> str:
    """The kind of a piece of evidence in words."""
    return {
        "doublevote": "two votes in one view, or two prepares or proposals",
        "hiddenprepare": "a view change that hides what its sender voted for",
        "brokenleave": "a signature in a round that its sender promised to leave",
        "doubleresult": "two results for one chunk of one plan",
        "doublecommitment": "two contributions, or two norms of one, in one life of one round",
        "copiedcommitment": "a commitment copied from another",
        "unsoundcontribution": "a contribution that does not decode, or has another norm than was signed",
        "wrongsum": "a result that is not what the contributions come to",
    }[kind]
