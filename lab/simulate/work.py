"""Work of one simulated peer and what of it was counted: `Contributions` of the product, and when it gets to disk.

This is what `node.rounds.participation` is around the same. A contribution is written some time after it is made, as
nodes write it beside the reduction; of some rounds it is not written at all, as where a disk rests.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shoal.collectives.contribution import EncodedContribution
from shoal.node.state.contributions import Contributions, HandedWork, Made, SavedWork
from shoal.protocol.chain import next_position
from shoal.protocol.messages import Ready, Value
from shoal.protocol.seats import are_few

if TYPE_CHECKING:
    from shoal.lab.simulate.peer import SimulatedPeer

BASES_KEPT = 8
"""Of so many contributions it is known what they were made on: who trains again on the same learns something else."""
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
        self._bases: deque[bytes] = deque(maxlen=BASES_KEPT)
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

    def make(self, head: Value, take: Callable[[int], Sequence[HandedWork]] | None) -> Ready:
        """Training is done: encode it with what others of the site handed over, and have it on disk in a while.

        take: gives what they did, for its own tokens; None, and it is not on disk, if it is to be handed over itself.
        """
        peer, swarm = self._peer, self._swarm
        again = sum(base == head.hash for base in self._bases)
        self._bases.append(head.hash)
        learnt, tokens = swarm.made(peer, head.next_round, again)
        handed = () if take is None else take(tokens)
        number = self._contributions.taken + 1
        made = self._contributions.make(
            head.next_round, number, tokens, learnt, base=head.hash, handed=handed, anchor=self._disk.state
        )
        swarm.residuals.made(peer, learnt, tokens, made, handed)
        return self.announcement(head) if take is None else self.keep(head)

    def keep(self, head: Value) -> Ready:
        """Have what was made on disk in a while; its announcement."""
        assert self.made is not None
        self._note(self._contributions.saved(self.made, head.next_term))
        return self.announcement(head)

    def _note(self, work: SavedWork) -> None:
        if self._rng.random() >= SKIPPED_SHARE:
            self._unsaved = work
            self._swarm.timeline.after(self._rng.uniform(*WRITTEN_S), self._save, work, self._peer.life)

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
        if found.work.account.passed_on is True:
            self._contributions.pass_on()
            return False
        return found.files.position == next_position(chain.head)

    def resume(self) -> None:
        """Take up what was found."""
        self.stand_on_head()
        self.settle()

    def pass_on(self, head: Value) -> None:
        """The delegate has what was made, or may have it: note so on disk in a while."""
        assert self.made is not None
        self._note(self._contributions.saved(self.made, head.next_term, passed_on=True))
        self._passed_on(self.made)

    def _passed_on(self, made: Made) -> None:
        self._swarm.residuals.passed_on(made)
        self._contributions.pass_on()

    @property
    def is_over(self) -> Made | None:
        """The contribution that is here, if what became of it can be said."""
        return self.made if self.made is not None and self._contributions.is_over(self._disk.ledger) else None

    def settle(self, *, is_passed_on: bool = False) -> None:
        """Count what was made as the chain says. is_passed_on: the delegate has it, or may have it."""
        chain, finals, made = self._disk.ledger, None, self.is_over
        if made is None:
            return
        if is_passed_on and not self._contributions.is_abandoned(chain):
            self._passed_on(made)
            return
        if self._contributions.awaits_finals(chain):
            entry = chain.after_base(made.base)
            finals = None if entry is None else self._disk.finals.get(entry.value.plan)
            if finals is not None and entry is not None and finals.bitmaps_root != entry.value.bitmaps:
                finals = None
        self._contributions.settle_by(chain, finals)

    def stand_on_head(self) -> None:
        """Go on from the state at the head; what was learnt on one that was abandoned is dropped."""
        self._contributions.stand_on(self._disk.ledger)
