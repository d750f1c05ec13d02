"""Which of the offered groups a node pulls: the J external groups of its round.

Groups whose announced rewards do not vary are left out before sampling, since their advantages are zero. Over what is
left the choice is uniform, as in the paper, or weighted by informativeness: by the announced variance, which for
rewards of 0 and 1 is largest where half of the completions succeed.

Source: arXiv 2509.08721, section 3 and algorithm 1.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from shoal.protocol.errors import LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.offer_book import Offer
from shoal.protocol.rollouts import Reason, TaskRef

Weighting = Literal["uniform", "informative"]

VARIANCE_LEAST = 1e-8
"""A reward variance up to this is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionSettings:
    """What may be chosen.

    staleness_rounds: the most of this node's rounds since an offer arrived. offers_per_origin: the most, its latest,
    that may be drawn of one peer, so that who offers more is not chosen more.
    """

    weighting: Weighting = "uniform"
    staleness_rounds: int = 4
    offers_per_origin: int = 64

    def __post_init__(self) -> None:
        """Raises LocalError."""
        if self.staleness_rounds < 0 or self.offers_per_origin < 1:
            raise LocalError(f"staleness is counted from 0 and offers from 1, not as in {self}")


class Selector:
    """Filters offers and draws from them. `rejected` counts each offer that is left out once, by reason."""

    def __init__(
        self,
        settings: SelectionSettings | None = None,
        *,
        ignored: Callable[[PeerId], bool] = lambda peer: False,
        scorable: Callable[[str], bool] = lambda family: True,
        assigned: Callable[[PeerId, int, int], TaskRef] | None = None,
        blame: Callable[[PeerId, Reason], None] = lambda peer, reason: None,
    ) -> None:
        """`ignored`: peers whose offers do not count; `scorable`: families whose text may be scored here.

        `assigned`: the task of a peer in its round at an index, where the caller would have others refused unpulled;
        `blame` hears who offered such.
        """
        self.settings = settings or SelectionSettings()
        self.rejected: Counter[Reason] = Counter()
        self._ignored = ignored
        self._scorable = scorable
        self._assigned = assigned
        self._blame = blame
        self._counted: set[bytes] = set()
        self._own_tasks: set[bytes] = set()  # digests of offers that were found to be about assigned tasks

    def eligible(self, offers: Iterable[Offer], *, round_number: int, used: Collection[bytes]) -> list[Offer]:
        """The offers that may be drawn in this node's round; `used`: digests of groups that were pulled before."""
        offers = list(offers)
        kept, counted = [], set()
        for offer in offers:
            if offer.digest in used:
                continue
            reason = self._reason_against(offer, round_number)
            if reason is None:
                kept.append(offer)
                continue
            if offer.digest not in self._counted:
                self.rejected[reason] += 1
                if reason is Reason.FOREIGN_TASK:
                    self._blame(offer.origin, reason)
            counted.add(offer.digest)
        # What is offered no more need not be remembered.
        self._counted = counted
        self._own_tasks &= {offer.digest for offer in offers}
        return self._latest(kept)

    def draw(self, offers: Iterable[Offer], count: int, rng: random.Random) -> list[Offer]:
        """Up to `count` of these offers, without repetition, in the order of the draw."""
        offers = list(offers)
        if self.settings.weighting == "uniform":
            return rng.sample(offers, min(count, len(offers)))
        # Efraimidis and Spirakis 2006: the largest u^(1/w) are a weighted sample without replacement.
        keys = [(rng.random() ** (1 / offer.announcement.reward_variance), at) for at, offer in enumerate(offers)]
        return [offers[at] for _, at in sorted(keys, reverse=True)[:count]]

    def _reason_against(self, offer: Offer, round_number: int) -> Reason | None:
        announcement = offer.announcement
        if self._ignored(offer.origin):
            return Reason.IGNORED
        if not self._scorable(announcement.task.family):
            return Reason.UNSAFE_FAMILY
        if round_number - offer.arrived > self.settings.staleness_rounds:
            return Reason.STALE
        if announcement.reward_variance <= VARIANCE_LEAST:
            return Reason.NO_VARIANCE
        return None if self._is_own_task(offer) else Reason.FOREIGN_TASK

    def _is_own_task(self, offer: Offer) -> bool:
        if self._assigned is None or offer.digest in self._own_tasks:
            return True
        announcement = offer.announcement
        if announcement.task != self._assigned(offer.origin, announcement.round, announcement.task.index):
            return False
        self._own_tasks.add(offer.digest)
        return True

    def _latest(self, offers: list[Offer]) -> list[Offer]:
        """The last `offers_per_origin` of each peer."""
        room: dict[PeerId, int] = {}
        latest = []
        for offer in reversed(offers):
            left = room.get(offer.origin, self.settings.offers_per_origin)
            if left:
                room[offer.origin] = left - 1
                latest.append(offer)
        return latest[::-1]


class ByteBudget:
    """Keeps what is pulled within the bytes of the groups trained on, plus `allowance` of them.

    What a round needs is pulled in any case: as many groups as it wants. A replacement, for a group that came and was
    refused, is pulled only while the bytes wasted so far leave room for it to be wasted as well.
    """

    def __init__(self, allowance: float = 0.05) -> None:
        self.allowance = allowance
        self.trained_bytes = 0
        self.wasted_bytes = 0

    def note(self, size_bytes: int, *, trained: bool) -> None:
        """A group of this size was pulled, and trained on or not."""
        if trained:
            self.trained_bytes += size_bytes
        else:
            self.wasted_bytes += size_bytes

    def allows(self, size_bytes: int) -> bool:
        """Whether a replacement of this size may be pulled."""
        return self.wasted_bytes + size_bytes <= self.allowance * self.trained_bytes
