"""Plans of a round, formed, checked and revised: the participants, their weights, and the owner of each chunk.

A plan is revised where its reduction lost participants:

    lead: Evict(lineage, evicted) ─► all: close the evicted's lanes, then Held(finals) ─► lead: revised plan

A final that anyone who remains holds stands and is copied, whoever signed it. What nobody holds is summed again by a
new owner, from contributions that everyone still has. What owners that remain have summed, or will, is theirs as
before; so the revised plan says something new about the chunks of the evicted only.

Source: docs/reduce.md, Repair.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import fsum, gcd, inf, sqrt
from typing import Self

import msgspec

from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import (
    CLIP_UNIT,
    MEMBER_LIMIT,
    NO_HASH,
    WEIGHT_LIMIT,
    ChunkResults,
    Delegated,
    Held,
    OwnedRange,
    Participant,
    Plan,
    Ready,
    Relay,
    Value,
)
from shoal.protocol.seats import Seating
from shoal.protocol.voting import CONTRIBUTORS, Voting, lead

CONTRIBUTOR = "contributor"
"""The contribution is encoded and committed to."""
TRAINING = "training"
"""Takes part; its contribution is still being made."""
OBSERVER = "observer"
"""A paused member: receives the finals and votes, contributes nothing."""
JOINER = "joiner"
"""Newly arrived with the certified state: receives the finals, weight zero, no vote yet."""
ROLES = frozenset({CONTRIBUTOR, TRAINING, OBSERVER, JOINER})

MEAN = "mean"
"""The aggregate that plans do not name."""

_WITH_BUFFERS = re.compile(r"(.+)\+buffers([1-9][0-9]{0,5})")

Deal = Callable[[Sequence[tuple[int, int]], int], tuple[OwnedRange, ...]]
"""Deals `chunks` among participants given (upload, download) bytes/s of each; 0 is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSettings:
    """Parameters of a round: those that the settings in force fix, and the number of values summed in it.

    norm_clip: whether no contribution may be larger than the median one. aggregate: what plans call the rule by which
    contributions are combined. seats: how many contributions may count. sites: whether a member may have a delegate.
    """

    numel: int
    chunk_values: int
    codec: str
    grace_s: float
    reduce_deadline_s: float
    weight_cap: float
    norm_clip: bool = False
    aggregate: str = MEAN
    seats: int = MEMBER_LIMIT
    sites: bool = False

    @property
    def chunks(self) -> int:
        """Return how many chunks the values are cut into."""
        return -(-self.numel // self.chunk_values)

    @classmethod
    def of(cls, manifest: Manifest, numel: int, buffers: int = 0) -> Self:
        """Settings of a round of `numel` values under this manifest, the last `buffers` chunks of which are buffers."""
        return cls(
            numel=numel,
            chunk_values=manifest.round.chunk_values,
            codec=with_buffers(manifest.sync.plan_codec, buffers),
            grace_s=manifest.round.grace_s,
            reduce_deadline_s=manifest.round.reduce_deadline_s,
            weight_cap=manifest.round.weight_cap,
            norm_clip=manifest.sync.norm_clip,
            aggregate=manifest.sync.plan_aggregate,
            seats=manifest.seats,
            sites=manifest.sites_together,
        )


def with_buffers(codec: str, buffers: int) -> str:
    """Return what a plan calls the codec of parameters in `codec` and, behind them, `buffers` chunks of buffers."""
    return f"{codec}+buffers{buffers}" if buffers else codec


def split_codec(name: str) -> tuple[str, int]:
    """Return the codec of the parameters, and the number of chunks of buffers, that a plan's codec names.

    The number is 0 where it names no buffers, or not as `with_buffers` does; the name is then left as it is.
    """
    found = _WITH_BUFFERS.fullmatch(name)
    return (name, 0) if found is None else (found[1], int(found[2]))


def capped_tokens(tokens: Mapping[PeerId, int], cap: float) -> dict[PeerId, int]:
    """Declared tokens, none above `cap` times the (lower) median of those that are not zero.

    What somebody declares beyond that neither weighs nor counts in the tokens that schedules run by.
    """
    counted = sorted(t for t in tokens.values() if t > 0)
    if not counted:
        return dict.fromkeys(tokens, 0)
    ceiling = min(WEIGHT_LIMIT, max(1, int(counted[(len(counted) - 1) // 2] * cap)))
    return {peer: min(t, ceiling) for peer, t in tokens.items()}


def capped_weights(tokens: Mapping[PeerId, int], cap: float) -> dict[PeerId, int]:
    """Token weights: the capped tokens in lowest terms, in which equal ones are all 1, and a sum need not multiply."""
    capped = capped_tokens(tokens, cap)
    common = gcd(*capped.values()) or 1
    return {peer: t // common for peer, t in capped.items()}


def norm_clips(squares: Mapping[PeerId, Sequence[float]]) -> dict[PeerId, int]:
    """Return the factor on each contribution in the sum, in 1/65536, so that none is larger than the median one.

    squares: of every contributor, as in its Ready. With N the exact sum of a contributor's squares, rounded once, and M
    the (lower) median of those that are not zero, it is ⌊65536 · √(M ÷ N)⌋ where N > M, and 65536 elsewhere. Division
    and root are rounded as IEEE 754 says: every node that has the Readies gets the lead's numbers.
    """
    norms = {peer: fsum(parts) for peer, parts in squares.items()}
    counted = sorted(norm for norm in norms.values() if norm > 0)
    median = counted[(len(counted) - 1) // 2] if counted else 0.0
    return {peer: _clip(norm, median) for peer, norm in norms.items()}


def _clip(norm: float, median: float) -> int:
    return int(CLIP_UNIT * sqrt(median / norm)) if norm > median else CLIP_UNIT


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOrder:
    """Position of a plan in the order of plans of its round; a later one supersedes an earlier one."""

    view: int
    attempt: int
    planner: PeerId
    evicted: tuple[PeerId, ...]


def make_plan(
    previous: Value,
    plan_order: PlanOrder,
    readies: Mapping[PeerId, Ready],
    *,
    weightless: Collection[PeerId],
    settings: RoundSettings,
    deal: Deal,
    line: tuple[PeerId, ...] = (),
) -> Plan:
    """The plan over everyone in `readies`; those in `weightless`, and all but contributors, get weight zero.

    Where norms are clipped, so do contributors that do not tell one of every chunk; and where seats are few, those who
    have none by the `line`. The order is by PeerId: any order will do, and this one needs no agreement.
    """
    order = sorted(readies)
    chunks = settings.chunks
    contributors = {p: r for p, r in readies.items() if r.role == CONTRIBUTOR and p not in weightless}
    if settings.norm_clip:
        contributors = {p: r for p, r in contributors.items() if len(r.squares) == chunks}
    seated = Seating(settings.seats, line).first(contributors.keys())
    contributors = {p: r for p, r in contributors.items() if p in seated}
    tokens = {p: r.tokens for p, r in contributors.items()}
    weights, tokens = capped_weights(tokens, settings.weight_cap), capped_tokens(tokens, settings.weight_cap)
    participants = tuple(
        Participant(
            peer=p,
            weight=weights.get(p, 0),
            tokens=tokens.get(p, 0),
            root=readies[p].root if weights.get(p, 0) else NO_HASH,
            upload=readies[p].upload,
            download=readies[p].download,
            life=readies[p].life,
        )
        for p in order
    )
    clips = norm_clips({p: readies[p].squares for p in order if weights.get(p, 0)})
    delegated = _delegated(order, readies, weights) if settings.sites else ()
    owners = sorted(set(range(len(order))) - {one.place for one in delegated})
    rates = [(readies[order[place]].upload, readies[order[place]].download) for place in owners]
    return Plan(
        term=previous.next_term,
        round=previous.next_round,
        base=previous.hash,
        view=plan_order.view,
        attempt=plan_order.attempt,
        planner=plan_order.planner,
        participants=participants,
        owners=tuple(OwnedRange(owners[one.owner], one.start, one.stop) for one in deal(rates, chunks)),
        evicted=plan_order.evicted,
        codec=settings.codec,
        numel=settings.numel,
        chunk_values=settings.chunk_values,
        clips=tuple(clips.get(p, CLIP_UNIT) for p in order) if settings.norm_clip else msgspec.UNSET,
        aggregate=settings.aggregate if settings.aggregate != MEAN else msgspec.UNSET,
        delegated=delegated or msgspec.UNSET,
    )


def _delegated(
    order: Sequence[PeerId], readies: Mapping[PeerId, Ready], weights: Mapping[PeerId, int]
) -> tuple[Delegated, ...]:
    """Those who have a delegate whose contribution counts; with any other, they observe as anybody may."""
    places = {peer: place for place, peer in enumerate(order)}
    named = ((peer, readies[peer].delegate) for peer in order if readies[peer].role == OBSERVER)
    return tuple(
        Delegated(places[peer], places[to]) for peer, to in named if isinstance(to, str) and weights.get(PeerId(to), 0)
    )


def separated(readies: Mapping[PeerId, Ready]) -> set[tuple[PeerId, PeerId]]:
    """Pairs of peers that both report the other as unreachable, the lower first. No report: a peer reaches all."""
    mute = {p: set(r.reaches) for p, r in readies.items() if r.reaches}
    return {(a, b) for a in mute for b in mute if a < b and b not in mute[a] and a not in mute[b]}


def check_plan(
    plan: Plan, sender: PeerId, previous: Value, settings: RoundSettings, *, voting: Voting = CONTRIBUTORS
) -> None:
    """Check what can be checked of a plan without having seen every Ready.

    Raises RemoteError naming what is wrong with it.
    """
    if not plan.planner == sender == lead(previous, plan.view, voting=voting):
        raise RemoteError(f"planned in view {plan.view}, which another leads", peer=sender)
    if (plan.codec, plan.numel, plan.chunk_values) != (settings.codec, settings.numel, settings.chunk_values):
        raise RemoteError("a plan for another grid or codec", peer=sender)
    peers = [p.peer for p in plan.participants]
    if len(set(peers)) != len(peers):
        raise RemoteError("a plan that names a participant twice", peer=sender)
    if plan.origin == NO_HASH and (plan.standing or set(peers) & set(plan.evicted)):
        raise RemoteError("a plan that revises nothing, with evicted participants or finals", peer=sender)
    if not any(p.weight for p in plan.participants):
        raise RemoteError("a plan without a contribution", peer=sender)
    if len(plan.contributors()) > settings.seats:
        raise RemoteError(f"a plan that counts {len(plan.contributors())} for {settings.seats} seats", peer=sender)
    if plan.aggregate != (settings.aggregate if settings.aggregate != MEAN else msgspec.UNSET):
        raise RemoteError("a plan that combines contributions otherwise than the settings have it", peer=sender)
    _check_weights(plan, sender, settings.weight_cap)
    _check_clips(plan, sender, norm_clip=settings.norm_clip)
    _check_delegated(plan, sender, sites=settings.sites)
    _check_owners(plan, sender)
    _check_relays(plan, sender)


def _check_weights(plan: Plan, sender: PeerId, cap: float) -> None:
    """Check that weights follow from the tokens, so that no lead makes a contribution heavier than it is."""
    tokens = {p.peer: p.tokens for p in plan.participants}
    weights = {p.peer: p.weight for p in plan.participants}
    if capped_tokens(tokens, cap) != tokens or capped_weights(tokens, cap) != weights:
        raise RemoteError("a plan with weights that do not follow from its tokens", peer=sender)


def _check_clips(plan: Plan, sender: PeerId, *, norm_clip: bool) -> None:
    """Check that a plan clips contributions only where norms are clipped, and leaves at least one unclipped."""
    if isinstance(plan.clips, msgspec.UnsetType):
        if norm_clip:
            raise RemoteError("a plan that does not clip the norms, as the manifest has it", peer=sender)
        return
    if not norm_clip:
        raise RemoteError("a plan that clips norms, which the manifest does not", peer=sender)
    weighty = [clip for clip, p in zip(plan.clips, plan.participants, strict=True) if p.weight]
    rest = [clip for clip, p in zip(plan.clips, plan.participants, strict=True) if not p.weight]
    if CLIP_UNIT not in weighty or any(clip != CLIP_UNIT for clip in rest):
        raise RemoteError("a plan that clips all contributions, or who contributes nothing", peer=sender)


def check_norms(plan: Plan, sender: PeerId, squares: Mapping[PeerId, Sequence[float]]) -> None:
    """Hold the clips of a plan against what contributors announced, as far as that is known here.

    squares: of those whose contribution the plan counts. Of the others the norm may be anything, so the median lies
    between two of the known norms; with everyone's it is one, and the clips are `norm_clips`.

    Raises RemoteError, naming the contributor, if the plan says of one what its announcement cannot lead to.
    """
    if isinstance(plan.clips, msgspec.UnsetType):
        return
    counted = [plan.participants[place].peer for place in plan.contributors()]
    norms = {peer: fsum(squares[peer]) for peer in counted if peer in squares}
    for peer in norms:
        if len(squares[peer]) != plan.chunks:
            raise RemoteError(f"a plan that counts {peer}, which told no norm of every chunk", peer=sender)
    low, high = _median_between(sorted(norm for norm in norms.values() if norm > 0), len(counted) - len(norms))
    for place in plan.contributors():
        norm = norms.get(plan.participants[place].peer)
        if norm is not None and not _clip(norm, low) <= plan.clip(place) <= _clip(norm, high):
            raise RemoteError(
                f"a plan that clips {plan.participants[place].peer} to {plan.clip(place)} of {CLIP_UNIT}; "
                f"by the norms that were announced it is {_clip(norm, low)} to {_clip(norm, high)}",
                peer=sender,
            )


def _median_between(norms: Sequence[float], unknown: int) -> tuple[float, float]:
    """Bounds on the lower median of these norms, ascending, and `unknown` others, of which zeros are left out."""
    if not norms:
        return 0.0, inf if unknown else 0.0
    middle = (len(norms) + unknown - 1) // 2
    return norms[middle - unknown] if middle >= unknown else 0.0, norms[middle] if middle < len(norms) else inf


def _check_owners(plan: Plan, sender: PeerId) -> None:
    """Check that each chunk has exactly one owner that was not evicted, or a result that such a one can serve."""
    remaining = {i for i, p in enumerate(plan.participants) if p.peer not in plan.evicted}
    standing = [chunk for results in plan.standing for chunk in results.by_chunk()]
    if len(set(standing)) != len(standing) or any(chunk >= plan.chunks for chunk in standing):
        raise RemoteError("a plan with finals that stand twice or not at all", peer=sender)
    if any(results.place not in remaining for results in plan.standing):
        raise RemoteError("a plan with finals to be had from nobody", peer=sender)
    stand, next_chunk = set(standing), 0
    for owned in plan.owners:
        whole = next_chunk == owned.start < owned.stop <= plan.chunks
        if not whole or owned.owner >= len(plan.participants):
            raise RemoteError("a plan that does not deal every chunk once", peer=sender)
        if owned.owner not in remaining and not stand.issuperset(range(owned.start, owned.stop)):
            raise RemoteError("a plan that deals chunks to the evicted", peer=sender)
        next_chunk = owned.stop
    if next_chunk != plan.chunks:
        raise RemoteError("a plan that does not deal every chunk once", peer=sender)


def _check_delegated(plan: Plan, sender: PeerId, *, sites: bool) -> None:
    """Check that who has a delegate contributes nothing, and that the delegate does."""
    if isinstance(plan.delegated, msgspec.UnsetType):
        return
    if not sites:
        raise RemoteError("a plan with delegates, which the manifest does not have", peer=sender)
    places = [one.place for one in plan.delegated]
    count = len(plan.participants)
    if places != sorted(set(places)) or any(max(one.place, one.delegate) >= count for one in plan.delegated):
        raise RemoteError("a plan with delegates of nobody", peer=sender)
    for one in plan.delegated:
        if plan.participants[one.place].weight or not plan.participants[one.delegate].weight:
            raise RemoteError("a plan with a delegate that contributes for nobody", peer=sender)


def _check_relays(plan: Plan, sender: PeerId) -> None:
    count = len(plan.participants)
    for relay in plan.relays:
        if max(relay.one, relay.other, relay.via) >= count or relay.one >= relay.other:
            raise RemoteError("a plan with a relay between nobody", peer=sender)
        if relay.via in (relay.one, relay.other) or plan.participants[relay.via].peer in plan.evicted:
            raise RemoteError("a plan with a relay through who cannot be one", peer=sender)


def absent_ready(role: str, previous: Value, state: bytes) -> Ready:
    """A Ready without a contribution: `role` is training, observer or joiner. The round machine adds its life."""
    if role not in (TRAINING, OBSERVER, JOINER):
        raise LocalError(f"role {role!r} needs a contribution")
    return Ready(
        term=previous.next_term,
        round=previous.next_round,
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


# -- revising a plan -------------------------------------------------------------------------------------------


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
        """True if `held` answers this eviction: its sender takes nothing more from the evicted, and maybe others."""
        return held is not None and held.lineage == self.lineage and self.evicted <= frozenset(held.evicted)

    def parted(self, helds: Mapping[PeerId, Held], me: PeerId) -> set[PeerId]:
        """Peers that remained, and gave these answers, and without whom the lineage must go on too.

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
    delegates = msgspec.structs.replace(plan, evicted=plan_order.evicted).delegates
    remaining = [i for i in remaining if peers[i] not in delegates] or remaining
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
    """Index the holders by chunk and by its (signer, result): places of those who hold it."""
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
