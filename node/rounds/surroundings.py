"""Surroundings of a member (`shoal.protocol.member`), as the parts of a node answer."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Sequence

from shoal.collectives.fragments import Fragments
from shoal.collectives.outer import OuterSettings
from shoal.collectives.state import HeldState
from shoal.node.rounds.engine_parts import EngineParts
from shoal.node.rounds.participation import Participation
from shoal.protocol.chain import Chain, Position
from shoal.protocol.durable import DurableRecord
from shoal.protocol.forks import Fork
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Value
from shoal.protocol.planning import RoundSettings
from shoal.protocol.surroundings import Rules
from shoal.protocol.wire import HASH_BYTES


class NodeSurroundings:
    """As `Surroundings` says. `believed_alive` is for the engine to keep up; `part` has what the node gives."""

    def __init__(self, parts: EngineParts) -> None:
        self._p = parts
        self._fragments: Fragments
        self._part: Participation | None = None
        self.believed_alive: frozenset[PeerId] = frozenset()

    def begin(self, part: Participation, fragments: Fragments) -> None:
        """The model is built."""
        self._part, self._fragments = part, fragments

    @property
    def chain(self) -> Chain:
        """All that is decided, as far as is known here."""
        return self._p.state_store.chain

    @property
    def current(self) -> bool:
        """True if the state at the head is here."""
        return self._p.state_store.current

    @property
    def held(self) -> HeldState | None:
        """The state that is here."""
        return self._p.state_store.state

    @property
    def replayed_rounds(self) -> int:
        """Number of rounds whose finals are fewer bytes than a state."""
        return self._p.state_store.catchup.replayed_rounds

    @property
    def donors(self) -> Collection[PeerId]:
        """Peers from which the last state or finals came that were fetched."""
        return self._p.state_store.catchup.donated

    @property
    def digest(self) -> bytes:
        """The digest of the state that is here."""
        return self._p.state_store.digest

    @property
    def made(self) -> bool:
        """True if this node's contribution to the round under way is made."""
        return self._part is not None and self._part.made is not None

    @property
    def paused(self) -> bool:
        """True if the user has the accelerator."""
        return self._p.training_client.paused

    @property
    def follows(self) -> bool:
        """True if this node's agent samples or judges, and trains nothing."""
        return self._p.config.rollouts != "train"

    @property
    def is_follower(self) -> bool:
        """True if this node takes part in no round at all."""
        return self._p.is_follower

    @property
    def takes_images(self) -> bool:
        """True if this node has use for the policy's image alone, and certificates vouch for it."""
        return self._p.is_follower and OuterSettings.of(self._p.config.manifest).imaged

    @property
    def resting(self) -> bool:
        """True if the trainer has done what it was told."""
        return self._p.training_client.resting

    @property
    def stuck(self) -> bool:
        """True if the trainer has made no step for long."""
        return self._p.training_client.stuck

    @property
    def waits_alone(self) -> bool:
        """True if the trainer waits without a quorum: of gradients an anchor gives this node one."""
        return self._p.config.manifest.sync.exchanges_gradients

    @property
    def cut_off(self) -> bool:
        """True if this machine has no network."""
        return self._p.cut_off()

    def bound_in(self, position: Position) -> Iterable[DurableRecord]:
        """Records on disk of what this node bound itself to in a round."""
        return self._p.store.bound_in(position)

    def alive(self) -> frozenset[PeerId]:
        """Peers that are believed alive."""
        return self.believed_alive

    def suspected(self) -> frozenset[PeerId]:
        """Peers believed alive that may be gone."""
        return self._p.suspected()

    def leaving(self) -> frozenset[PeerId]:
        """Peers that say in their records that they are about to leave."""
        return self._p.leaving()

    def linked(self) -> frozenset[PeerId]:
        """Peers that can be told something."""
        return self._p.links.linked()

    def site_mates(self) -> Collection[PeerId]:
        """Linked peers of this node's site."""
        return self._p.site.mates()

    def is_revoked(self, peer: PeerId) -> bool:
        """True if the authority has shut a peer out."""
        return self._p.is_revoked(peer)

    def may_join(self, peer: PeerId) -> bool:
        """True if the swarm lets a peer in."""
        return self._p.may_join(peer)

    @property
    def forks(self) -> Sequence[Fork]:
        """Forks that this node has seen, and keeps."""
        return self._p.standstill.forks.forks

    def key_is_elsewhere(self, head: Value) -> bool:
        """True if this node's key may be in use elsewhere. Raises StorageError."""
        return self._p.standstill.key_use.abstains(head)

    def rules(self, round: int) -> Rules:
        """Rules of the round after the head, which is `round`."""
        manifest = self.chain.amended(round) or self._p.config.manifest
        settings = RoundSettings.of(manifest, self._fragments.of_round(round).numel, self._fragments.buffers)
        return Rules(settings=settings, staleness_rounds=manifest.round.staleness_rounds)

    def new_life(self) -> bytes:
        """Drawn anew."""
        return secrets.token_bytes(HASH_BYTES)
