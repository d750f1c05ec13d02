"""Surroundings of a member: what it looks at before it decides, as whoever drives it answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from shoal.protocol.chain import Chain, Position
from shoal.protocol.durable import DurableRecord
from shoal.protocol.forks import Fork
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import OfState
from shoal.protocol.messages import Value
from shoal.protocol.planning import RoundSettings
from shoal.protocol.terms import RollbackPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rules of a round: the settings of its machine, and how many rounds a member may have been away."""

    settings: RoundSettings
    staleness_rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """Choices of this node's user about what others may decide.

    rollback: when it follows a user of another node who wants to go back. amendments: whether it follows the authority.
    """

    rollback: RollbackPolicy = "spike"
    amendments: bool = True


USUAL: Final = Policies()


class Surroundings(Protocol):
    """Facts that a member looks at before it decides. Nothing of it waits, and asking changes nothing."""

    @property
    def chain(self) -> Chain:
        """All that is decided, as far as is known here. It changes by `Append`, or before a `HeadMoved`."""
        ...

    @property
    def current(self) -> bool:
        """True if the state at the head is here."""
        ...

    @property
    def held(self) -> OfState | None:
        """The state that is here; of an earlier round than the head's, if it lags behind."""
        ...

    @property
    def replayed_rounds(self) -> int:
        """Number of rounds whose finals are fewer bytes than a state; 0 as long as that is not known."""
        ...

    @property
    def donors(self) -> Collection[PeerId]:
        """Peers from which the last state or finals came that were fetched."""
        ...

    @property
    def digest(self) -> bytes:
        """The digest of the state that is here; there is one."""
        ...

    @property
    def made(self) -> bool:
        """True if this node's contribution to the round under way is made."""
        ...

    @property
    def paused(self) -> bool:
        """True if the user has the accelerator."""
        ...

    @property
    def follows(self) -> bool:
        """True if this node takes the states of rounds, and never contributes to one."""
        ...

    @property
    def is_follower(self) -> bool:
        """True if this node takes part in no round at all, not even as an observer (followers.py); it `follows` too."""
        ...

    @property
    def takes_images(self) -> bool:
        """True if this node, a follower, has use for the policy's image alone, and certificates vouch for it."""
        ...

    @property
    def resting(self) -> bool:
        """True if the trainer has done what it was told."""
        ...

    @property
    def stuck(self) -> bool:
        """True if the trainer was told to train, and made no step for so long that nobody is to wait for it."""
        ...

    @property
    def waits_alone(self) -> bool:
        """True if an anchor gives the trainer one contribution only, so that without a quorum it waits."""
        ...

    @property
    def cut_off(self) -> bool:
        """True if this machine has no network, and whom it does not hear may be well."""
        ...

    def is_revoked(self, peer: PeerId) -> bool:
        """True if the swarm's authority has shut a peer out, as far as is known here."""
        ...

    def bound_in(self, position: Position) -> Iterable[DurableRecord]:
        """Records on disk of what this node bound itself to in a round."""
        ...

    def alive(self) -> frozenset[PeerId]:
        """Peers that are believed alive."""
        ...

    def suspected(self) -> frozenset[PeerId]:
        """Peers believed alive that may be gone."""
        ...

    def leaving(self) -> Collection[PeerId]:
        """Peers that say that they are about to leave."""
        ...

    def linked(self) -> Collection[PeerId]:
        """Peers that can be told something."""
        ...

    def site_mates(self) -> Collection[PeerId]:
        """Linked peers of this node's site (sites.py); nobody where sites are apart."""
        ...

    def may_join(self, peer: PeerId) -> bool:
        """True if the swarm lets a peer in."""
        ...

    @property
    def forks(self) -> Sequence[Fork]:
        """Forks that this node has seen, and keeps; more by `KeepFork`."""
        ...

    def key_is_elsewhere(self, head: Value) -> bool:
        """True if this node's key may be in use elsewhere, so that it may sign nothing after `head`.

        Raises StorageError.
        """
        ...

    def rules(self, round: int) -> Rules:
        """Rules of the round after the head, which is `round`."""
        ...

    def new_life(self) -> bytes:
        """32 bytes that no machine had before."""
        ...
