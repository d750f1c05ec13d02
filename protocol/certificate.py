"""Certificates: the cost of a leave, and the checks by which a decided value holds after the one before it.

The hash of a certificate is the hash of its value alone, so certificates of one value that differ in view or
signers are the same certificate. C(e-1) and the manifest fix everything about round e that must not move: its
electorate, the order of its leads, and whose vote breaks a tie (voting.py). Source: docs/agreement.md.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from functools import lru_cache

import msgspec

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import SIGNATURE_BYTES, PeerId, verify
from shoal.protocol.messages import (
    FIRST_VOTE_DOMAIN,
    LEAVE_DOMAIN,
    NO_HASH,
    REPORT_DOMAIN,
    VOTE_DOMAIN,
    Certificate,
    Report,
    Term,
    Value,
    report_preimage,
    step_preimage,
)
from shoal.protocol.voting import CONTRIBUTORS, Voting, is_quorum, lead_order


def genesis(swarm_id: bytes, founders: Sequence[PeerId]) -> Value:
    """C(0): nothing decided yet; the electorate of round 1 is the founders named in the manifest."""
    return Value(
        swarm=swarm_id,
        term=Term(),
        round=0,
        base=NO_HASH,
        plan=NO_HASH,
        planner=founders[0],
        members=tuple(sorted(founders)),
        bitmaps=NO_HASH,
        tokens=0,
        digest=NO_HASH,
    )


class LeaveCost(enum.Enum):
    """Consequence for those who stay of a member's going in the middle of a round."""

    FREE = enum.auto()
    """They go on without it, or could not with it either, or nobody stays."""
    PROMISE = enum.auto()
    """They go on once its leave is counted."""
    NEEDED = enum.auto()
    """They go on only with it."""


def leave_cost(
    previous: Value,
    me: PeerId,
    alive: Collection[PeerId],
    leaves: Collection[PeerId],
    leaving: Collection[PeerId] = (),
    *,
    voting: Voting = CONTRIBUTORS,
) -> LeaveCost:
    """Work out what the going of `me` means for those who stay, while those in `leaving` are about to go as well.

    Where they can go on, a promise is of no use, the next certificate drops who is gone; and it would do harm: who
    comes back in the same round could not vote. Nor may all promise, or nobody could ever vote again: the first in the
    order of leads, the last planner aside, never does. Everyone counts it as living, itself at least, so this holds
    whatever each has heard of the others.
    """
    living = [peer for peer in lead_order(previous, voting=voting) if peer in alive and peer not in leaves]
    going = {me, *leaving}.intersection(living)
    staying = set(living) - going
    if me not in going or not staying or is_quorum(previous, staying, leaves, voting=voting):
        return LeaveCost.FREE
    if not is_quorum(previous, living, leaves, voting=voting):
        return LeaveCost.FREE
    spared = next((peer for peer in living if peer != previous.planner), me)
    promising = going - {spared}
    enough = is_quorum(previous, staying, {*leaves, *promising}, voting=voting)
    return LeaveCost.PROMISE if me in promising and enough else LeaveCost.NEEDED


def follows(value: Value, previous: Value, *, voting: Voting = CONTRIBUTORS) -> bool:
    """True if `value` may come right after `previous` in a chain, as far as these two tell."""
    return (
        value.swarm == previous.swarm
        and value.term == previous.next_term
        and value.round == previous.next_round
        and value.base == previous.hash
        and set(value.leaves) <= set(voting.may_leave(previous))
        and list(value.leaves) == sorted(set(value.leaves))
        and list(value.members) == sorted(set(value.members))
        and not set(value.leaves).intersection(value.members)
        and (not value.rollback or _goes_back(value, previous, voting))
    )


def newcomers(value: Value, previous: Value) -> tuple[PeerId, ...]:
    """The members after `value` that were none before it, in order."""
    return tuple(peer for peer in value.members if peer not in previous.members)


@lru_cache(maxsize=256)
def has_proofs(value: Value, previous: Value, *, voting: Voting = CONTRIBUTORS) -> bool:
    """Check that each leave and each new member in `value` has its own signature, and enough voters are members.

    Voters of B(e) that are members, and those that `value` bans, are a quorum of B(e) less the leaves.
    """
    leaves, joined = _given(value.leave_signatures), _given(value.report_signatures)
    new = newcomers(value, previous)
    if len(leaves) != len(value.leaves) or len(joined) != len(new):
        return False
    report = report_preimage(value.base, value.plan, value.digest, value.bitmaps, value.tokens)
    banned = () if isinstance(value.bans, msgspec.UnsetType) else (ban.peer for ban in value.bans)
    return (
        is_quorum(previous, {*value.members, *banned}, value.leaves, voting=voting)
        and all(verify_leave(peer, value.base, one) for peer, one in zip(value.leaves, leaves, strict=True))
        and all(verify(peer, REPORT_DOMAIN, report, one) for peer, one in zip(new, joined, strict=True))
    )


def _given(signatures: tuple[bytes, ...] | msgspec.UnsetType) -> tuple[bytes, ...]:
    return () if isinstance(signatures, msgspec.UnsetType) else signatures


def _goes_back(value: Value, previous: Value, voting: Voting) -> bool:
    """True if a rollback has no result of its own, goes back to a round before it, and keeps the members."""
    assert value.rollback
    return (
        (value.plan, value.bitmaps, value.tokens) == (NO_HASH, NO_HASH, 0)
        and value.rollback.target.round <= previous.state_round
        and value.planner in voting.electorate(previous)
        and set(value.members) == set(previous.members) - set(value.leaves)
    )


def check_certificate(
    certificate: Certificate, previous: Value, *, trusted: bool = False, voting: Voting = CONTRIBUTORS
) -> None:
    """Check one certificate against the value before it.

    trusted: it is from this node's own disk, or beneath the checkpoint of a link, and may be one of 0.1.0, whose votes
    had one step, and whose leaves and new members were not proven.

    Raises RemoteError naming what is wrong.
    """
    value = certificate.value
    if not follows(value, previous, voting=voting):
        raise RemoteError(f"the certificate of round {value.round} does not follow round {previous.round}")
    if len(certificate.signers) != len(certificate.signatures):
        raise RemoteError(f"the certificate of round {value.round} has signers without signatures")
    if len(set(certificate.signers)) != len(certificate.signers):
        raise RemoteError(f"the certificate of round {value.round} counts a signer twice")
    # Whatever anybody can make costs little: signatures of others than voters, or without a quorum, are not looked at.
    if not is_quorum(previous, certificate.signers, value.leaves, voting=voting):
        raise RemoteError(f"the certificate of round {value.round} has no quorum")
    if not trusted and not set(certificate.signers) <= set(voting.electorate(previous)):
        raise RemoteError(f"the certificate of round {value.round} is signed by who has no vote")
    first_edition = trusted and _is_of_first_edition(certificate)
    domain = FIRST_VOTE_DOMAIN if first_edition else VOTE_DOMAIN
    for signer, signature in zip(certificate.signers, certificate.signatures, strict=True):
        if not verify_step(domain, signer, certificate.view, value.hash, signature):
            raise RemoteError(f"the certificate of round {value.round} has a forged signature", peer=signer)
    if not first_edition and not has_proofs(value, previous, voting=voting):
        raise RemoteError(f"the certificate of round {value.round} names leaves or members without their proofs")


def _is_of_first_edition(certificate: Certificate) -> bool:
    """True if its first signature is a vote of 0.1.0."""
    votes = zip(certificate.signers, certificate.signatures, strict=True)
    return any(
        verify_step(FIRST_VOTE_DOMAIN, signer, certificate.view, certificate.value.hash, one) for signer, one in votes
    )


def verify_step(domain: bytes, peer: PeerId, view: int, value_hash: bytes, signature: bytes) -> bool:
    """Check that `signature` is `peer`'s Propose, Prepare or Vote, by the domain, of the value in `view`."""
    return verify(peer, domain, step_preimage(view, value_hash), signature)


def verify_leave(peer: PeerId, base: bytes, signature: bytes) -> bool:
    """Check that `signature` is `peer`'s promise to sign nothing in the round after the value of hash `base`."""
    return verify(peer, LEAVE_DOMAIN, base, signature)


def verify_report(peer: PeerId, report: Report) -> bool:
    """Check that `peer` signed this Report."""
    preimage = report_preimage(report.base, report.plan, report.digest, report.bitmaps, report.tokens)
    return len(report.signature) == SIGNATURE_BYTES and verify(peer, REPORT_DOMAIN, preimage, report.signature)
