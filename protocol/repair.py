"""Repairing a reduction that lost participants: what stands, what is done again, and by whom.

    lead: Evict(lineage, evicted) ─► all: close the evicted's lanes, then Held(finals) ─► lead: revised plan

A final that anyone who remains holds stands and is copied, whoever signed it. What nobody holds is summed again by a
new owner, from contributions that everyone still has. What owners that remain have summed, or will, is theirs as
before; so the revised plan says something new about the chunks of the evicted only.

Source: docs/reduce.md, Repair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

import msgspec

from shoal.protocol.identity import PeerId
from shoal.protocol.messages import ChunkResults, Held, OwnedRange, Plan, Relay
from shoal.protocol.planning import Deal, PlanOrder


@dataclass(frozen=True, slots=True)
class Eviction:
    """The lead decided, at `since`, that `lineage` goes on without `evicted`, and collects what is held.

    The plan that follows will be attempt `attempt` of `view`.
    """

    view: int
    attempt: int
    lineage: bytes
    evicted: frozenset[PeerId]
    since: float

    def answered_by(self, held: Held | None) -> bool:
        """Whether this is an answer to it: its sender takes nothing more from these, nor perhaps from others."""
        return held is not None and held.lineage == self.lineage and self.evicted <= frozenset(held.evicted)

    def parted(self, helds: Mapping[PeerId, Held], me: PeerId) -> set[PeerId]:
        """Of those who remain, and gave these answers, whom the lineage must go on without too.

        Where one takes nothing from another, by an eviction that this lead (`me`) does not know or makes no more, one
        of the two goes. It is the other if two say so, or the lead does; else who says it, so that no lone word evicts
        anybody but its speaker.
        """
        gone: set[PeerId] = set()
        for peer in helds:
            closed = {p for p, held in helds.items() if p != peer and peer in held.evicted}
            gone |= {peer} if peer != me and (me in closed or len(closed) > 1) else closed
        return gone


def revise_plan(plan: Plan, plan_order: PlanOrder, helds: Mapping[PeerId, Held], deal: Deal) -> Plan:
    """`plan` without those evicted in `plan_order`, given what each participant that remains holds.

    Of two results for one chunk (its plan was revised behind the lead's back) the one that more hold stands.
    """
    peers = [p.peer for p in plan.participants]
    gone = {i for i, peer in enumerate(peers) if peer in plan_order.evicted}
    owners = [owned.owner for owned in plan.owners for _ in range(owned.start, owned.stop)]
    holders = _holders(helds, peers)
    standing: dict[int, dict[int, bytes]] = {}
    lost: list[int] = []
    for chunk, owner in enumerate(owners):
        if owner not in gone:
            continue
        if chunk not in holders:
            lost.append(chunk)
            continue
        (signer, result), sources = min(holders[chunk].items(), key=lambda item: (-len(item[1]), item[0]))
        owners[chunk] = signer
        source = min(sources, key=lambda place: (len(standing.get(place, ())), place))
        standing.setdefault(source, {})[chunk] = result
    remaining = [i for i in range(len(peers)) if i not in gone]
    rates = [(plan.participants[i].upload, plan.participants[i].download) for i in remaining]
    for owned in deal(rates, len(lost)) if lost else ():
        for chunk in lost[owned.start : owned.stop]:
            owners[chunk] = remaining[owned.owner]
    return msgspec.structs.replace(
        plan,
        view=plan_order.view,
        attempt=plan_order.attempt,
        planner=plan_order.planner,
        evicted=plan_order.evicted,
        origin=plan.lineage,
        owners=_ranges(owners),
        standing=tuple(ChunkResults.of(source, results) for source, results in sorted(standing.items())),
        relays=tuple(r for r in plan.relays if not {r.one, r.other, r.via} & gone),
    )


def reroute_plan(plan: Plan, plan_order: PlanOrder, relays: tuple[Relay, ...]) -> Plan:
    """`plan` with other relays, and nothing else changed."""
    return msgspec.structs.replace(
        plan,
        view=plan_order.view,
        attempt=plan_order.attempt,
        planner=plan_order.planner,
        origin=plan.lineage,
        relays=relays,
    )


def _holders(helds: Mapping[PeerId, Held], peers: list[PeerId]) -> dict[int, dict[tuple[int, bytes], set[int]]]:
    """Per chunk, who holds which result of which signer, by places."""
    holders: dict[int, dict[tuple[int, bytes], set[int]]] = {}
    for place, peer in enumerate(peers):
        held = helds.get(peer)
        for results in held.chunks if held is not None else ():
            if results.place >= len(peers):
                continue  # signed by nobody in the plan: what its sender says is no reason for a plan that is none
            for chunk, result in results.by_chunk().items():
                holders.setdefault(chunk, {}).setdefault((results.place, result), set()).add(place)
    return holders


def _ranges(owners: Iterable[int]) -> tuple[OwnedRange, ...]:
    runs, start = [], 0
    for owner, run in groupby(owners):
        stop = start + sum(1 for _ in run)
        runs.append(OwnedRange(owner, start, stop))
        start = stop
    return tuple(runs)
