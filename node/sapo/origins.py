"""Trainers and samplers of an averaged policy, told apart: the samplers' groups can be gone through again.

Who samples says so in its record, and draws from the certified policy that it names. Who trains draws from its own,
which has moved since, and is known by the chain: it is, or was, a member. Of who says neither its groups wait: it may
be a trainer that is not a member yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.protocol.followers import is_follower
from shoal.protocol.identity import PeerId
from shoal.protocol.records import NodeRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """The rule at one node. waits_outside: whether who trains may wait outside, and be no member for long."""

    was_member: Callable[[PeerId], bool]
    record_of: Callable[[PeerId], NodeRecord | None]
    waits_outside: bool

    def trains(self, peer: PeerId) -> bool:
        """True of who is, or was, a member; and where trainers wait outside of who does not say that it samples."""
        return self.was_member(peer) or (self.waits_outside and not is_follower(self.record_of(peer)))

    def may_be_taken(self, peer: PeerId) -> bool:
        """True of who trains or says that it samples."""
        return self.trains(peer) or is_follower(self.record_of(peer))
