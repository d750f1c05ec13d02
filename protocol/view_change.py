"""View changes: a quorum's claims about earlier views when it moves to a view, and the value they compel.

A ViewChange is signed apart from its message, over its view and the highest prepare certificate of its sender. So the
lead of a view can show to everyone, by the `Moves` of one quorum, that the view was entered and what binds it:

    the highest certificate among them is of value x   ─► the lead proposes x, unchanged, and shows that certificate
    none of them has any                               ─► the lead is free to plan, to evict and to propose

Whoever may have decided in a lower view had a quorum's votes, each with a prepare certificate behind it; that quorum
and this one share a member (certificate.py). Without the certificate nobody's word about the views before counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import msgspec

from shoal.protocol.certificate import follows, verify_leave, verify_step
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerId, verify
from shoal.protocol.messages import (
    NO_HASH,
    PREPARE_DOMAIN,
    VIEW_CHANGE_DOMAIN,
    Moved,
    Moves,
    Prepared,
    PreparedValue,
    Value,
    ViewChange,
    move_preimage,
)
from shoal.protocol.voting import Voting, is_quorum

NOTHING_PREPARED = -1


def sign_move(identity: Identity, base: bytes, view: int, prepared: PreparedValue | None) -> bytes:
    """The detached signature of a ViewChange."""
    highest, value = _claim(prepared)
    return identity.sign(VIEW_CHANGE_DOMAIN, move_preimage(base, view, highest, value))


def _claim(prepared: PreparedValue | None) -> tuple[int, bytes]:
    return (NOTHING_PREPARED, NO_HASH) if prepared is None else (prepared.prepared.view, prepared.value.hash)


def moved(sender: PeerId, change: ViewChange) -> Moved:
    """Return the claim in the ViewChange of `sender`, without the value."""
    return Moved(sender, *_claim(change.prepared), change.signature)


def verify_move(base: bytes, view: int, one: Moved) -> bool:
    """Check that the peer named in the claim signed it."""
    return verify(one.peer, VIEW_CHANGE_DOMAIN, move_preimage(base, view, one.prepared, one.value), one.signature)


def is_prepared(prepared: Prepared, value: Value, previous: Value, *, voting: Voting) -> bool:
    """Check that a prepare certificate of `value` holds: signed by a quorum, each counted once."""
    signed = list(zip(prepared.signers, prepared.signatures, strict=False))
    return (
        len(prepared.signers) == len(prepared.signatures) == len(set(prepared.signers))
        and not set(prepared.signers).intersection(value.leaves)
        and is_quorum(previous, prepared.signers, value.leaves, voting=voting)
        and all(verify_step(PREPARE_DOMAIN, peer, prepared.view, value.hash, one) for peer, one in signed)
    )


def check_change(sender: PeerId, change: ViewChange, previous: Value, *, voting: Voting) -> None:
    """Raises RemoteError unless `sender` signed it, and its certificate is what it says and of an earlier view."""
    if not verify_move(previous.hash, change.view, moved(sender, change)):
        raise RemoteError("a view change whose signature does not hold", peer=sender)
    if change.prepared is None:
        return
    value, prepared = change.prepared.value, change.prepared.prepared
    if prepared.view >= change.view or not follows(value, previous, voting=voting):
        raise RemoteError("a view change with an impossible certificate", peer=sender)
    if not is_prepared(prepared, value, previous, voting=voting):
        raise RemoteError("a view change with a certificate that does not hold", peer=sender)


def make_moves(changes: Mapping[PeerId, ViewChange], leaves: Mapping[PeerId, bytes]) -> Moves:
    """The ViewChanges of one view, as proof; `leaves` has the signature of each leave that the quorum counts on."""
    gone = sorted(leaves)
    return Moves(
        tuple(moved(peer, changes[peer]) for peer in sorted(changes) if peer not in leaves),
        tuple(gone),
        tuple(leaves[peer] for peer in gone),
    )


def highest_of(changes: Iterable[ViewChange]) -> PreparedValue | None:
    """The highest prepare certificate that they carry."""
    carried = [change.prepared for change in changes if change.prepared is not None]
    return max(carried, key=lambda one: one.prepared.view, default=None)


def compelled(moves: Moves) -> tuple[int, bytes] | None:
    """View and value of the highest prepare certificate that is claimed in `moves`; None if the lead is free."""
    highest = max(moves.changes, key=lambda one: one.prepared)
    return None if highest.prepared == NOTHING_PREPARED else (highest.prepared, highest.value)


@lru_cache(maxsize=256)
def are_sound(moves: Moves, view: int, previous: Value, *, voting: Voting) -> bool:
    """Check that `moves` show that a quorum entered `view`: all signed, each counted once, the leaves too."""
    peers = [one.peer for one in moves.changes]
    leaves = dict(zip(moves.leaves, moves.leave_signatures, strict=False))
    return (
        len(set(peers)) == len(peers)
        and len(leaves) == len(moves.leaves) == len(moves.leave_signatures)
        and not leaves.keys() & set(peers)
        and all(one.prepared < view for one in moves.changes)
        and is_quorum(previous, peers, leaves, voting=voting)
        and all(verify_leave(peer, previous.hash, signature) for peer, signature in leaves.items())
        and all(verify_move(previous.hash, view, one) for one in moves.changes)
    )


def check_entered(
    sender: PeerId, view: int, moves: Moves | msgspec.UnsetType, previous: Value, *, voting: Voting
) -> None:
    """Check that the lead of `view` may say something of its own in it: nothing compels it.

    Raises RemoteError where it may not. The first view needs no proof and has none.
    """
    if view == 0:
        if not isinstance(moves, msgspec.UnsetType):
            raise RemoteError("the first view was entered by nobody", peer=sender)
        return
    if isinstance(moves, msgspec.UnsetType) or not are_sound(moves, view, previous, voting=voting):
        raise RemoteError(f"no quorum is shown to have moved to view {view}", peer=sender)
    if compelled(moves) is not None:
        raise RemoteError(f"plans in view {view}, in which a value stands already", peer=sender)


def check_proposed(
    sender: PeerId,
    view: int,
    value: Value,
    moves: Moves | msgspec.UnsetType,
    prepared: Prepared | msgspec.UnsetType,
    previous: Value,
    *,
    voting: Voting,
) -> bool:
    """Check what compels a proposal in `view`; returns whether something does.

    Raises RemoteError where the lead shows no quorum, or proposes another value than its quorum compels.
    """
    if isinstance(prepared, msgspec.UnsetType):
        check_entered(sender, view, moves, previous, voting=voting)
        return False
    if isinstance(moves, msgspec.UnsetType) or not are_sound(moves, view, previous, voting=voting):
        raise RemoteError(f"no quorum is shown to have moved to view {view}", peer=sender)
    if compelled(moves) != (prepared.view, value.hash):
        raise RemoteError(f"proposes in view {view} another value than stands", peer=sender)
    if not is_prepared(prepared, value, previous, voting=voting):
        raise RemoteError(f"proposes in view {view} by a certificate that does not hold", peer=sender)
    return True
