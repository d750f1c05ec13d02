"""Ends of a term: a rollback, which a quorum of the electorate decides, and a rebase, which the authority signs.

                   rollback to C(k)                          rebase on C(k)
    who            a quorum of B(e), as the value of e        the swarm's authority key
    next term      (rebases, rollbacks + 1)                   (rebases + 1, 0)
    next round     k + 1, standing on S(k)                    k + 1, standing on S(k)
    its base       the hash of the rollback value             the hash of the rebase's value
    electorate     B(e) less the leaves counted               whom the rebase names
    tie-break      the member that proposed the rollback      the first of the electorate

A rollback is agreed on as any value is (agreement.py): what follows here decides only whether somebody proposes one.
Members say so by consents, each for one round, and the value carries those of a quorum: so a member that would rather
not go back can see that a quorum would, and votes as for any result it could verify. It does need S(k) for that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Literal

from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import Identity, PeerId, verify
from shoal.protocol.messages import (
    CONSENT_DOMAIN,
    NO_HASH,
    REBASE_DOMAIN,
    Consent,
    Rebase,
    Rollback,
    Target,
    Term,
    Value,
    consent_preimage,
)
from shoal.protocol.voting import CONTRIBUTORS, Voting, is_quorum

RollbackPolicy = Literal["never", "spike", "always"]
"""Policy on when a member consents to a rollback that another member's user ordered; see going_back.py."""


def make_consent(identity: Identity, previous: Value, target: Target, *, asked: bool) -> Consent:
    """The consent of `identity` that the round after `previous` goes back to `target`."""
    signature = identity.sign(CONSENT_DOMAIN, consent_preimage(previous.hash, target))
    return Consent(
        term=previous.next_term,
        round=previous.next_round,
        base=previous.hash,
        target=target,
        asked=asked,
        signature=signature,
    )


def verify_consent(peer: PeerId, base: bytes, target: Target, signature: bytes) -> bool:
    """Check that `signature` is the consent of `peer` to go back to `target` in the round after the value `base`."""
    return verify(peer, CONSENT_DOMAIN, consent_preimage(base, target), signature)


def make_rollback(
    previous: Value,
    planner: PeerId,
    target: Target,
    consents: Mapping[PeerId, Consent],
    *,
    digest: bytes,
    leaves: Collection[PeerId] = (),
    voting: Voting = CONTRIBUTORS,
) -> Value:
    """The value by which the round after `previous` goes back to `target`, whose state has `digest`."""
    counted = tuple(sorted(set(leaves).intersection(voting.may_leave(previous))))
    consenting = sorted(peer for peer in consents if peer in voting.electorate(previous) and peer not in counted)
    return Value(
        swarm=previous.swarm,
        term=previous.next_term,
        round=previous.next_round,
        base=previous.hash,
        plan=NO_HASH,
        planner=planner,
        members=tuple(sorted(set(previous.members) - set(counted))),
        leaves=counted,
        bitmaps=NO_HASH,
        tokens=0,
        digest=digest,
        rollback=Rollback(target, tuple(consenting), tuple(consents[peer].signature for peer in consenting)),
    )


@lru_cache(maxsize=64)
def is_consented(value: Value, previous: Value, *, voting: Voting = CONTRIBUTORS) -> bool:
    """Check that a rollback carries valid consents of a quorum. Other values need none."""
    rollback = value.rollback
    if not rollback:
        return True
    signed = list(zip(rollback.consenting, rollback.signatures, strict=False))
    return (
        len(rollback.consenting) == len(rollback.signatures) == len(set(rollback.consenting))
        and is_quorum(previous, rollback.consenting, value.leaves, voting=voting)
        and all(verify_consent(peer, value.base, rollback.target, signature) for peer, signature in signed)
    )


def make_rebase(authority: Identity, head: Value, electorate: Collection[PeerId]) -> Rebase:
    """Order, as the authority, that the chain goes on after `head` with `electorate`. Raises LocalError if empty."""
    members = tuple(sorted(set(electorate)))
    if not members:
        raise LocalError("a rebase needs an electorate")
    value = Value(
        swarm=head.swarm,
        term=Term(head.term.rebases + 1, 0),
        round=head.state_round,
        base=head.hash,
        plan=NO_HASH,
        planner=members[0],
        members=members,
        bitmaps=NO_HASH,
        tokens=0,
        digest=head.digest,
    )
    return Rebase(value=value, signature=authority.sign(REBASE_DOMAIN, value.hash))


def is_signed(rebase: Rebase, authority: PeerId) -> bool:
    """Check that the authority signed it."""
    return verify(authority, REBASE_DOMAIN, rebase.value.hash, rebase.signature)


def check_rebase(rebase: Rebase, parent: Value, authority: PeerId) -> None:
    """Check a rebase against C(k), on which it stands.

    Raises RemoteError naming what is wrong.
    """
    value = rebase.value
    stands = (
        (value.swarm, value.base) == (parent.swarm, parent.hash)
        and value.term == Term(parent.term.rebases + 1, 0)
        and (value.round, value.digest) == (parent.state_round, parent.digest)
        and (value.plan, value.bitmaps, value.tokens, value.leaves) == (NO_HASH, NO_HASH, 0, ())
        and list(value.members) == sorted(set(value.members))
        and value.planner == value.members[0]
        and not (value.rollback or value.amended)
    )
    if not stands:
        raise RemoteError(f"a rebase to term {value.term} that does not stand on round {value.round}")
    if not is_signed(rebase, authority):
        raise RemoteError(f"a rebase to term {value.term} that the swarm's authority did not sign")
