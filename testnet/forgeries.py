"""What a member says that lies in the agreement: signed as it should be, and of its own invention."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

import msgspec

from shoal.protocol.certificate import lead
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import (
    LEAVE_DOMAIN,
    PREPARE_DOMAIN,
    PROPOSE_DOMAIN,
    REPORT_DOMAIN,
    VOTE_DOMAIN,
    Certificate,
    Evict,
    Moves,
    Prepared,
    PreparedValue,
    Propose,
    Value,
    ViewChange,
    report_preimage,
    step_preimage,
)
from shoal.protocol.view_change import make_moves, sign_move
from shoal.protocol.wire import HASH_BYTES

FAR_VIEW = 100


def invented_value(liar: Identity, previous: Value, members: Iterable[PeerId], leaves: Iterable[PeerId] = ()) -> Value:
    """A result that nobody computed, of the round after `previous`; each leave is "proven" by one of the liar's."""
    gone = tuple(sorted(leaves))
    proof = liar.sign(LEAVE_DOMAIN, previous.hash)
    return Value(
        swarm=previous.swarm,
        term=previous.next_term,
        round=previous.next_round,
        base=previous.hash,
        plan=secrets.token_bytes(HASH_BYTES),
        planner=liar.peer_id,
        members=tuple(sorted(members)),
        leaves=gone,
        bitmaps=secrets.token_bytes(HASH_BYTES),
        tokens=previous.tokens + 1,
        digest=secrets.token_bytes(HASH_BYTES),
        leave_signatures=(proof,) * len(gone) or msgspec.UNSET,
    )


def forged_certificate(liar: Identity, previous: Value) -> Certificate:
    """By its own vote alone: all others are said to have left."""
    others = [peer for peer in previous.members if peer != liar.peer_id]
    value = invented_value(liar, previous, [liar.peer_id], others)
    vote = liar.sign(VOTE_DOMAIN, step_preimage(0, value.hash))
    return Certificate(value=value, view=0, signers=(liar.peer_id,), signatures=(vote,))


def proposal(liar: Identity, view: int, value: Value, moves: Moves | msgspec.UnsetType = msgspec.UNSET) -> Propose:
    """That `value` be decided in `view`, as its lead says it."""
    return Propose(
        term=value.term,
        round=value.round,
        base=value.base,
        view=view,
        value=value,
        signature=liar.sign(PROPOSE_DOMAIN, step_preimage(view, value.hash)),
        moves=moves,
    )


def without(value: Value, peer: PeerId) -> Value:
    """`value`, but `peer` is no member any more."""
    return msgspec.structs.replace(value, members=tuple(one for one in value.members if one != peer))


def with_stranger(value: Value, stranger: Identity, *, signs: bool) -> Value:
    """`value`, but somebody who took no part is a member, and signs the Report of its result or does not."""
    report = report_preimage(value.base, value.plan, value.digest, value.bitmaps, value.tokens)
    signature = stranger.sign(REPORT_DOMAIN, report) if signs else bytes(64)
    members = tuple(sorted({*value.members, stranger.peer_id}))
    return msgspec.structs.replace(value, members=members, report_signatures=(signature,))


def invented_change(liar: Identity, previous: Value, view: int) -> ViewChange:
    """A move to `view` that carries a prepare certificate of what nobody else prepared."""
    value = invented_value(liar, previous, previous.members)
    mine = liar.sign(PREPARE_DOMAIN, step_preimage(0, value.hash))
    members = previous.members
    carried = PreparedValue(value, Prepared(0, members, (mine,) * len(members)))
    return _change(liar, previous, view, carried)


def _change(liar: Identity, previous: Value, view: int, carried: PreparedValue | None) -> ViewChange:
    return ViewChange(
        term=previous.next_term,
        round=previous.next_round,
        base=previous.hash,
        view=view,
        prepared=carried,
        signature=sign_move(liar, previous.hash, view, carried),
    )


def far_messages(liar: Identity, previous: Value) -> tuple[ViewChange, Evict, Propose]:
    """What speaks of a view far ahead that the liar leads, and that nobody else entered."""
    view = next(view for view in range(FAR_VIEW, 2 * FAR_VIEW) if lead(previous, view) == liar.peer_id)
    change = _change(liar, previous, view, None)
    moves = make_moves({liar.peer_id: change}, {})
    others = tuple(peer for peer in previous.members if peer != liar.peer_id)
    evict = Evict(
        term=previous.next_term,
        round=previous.next_round,
        base=previous.hash,
        view=view,
        attempt=1,
        lineage=secrets.token_bytes(HASH_BYTES),
        evicted=others[:1],
        moves=moves,
    )
    return change, evict, proposal(liar, view, invented_value(liar, previous, previous.members), moves)
