"""A member of an explored agreement that lies: every well-formed message that it may send, signed with its real key.

What it says takes nobody else's key: it has its own signatures, and those that honest members gave away. The alphabet:

* Prepares and votes of every value that was proposed, or that it made up itself, in every view;
* ViewChanges to every view, with nothing prepared, with every prepare certificate that it can make of what was signed
  with its own Prepare, shown or hidden, and with an invented one; and to a view far ahead;
* proposals in the views that it leads, and in all where it has no vote, of what each quorum's ViewChanges compel, of
  its own values where they compel nothing and where they do, by an invented certificate, and without any ViewChanges;
  and in a view far ahead;
* a Leave; certificates of its own values by its own vote, and by all votes that there are.

Its own values are two true ones, one with a digest that nobody computed, one with a stranger for a member, and one that
counts leaves which nobody signed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

import msgspec

from shoal.lab.explore.member import Members
from shoal.lab.explore.scope import Scope
from shoal.lab.explore.word import Said, order_of
from shoal.lab.forgeries import with_stranger, without_others
from shoal.lab.signed import certified, change_of, leave_of, moves_of, prepare_of, prepared_by, propose_of, vote_of
from shoal.protocol.identity import Identity
from shoal.protocol.messages import (
    Certificate,
    Leave,
    Message,
    Moves,
    Prepare,
    PreparedValue,
    Propose,
    Value,
    ViewChange,
    Vote,
    domain_hash,
)
from shoal.protocol.view_change import compelled
from shoal.protocol.voting import is_quorum

FAR_VIEWS = 8
"""A view far ahead is so many beyond the last that is explored."""

_STRANGER = Identity.from_seed(b"\xff" * 32)

Signers = Mapping[tuple[int, bytes], frozenset[int]]
"""Signers of messages of a kind, by view and hash of the value."""


class _Remembering(Identity):
    """An identity that signs the same again without the work."""

    def __init__(self, identity: Identity) -> None:
        self.peer_id = identity.peer_id
        self._signed = cache(identity.sign)

    def sign(self, domain: bytes, message: bytes) -> bytes:
        return self._signed(domain, message)


class Liar:
    """The lying member `position`, and all messages that it may send; others that lie lend it their keys."""

    def __init__(self, scope: Scope, members: Members, position: int) -> None:
        values = members.values
        self.position = position
        self._voting = members.voting
        self._identities = [_Remembering(identity) for identity in members.identities]
        self._me = self._identities[position]
        self._scope = scope
        self._base = values.previous
        peer = self._me.peer_id
        true, other = (values.fresh(peer, plan, ()) for plan in (0, 1))
        self.false = msgspec.structs.replace(true, digest=domain_hash("what nobody computed"))
        self.taken = without_others(true, self._me)
        self.unfair = with_stranger(true, _STRANGER, signs=True)
        self.own = (true, other, self.false, self.unfair, self.taken)
        self.bad = {value.hash: name for value, name in self._named()}
        values.names.update(self.bad)
        for value in self.own:
            values.by_hash[value.hash] = value
        self.lent: tuple[Value, ...] = ()
        """Values of other liars, which it prepares and votes for as for its own."""
        self._alphabets: dict[object, frozenset[Message]] = {}

    def _named(self) -> Iterator[tuple[Value, str]]:
        if self.position >= self._scope.members:
            yield from ((value, "what a stranger proposed") for value in self.own)
        yield self.false, "a false digest"
        yield self.unfair, "a stranger as a member"
        yield self.taken, "leaves that nobody signed"

    # -- the alphabet --------------------------------------------------------------------------------------------

    def alphabet(self, said: Sequence[Said]) -> frozenset[Message]:
        """Return all that it may say when the members, in order, said what is in `said`."""
        heard = frozenset(
            (who, message) for who, messages in enumerate(said) for message in messages if who != self.position
        )
        known = self._alphabets.get(heard)
        if known is None:
            known = self._alphabets[heard] = frozenset(self._messages(heard))
        return known

    def _messages(self, heard: frozenset[tuple[int, Message]]) -> Iterator[Message]:
        values = {value.hash: value for value in (*self.own, *self.lent)}
        values |= {m.value.hash: m.value for _, m in heard if isinstance(m, Propose)}
        certificates = list(self._certificates(values, _signers(heard, Prepare)))
        for view in range(self._scope.views):
            for value in values.values():
                yield prepare_of(self._me, view, value)
                yield vote_of(self._me, view, value)
        yield leave_of(self._me, self._base)
        yield from self._moves(certificates)
        yield from self._proposals(heard, certificates)
        yield from self._decisions(values, _signers(heard, Vote))

    def _certificates(self, values: Mapping[bytes, Value], prepares: Signers) -> Iterator[PreparedValue]:
        """Yield the prepare certificates that hold, with its own Prepare where need be."""
        for view in range(self._scope.views):
            for value_hash, value in values.items():
                prepared = prepared_by(self._with_me(prepares.get((view, value_hash), ())), view, value)
                if is_quorum(self._base, prepared.signers, value.leaves, voting=self._voting):
                    yield PreparedValue(value, prepared)

    def _with_me(self, others: Iterable[int]) -> list[Identity]:
        return [self._identities[one] for one in {*others, *self._scope.lying}]

    def _moves(self, certificates: Sequence[PreparedValue]) -> Iterator[ViewChange]:
        for view in range(1, self._scope.views):
            yield from self._claims(view, certificates)
            yield from (self._change(view, one) for one in self._invented(view))
        yield self._change(self._scope.views + FAR_VIEWS, None)

    def _claims(self, view: int, certificates: Sequence[PreparedValue]) -> Iterator[ViewChange]:
        yield self._change(view, None)
        yield from (self._change(view, one) for one in certificates if one.prepared.view < view)

    def _invented(self, view: int) -> Iterator[PreparedValue]:
        for value in (self.own[1], self.unfair):
            yield PreparedValue(value, prepared_by([self._me], view - 1, value))

    def _change(self, view: int, prepared: PreparedValue | None) -> ViewChange:
        return change_of(self._me, self._base, view, prepared)

    # -- proposals and certificates --------------------------------------------------------------------------------

    def _proposals(
        self, heard: frozenset[tuple[int, Message]], certificates: Sequence[PreparedValue]
    ) -> Iterator[Message]:
        stranger = self.position >= self._scope.members
        led = [view for view in range(self._scope.views) if stranger or view % self._scope.members == self.position]
        for view in led:
            for value in self.own:
                yield propose_of(self._me, view, value)
            if view > 0:
                yield from self._justified(view, heard, certificates)
        far = self._scope.members * (self._scope.views + FAR_VIEWS) + self.position
        yield propose_of(self._me, far, self.own[0])
        yield propose_of(self._me, far, self.own[0], self._shown(far, {}, self._change(far, None)))

    def _justified(
        self, view: int, heard: frozenset[tuple[int, Message]], certificates: Sequence[PreparedValue]
    ) -> Iterator[Message]:
        """One proposal for each thing that some quorum's ViewChanges compel, and some that they do not."""
        moved = sorted(
            ((who, m) for who, m in heard if isinstance(m, ViewChange) and m.view == view), key=lambda o: o[0]
        )
        by_claim = {(one.prepared.view, one.value.hash): one for one in certificates}
        met: set[tuple[int, bytes] | None] = set()
        for count in range(len(moved) + 1):
            for some in itertools.combinations(moved, count):
                for own in self._claims(view, certificates):
                    moves = self._shown(view, dict(some), own)
                    if not is_quorum(self._base, [one.peer for one in moves.changes], voting=self._voting):
                        continue
                    claim = compelled(moves)
                    if claim in met or (claim is not None and claim not in by_claim):
                        continue
                    met.add(claim)
                    for value in self.own:
                        yield propose_of(self._me, view, value, moves)
                    if claim is not None:
                        yield propose_of(self._me, view, by_claim[claim].value, moves, by_claim[claim].prepared)
        for one in self._invented(view):
            moves = self._shown(view, dict(moved), self._change(view, one))
            yield propose_of(self._me, view, one.value, moves, one.prepared)

    def _shown(self, view: int, moved: Mapping[int, ViewChange], own: ViewChange) -> Moves:
        """The ViewChanges of those and of all liars, each under its sender's key."""
        carried = {self._identities[who].peer_id: change.prepared for who, change in moved.items()}
        carried |= {self._identities[who].peer_id: own.prepared for who in self._scope.lying}
        return moves_of(self._with_me(moved), self._base, view, carried)

    def _decisions(self, values: Mapping[bytes, Value], votes: Signers) -> Iterator[Certificate]:
        for view in range(self._scope.views):
            for value_hash, value in values.items():
                yield certified(value, self._me, view=view)
                yield certified(value, *self._with_me(votes.get((view, value_hash), ())), view=view)


def _signers(heard: Iterable[tuple[int, Message]], kind: type[Prepare | Vote]) -> Signers:
    found: dict[tuple[int, bytes], frozenset[int]] = {}
    for who, message in heard:
        if isinstance(message, kind):
            at = message.view, message.value
            found[at] = found.get(at, frozenset()) | {who}
    return found


def evidence(said: Iterable[Message]) -> str | None:
    """Find what convicts the sender of all these messages, if anything does."""
    signed: dict[tuple[type[Message], int], bytes] = {}
    left = False
    others = False
    votes: list[int] = []
    moves: list[tuple[int, int]] = []
    for message in said:
        left, others = left or isinstance(message, Leave), others or not isinstance(message, Leave | Certificate)
        if isinstance(message, Prepare | Vote | Propose):
            value = message.value.hash if isinstance(message, Propose) else message.value
            if signed.setdefault((type(message), message.view), value) != value:
                return f"two {type(message).__name__}s in view {message.view}"
        if isinstance(message, Vote):
            votes.append(message.view)
        if isinstance(message, ViewChange):
            moves.append((message.view, -1 if message.prepared is None else message.prepared.prepared.view))
    if any(shown < vote < view for view, shown in moves for vote in votes):
        return "a ViewChange below its own vote"
    return "a leave beside something signed" if left and others else None


def one_of(alphabet: frozenset[Message], rng: random.Random) -> Message:
    """Draw a message, each kind with equal probability; which one follows from `rng` alone."""
    kinds = sorted({type(message) for message in alphabet}, key=lambda kind: kind.__name__)
    kind = rng.choice(kinds)
    return rng.choice(sorted((m for m in alphabet if type(m) is kind), key=order_of))
