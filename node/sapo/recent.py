"""The newest groups that went through this node, for people to read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shoal.protocol.identity import PeerId
from shoal.protocol.rollouts import Announcement

RECENT_LIMIT = 24
TEXT_LIMIT_BYTES = 4 << 20
"""Of all of them together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentGroup:
    """An encoded group, and what `origin` announced of it. rewards: what this node scored its own completions with.

    question: what the completions answer, as this node's agent has it; empty where it did not open the group. came: in
    which of this node's rounds.
    """

    announcement: Announcement
    origin: PeerId
    group: bytes
    rewards: Sequence[float] = ()
    question: str = ""
    came: int = 0

    @property
    def digest(self) -> bytes:
        """The name of the group's bytes."""
        return self.announcement.digest


class RecentGroups:
    """A bounded number of them, oldest first."""

    def __init__(self) -> None:
        self._groups: deque[RecentGroup] = deque()
        self._bytes = 0

    def add(self, group: RecentGroup) -> None:
        """Keep one more; the oldest make room."""
        self._groups.append(group)
        self._bytes += len(group.group)
        while len(self._groups) > RECENT_LIMIT or self._bytes > TEXT_LIMIT_BYTES:
            self._bytes -= len(self._groups.popleft().group)

    def ask(self, digest: bytes, question: str) -> None:
        """Note what the completions of a group answer, if it is still here."""
        for place, group in enumerate(self._groups):
            if group.digest == digest:
                self._groups[place] = replace(group, question=question)

    def __iter__(self) -> Iterator[RecentGroup]:
        return iter(tuple(self._groups))
