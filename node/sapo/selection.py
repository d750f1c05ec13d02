"""The choice of the groups that a node pulls: the J external groups of its round, and what replaces those it refuses.

Only announcements are looked at, so this is done in the daemon, which has them. Groups whose announced rewards do not
vary are left out before sampling, since their advantages are zero. Over what is left the choice is uniform.

`Intake` is the whole way without IO. Whoever drives it pulls what it wants, and has the agent judge what came:

    wanted = intake.begin(offers, count, round_number)
    while wanted:
        while wanted:
            wanted = intake.receive(await exchange.fetch(wanted, ...))
        wanted = intake.judged(what the judge finds of intake.pulled)

Source: arXiv 2509.08721, section 3 and algorithm 1.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.node.sapo.groups import mean
from shoal.node.sapo.tasks import INDEX_LIMIT, TaskTable
from shoal.node.sapo.trust import Replayed, Trust
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.offer_book import Offer, OfferKey
from shoal.protocol.rollouts import COMPLETION_LIMIT, Reason, TaskRef
from shoal.protocol.wire import SwarmId

VARIANCE_LEAST = 1e-8
"""A reward variance up to this is none."""
USED_LIMIT = 65_536
"""Offers that are remembered: whose groups were pulled, or could not be; and those that were counted as left out."""
OFFERS_PER_ORIGIN = 64
"""The latest so many may be drawn of one peer, so that who offers more is not chosen more."""
ATTEMPTS_PER_GROUP = 4
"""Offers that a round may try for each group that it wants."""
WASTE_SHARE = 0.05
"""Bytes of refused groups that may be replaced, of those trained on."""

Reward = Annotated[float, Meta(ge=0, le=1)]


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The judge's finding on a pulled group.

    rewards: (G,) of an accepted group, given here; none of a refused one. refused: why it is. blamed: whether its
    origin is at fault. replayed: what was found of its tokens, where they were gone through.
    """

    rewards: Annotated[tuple[Reward, ...], Meta(max_length=COMPLETION_LIMIT)] = ()
    refused: Reason | None = None
    blamed: bool = True
    replayed: Replayed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """The swarm's tasks by their names. scorable: families of which others' text can be scored on this machine."""

    swarm_id: SwarmId
    table: TaskTable
    scorable: frozenset[str]


class Selector:
    """Filters offers."""

    def __init__(
        self,
        tasks: Tasks,
        trust: Trust,
        *,
        staleness_rounds: int,
        other_version: Callable[[Offer, str], None] = lambda *_: None,
    ) -> None:
        """`trust`: of whom nothing is drawn, and where a task that its origin was not assigned counts as a fault.

        staleness_rounds: the most of this node's rounds since an offer arrived. other_version: is told once for each
        family that another has it in another version than this one.
        """
        self._staleness_rounds = staleness_rounds
        self._other_version = other_version
        self._told: set[str] = set()
        self._tasks = tasks
        self._trust = trust
        self._counted: OrderedDict[OfferKey, None] = OrderedDict()
        self._own_tasks: set[OfferKey] = set()  # offers that were found to be about assigned tasks

    def eligible(
        self,
        offers: Iterable[Offer],
        *,
        round_number: int,
        used: Collection[OfferKey],
        policies: Collection[int] | None = None,
    ) -> tuple[list[Offer], Counter[Reason]]:
        """Return those that may be drawn in this node's round, and why others are left out, each told of once.

        used: offers whose groups were pulled before. policies: the versions of which groups are taken, None for all.
        A later one may be taken later.
        """
        offers = list(offers)
        kept, rejected = [], Counter[Reason]()
        for offer in offers:
            if offer.key in used:
                continue
            if policies and offer.announcement.policy_version > max(policies):
                continue
            reason = self._reason_against(offer, round_number)
            if reason is None and policies is not None and offer.announcement.policy_version not in policies:
                reason = Reason.STALE
            if reason is None:
                kept.append(offer)
                continue
            if offer.key not in self._counted:
                self._counted[offer.key] = None
                rejected[reason] += 1
                if reason is Reason.FOREIGN_TASK:
                    self._trust.fault(offer.origin, reason)
                elif reason is Reason.UNKNOWN_TASK:
                    self._tell(offer)
        while len(self._counted) > USED_LIMIT:
            self._counted.popitem(last=False)
        # What is offered no more need not be remembered.
        self._own_tasks &= {offer.key for offer in offers}
        return self._latest(kept), rejected

    def _reason_against(self, offer: Offer, round_number: int) -> Reason | None:
        announcement = offer.announcement
        if self._trust.ignored(offer.origin):
            return Reason.IGNORED
        if announcement.task.family not in self._tasks.scorable:
            return Reason.UNSAFE_FAMILY
        if round_number - offer.arrived > self._staleness_rounds:
            return Reason.STALE
        if announcement.reward_variance <= VARIANCE_LEAST:
            return Reason.NO_VARIANCE
        return self._reason_against_task(offer)

    def _reason_against_task(self, offer: Offer) -> Reason | None:
        """Refuse what its origin was not assigned; where all but the version is right, it has other code, and no fault.

        Its version is its own word, but nothing of an unknown task is pulled.
        """
        if offer.key in self._own_tasks:
            return None
        task, own = offer.announcement.task, self._assigned(offer)
        if task.index >= INDEX_LIMIT or msgspec.structs.replace(task, version=own.version) != own:
            return Reason.FOREIGN_TASK
        if task != own:
            return Reason.UNKNOWN_TASK
        self._own_tasks.add(offer.key)
        return None

    def _assigned(self, offer: Offer) -> TaskRef:
        """The task that the offer has to be about."""
        announcement = offer.announcement
        return self._tasks.table.assigned(
            self._tasks.swarm_id, offer.origin, announcement.round, announcement.task.index
        )

    def _tell(self, offer: Offer) -> None:
        family = offer.announcement.task.family
        if family not in self._told:
            self._told.add(family)
            self._other_version(offer, self._assigned(offer).version)

    def _latest(self, offers: list[Offer]) -> list[Offer]:
        """Return the last `OFFERS_PER_ORIGIN` of each peer."""
        room: dict[PeerId, int] = {}
        latest = []
        for offer in reversed(offers):
            left = room.get(offer.origin, OFFERS_PER_ORIGIN)
            if left:
                room[offer.origin] = left - 1
                latest.append(offer)
        return latest[::-1]


class ByteBudget:
    """Keeps what is pulled within the bytes of the groups trained on, plus `WASTE_SHARE` of them.

    What a round needs is pulled in any case: as many groups as it wants. A replacement, for a group that came and was
    refused, is pulled only while the bytes wasted so far leave room for it to be wasted as well.
    """

    def __init__(self) -> None:
        self.trained_bytes = 0
        self.wasted_bytes = 0

    def note(self, size_bytes: int, *, trained: bool) -> None:
        """Note that a group of this size was pulled, and trained on or not."""
        if trained:
            self.trained_bytes += size_bytes
        else:
            self.wasted_bytes += size_bytes

    def allows(self, size_bytes: int) -> bool:
        """Return whether a replacement of this size may be pulled."""
        return self.wasted_bytes + size_bytes <= WASTE_SHARE * self.trained_bytes


@dataclass(slots=True, kw_only=True)
class RoundIntake:
    """The intake of a round.

    origins: accepted groups of whom; rejected: offers and groups that were not, by reason; rewards: of the completions
    of each accepted group, by its task family.
    """

    origins: Counter[PeerId] = field(default_factory=Counter)
    rejected: Counter[Reason] = field(default_factory=Counter)
    rewards: dict[str, list[Sequence[float]]] = field(default_factory=dict)

    @property
    def reward(self) -> float | None:
        """The mean over the accepted groups' completions."""
        return mean(reward for groups in self.rewards.values() for group in groups for reward in group)


class Intake:
    """One node's way from offers to judged groups; one draw at a time. What verdicts cost whom is decided here."""

    def __init__(
        self,
        tasks: Tasks,
        *,
        trust: Trust,
        seed: int,
        staleness_rounds: int,
        other_version: Callable[[Offer, str], None] = lambda *_: None,
    ) -> None:
        """`seed`: of the draws. The rest: see `Selector`."""
        self.trust = trust
        self.budget = ByteBudget()
        self.pulled: list[tuple[Offer, bytes]] = []
        """The groups that came and are to be judged, with their offers."""
        self._selector = Selector(tasks, trust, staleness_rounds=staleness_rounds, other_version=other_version)
        self._rng = random.Random(seed)
        self._used: OrderedDict[OfferKey, None] = OrderedDict()
        self._left: list[Offer] = []
        self._wanted: list[Offer] = []
        self._missing = 0
        self._round = RoundIntake()

    def begin(
        self, offers: Iterable[Offer], count: int, round_number: int, *, policies: Collection[int] | None = None
    ) -> list[Offer]:
        """Draw `count` of the offers that may be drawn in this node's round, and return them: they are to be pulled.

        policies: see `Selector.eligible`.
        """
        self.trust.advance(round_number)
        self.pulled, self._missing = [], count
        eligible, left_out = self._selector.eligible(
            offers, round_number=round_number, used=self._used, policies=policies
        )
        self.rejected.update(left_out)
        drawn = self._rng.sample(eligible, min(ATTEMPTS_PER_GROUP * count, len(eligible)))
        self._left = drawn[count:]
        return self._want(drawn[:count])

    def receive(self, came: Mapping[bytes, bytes]) -> list[Offer]:
        """Take what came of the offers wanted last, and return the replacements of the others, which cost nothing."""
        here = [(offer, came[offer.digest]) for offer in self._wanted if offer.digest in came]
        absent = len(self._wanted) - len(here)
        self.pulled += here
        self._used.update((offer.key, None) for offer in self._wanted)
        while len(self._used) > USED_LIMIT:
            self._used.popitem(last=False)
        return self._want(self._replacements(absent))

    def judged(self, verdicts: Sequence[Verdict]) -> list[Offer]:
        """Take the verdicts on `pulled`, and return what replaces the refused groups, while the budget lasts.

        Raises LocalError for another number of verdicts than groups.
        """
        if len(verdicts) != len(self.pulled):
            raise LocalError(f"{len(verdicts)} verdicts on {len(self.pulled)} groups")
        for (offer, data), verdict in zip(self.pulled, verdicts, strict=True):
            self.budget.note(len(data), trained=verdict.refused is None)
            self._note(offer, verdict)
        self.pulled = []
        return self._want(self._replacements(self._missing, self.budget))

    @property
    def rejected(self) -> Counter[Reason]:
        """Offers and groups that were left out in this round, by reason."""
        return self._round.rejected

    def end_round(self) -> RoundIntake:
        """Return what the round took; it begins anew."""
        ended, self._round = self._round, RoundIntake()
        return ended

    def _note(self, offer: Offer, verdict: Verdict) -> None:
        origin = offer.origin
        if verdict.replayed is not None:
            self.trust.replayed(origin, verdict.replayed)
        if verdict.refused is not None:
            self.rejected[verdict.refused] += 1
            if verdict.blamed:
                self.trust.fault(origin, verdict.refused)
            return
        self._missing -= 1
        self._round.origins[origin] += 1
        self._round.rewards.setdefault(offer.announcement.task.family, []).append(verdict.rewards)
        self.trust.good(origin)

    def _replacements(self, count: int, budget: ByteBudget | None = None) -> list[Offer]:
        """Take up to `count` of the offers that were drawn and not tried, as far as `budget` reaches."""
        chosen: list[Offer] = []
        while self._left and len(chosen) < count:
            offer = self._left[0]
            if self.trust.ignored(offer.origin):
                del self._left[0]
                continue
            if budget is not None and not budget.allows(total_bytes([*chosen, offer])):
                break
            chosen.append(self._left.pop(0))
        return chosen

    def _want(self, offers: Sequence[Offer]) -> list[Offer]:
        self._wanted = list(offers)
        return list(offers)


def total_bytes(offers: Iterable[Offer]) -> int:
    """Return the bytes of these offers' groups."""
    return sum(offer.announcement.size_bytes for offer in offers)
