"""Messages of a member that lies in the agreement: signed as they should be, and of its own invention."""

from __future__ import annotations

import secrets

import msgspec

from shoal.lab.signed import certified, change_of, moves_of, prepare_of, propose_of, report_of, signed_report
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import (
    LEAVE_DOMAIN,
    Certificate,
    Evict,
    Prepared,
    PreparedValue,
    Propose,
    Value,
    ViewChange,
)
from shoal.protocol.voting import lead
from shoal.protocol.wire import HASH_BYTES

FAR_VIEW = 100


def invented_value(liar: Identity, previous: Value) -> Value:
    """A result that nobody computed, of the round after `previous`, with the same members."""
    return Value(
        swarm=previous.swarm,
        term=previous.next_term,
        round=previous.next_round,
        base=previous.hash,
        plan=secrets.token_bytes(HASH_BYTES),
        planner=liar.peer_id,
        members=previous.members,
        leaves=(),
        bitmaps=secrets.token_bytes(HASH_BYTES),
        tokens=previous.tokens + 1,
        digest=secrets.token_bytes(HASH_BYTES),
    )


def without(value: Value, peer: PeerId) -> Value:
    """`value`, but `peer` is no member any more."""
    return msgspec.structs.replace(value, members=tuple(one for one in value.members if one != peer))


def without_others(value: Value, liar: Identity) -> Value:
    """`value`, but all others left, and the liar signs that of each of them."""
    gone = without(value, liar.peer_id).members
    signature = liar.sign(LEAVE_DOMAIN, value.base)
    return msgspec.structs.replace(
        value, members=(liar.peer_id,), leaves=gone, leave_signatures=(signature,) * len(gone)
    )


def with_stranger(value: Value, stranger: Identity, *, signs: bool) -> Value:
    """`value`, but somebody who took no part is a member, and signs the Report of its result or does not."""
    signature = signed_report(stranger, report_of(value)).signature if signs else bytes(64)
    members = tuple(sorted({*value.members, stranger.peer_id}))
    return msgspec.structs.replace(value, members=members, report_signatures=(signature,))


def forged_certificate(liar: Identity, previous: Value) -> Certificate:
    """A certificate by the liar's vote alone: all others are said to have left."""
    return certified(without_others(invented_value(liar, previous), liar), liar)


def invented_change(liar: Identity, previous: Value, view: int) -> ViewChange:
    """A move to `view` that carries a prepare certificate of what nobody else prepared."""
    value, members = invented_value(liar, previous), previous.members
    mine = prepare_of(liar, 0, value).signature
    return change_of(liar, previous, view, PreparedValue(value, Prepared(0, members, (mine,) * len(members))))


def far_messages(liar: Identity, previous: Value) -> tuple[ViewChange, Evict, Propose]:
    """Messages of a view far ahead that the liar leads, and that nobody else entered."""
    view = next(view for view in range(FAR_VIEW, 2 * FAR_VIEW) if lead(previous, view) == liar.peer_id)
    moves = moves_of([liar], previous, view)
    evict = Evict(
        term=previous.next_term,
        round=previous.next_round,
        base=previous.hash,
        view=view,
        attempt=1,
        lineage=secrets.token_bytes(HASH_BYTES),
        evicted=without(previous, liar.peer_id).members[:1],
        moves=moves,
    )
    return change_of(liar, previous, view), evict, propose_of(liar, view, invented_value(liar, previous), moves)
