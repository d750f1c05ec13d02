"""Contributions judged by value: what a peer has learnt, and what of its earlier work no round has counted.

    work counted once    nothing that a certified round counted comes again, but for what encoding lost of it; and what
                         was not counted, or has no place in a sparse final, does, unless the peer was restarted since,
                         or it became too old
    one contribution     in one life a peer announces one of a round; who lost it may make another in another life

Each contribution is compared with every one that may follow from what the same peer announced last of the same
fragment, as the entries of the peer's chain say of it; no account that the peer keeps is asked. Of what was learnt on a
state, or counted in a round, that was abandoned since, nothing comes again. Where seats are few, what is given is the
mean of what was learnt and of what comes again uncounted, by tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shoal.collectives.codecs import F32, final_codec
from shoal.lab.simulate.judge import Judge, Violation
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Ready, Value
from shoal.protocol.planning import CONTRIBUTOR
from shoal.protocol.seats import counted_in

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


@dataclass(frozen=True, slots=True)
class _Last:
    """Contribution of which something may come again.

    ended_by: the entry after its base; included: per chunk, whether it counted.
    """

    given: _Given
    ended_by: Value
    included: Sequence[bool]


class Residuals:
    """Knows what every peer made, and announced last of each fragment."""

    def __init__(
        self,
        judge: Judge,
        *,
        staleness_rounds: int,
        error_feedback: float,
        mixing: float | None = None,
        averages: bool = False,
    ) -> None:
        self._averages = averages
        self._judge = judge
        self._fragments = judge.fragments.count
        self._staleness_rounds = staleness_rounds
        self._error_feedback = np.float32(error_feedback)
        self._mixing = np.float32(mixing or 0.0)
        self._made: dict[bytes, _Given] = {}
        self._unsaid: set[bytes] = set()
        self._announced: dict[tuple[PeerId, int], list[_Given]] = {}
        self._roots: dict[tuple[bytes, bytes], bytes] = {}
        self.carried = 0
        """How many contributions had something of an earlier round."""
        self.lost = 0
        """How many had nothing of it, since it had waited for too long."""

    def made(self, peer: SimulatedPeer, learnt: F32, tokens: int, made: Made) -> None:
        """`peer` encoded what it `learnt`, of so many tokens, and what it has of earlier rounds."""
        names = []
        for last, (name, residual, more) in self._all_possible(peer, made):
            names.append(name)
            values = learnt if residual is None else learnt + self._error_feedback * residual
            if self._averages and residual is not None and more:
                values = (np.float32(tokens) * learnt + np.float32(more) * residual) / np.float32(tokens + more)
            if made.tokens == tokens + more and np.allclose(made.values, values, rtol=0, atol=1e-6):
                self.carried += residual is not None
                self.lost += name == "nothing of what is too old"
                since = made.round if last is None or any(last.included) else last.given.since
                self._made[made.encoded.root] = _Given(made, learnt, peer.life, since)
                self._judge.contributed(made.encoded)
                return
        raise Violation(
            "work counted once",
            f"peer {peer.number} gives to round {made.round} what it learnt and something else than {names}",
        )

    def kept(self, sender: PeerId, ready: Ready) -> None:
        """`sender` follows, and tells nobody of what it made: it comes again in its next contribution."""
        self._unsaid.add(ready.root)
        self.announced(sender, ready)

    def _all_possible(self, peer: SimulatedPeer, made: Made) -> Iterator[tuple[_Last | None, Residual]]:
        for last in self._lasts(peer, made):
            yield from ((last, possible) for possible in self._possible(last, peer, made))

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

    def _lasts(self, peer: SimulatedPeer, made: Made) -> Iterator[_Last | None]:
        """The newest that was for another round and stands; None if all that was left of it is gone.

        Of what another life told nobody no round can have counted anything, so if it was lost the one before stands.
        """
        head = peer.disk.ledger.head
        for given in reversed(self._announced.get((peer.id, made.round % self._fragments), [])):
            ended_by = None if given.made.base == made.base else self._ended_by(given.made, head)
            if ended_by is not None:
                yield _Last(given, ended_by, self._included(given.made, peer.id, ended_by))
                if given.life == peer.life or given.made.encoded.root not in self._unsaid:
                    return
            elif given.made.base != made.base and given.life == peer.life:
                break  # with what was abandoned went all of before; another life may have that on disk
        yield None

    def _ended_by(self, made: Made, head: Value) -> Value | None:
        """Find what ended the round that it was for, in the chain up to `head`; None if that chain abandoned it."""
        judge, ended_by = self._judge, head
        while ended_by.base != made.base:
            if ended_by.base not in judge.values:
                return None
            ended_by = judge.values[ended_by.base]
        led_to = judge.values[made.base] if judge.is_rebase(ended_by) else ended_by
        stands = not ended_by.rollback and judge.origin(led_to) in judge.branch(head)
        return ended_by if stands else None

    def _included(self, made: Made, peer: PeerId, ended_by: Value) -> Sequence[bool]:
        """Per chunk, whether the round that it was made for counted it."""
        nowhere = [False] * made.encoded.grid.chunks
        if self._judge.is_rebase(ended_by):
            return nowhere
        plan, bitmaps = self._judge.plan_of(ended_by)
        place = plan.number(peer)
        if place is None or plan.participants[place].root != made.encoded.root:
            return nowhere
        return [bool(int.from_bytes(bits, "little") >> place & 1) for bits in bitmaps]

    def _possible(self, last: _Last | None, peer: SimulatedPeer, made: Made) -> Iterator[Residual]:
        """Go through what may come again in `made`."""
        if last is None:
            yield "nothing", None, 0
            return
        given, counted = last.given, any(last.included)
        applied = self._applied(last)
        yield "what was not counted", self._left(given, last.included, applied), 0 if counted else given.made.tokens
        restarted = peer.life != given.life
        too_old = made.round - given.since + 1 > self._staleness_rounds and not counted
        # It may have stood on a state after that, which a rollback or a rebase has abandoned since.
        elsewhere = peer.disk.ledger.head.next_term != self._judge.values[given.made.base].next_term
        if restarted or elsewhere:
            yield "nothing", None, 0
        elif too_old:
            yield "nothing of what is too old", None, 0
        is_said = self._averages and peer.id not in counted_in(last.ended_by)  # by the value, without its finals
        unknown = (restarted or last.ended_by.plan not in peer.disk.finals) and not is_said
        if unknown and not self._judge.is_rebase(last.ended_by):  # nobody could say, and once is the limit
            yield "what encoding lost", self._left(given, [True] * len(last.included), None), 0

    def _applied(self, last: _Last) -> F32 | None:
        """The applied update of the round that counted it, if that leaves values out."""
        update = self._judge.updates.get(last.ended_by.hash)
        return update if final_codec(last.given.made.encoded.codec).leaves_out else None

    def _left(self, given: _Given, included: Sequence[bool], applied: F32 | None) -> F32:
        """Compute what such a verdict leaves of a contribution; where `applied` is zero all of it is left."""
        made, left = given.made, np.empty_like(given.made.values)
        decoded = made.encoded.decoded()
        if applied is not None:
            decoded[applied == 0] = 0
        for chunk, counted in enumerate(included):
            at = slice(*made.encoded.grid.span(chunk))
            left[at] = made.values[at] - (decoded[at] if counted else self._mixing * given.learnt[at])
        return left
