"""Certificates: who leads, what a quorum is, and what makes a decided value hold after the one before it.

The hash of a certificate is the hash of its value alone, so certificates of one value that differ in view or
signers are the same certificate. C(e-1) fixes everything about round e that must not move: its electorate, the
order of its leads, and whose vote breaks a tie.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId, verify
from shoal.protocol.messages import (
    NO_HASH,
    VOTE_DOMAIN,
    Certificate,
    Term,
    Value,
    domain_hash,
    vote_preimage,
)

# A vote weighs 2, the previous planner's 3: "1 + epsilon" in whole numbers. Exactly half of an even electorate
# then suffices with the planner in it, and no two disjoint sets can both be quorums.
VOTE_WEIGHT = 2
PLANNER_VOTE_WEIGHT = 3


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
    """The electorate in the order in which it leads the views of the round after `previous`."""
    base = previous.hash
    return tuple(sorted(previous.members, key=lambda peer: domain_hash("lead", base, peer.encode())))


def lead(previous: Value, view: int) -> PeerId:
    """Lead(e, v): the member whose turn view `view` is, whether it is alive or not."""
    order = lead_order(previous)
    return order[view % len(order)]


def is_quorum(previous: Value, supporters: Iterable[PeerId], leaves: Collection[PeerId] = ()) -> bool:
    """Whether `supporters` outweigh half of the electorate less the leaves counted."""

    def weight(peers: Set[PeerId]) -> int:
        return VOTE_WEIGHT * len(peers) + (PLANNER_VOTE_WEIGHT - VOTE_WEIGHT) * (previous.planner in peers)

    electorate = set(previous.members) - set(leaves)
    return 2 * weight(electorate.intersection(supporters)) > weight(electorate)


def leave_needs_promise(previous: Value, me: PeerId, alive: Collection[PeerId], leaves: Collection[PeerId]) -> bool:
    """Whether the others could not go on without counting the leave of `me`.

    Where they can, a promise is of no use: the next certificate drops who is gone. Where they cannot, and several leave
    at once, not all may promise, or nobody could ever vote again: of those who would have to, the first in the order of
    leads goes without.
    """
    living = [peer for peer in lead_order(previous) if peer in alive and peer not in leaves]

    def stuck_without(peer: PeerId) -> bool:
        others = [other for other in living if other != peer]
        return bool(others) and not is_quorum(previous, others, leaves)

    needing = [peer for peer in living if stuck_without(peer)]
    return me in needing and (len(needing) < len(living) or needing[0] != me)


def follows(value: Value, previous: Value) -> bool:
    """Whether `value` may come right after `previous` in a chain, as far as these two tell."""
    return (
        value.swarm == previous.swarm
        and value.term == previous.next_term
        and value.round == previous.next_round
        and value.base == previous.hash
        and set(value.leaves) <= set(previous.members)
        and list(value.leaves) == sorted(set(value.leaves))
        and list(value.members) == sorted(set(value.members))
        and (not value.rollback or _goes_back(value, previous))
    )


def _goes_back(value: Value, previous: Value) -> bool:
    """Whether a rollback has no result of its own, goes back to a round before it, and keeps the electorate B(e)."""
    assert value.rollback
    return (
        (value.plan, value.bitmaps, value.tokens) == (NO_HASH, NO_HASH, 0)
        and value.rollback.target.round <= previous.state_round
        and value.planner in previous.members
        and set(value.members) == set(previous.members) - set(value.leaves)
    )


def check_certificate(certificate: Certificate, previous: Value) -> None:
    """Check one certificate against the value before it.

    Raises RemoteError naming what is wrong.
    """
    value = certificate.value
    if not follows(value, previous):
        raise RemoteError(f"the certificate of round {value.round} does not follow round {previous.round}")
    if len(certificate.signers) != len(certificate.signatures):
        raise RemoteError(f"the certificate of round {value.round} has signers without signatures")
    if len(set(certificate.signers)) != len(certificate.signers):
        raise RemoteError(f"the certificate of round {value.round} counts a signer twice")
    preimage = vote_preimage(certificate.view, value.hash)
    for signer, signature in zip(certificate.signers, certificate.signatures, strict=True):
        if not verify(signer, VOTE_DOMAIN, preimage, signature):
            raise RemoteError(f"the certificate of round {value.round} has a forged signature", peer=signer)
    if not is_quorum(previous, certificate.signers, value.leaves):
        raise RemoteError(f"the certificate of round {value.round} has no quorum")


def verify_vote(peer: PeerId, view: int, value_hash: bytes, signature: bytes) -> bool:
    """Whether `signature` is `peer`'s vote for the value in `view`."""
    return verify(peer, VOTE_DOMAIN, vote_preimage(view, value_hash), signature)
