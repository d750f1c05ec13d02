"""The interface of a node's rounds, whatever its strategy exchanges: what the rest of the node asks of them.

A strategy says what it exchanges (`protocol/strategies`); `table` has which of these a node takes part by.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import trio

from shoal.node.parts import Parts
from shoal.node.rounds.engine import Engine
from shoal.node.rounds.inbox import Own
from shoal.protocol.amending import AmendConsent
from shoal.protocol.chain import Position
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import Consent, Term
from shoal.protocol.records import Phase
from shoal.protocol.seats import LinePlace
from shoal.protocol.voting import FaultModel
from shoal.swarm.members import Taker

if TYPE_CHECKING:
    from shoal.node.gossip.engine import GossipEngine
    from shoal.node.sapo.engine import RolloutEngine

Task = Callable[[], Awaitable[None]]


class RoundEngine(Protocol):
    """Engine of a node's rounds, from obtaining a state to leaving."""

    def put(self, event: Own) -> None:
        """Take an input of this node's own."""

    def alive(self, peers: frozenset[PeerId]) -> None:
        """Take note of the peers believed alive."""

    def linked(self, peer: PeerId, certified: Position) -> None:
        """Take note of a new link; the peer's record says that its newest certificate is that of `certified`."""

    def ask_to_leave(self) -> None:
        """Leave the swarm as soon as the rounds allow; `left` is set then."""

    @property
    def left(self) -> trio.Event:
        """Set once this node takes part in nothing more."""

    @property
    def leaving(self) -> bool:
        """True if leaving was asked for."""

    @property
    def finished(self) -> bool:
        """True if the rounds asked for are done: the node stops by itself."""

    @property
    def phase(self) -> str:
        """Phase of the node, for its user."""

    @property
    def machine(self) -> object | None:
        """Machine of the round; None before this node takes part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Position of a node in its swarm. digest: of its newest state, where that is in common.

    members: whose rounds these are, this node among them. voters: who decides them, where anything is decided; faults:
    what of them that withstands. amended: the settings in force where they were amended. turn_in_rounds: in how many
    rounds this node has a seat; None where seats are for all, or it is no member. outside: its place, where it waits
    outside for one. trains_alone: whether its trainer goes on where there is no quorum. unready: for whose
    contributions it waits, having made its own. stuck: whether its trainer makes no step.
    """

    term: Term
    round: int
    members: Sequence[PeerId]
    voters: Sequence[PeerId] = ()
    faults: FaultModel = FaultModel.CRASH
    digest: str | None = None
    missing: Sequence[PeerId] = ()
    trains_alone: bool = False
    unready: Collection[PeerId] = ()
    stuck: bool = False
    rollbacks: Mapping[PeerId, Consent] = field(default_factory=dict)
    amendments: Mapping[PeerId, AmendConsent] = field(default_factory=dict)
    amended: Manifest | None = None
    abstains: str | None = None
    turn_in_rounds: int | None = None
    outside: LinePlace | None = None


class Rounds(ABC):
    """A node's rounds under one kind of strategy."""

    engine: RoundEngine
    certifying: Engine | None = None
    """The engine again, where what it comes to is certified."""
    sharing: RolloutEngine | None = None
    """Engine that shares rollouts, where these are shared: all that there is, or beside the rounds."""
    trains: bool = True
    """True if a trainer makes what is exchanged, and all train one model; else an agent does, of its own."""

    def __init__(self, parts: Parts) -> None:
        self._p = parts

    @property
    def takers(self) -> Mapping[type, Taker]:
        """Handlers of these rounds' messages, by message type."""
        return {}

    @property
    def tasks(self) -> Sequence[Task]:
        """Tasks that run beside these rounds until the node ends."""
        return ()

    @property
    def contributed(self) -> Callable[[PeerId], bool] | None:
        """Test for whether a peer has contributed, as far as was seen here; None where the chain says it."""
        return None

    @property
    def leaves_in_order(self) -> bool:
        """True if the engine has to be asked to leave; before a node takes part it may just end."""
        return self.engine.machine is not None

    @property
    def record_phase(self) -> Phase:
        """The phase in this node's record."""
        if self.engine.leaving:
            return "leaving"
        if self.engine.machine is None:
            return "joining"
        return "paused" if self.paused else "training"

    @property
    def paused(self) -> bool:
        """True if the node's user wants the accelerator."""
        return self._p.training_client.paused

    @property
    @abstractmethod
    def position(self) -> Position:
        """Term and round of this node's record: of its newest certificate, or of its own newest state."""

    @abstractmethod
    async def run(self, *, numel: int, buffers: int = 0) -> None:
        """Take part in rounds with a trainer of a model of `numel` values, until cancelled or this node has left.

        buffers: how many of the chunks of its vector, the last ones, are buffers.

        Raises StorageError, ConfigError. Cancellation: what was persisted stands.
        """

    @abstractmethod
    def standing(self) -> Standing:
        """Position of this node now."""


class ApartRounds(Rounds):
    """Rounds that nobody certifies: each node counts its own, in the first term."""

    _engine: GossipEngine | RolloutEngine

    @property
    def contributed(self) -> Callable[[PeerId], bool] | None:
        """See `Rounds`."""
        return self._engine.contributors.__contains__

    @property
    def position(self) -> Position:
        """See `Rounds`."""
        return Term(), self._engine.state_round

    def standing(self) -> Standing:
        """See `Rounds`."""
        members = (self._p.identity.peer_id, *sorted(self._engine.others))
        return Standing(term=Term(), round=self._engine.state_round, members=members)
