"""Forming and checking a round's plan: who takes part, with what weight, and who sums which chunks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from shoal.protocol.certificate import lead
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH, WEIGHT_LIMIT, OwnedRange, Participant, Plan, Ready, Value

CONTRIBUTOR = "contributor"
"""The contribution is encoded and committed to."""
TRAINING = "training"
"""Takes part; its contribution is still being made."""
OBSERVER = "observer"
"""A paused member: receives the finals and votes, contributes nothing."""
JOINER = "joiner"
"""Newly arrived with the certified state: receives the finals, weight zero, no vote yet."""
ROLES = frozenset({CONTRIBUTOR, TRAINING, OBSERVER, JOINER})

Deal = Callable[[Sequence[tuple[int, int]], int], tuple[OwnedRange, ...]]
"""Deals `chunks` among participants given (upload, download) bytes/s of each; 0 is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSettings:
    """What the manifest fixes about every round, and the shape of the model."""

    numel: int
    chunk_values: int
    codec: str
    grace_s: float
    reduce_deadline_s: float
    weight_cap: float


def capped_weights(tokens: Mapping[PeerId, int], cap: float) -> dict[PeerId, int]:
    """Token weights, none above `cap` times the (lower) median of those that are not zero."""
    counted = sorted(t for t in tokens.values() if t > 0)
    if not counted:
        return dict.fromkeys(tokens, 0)
    ceiling = min(WEIGHT_LIMIT, max(1, int(counted[(len(counted) - 1) // 2] * cap)))
    return {peer: min(t, ceiling) for peer, t in tokens.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSeat:
    """Where a plan stands in the order of plans of its round; a later seat supersedes an earlier one."""

    view: int
    attempt: int
    planner: PeerId
    evicted: tuple[PeerId, ...]


def make_plan(
    previous: Value,
    seat: PlanSeat,
    readies: Mapping[PeerId, Ready],
    *,
    weightless: Collection[PeerId],
    settings: RoundSettings,
    deal: Deal,
) -> Plan:
    """The plan over everyone in `readies`; those in `weightless`, and all but contributors, get weight zero.

    The order is by PeerId: any order will do, and this one needs no agreement.
    """
    order = sorted(readies)
    tokens = {p: r.tokens for p, r in readies.items() if r.role == CONTRIBUTOR and p not in weightless}
    weights = capped_weights(tokens, settings.weight_cap)
    participants = tuple(
        Participant(p, weights.get(p, 0), tokens.get(p, 0), readies[p].root if weights.get(p, 0) else NO_HASH)
        for p in order
    )
    chunks = -(-settings.numel // settings.chunk_values)
    return Plan(
        term=previous.term,
        round=previous.round + 1,
        base=previous.hash,
        view=seat.view,
        attempt=seat.attempt,
        planner=seat.planner,
        participants=participants,
        owners=deal([(readies[p].upload, readies[p].download) for p in order], chunks),
        evicted=seat.evicted,
        codec=settings.codec,
        numel=settings.numel,
        chunk_values=settings.chunk_values,
    )


def check_plan(plan: Plan, sender: PeerId, previous: Value, settings: RoundSettings) -> None:
    """Check what can be checked of a plan without having seen every Ready.

    Raises RemoteError naming what is wrong with it.
    """
    if not plan.planner == sender == lead(previous, plan.view):
        raise RemoteError(f"planned in view {plan.view}, which another leads", peer=sender)
    if (plan.codec, plan.numel, plan.chunk_values) != (settings.codec, settings.numel, settings.chunk_values):
        raise RemoteError("a plan for another grid or codec", peer=sender)
    peers = [p.peer for p in plan.participants]
    if len(set(peers)) != len(peers) or set(peers) & set(plan.evicted):
        raise RemoteError("a plan that names a participant twice", peer=sender)
    if not any(p.weight for p in plan.participants):
        raise RemoteError("a plan without a contribution", peer=sender)
    next_chunk = 0
    for owned in plan.owners:
        if owned.start != next_chunk or owned.stop <= owned.start or owned.owner >= len(peers):
            raise RemoteError("a plan that does not deal every chunk once", peer=sender)
        next_chunk = owned.stop
    if next_chunk != plan.chunks:
        raise RemoteError("a plan that does not deal every chunk once", peer=sender)


def absent_ready(role: str, previous: Value, state: bytes) -> Ready:
    """A Ready without a contribution: `role` is training, observer or joiner."""
    if role not in (TRAINING, OBSERVER, JOINER):
        raise LocalError(f"role {role!r} needs a contribution")
    return Ready(
        term=previous.term,
        round=previous.round + 1,
        base=previous.hash,
        role=role,
        state=state,
        root=NO_HASH,
        squares=(),
        tokens=0,
        upload=0,
        download=0,
        reaches=(),
    )
