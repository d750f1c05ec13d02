"""Agents that attack a swarm which shares rollouts: what they announce and hold in each round.

An attacker has no model. It is one of four kinds, by turns, and each of them announces as many groups as a swarm of
its size can bear to hear of:

* ``liar``: wrong answers to its own tasks, announced as half right.
* ``garbage``: bytes that are no group, or no announcement.
* ``flood``: hundreds of announcements a round, and earlier ones of itself and of others once more.
* ``copier``: others' announcements and groups, as its own.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Final

from shoal.lab.bench.sapo_swarm import SharedMemory
from shoal.node.sapo.tasks import TaskSource
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.rollouts import (
    Announcement,
    RolloutGroup,
    announce_group,
    decode_group,
    digest_of,
    encode_group,
    open_announcement,
    seal_announcement,
)
from shoal.protocol.wire import Sealer

KINDS: Final = ("liar", "garbage", "flood", "copier")
GROUP_SIZE: Final = 8
GROUPS: Final = 8
"""Groups that an attacker announces in a round."""
FLOOD: Final = 300
HEARD_LIMIT: Final = 256
HALF_RIGHT: Final = (1.0, 0.0) * (GROUP_SIZE // 2)


class Attacker:
    """One attacking member."""

    def __init__(self, shared: SharedMemory, identity: Identity, source: TaskSource, *, kind: int, seed: int) -> None:
        """kind: an index into `KINDS`, modulo their number."""
        self.kind = KINDS[kind % len(KINDS)]
        self._shared = shared
        self._sealer = Sealer(identity, shared.swarm_id, boot=0)
        self._source = source
        self._random = random.Random(f"{seed}/{kind}")
        self._heard: deque[bytes] = deque(maxlen=HEARD_LIMIT)
        self._said: deque[bytes] = deque(maxlen=HEARD_LIMIT)

    @property
    def peer_id(self) -> PeerId:
        """PeerId of this attacker."""
        return self._sealer.peer_id

    def hear(self, data: bytes, *, sender: PeerId) -> None:
        """Keep what others announce."""
        self._heard.append(data)

    def attack(self, round_number: int) -> None:
        """Attack in this round as its kind does."""
        sealed = {
            "liar": self._lie,
            "garbage": self._litter,
            "flood": self._flood,
            "copier": self._copy,
        }[self.kind](round_number)
        self._said.extend(sealed)
        self._shared.publish(sealed, sender=self.peer_id)

    def _lie(self, round_number: int) -> list[bytes]:
        return [self._announce(self._wrong_group(round_number, at), round_number) for at in range(GROUPS)]

    def _litter(self, round_number: int) -> list[bytes]:
        sealed = []
        for at in range(GROUPS):
            data = self._random.randbytes(self._random.randint(1, 2000))
            told = announce_group(group := self._wrong_group(round_number, at), encode_group(group), HALF_RIGHT)
            self._shared.hold(digest_of(data), data, round_number)
            sealed.append(self._seal(told, digest=digest_of(data), size_bytes=len(data)))
            sealed.append(self._random.randbytes(300))
        return sealed

    def _flood(self, round_number: int) -> list[bytes]:
        fresh = [self._announce(self._wrong_group(round_number, at), round_number) for at in range(FLOOD)]
        return [*list(self._said)[:GROUPS], *list(self._heard)[:GROUPS], *fresh]

    def _copy(self, round_number: int) -> list[bytes]:
        sealed = []
        for at, data in enumerate(self._random.sample(self._heard, min(GROUPS, len(self._heard)))):
            try:
                signed = open_announcement(data, self._shared.swarm_id)
            except RemoteError:
                continue
            told = signed.announcement
            held = self._shared.held(told.digest)
            if held is None:
                continue
            sealed.append(seal_announcement(self._sealer, told))  # the group itself, as this attacker's
            try:
                group = decode_group(held)
            except RemoteError:
                continue
            task = self._source.table.assigned(self._shared.swarm_id, self.peer_id, round_number, at)
            copied = RolloutGroup(
                origin=self.peer_id, round=round_number, policy_version=0, task=task, completions=group.completions
            )
            copy = encode_group(copied)
            self._shared.hold(digest_of(copy), copy, round_number)
            claimed = announce_group(copied, copy, tuple(HALF_RIGHT * 8)[: len(group.completions)])
            sealed.append(seal_announcement(self._sealer, claimed))  # its completions, as answers to another task
        return sealed

    def _wrong_group(self, round_number: int, index: int) -> RolloutGroup:
        task = self._source.table.assigned(self._shared.swarm_id, self.peer_id, round_number, index)
        texts = tuple(str(self._random.randint(10_000, 99_999)) for _ in range(GROUP_SIZE))
        return RolloutGroup(
            origin=self.peer_id, round=round_number, policy_version=round_number, task=task, completions=texts
        )

    def _announce(self, group: RolloutGroup, round_number: int) -> bytes:
        data = encode_group(group)
        self._shared.hold(digest_of(data), data, round_number)
        return seal_announcement(self._sealer, announce_group(group, data, HALF_RIGHT))

    def _seal(self, told: Announcement, *, digest: bytes, size_bytes: int) -> bytes:
        changed = Announcement(
            digest=digest,
            size_bytes=size_bytes,
            task=told.task,
            completions=told.completions,
            reward_mean=told.reward_mean,
            reward_variance=told.reward_variance,
            policy_version=told.policy_version,
            round=told.round,
        )
        return seal_announcement(self._sealer, changed)
