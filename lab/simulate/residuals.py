"""What a peer contributes, judged by value: what it has learnt, and what of its earlier work no round has counted.

    work counted once    nothing that a certified round counted comes again, but for what encoding lost of it; and what
                         was not counted does, unless the peer was restarted since, or it became too old
    one contribution     in one life a peer announces one of a round; who lost it may make another in another life

Each contribution is compared with every one that may follow from what the same peer announced last of the same
fragment, as the certificates that were seen say of it; no account that the peer keeps is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shoal.collectives.codecs import F32
from shoal.lab.simulate.judge import Judge, Violation
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Ready
from shoal.protocol.planning import CONTRIBUTOR

if TYPE_CHECKING:
    from shoal.lab.simulate.peer import SimulatedPeer
    from shoal.node.state.contributions import Made

Residual = tuple[str, F32 | None, int]
"""A name for it, what comes again of earlier rounds or None, and its tokens."""


@dataclass(frozen=True, slots=True)
class _Given:
    """A contribution, in a life of its peer. since: the first round of those that left it out one after the other."""

    made: Made
    learnt: F32
    life: int
    since: int


class Residuals:
    """Knows what every peer made, and announced last of each fragment."""

    def __init__(
        self, judge: Judge, *, staleness_rounds: int, error_feedback: float, mixing: float | None = None
    ) -> None:
        self._judge = judge
        self._fragments = judge.fragments.count
        self._staleness_rounds = staleness_rounds
        self._error_feedback = np.float32(error_feedback)
        self._mixing = np.float32(mixing or 0.0)
        self._made: dict[bytes, _Given] = {}
        self._announced: dict[tuple[PeerId, int], list[_Given]] = {}
        self._roots: dict[tuple[bytes, bytes], bytes] = {}
        self.carried = 0
        """How many contributions had something of an earlier round."""

    def made(self, peer: SimulatedPeer, learnt: F32, tokens: int, made: Made) -> None:
        """`peer` encoded what it `learnt`, of so many tokens, and what it has of earlier rounds."""
        before = self._announced.get((peer.id, made.round % self._fragments), [])
        last = next((given for given in reversed(before) if given.made.base != made.base), None)
        names = []
        for name, residual, more in self._possible(last, peer, made):
            names.append(name)
            values = learnt if residual is None else learnt + self._error_feedback * residual
            if made.tokens == tokens + more and np.allclose(made.values, values, rtol=0, atol=1e-6):
                self.carried += residual is not None
                break
        else:
            raise Violation(
                "work counted once",
                f"peer {peer.number} gives to round {made.round} what it learnt and something else than {names}",
            )
        again = last is not None and not any(self._included(last.made, peer.id))
        since = last.since if again and last is not None else made.round
        self._made[made.encoded.root] = _Given(made, learnt, peer.life, since)
        self._judge.contributed(made.encoded)

    def announced(self, sender: PeerId, ready: Ready) -> None:
        """`sender` says that it contributes to a round. Raises Violation if it said so of something else before."""
        if ready.role != CONTRIBUTOR:
            return
        given = self._made.get(ready.root)
        if given is None:
            raise Violation("one contribution", f"{sender} announces what it did not make in round {ready.round}")
        if self._roots.setdefault((ready.base, ready.life), ready.root) != ready.root:
            raise Violation("one contribution", f"{sender} announces two in round {ready.round}")
        self._announced.setdefault((sender, ready.round % self._fragments), []).append(given)

    def _possible(self, last: _Given | None, peer: SimulatedPeer, made: Made) -> Iterator[Residual]:
        """What may come again in `made`."""
        if last is None:
            yield "nothing", None, 0
            return
        bits = self._included(last.made, peer.id)
        yield "what was not counted", self._left(last, bits), 0 if any(bits) else last.made.tokens
        whole = [True] * len(bits)
        ended = last.made.base not in self._judge.certified or not self._stands(peer, last)
        restarted = peer.life != last.life or ended
        if restarted or (made.round - last.since + 1 > self._staleness_rounds and not any(bits)):
            yield "nothing", None, 0
        if ended:
            return
        value = self._judge.values[self._judge.certified[last.made.base]]
        if restarted or value.plan not in peer.disk.finals:  # nobody could say, and once is the limit
            yield "what encoding lost", self._left(last, whole), 0

    def _stands(self, peer: SimulatedPeer, given: _Given) -> bool:
        """Whether no rollback and no rebase came since."""
        return peer.disk.ledger.head.next_term == self._judge.values[given.made.base].next_term

    def _included(self, made: Made, peer: PeerId) -> Sequence[bool]:
        """Per chunk, whether the round that it was made for counted it."""
        certified = self._judge.certified.get(made.base)
        value = None if certified is None else self._judge.values[certified]
        if value is None or value.rollback:  # nothing counts that was for it
            return [False] * made.encoded.grid.chunks
        plan, bitmaps = self._judge.plan_of(value)
        place = plan.number(peer)
        if place is None or plan.participants[place].root != made.encoded.root:
            return [False] * made.encoded.grid.chunks
        return [bool(int.from_bytes(bits, "little") >> place & 1) for bits in bitmaps]

    def _left(self, given: _Given, included: Sequence[bool]) -> F32:
        """What such a verdict leaves of a contribution."""
        made, left = given.made, np.empty_like(given.made.values)
        decoded = made.encoded.decoded()
        for chunk, counted in enumerate(included):
            at = slice(*made.encoded.grid.span(chunk))
            left[at] = made.values[at] - (decoded[at] if counted else self._mixing * given.learnt[at])
        return left
