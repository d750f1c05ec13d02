"""Certificates: the order of leads, quorums, and the checks by which a decided value holds after the one before it.

The hash of a certificate is the hash of its value alone, so certificates of one value that differ in view or
signers are the same certificate. C(e-1) fixes everything about round e that must not move: its electorate, the
order of its leads, and whose vote breaks a tie.

A quorum is, by fault model,

    crash   more than half of B(e) less the leaves counted; the vote of C(e-1)'s planner breaks a tie
    lying   more than two thirds of all of B(e): no tie-break, and leaves are not taken off

Two quorums of one round share a member in `crash`, and an honest one in `lying` as long as less than a third lies. One
rule serves prepares, votes, view changes, and the consents in a value. Source: docs/agreement.md, the table of quorums.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence, Set
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
    domain_hash,
    report_preimage,
    step_preimage,
)

# A vote weighs 2, the previous planner's 3: "1 + epsilon" in whole numbers. Exactly half of an even electorate
# then suffices with the planner in it, and no two disjoint sets can both be quorums.
VOTE_WEIGHT = 2
PLANNER_VOTE_WEIGHT = 3


class FaultModel(enum.Enum):
    """Faults of an electorate's members under which no two values can be certified."""

    CRASH = "crash"
    LYING = "lying"


def is_quorum(
    previous: Value,
    supporters: Iterable[PeerId],
    leaves: Collection[PeerId] = (),
    *,
    faults: FaultModel = FaultModel.CRASH,
) -> bool:
    """True if `supporters` are a quorum of the electorate that `previous` names. The leaves must have been proven."""
    electorate = frozenset(previous.members)
    if faults is FaultModel.LYING:
        return 3 * len(electorate.intersection(supporters)) > 2 * len(electorate)

    def weight(peers: Set[PeerId]) -> int:
        return VOTE_WEIGHT * len(peers) + (PLANNER_VOTE_WEIGHT - VOTE_WEIGHT) * (previous.planner in peers)

    remaining = electorate.difference(leaves)
    return 2 * weight(remaining.intersection(supporters)) > weight(remaining)


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


def lead_order(previous: Value) -> tuple[PeerId, ...]:
    """The electorate in the order in which it leads the views of the round after `previous`.

    The order follows from swarm, term and round, in which nobody who may lie has a choice.
    """
    rebases, rollbacks, round = previous.next_term.rebases, previous.next_term.rollbacks, previous.next_round
    position = b"".join(number.to_bytes(8, "little") for number in (rebases, rollbacks, round))
    return tuple(
        sorted(previous.members, key=lambda peer: domain_hash("lead", previous.swarm, position, peer.encode()))
    )


def lead(previous: Value, view: int) -> PeerId:
    """Lead(e, v): the member whose turn view `view` is, whether it is alive or not."""
    order = lead_order(previous)
    return order[view % len(order)]


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
) -> LeaveCost:
    """Work out what the going of `me` means for those who stay, while those in `leaving` are about to go as well.

    Where they can go on, a promise is of no use, the next certificate drops who is gone; and it would do harm: who
    comes back in the same round could not vote. Nor may all promise, or nobody could ever vote again: the first in the
    order of leads, the last planner aside, never does. Everyone counts it as living, itself at least, so this holds
    whatever each has heard of the others.
    """
    living = [peer for peer in lead_order(previous) if peer in alive and peer not in leaves]
    going = {me, *leaving}.intersection(living)
    staying = set(living) - going
    if me not in going or not staying or is_quorum(previous, staying, leaves):
        return LeaveCost.FREE
    if not is_quorum(previous, living, leaves):
        return LeaveCost.FREE
    spared = next((peer for peer in living if peer != previous.planner), me)
    promising = going - {spared}
    enough = is_quorum(previous, staying, {*leaves, *promising})
    return LeaveCost.PROMISE if me in promising and enough else LeaveCost.NEEDED


def follows(value: Value, previous: Value) -> bool:
    """True if `value` may come right after `previous` in a chain, as far as these two tell."""
    return (
        value.swarm == previous.swarm
        and value.term == previous.next_term
        and value.round == previous.next_round
        and value.base == previous.hash
        and set(value.leaves) <= set(previous.members)
        and list(value.leaves) == sorted(set(value.leaves))
        and list(value.members) == sorted(set(value.members))
        and not set(value.leaves).intersection(value.members)
        and (not value.rollback or _goes_back(value, previous))
    )


def newcomers(value: Value, previous: Value) -> tuple[PeerId, ...]:
    """The members after `value` that were none before it, in order."""
    return tuple(peer for peer in value.members if peer not in previous.members)


@lru_cache(maxsize=256)
def has_proofs(value: Value, previous: Value, faults: FaultModel = FaultModel.CRASH) -> bool:
    """Check that each leave and each new member in `value` has its own signature, and the others are a quorum.

    The members of B(e) that remain members, and those that `value` bans, are a quorum of B(e) less the leaves.
    """
    leaves, joined = _given(value.leave_signatures), _given(value.report_signatures)
    new = newcomers(value, previous)
    if len(leaves) != len(value.leaves) or len(joined) != len(new):
        return False
    report = report_preimage(value.base, value.plan, value.digest, value.bitmaps, value.tokens)
    banned = () if isinstance(value.bans, msgspec.UnsetType) else (ban.peer for ban in value.bans)
    return (
        is_quorum(previous, {*value.members, *banned}, value.leaves, faults=faults)
        and all(verify_leave(peer, value.base, one) for peer, one in zip(value.leaves, leaves, strict=True))
        and all(verify(peer, REPORT_DOMAIN, report, one) for peer, one in zip(new, joined, strict=True))
    )


def _given(signatures: tuple[bytes, ...] | msgspec.UnsetType) -> tuple[bytes, ...]:
    return () if isinstance(signatures, msgspec.UnsetType) else signatures


def _goes_back(value: Value, previous: Value) -> bool:
    """True if a rollback has no result of its own, goes back to a round before it, and keeps the electorate B(e)."""
    assert value.rollback
    return (
        (value.plan, value.bitmaps, value.tokens) == (NO_HASH, NO_HASH, 0)
        and value.rollback.target.round <= previous.state_round
        and value.planner in previous.members
        and set(value.members) == set(previous.members) - set(value.leaves)
    )


def check_certificate(
    certificate: Certificate, previous: Value, *, trusted: bool = False, faults: FaultModel = FaultModel.CRASH
) -> None:
    """Check one certificate against the value before it.

    trusted: it is from this node's own disk, or beneath the checkpoint of a link, and may be one of 0.1.0, whose votes
    had one step, and whose leaves and new members were not proven.

    Raises RemoteError naming what is wrong.
    """
    value = certificate.value
    if not follows(value, previous):
        raise RemoteError(f"the certificate of round {value.round} does not follow round {previous.round}")
    if len(certificate.signers) != len(certificate.signatures):
        raise RemoteError(f"the certificate of round {value.round} has signers without signatures")
    if len(set(certificate.signers)) != len(certificate.signers):
        raise RemoteError(f"the certificate of round {value.round} counts a signer twice")
    # Whatever anybody can make costs little: signatures of others than members, or without a quorum, are not looked at.
    if not is_quorum(previous, certificate.signers, value.leaves, faults=faults):
        raise RemoteError(f"the certificate of round {value.round} has no quorum")
    if not trusted and not set(certificate.signers) <= set(previous.members):
        raise RemoteError(f"the certificate of round {value.round} is signed by who is no member")
    first_edition = trusted and _is_of_first_edition(certificate)
    domain = FIRST_VOTE_DOMAIN if first_edition else VOTE_DOMAIN
    for signer, signature in zip(certificate.signers, certificate.signatures, strict=True):
        if not verify_step(domain, signer, certificate.view, value.hash, signature):
            raise RemoteError(f"the certificate of round {value.round} has a forged signature", peer=signer)
    if not first_edition and not has_proofs(value, previous, faults):
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
