"""Copies and keys of a member and of a reduction, so that a step can be taken from one state many times.

Two machines of one member whose keys are equal behave alike from here on. What a machine heard and did not act on is
left out of it after every step (`unhear`): it may be heard again at any time.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Hashable, Mapping
from dataclasses import replace
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import msgspec

from shoal.collectives.finals import FinalChunk
from shoal.collectives.reduce import Kept, PendingChunk, Reduction
from shoal.protocol.chain import Chain
from shoal.protocol.errors import LocalError
from shoal.protocol.following import AccusedFor
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.member import Member
from shoal.protocol.messages import Plan, Ready, Value
from shoal.protocol.round import RESEND_S, RoundMachine
from shoal.protocol.surroundings import Surroundings

NOW, DUE = 0.0, 1e9
"""Every clock begins at `NOW`; at `DUE` every deadline has passed."""
MOMENT_S = 1.0
"""Longer than a lead waits before it looks again, shorter than anyone waits for a lead."""

# Who a machine is, what never changes, and clocks, which all stand at `NOW` between two steps.
_FIXED = {"me", "_me", "_identity", "identity", "previous", "round", "member", "_order", "settings", "_settings"}
_FIXED |= {"_deal", "_heard_at", "since", "planned_at", "_values", "_votes", "_squares", "_taking_part"}
_FIXED |= {"_said", "_said_at", "_resend_s", "_asked_at", "votes", "voting", "electorate", "everyone"}
# Tables by view. The rows below the machine's own view are never read again.
_BY_VIEW = {"_proposed", "_proposals", "_my_prepares", "_my_votes", "_freed", "_mismatched", "_refused", "_changes"}

_ATOMS: tuple[type, ...] = (
    bytes,
    str,
    int,
    float,
    type(None),
    frozenset,
    tuple,
    enum.Enum,
    msgspec.Struct,
    Identity,
    Chain,
)
_ATOMS += (FunctionType, MethodType, BuiltinMethodType, type)


class _Atomic(dict[Any, bool]):
    """Table by kind of object: whether it never changes, and so may be shared."""

    def __missing__(self, kind: Any) -> bool:
        dataclass: Any = getattr(kind, "__dataclass_params__", None)
        atomic = self[kind] = (dataclass is not None and dataclass.frozen) or issubclass(kind, _ATOMS)
        return atomic


_ATOMIC = _Atomic()


class _Slots(dict[Any, tuple[str, ...]]):
    """Table by kind of object: the attributes that it keeps in slots."""

    def __missing__(self, kind: Any) -> tuple[str, ...]:
        slots = self[kind] = tuple(name for base in kind.__mro__ for name in vars(base).get("__slots__", ()))
        return slots


_SLOTS = _Slots()


def _parts(held: Any) -> dict[str, Any]:
    """The attributes of an object, wherever it keeps them."""
    slots = _SLOTS[type(held)]
    return {name: getattr(held, name) for name in slots} if slots else vars(held)


def copy_of(held: Any, known: dict[int, Any] | None = None) -> Any:
    """An independent copy of a machine: objects and tables are copied, what is immutable is shared."""
    known = {} if known is None else known
    kind = type(held)
    if _ATOMIC[kind]:
        return held
    if id(held) in known:
        return known[id(held)]
    if kind is dict:
        return {key: value if _ATOMIC[type(value)] else copy_of(value, known) for key, value in held.items()}
    if kind is set:
        return held.copy()
    if kind is list:
        return [copy_of(value, known) for value in held]
    copy = known[id(held)] = object.__new__(kind)
    parts = {name: value if _ATOMIC[type(value)] else copy_of(value, known) for name, value in _parts(held).items()}
    if _SLOTS[kind]:
        for name, value in parts.items():
            object.__setattr__(copy, name, value)
    else:
        copy.__dict__.update(parts)
    return copy


def member_copy(member: Member, here: Surroundings) -> Member:
    """An independent copy of a member between two inputs, which looks at `here`."""
    early = member._early
    if len(early):
        raise LocalError("a message of another round was kept for later")
    copy: Member = copy_of(member, {id(member._here): here, id(early): early})
    return copy


def unhear(machine: RoundMachine, everyone: frozenset[PeerId], readies: dict[PeerId, Ready]) -> None:
    """Forget what others said and nothing came of; believe everyone alive; set every clock to `NOW`.

    `readies` are put back for those that were believed dead for a moment.
    """
    me, facts, agreement = machine.me, machine._facts, machine.agreement
    facts.alive, facts.suspected = everyone, frozenset()
    facts.dead_since.clear()
    timeouts = machine._watch._timeouts
    facts.planned_at = timeouts.since = timeouts._series_since = timeouts._adopted_at = NOW
    facts.held = {peer: held for peer, held in facts.held.items() if peer == me}
    agreement.reports = {plan: {me: row[me]} for plan, row in agreement.reports.items() if me in row}
    agreement._prepares = {at: {me: row[me]} for at, row in agreement._prepares.items() if me in row}
    agreement._changes = {view: {me: row[me]} for view, row in agreement._changes.items() if me in row}
    gathering = machine._gathering
    gathering._readies = readies | gathering._readies
    if gathering.half_ready_at is not None:
        gathering.half_ready_at = NOW
    lead = machine._lead
    lead._quorum_reported.at = None
    if lead.eviction is not None:
        lead.eviction = replace(lead.eviction, since=NOW)
    watch = machine._watch
    watch._others_reported.at = watch._together.at = None
    watch._lead_accused, watch._others_accused = AccusedFor(), AccusedFor()
    machine._planner_died = False  # whoever hears a plan may have believed its planner dead before
    watch._heard_at = NOW
    machine._said, machine._resend_s = machine.current(), RESEND_S
    machine._said_at = machine._asked_at = DUE * DUE  # what was said stays said


def machine_key(machine: RoundMachine) -> Hashable:
    """Key that is equal for machines of one member that behave alike."""
    return _key(machine, machine.agreement.view, set())


def _key(held: Any, view: int, met: set[int]) -> Hashable:
    kind: Any = type(held)
    if kind is Plan or kind is Value:
        return held.hash  # type: ignore[no-any-return]
    if _ATOMIC[kind]:
        return held  # type: ignore[no-any-return]
    if kind is dict:
        return frozenset([(name, _key(value, view, met)) for name, value in held.items()])
    if kind is set:
        return frozenset(held)
    if kind is list:
        return tuple([_key(value, view, met) for value in held])
    if id(held) in met:
        return None
    met.add(id(held))
    rows = []
    for name, value in _parts(held).items():
        if name in _BY_VIEW:
            kept = (
                {v: value[v] for v in value if v >= view}
                if isinstance(value, dict)
                else {v for v in value if v >= view}
            )
            rows.append((name, _key(kept, view, met)))
        elif name not in _FIXED:
            rows.append((name, _key(value, view, met)))
    return tuple(rows)


def reduction_copy(of: Reduction) -> Reduction:
    """An independent copy between two deliveries: no payload is half received."""
    copy = object.__new__(type(of))
    for name, held in vars(of).items():
        if isinstance(held, dict | set):
            held = held.copy()
        setattr(copy, name, held)
    copy._kept = kept_copy(of._kept)
    copy._signed = copy._kept.signed  # one table, as in the original
    copy._lock, copy._gate = threading.Lock(), threading.Lock()
    copy._inboxes = {chunk: _pending_copy(inbox) for chunk, inbox in of._inboxes.items()}
    copy._finals_wanted = {chunk: copy._final_pieces(copy.final_format, chunk) for chunk in of._finals_wanted}
    return copy


def kept_copy(of: Kept) -> Kept:
    """An independent copy of what a reduction leaves."""
    return Kept(signed=dict(of.signed), finals=dict(of.finals))


def _pending_copy(of: PendingChunk) -> PendingChunk:
    copy = PendingChunk(of.owing)
    copy.arrived, copy.excluded = dict(of.arrived), list(of.excluded)
    return copy


def reduction_key(reduction: Reduction | None) -> Hashable:
    """Key that is equal for reductions of one member that behave alike."""
    if reduction is None:
        return None
    inboxes = frozenset(
        (c, frozenset(inbox.owing), frozenset(inbox.arrived), frozenset(inbox.excluded))
        for c, inbox in reduction._inboxes.items()
    )
    return (
        (reduction.plan.hash, reduction.lineage, reduction._completed, reduction._closed, reduction._first_owners),
        (reduction._closed_to, frozenset(reduction._sent), frozenset(reduction._finals_wanted)),
        (_finals_key(reduction._finals), _finals_key(reduction._signed), inboxes),
    )


def kept_key(kept: Mapping[bytes, Kept], reduction: Reduction | None) -> Hashable:
    """Key that is equal where reductions begun again find the same. Of the one under way, its own key says it all."""
    under_way = None if reduction is None else reduction.lineage
    return frozenset(
        (lineage, _finals_key(left.signed), _finals_key(left.finals))
        for lineage, left in kept.items()
        if lineage != under_way
    )


def _finals_key(finals: Mapping[int, FinalChunk]) -> Hashable:
    return frozenset((c, f.owner, f.result, f.bitmap) for c, f in finals.items())
