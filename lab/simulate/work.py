"""Work of one simulated peer and what of it was counted: `Contributions` of the product, and when it gets to disk.

This is what `node.rounds.participation` is around the same. A contribution is written some time after it is made, as
nodes write it beside the reduction; of some rounds it is not written at all, as where a disk rests.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from shoal.collectives.contribution import EncodedContribution
from shoal.node.state.contributions import Contributions, Made, SavedWork
from shoal.protocol.chain import next_position
from shoal.protocol.messages import Ready, Value
from shoal.protocol.seats import are_few

if TYPE_CHECKING:
    from shoal.lab.simulate.peer import SimulatedPeer

WRITTEN_S = (0.0, 1.5)
"""So long after it was made a contribution is on disk."""
SKIPPED_SHARE = 0.15
"""Of the contributions, those that are never written."""


class Work:
    """The contribution of the round under way, and what is left of earlier ones, in one life of a peer."""

    def __init__(self, peer: SimulatedPeer) -> None:
        swarm = peer.swarm
        self._peer = peer
        self._swarm = swarm
        self._disk = peer.disk
        self._rng = random.Random(f"work {swarm.scenario.seed} {peer.number} {peer.life}")
        self._unsaved: SavedWork | None = None
        self._contributions = Contributions(
            swarm.fragments,
            swarm.settings.codec,
            swarm.staleness_rounds,
            sender=peer.id,
            error_feedback=swarm.error_feedback,
            mixing=swarm.mixing,
            few_seats=are_few(swarm.settings.seats),
        )

    @property
    def made(self) -> Made | None:
        """The contribution to the round under way, once it is made."""
        return self._contributions.made

    @property
    def encoded(self) -> EncodedContribution | None:
        """Encoded form of it, which goes to the others."""
        return None if self.made is None else self.made.encoded

    def make(self, head: Value) -> Ready:
        """Training is done: encode; it is noted on disk in a while."""
        peer, swarm = self._peer, self._swarm
        learnt, tokens = swarm.made(peer, head.next_round)
        number = self._contributions.taken + 1
        made = self._contributions.make(head.next_round, number, tokens, learnt, base=head.hash)
        swarm.residuals.made(peer, learnt, tokens, made)
        if self._rng.random() >= SKIPPED_SHARE:
            self._unsaved = self._contributions.saved(made, head.next_term)
            swarm.timeline.after(self._rng.uniform(*WRITTEN_S), self._save, self._unsaved, peer.life)
        return self.announcement(head)

    def announcement(self, head: Value) -> Ready:
        """Announcement of the contribution that is here."""
        assert self.made is not None
        place = self._swarm.network.places[self._peer.number]
        return self.made.ready(
            head,
            head.digest,
            sender=self._peer.id,
            upload=int(place.upload),
            download=int(place.download),
            reaches=(),
        )

    def _save(self, work: SavedWork, life: int) -> None:
        if life == self._peer.life and work is self._unsaved:
            self.finish()

    def finish(self) -> None:
        """Have on disk what was made, if it is to be written at all."""
        if self._unsaved is not None:
            self._disk.save_work(self._unsaved)
            self._unsaved = None

    def find(self, *, countable: bool) -> bool:
        """Take up what was made before a restart; whether that is a contribution to the round under way."""
        chain = self._disk.ledger
        found = self._disk.work.find(chain, countable=countable)
        if found is None or found.files is None or found.work is None:
            return False
        if not self._contributions.make_again(found.work):
            return False
        self._swarm.met["work found"] += 1
        return found.files.position == next_position(chain.head)

    def resume(self) -> None:
        """Take up what was found."""
        self.stand_on_head()
        self.settle()

    def settle(self) -> None:
        """Count what was made as the chain says."""
        chain, finals = self._disk.ledger, None
        if self.made is not None and self._contributions.awaits_finals(chain):
            entry = chain.after_base(self.made.base)
            finals = None if entry is None else self._disk.finals.get(entry.value.plan)
            if finals is not None and entry is not None and finals.bitmaps_root != entry.value.bitmaps:
                finals = None
        self._contributions.settle_by(chain, finals)

    def stand_on_head(self) -> None:
        """Go on from the state at the head; what was learnt on one that was abandoned is dropped."""
        self._contributions.stand_on(self._disk.ledger)
