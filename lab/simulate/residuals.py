"""Contributions judged by value: what a peer has learnt, and what of its earlier work no round has counted.

    work counted once    nothing that a certified round counted comes again, but for what encoding lost of it; and what
                         was not counted, or has no place in a sparse final, does, unless the peer was restarted since,
                         or it became too old
    one contribution     in one life a peer announces one of a round; who lost it may make another in another life
    sites                what was handed over is in one contribution of another, or in none: then it comes again, unless
                         the link to the delegate broke, or that one died, or has not answered by the next contribution;
                         and it is announced by none but that one

Each contribution is compared with every one that may follow from what the same peer announced last of the same
fragment, as the entries of the peer's chain say of it; no account that the peer keeps is asked. Of what was learnt on a
state, or counted in a round, that was abandoned since, nothing comes again. Where seats are few, what is given is the
mean of what was learnt and of what comes again uncounted, by tokens, of which each value of the latter has the share by
which it goes beyond where the state has come since.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shoal.collectives.codecs import F32, final_codec
from shoal.lab.simulate.judge import Judge, Violation
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Ready, Value
from shoal.protocol.planning import CONTRIBUTOR
from shoal.protocol.seats import counted_in

if TYPE_CHECKING:
    from shoal.lab.simulate.peer import SimulatedPeer
    from shoal.node.state.contributions import HandedWork, Made

VALUES_ATOL = 2e-6
"""Of sums of a few values of about 1, in float32."""

Residual = tuple[str, F32 | None, int]
"""A name for it, what comes again of earlier rounds or None, and its tokens."""
_Work = tuple[bytes, bytes]
"""Base and root of a contribution."""


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


def _work(made: Made) -> _Work:
    """Name of a contribution: on another state the same may be learnt again."""
    return made.base, made.encoded.root


def _left_to_do(step: F32, moved: F32) -> npt.NDArray[np.float64]:
    """Share of each value of a step by which it goes beyond where the state has come since: all, if that went back."""
    same = step.astype(np.float64) * moved > 0
    beyond = 1 - np.abs(moved) / np.where(same, np.abs(step), 1).astype(np.float64)
    return np.where(same, np.maximum(beyond, 0), 1.0)


def _mean(own: F32, own_tokens: int, others: Sequence[tuple[_Given, int]]) -> tuple[F32, int]:
    """The mean of what several learnt, by their tokens as far as they count, and the tokens of all."""
    tokens = own_tokens + sum(counted for _, counted in others)
    rest = [counted * given.made.encoded.decoded().astype(np.float64) for given, counted in others]
    return ((own_tokens * own.astype(np.float64) + sum(rest)) / tokens).astype(np.float32), tokens


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
        self._offered: dict[tuple[PeerId, bytes], list[_Given]] = {}
        """By peer and base, what was handed over."""
        self._together: dict[_Work, tuple[PeerId, bytes]] = {}
        """By what was handed over, whose contribution has it in it, and the root of that."""
        self._passed_on: set[_Work] = set()
        self._announced: dict[tuple[PeerId, int], list[_Given]] = {}
        self._said: set[_Work] = set()
        self._roots: dict[tuple[bytes, bytes], bytes] = {}
        self.carried = 0
        """How many contributions had something of an earlier round."""
        self.lost = 0
        """How many had nothing of it, since it had waited for too long."""
        self.lost_on_the_way = 0
        """How many were handed over to a delegate that was gone before it contributed."""

    def made(
        self, peer: SimulatedPeer, own: F32, own_tokens: int, made: Made, handed: Sequence[HandedWork] = ()
    ) -> None:
        """`peer` encoded its `own` work, of so many tokens, what others handed over, and what it has of before."""
        others = [(self._handed(peer, work, made.base), work.tokens) for work in handed]
        learnt, tokens = _mean(own, own_tokens, others)
        names = []
        for last, (name, residual, more) in self._all_possible(peer, made):
            names.append(name)
            values = learnt if residual is None else learnt + self._error_feedback * residual
            if self._averages and last is not None and residual is not None and more:
                states = self._judge.states
                weight = more * _left_to_do(residual, states[last.given.made.base] - states[made.base])
                values = (tokens * learnt + weight * residual) / (tokens + weight)
            if made.tokens == tokens + more and np.allclose(made.values, values, rtol=0, atol=VALUES_ATOL):
                self._check_on_the_way(peer, last)
                self.carried += residual is not None
                self.lost += name == "nothing of what is too old"
                since = made.round if last is None or any(last.included) else last.given.since
                self._made[made.encoded.root] = _Given(made, learnt, peer.life, since)
                self._together.update((_work(other.made), (peer.id, made.encoded.root)) for other, _ in others)
                self._judge.contributed(made.encoded)
                return
        raise Violation(
            "work counted once",
            f"peer {peer.number} gives to round {made.round} what it learnt and something else than {names}",
        )

    def _handed(self, peer: SimulatedPeer, work: HandedWork, base: bytes) -> _Given:
        """Find what was handed over. Raises Violation if nobody did, or if it counts elsewhere."""
        for given in self._offered.get((work.peer, base), ()):
            encoded = given.made.encoded
            if all(np.array_equal(encoded.encoded(chunk), part) for chunk, part in enumerate(work.chunks)):
                if _work(given.made) in self._together or _work(given.made) in self._said:
                    raise Violation("work counted once", f"peer {peer.number} gives what {work.peer} gives elsewhere")
                return given
        raise Violation("work counted once", f"peer {peer.number} gives what {work.peer} did not hand over")

    def offered(self, peer: SimulatedPeer, made: Made) -> None:
        """`peer` hands over what it made, or says so again."""
        given = self._made[made.encoded.root]
        offered = self._offered.setdefault((peer.id, made.base), [])
        if any(one is given for one in offered):
            return
        offered.append(given)
        self._announced.setdefault((peer.id, made.round % self._fragments), []).append(given)

    def passed_on(self, made: Made) -> None:
        """Its maker holds that the delegate has it."""
        self._passed_on.add(_work(made))

    def _check_on_the_way(self, peer: SimulatedPeer, last: _Last | None) -> None:
        """Raises Violation if what `peer` passed on last is in no other contribution, and its delegate undisturbed."""
        if last is None or last.given.life != peer.life or not self._is_passed_on(last.given):
            return
        if _work(last.given.made) not in self._together:
            self.lost_on_the_way += 1
            if not peer.peer_rounds.handing_over.may_be_lost(last.given.made.base):
                raise Violation("work counted once", f"peer {peer.number} lost what it gave to {last.given.made.round}")

    def given_by_another(self, peer: PeerId, base: bytes) -> tuple[PeerId, bytes] | None:
        """In whose contribution what a peer handed over is, and the root of that; None if in nobody's."""
        mine = (self._together.get(_work(given.made)) for given in self._offered.get((peer, base), ()))
        return next((found for found in mine if found is not None), None)

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
        if (ready.base, ready.root) in self._together:
            raise Violation("work counted once", f"{sender} announces what its delegate has in round {ready.round}")
        self._said.add((ready.base, ready.root))
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
            if ended_by is None and self._is_passed_on(given) and self._stands(given.made, head):
                # It trained again in the round, or that went back: what encoding lost stands on a state that stands.
                yield _Last(given, head, self._included(given.made, peer.id, head))
                if given.life == peer.life:
                    return
            if ended_by is not None:
                yield _Last(given, ended_by, self._included(given.made, peer.id, ended_by))
                if given.life == peer.life or not self._is_unsaid(given):
                    return
            elif given.made.base != made.base and given.life == peer.life:
                break  # with what was abandoned went all of before; another life may have that on disk
        yield None

    def _is_passed_on(self, given: _Given) -> bool:
        """True if another has it, or may have it."""
        return _work(given.made) in self._together or _work(given.made) in self._passed_on

    def _is_unsaid(self, given: _Given) -> bool:
        """True if nobody was told of it, so that no round can have counted it."""
        elsewhere = _work(given.made) in self._said or _work(given.made) in self._together
        return given.made.encoded.root in self._unsaid or not elsewhere

    def _stands(self, made: Made, head: Value) -> bool:
        """True if the state on which it was made is one of the chain up to `head`."""
        return self._judge.origin(self._judge.values[made.base]) in self._judge.branch(head)

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
        if _work(made) in self._together or _work(made) in self._passed_on:
            return [True] * made.encoded.grid.chunks
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
        restarted = peer.life != given.life
        # It may have stood on a state after that, which a rollback or a rebase has abandoned since.
        elsewhere = peer.disk.ledger.head.next_term != self._judge.values[given.made.base].next_term
        if self._is_passed_on(given):
            yield "what encoding lost", self._left(given, last.included, None), 0
            if restarted or elsewhere:
                yield "nothing", None, 0
            return
        applied = self._applied(last)
        yield "what was not counted", self._left(given, last.included, applied), 0 if counted else given.made.tokens
        too_old = made.round - given.since + 1 > self._staleness_rounds and not counted
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
