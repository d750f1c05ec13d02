"""Inputs of a member: what peers say, what its trainer, reductions and user do, what became of its state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from shoal.protocol.chain import Position
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Amendment, Certificate, Message, Plan, Rebase, RoundMessage, Target, Term, Value


class Wanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An amendment that is wanted, and the authority's signature on it or nothing."""

    amendment: Amendment
    authority: bytes = b""


Order = Target | Wanted
"""Order of a user that no round carries out by itself, and that stands until it is done."""


class OfPlan(Protocol):
    """All finals of a plan, as whoever reduces has them."""

    @property
    def plan(self) -> Plan:
        """Plan that they are of."""
        ...

    @property
    def counted(self) -> Collection[PeerId]:
        """Participants whose contribution is in at least one chunk; asked for where seats are few."""
        ...


class OfState(Protocol):
    """A state, as whoever holds states has it."""

    @property
    def term(self) -> Term:
        """Term of the round that led to it."""
        ...

    @property
    def round(self) -> int:
        """The round that led to it."""
        ...


@dataclass(frozen=True, slots=True)
class Received:
    """A round message from a peer."""

    peer: PeerId
    message: Message

    @property
    def position(self) -> Position:
        """The decision that the message is about."""
        about = self.message.value if isinstance(self.message, Certificate | Rebase) else self.message
        return (about.term, about.round) if isinstance(about, RoundMessage | Value) else (Term(), 0)


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed, or who is alive changed."""


@dataclass(frozen=True, slots=True)
class Linked:
    """A link came up: the peer, whose newest certificate is of `certified`, may have missed what this node said."""

    peer: PeerId
    certified: Position


@dataclass(frozen=True, slots=True)
class Trained:
    """The trainer made its inner steps of a round; `work` is theirs, as whoever encodes it knows it."""

    round: int
    work: object


@dataclass(frozen=True, slots=True)
class Offered:
    """A member of this node's site has handed over its contribution to the round after the value of that hash."""

    peer: PeerId
    base: bytes


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The delegate of this site was offered this node's contribution to the round after that value.

    taken: it has it, or may have it; else it has not, for certain.
    """

    base: bytes
    taken: bool


@dataclass(frozen=True, slots=True)
class TrainerRestarted:
    """The trainer began anew, and what it was ordered is forgotten."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """All finals of a plan are here, from a reduction or fetched; they took so many seconds."""

    finals: OfPlan
    seconds: float


@dataclass(frozen=True, slots=True)
class SetPaused:
    """The user wants the accelerator, or gives it back."""

    paused: bool


@dataclass(frozen=True, slots=True)
class GoOnWithout:
    """The user of this node, which has the authority's key, wants a rebase: these members are gone for good."""

    forget: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class Proven:
    """Evidence of that digest is verified here, and no ban covers it."""

    evidence: bytes
    accused: PeerId


@dataclass(frozen=True, slots=True)
class StateHeld:
    """The state of a round to go back to is on disk, and has this digest; None if it was not to be had this time."""

    target: Target
    digest: bytes | None


@dataclass(frozen=True, slots=True)
class HeadMoved:
    """The chain went on, or was replaced: the round under way is over, wherever its state may be."""


@dataclass(frozen=True, slots=True)
class GoBack:
    """This node's user wants the swarm to go back to the state of a round."""

    round: int


@dataclass(frozen=True, slots=True)
class Amend:
    """This node's user wants these, each SECTION.KEY=VALUE, in force.

    by_authority: signed with the authority's key, which is to be here.
    """

    settings: tuple[str, ...]
    by_authority: bool = False


@dataclass(frozen=True, slots=True)
class Withdraw:
    """This node's user does not want any more what was ordered."""

    kind: type[Order]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The trainer measured the held-out loss of a state."""

    round: int
    loss: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """Start of this node: the chain and the state on its disk were loaded.

    orders: of its user, which stand from before. losses: held-out ones measured in earlier lives, by round; what a
    rollback abandoned may be among them.
    """

    orders: tuple[Order, ...] = ()
    losses: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StateSought:
    """An attempt to come to the state at the head is over; with a state, or none."""

    state: OfState | None


@dataclass(frozen=True, slots=True)
class ChainCompared:
    """The chain here was compared with a peer's. theirs: the certificate with which that one parts from it, if any."""

    peer: PeerId
    theirs: Certificate | None


@dataclass(frozen=True, slots=True)
class GenesisFetched:
    """S(0) as the first founder has it."""

    state: OfState


Input = (
    Received
    | Tick
    | Linked
    | Trained
    | Offered
    | HandedOver
    | TrainerRestarted
    | Reduced
    | SetPaused
    | GoOnWithout
    | Proven
    | StateHeld
    | GoBack
    | Amend
    | Withdraw
    | Evaluated
    | HeadMoved
    | Loaded
    | StateSought
    | ChainCompared
    | GenesisFetched
)
