"""What a member looks at before it decides, as whoever drives it answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from shoal.protocol.chain import Chain, Position
from shoal.protocol.durable import DurableRecord
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import OfState
from shoal.protocol.messages import Value
from shoal.protocol.planning import RoundSettings
from shoal.protocol.terms import RollbackPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What holds in a round: the settings of its machine, and how many rounds a member may have been away."""

    settings: RoundSettings
    staleness_rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """What this node's user lets others decide.

    rollback: when it follows a user of another node who wants to go back. amendments: whether it follows the authority.
    """

    rollback: RollbackPolicy = "spike"
    amendments: bool = True


USUAL: Final = Policies()


class Surroundings(Protocol):
    """What a member looks at before it decides. Nothing of it waits, and asking changes nothing."""

    @property
    def chain(self) -> Chain:
        """All that is decided, as far as is known here. It changes by `Append`, or before a `HeadMoved`."""
        ...

    @property
    def current(self) -> bool:
        """Whether the state at the head is here."""
        ...

    @property
    def held(self) -> OfState | None:
        """The state that is here; of an earlier round than the head's, if it lags behind."""
        ...

    @property
    def replayed_rounds(self) -> int:
        """For how many rounds the finals are fewer bytes than a state; 0 as long as that is not known."""
        ...

    @property
    def donors(self) -> Collection[PeerId]:
        """From whom the last state or finals came that were fetched."""
        ...

    @property
    def digest(self) -> bytes:
        """The digest of the state that is here; there is one."""
        ...

    @property
    def made(self) -> bool:
        """Whether this node's contribution to the round under way is made."""
        ...

    @property
    def paused(self) -> bool:
        """Whether the user has the accelerator."""
        ...

    @property
    def resting(self) -> bool:
        """Whether the trainer has done what it was told."""
        ...

    @property
    def waits_alone(self) -> bool:
        """Whether an anchor gives the trainer one contribution only, so that without a quorum it waits."""
        ...

    def bound_in(self, position: Position) -> Iterable[DurableRecord]:
        """What is on disk of what this node bound itself to in a round."""
        ...

    def alive(self) -> frozenset[PeerId]:
        """Who is believed alive."""
        ...

    def suspected(self) -> frozenset[PeerId]:
        """Who of them may be gone."""
        ...

    def linked(self) -> Collection[PeerId]:
        """Who can be told something."""
        ...

    def may_join(self, peer: PeerId) -> bool:
        """Whether the swarm lets a peer in."""
        ...

    def stands_still(self, head: Value) -> str | None:
        """In a word why nothing may be signed after `head`; None if it may. Raises StorageError."""
        ...

    def rules(self, round: int) -> Rules:
        """What holds in the round after the head, which is `round`."""
        ...

    def new_life(self) -> bytes:
        """32 bytes that no machine had before."""
        ...
