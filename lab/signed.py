"""Messages of the agreement as a member signs them, whatever it would say by the rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import (
    LEAVE_DOMAIN,
    PREPARE_DOMAIN,
    PROPOSE_DOMAIN,
    REPORT_DOMAIN,
    VOTE_DOMAIN,
    Certificate,
    Leave,
    Moves,
    Prepare,
    Prepared,
    PreparedValue,
    Propose,
    Report,
    Value,
    ViewChange,
    Vote,
    report_preimage,
    step_preimage,
)
from shoal.protocol.view_change import make_moves, sign_move

StepT = TypeVar("StepT", Prepare, Vote)


def report_of(value: Value) -> Report:
    """The Report, unsigned, of who computed what `value` says."""
    return Report(
        term=value.term,
        round=value.round,
        base=value.base,
        plan=value.plan,
        digest=value.digest,
        bitmaps=value.bitmaps,
        tokens=value.tokens,
    )


def signed_report(identity: Identity, report: Report) -> Report:
    """`report` as `identity` says it."""
    preimage = report_preimage(report.base, report.plan, report.digest, report.bitmaps, report.tokens)
    return msgspec.structs.replace(report, signature=identity.sign(REPORT_DOMAIN, preimage))


def leave_of(identity: Identity, previous: Value) -> Leave:
    """`identity`'s signed leave of the round after `previous`."""
    return Leave(
        term=previous.next_term,
        round=previous.next_round,
        base=previous.hash,
        signature=identity.sign(LEAVE_DOMAIN, previous.hash),
    )


def vote_of(identity: Identity, view: int, value: Value) -> Vote:
    """`identity`'s signed vote for `value` in `view`."""
    return _step_of(Vote, VOTE_DOMAIN, identity, view, value)


def prepare_of(identity: Identity, view: int, value: Value) -> Prepare:
    """`identity`'s signed Prepare of `value` in `view`."""
    return _step_of(Prepare, PREPARE_DOMAIN, identity, view, value)


def _step_of(kind: type[StepT], domain: bytes, identity: Identity, view: int, value: Value) -> StepT:
    signature = identity.sign(domain, step_preimage(view, value.hash))
    return kind(term=value.term, round=value.round, base=value.base, view=view, value=value.hash, signature=signature)


def certified(value: Value, *signing: Identity, view: int = 0) -> Certificate:
    """The certificate of `value` by the votes of these in `view`."""
    votes = {one.peer_id: vote_of(one, view, value).signature for one in signing}
    signers = tuple(sorted(votes))
    return Certificate(value=value, view=view, signers=signers, signatures=tuple(votes[peer] for peer in signers))


def prepared_by(identities: Iterable[Identity], view: int, value: Value) -> Prepared:
    """The prepare certificate that these make."""
    signed = {one.peer_id: prepare_of(one, view, value).signature for one in identities}
    return Prepared(view, tuple(sorted(signed)), tuple(signed[peer] for peer in sorted(signed)))


def propose_of(
    identity: Identity,
    view: int,
    value: Value,
    moves: Moves | msgspec.UnsetType = msgspec.UNSET,
    prepared: Prepared | msgspec.UnsetType = msgspec.UNSET,
) -> Propose:
    """The proposal of `value` in `view`, signed by `identity` as its lead."""
    return Propose(
        term=value.term,
        round=value.round,
        base=value.base,
        view=view,
        value=value,
        signature=identity.sign(PROPOSE_DOMAIN, step_preimage(view, value.hash)),
        moves=moves,
        prepared=prepared,
    )


def change_of(identity: Identity, previous: Value, view: int, prepared: PreparedValue | None = None) -> ViewChange:
    """`identity`'s move to `view`, with the prepare certificate that it carries."""
    return ViewChange(
        term=previous.next_term,
        round=previous.next_round,
        base=previous.hash,
        view=view,
        prepared=prepared,
        signature=sign_move(identity, previous.hash, view, prepared),
    )


def moves_of(
    identities: Iterable[Identity],
    previous: Value,
    view: int,
    carried: Mapping[PeerId, PreparedValue | None] | None = None,
) -> Moves:
    """The ViewChanges to `view` of these, as proof."""
    carried = carried or {}
    changes = {one.peer_id: change_of(one, previous, view, carried.get(one.peer_id)) for one in identities}
    return make_moves(changes, {})
