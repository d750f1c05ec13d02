"""The judging of a pulled group: bytes from a peer become a `JudgedGroup`, or are refused, each with a verdict.

Of what the peer says only the text is used. The task is made anew from its reference, which must be the one that the
origin was assigned; the completions are scored by this node's own scorer. The announced rewards then show whether the
origin told the truth: where they disagree the group is refused, and the origin is to blame. A group with a text that
could not be scored in time, or of a task that could not be made in time, is refused too, but says nothing of the hint:
the time may have been lacking here. Where scoring did not even begin, nobody is to blame. A group most of whose texts
another offered before is a copy: who copies has to have heard of them first.

The judge works in the agent, next to tasks and scorers, and is the only place where a pulled group is decoded. What
verdicts cost whom is decided in the daemon, by `Intake` and `Trust`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from shoal.node.sapo.dialogue import TURN, turns_in
from shoal.node.sapo.groups import JudgedGroup, all_known
from shoal.node.sapo.sandbox import TASK_LIMIT_S
from shoal.node.sapo.sandbox_process import Overdue, limited
from shoal.node.sapo.selection import VARIANCE_LEAST, Verdict
from shoal.node.sapo.tasks import Task, TaskSource
from shoal.node.sapo.trust import Replayed
from shoal.protocol.errors import ShoalError
from shoal.protocol.identity import PeerId
from shoal.protocol.offer_book import Offer
from shoal.protocol.rollouts import (
    Reason,
    RolloutError,
    RolloutGroup,
    check_as_announced,
    decode_group,
    digest_of,
    reward_moments,
)
from shoal.protocol.wire import SwarmId

logger = logging.getLogger(__name__)

HINT_TOLERANCE = 0.02
"""The most that announced mean and variance may be from this node's own."""
SEEN_LIMIT = 65_536
"""Groups, and texts, that are remembered."""
COPY_LEAST_BYTES = 48
"""Shorter texts are nobody's: short answers coincide by chance."""
COPIES_LEAST = 2
"""Different texts of others that make a copy: two models may well say one sentence, or repeat one token to the end."""
OWN = -1
"""The order of this node's own texts: before all that it heard."""

Score = Callable[[Sequence[tuple[Task, str]]], Sequence[float | None]]
"""Rewards in [0, 1] of texts, in their order; None for one that could not be scored in time."""


class _Memory:
    """The last SEEN_LIMIT keys, each with whose it is: of those who had it, who was heard of first."""

    def __init__(self) -> None:
        self._owners: OrderedDict[Hashable, tuple[int, PeerId | None]] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._owners

    def is_anothers(self, key: Hashable, owner: PeerId | None, order: int) -> bool:
        known = self._owners.get(key)
        return known is not None and known[0] <= order and known[1] != owner

    def note(self, key: Hashable, owner: PeerId | None, order: int) -> None:
        known = self._owners.get(key)
        if known is None or order < known[0]:
            self._owners[key] = order, owner
        if len(self._owners) > SEEN_LIMIT:
            self._owners.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Opened:
    offer: Offer
    group: RolloutGroup
    task: Task


Replay = Callable[[JudgedGroup], Replayed]
"""Goes through a group's tokens again, as `Replayer.replay`."""


class Judgement(NamedTuple):
    """The verdict on a pulled group, the group itself where it was accepted, and its question if it was opened."""

    verdict: Verdict
    group: JudgedGroup | None = None
    question: str = ""


class Judge:
    """Judges groups for one node. Nothing that a peer sent makes it raise."""

    def __init__(self, *, swarm_id: SwarmId, source: TaskSource, score: Score) -> None:
        """`score`: of peers' text, bounded in time, such as `Scorer.score_each`.

        Nothing is gone through again before `replay` is set.
        """
        self._swarm_id = swarm_id
        self._source = source
        self._score = score
        self._scorable = source.scorable
        self._seen = _Memory()
        self._texts = _Memory()
        self.replay: Replay | None = None

    def judge(self, pulled: Sequence[tuple[Offer, bytes]], *, to_replay: Collection[bytes] = ()) -> list[Judgement]:
        """Return what is found of each group, in their order, with this node's own rewards.

        to_replay: digests of the groups whose tokens are gone through again.
        """
        judged: list[Judgement] = []
        for one in [self._open_or_refuse(offer, data) for offer, data in pulled]:
            if isinstance(one, Judgement):
                judged.append(one)
                continue
            judgement = self._weigh_or_refuse(one, self._scores(one))
            if judgement.group is not None:
                judgement = self._with_proof(one, judgement, judgement.group, replays=one.offer.digest in to_replay)
            judged.append(judgement._replace(question=one.task.question))
        return judged

    def _with_proof(self, one: _Opened, judgement: Judgement, group: JudgedGroup, *, replays: bool) -> Judgement:
        """The judgement once its texts were compared with others', and its tokens gone through where that is due.

        Where draws are assigned anybody can foretell an honest one's texts, and announce them first: so whose tokens
        are those that it had to draw has copied nobody, and what was refused is nobody's.
        """
        peer, texts = one.offer.origin, _comparable(one.task, one.group.completions)
        copied = [text for text in texts if self._texts.is_anothers(text, peer, one.offer.order)]
        is_copy = 2 * len(copied) > len(one.group.completions) and len(set(copied)) >= COPIES_LEAST
        if self.replay is not None and (replays or is_copy):
            judgement = _replayed(judgement, group, self.replay)
        found = judgement.verdict.replayed
        if is_copy and judgement.group is not None and (found is None or found.doubt > 0):
            return _refusal(RolloutError("completions of somebody else", reason=Reason.COPIED, peer=peer))
        if judgement.group is not None:
            for text in texts:
                self._texts.note(text, peer, one.offer.order)
        return judgement

    def note_own(self, task: Task, texts: Sequence[str]) -> None:
        """Remember completions that this node announced itself: whoever offers them as its own has copied them."""
        for text in _comparable(task, texts):
            self._texts.note(text, None, OWN)

    def _scores(self, one: _Opened) -> Sequence[float | None]:
        """Return rewards of a group's texts; none where the scorer itself fails, which is no peer's fault."""
        try:
            return self._score([(one.task, text) for text in one.group.completions])
        except ShoalError as error:
            logger.error("a group of another cannot be scored: %s", error)
            return ()

    def _open_or_refuse(self, offer: Offer, data: bytes) -> _Opened | Judgement:
        try:
            return self._open(offer, data)
        except RolloutError as error:
            return _refusal(error)

    def _weigh_or_refuse(self, one: _Opened, rewards: Sequence[float | None]) -> Judgement:
        if not rewards:
            return Judgement(Verdict(refused=Reason.UNSCORED, blamed=False))
        try:
            group = self._weigh(one, _known(rewards, one.offer.origin))
        except RolloutError as error:
            return _refusal(error)
        return Judgement(Verdict(rewards=group.rewards), group)

    def _open(self, offer: Offer, data: bytes) -> _Opened:
        """Return the group and its task, if it is the one announced and its origin was assigned the task."""
        peer = offer.origin
        if digest_of(data) != offer.digest:
            raise RolloutError("other bytes than announced", reason=Reason.FORGED, peer=peer)
        group = decode_group(data, peer=peer)
        check_as_announced(group, offer.announcement, peer)
        if not self._source.table.is_assigned(self._swarm_id, peer, group.round, group.task):
            raise RolloutError("a task that its origin was not assigned", reason=Reason.FOREIGN_TASK, peer=peer)
        if group.task.family not in self._scorable:
            raise RolloutError(
                f"a task of {group.task.family!r}, whose answers cannot be scored safely here",
                reason=Reason.UNSAFE_FAMILY,
                peer=peer,
            )
        place = (peer, group.task.seed)
        if offer.digest in self._seen or place in self._seen:
            raise RolloutError("a second group of one task", reason=Reason.DUPLICATE, peer=peer)
        self._seen.note(offer.digest, peer, offer.order)
        self._seen.note(place, peer, offer.order)
        return _Opened(offer, group, self._make(group, peer))

    def _make(self, group: RolloutGroup, peer: PeerId) -> Task:
        try:
            with limited(TASK_LIMIT_S):
                return self._source.task(group.task)
        except Overdue:
            raise RolloutError("a task that takes too long to make", reason=Reason.UNSCORED, peer=peer) from None
        except Exception as error:  # the boundary: a peer's reference in a foreign generator
            reason = Reason.UNKNOWN_TASK
            raise RolloutError(f"a task that cannot be made here: {error}", reason=reason, peer=peer) from error

    def _weigh(self, one: _Opened, rewards: tuple[float, ...]) -> JudgedGroup:
        """Return the group with its rewards, if they are what was announced and it teaches something."""
        peer, announcement = one.offer.origin, one.offer.announcement
        mean, variance = reward_moments(rewards)
        gap = max(abs(mean - announcement.reward_mean), abs(variance - announcement.reward_variance))
        if gap > HINT_TOLERANCE:
            raise RolloutError(
                f"announced a mean reward of {announcement.reward_mean:.3f}, here it is {mean:.3f}",
                reason=Reason.HINT,
                peer=peer,
            )
        if variance <= VARIANCE_LEAST:
            raise RolloutError("rewards that do not vary", reason=Reason.NO_VARIANCE, peer=peer)
        return JudgedGroup(
            task=one.task,
            texts=one.group.completions,
            rewards=rewards,
            origin=peer,
            round=one.group.round,
            policy_version=one.group.policy_version,
            sampling=None if one.group.sampling is msgspec.UNSET else one.group.sampling,
        )


def _refusal(error: RolloutError) -> Judgement:
    logger.info("a group was refused as %s: %s", error.reason, error)
    return Judgement(Verdict(refused=error.reason))


def _replayed(judgement: Judgement, group: JudgedGroup, replay: Replay) -> Judgement:
    """The judgement once tokens of the group were gone through: it is refused where they alone are proof."""
    try:
        found = replay(group)
    except RolloutError as error:
        return _refusal(error)
    except Exception as error:  # the boundary: a group may be longer than this node has memory for
        logger.error("a group of %s cannot be gone through here: %s", group.origin, error)
        return Judgement(Verdict(blamed=False, refused=Reason.UNSCORED))
    if found.is_proof:
        logger.info("a group of %s is not of the policy that it names: %s", group.origin, found)
        return Judgement(Verdict(refused=Reason.OTHER_POLICY, blamed=False, replayed=found))
    return judgement._replace(verdict=msgspec.structs.replace(judgement.verdict, replayed=found))


def _known(rewards: Sequence[float | None], origin: PeerId) -> tuple[float, ...]:
    """Return the rewards. Raises RolloutError if one could not be told in time."""
    known = all_known(rewards)
    if known is None:
        raise RolloutError("completions that cannot be scored in time", reason=Reason.UNSCORED, peer=origin)
    return known


def _comparable(task: Task, texts: Sequence[str]) -> list[bytes]:
    """Fingerprints of the texts that are long enough to be somebody's own.

    Of a dialogue it is what was said, whatever was answered, and one of its turns has to be so long.
    """
    own = ((text,) if task.answering is None else turns_in(text)[0] for text in texts)
    encoded = ([turn.encode(errors="replace") for turn in turns] for turns in own)
    return [digest_of(TURN.encode().join(turns)) for turns in encoded if max(map(len, turns)) >= COPY_LEAST_BYTES]
