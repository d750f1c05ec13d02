"""Random schedules of an agreement that is too large to walk whole; some members may be replaced by liars (`liar.py`).

Messages lie in a bag for each receiver; one is lost, heard, or heard and kept for another time. Nothing is reduced:
every message goes to everyone, and votes and certificates are heard. A liar puts any message of its alphabet into any
bag at any moment, others to others. Checked at every step: what `member.py` checks of honest members, that none of them
signs a value that is false, moves to a view far ahead, or takes a certificate without a quorum's votes, and that two
values are certified in `crash` only if what a liar sent convicts it, in `lying` never. At the end of each walk the
network is calm, liars go on, and the first view with an honest lead has to decide. A seed gives the same walks again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from shoal.lab.explore.liar import Liar, evidence, one_of
from shoal.lab.explore.liar_calm import Calm
from shoal.lab.explore.member import MakeAgreement, Members, Outcome, plain_agreement
from shoal.lab.explore.scope import Scope
from shoal.lab.explore.search import Exploration, OnProgress, Walk, ignore_progress, taken_from, walk_at_random
from shoal.lab.explore.word import order_of
from shoal.protocol.messages import Certificate, Message, Prepare, Propose, Vote
from shoal.protocol.voting import FaultModel

STEPS_PER_MEMBER_LIMIT = 60
"""A walk this long ends, and the next begins."""

LOSS, REPEAT = 0.1, 0.15
VOTE_LOSS = (0.1, 0.6, 0.95)
"""Probabilities that a vote is lost: the outcome stays unknown then, and members go through many views with votes
behind them."""
LOSS_BESIDE_LIARS, LYING = 0.05, 0.25
"""Probabilities that a message is lost, and that it is a liar who acts."""

TO_THE_POINT = 0.7
"""Probability that a liar's message is of the view that its hearer is in, and of what that prepared, if anything."""

TWO_FACED = 0.5
"""In how many walks a liar tells one half of the others one of its true values, and the other half the other."""

NOWHERE = -1
"""Of no view."""


def walk(
    scope: Scope,
    steps: int,
    seed: int,
    make: MakeAgreement = plain_agreement,
    *,
    on_progress: OnProgress = ignore_progress,
) -> Exploration[Scope]:
    """Take `steps` random steps, in as many walks as it needs; planner and liars are others in each."""
    rng, liars = random.Random(seed), scope.liars
    met: list[tuple[int, frozenset[str]]] = []

    def begin() -> _AgreementWalk:
        planner = rng.randrange(scope.members)
        liar = rng.randrange(scope.everyone - liars + 1) if liars else 0
        return _AgreementWalk(replace(scope, reduced=False, planner=planner, liar=liar), rng, make)

    def ended(one: _AgreementWalk) -> None:
        met.append((len(one.members.states), one.names_certified()))

    figures = walk_at_random(begin, ended, steps, on_progress)
    return Exploration(
        scope=replace(scope, reduced=False),
        member_states=sum(count for count, _ in met),
        certified=frozenset(names for _, names in met),
        **figures,
    )


class _AgreementWalk(Walk):
    """One schedule. It is over when a liar is convicted that may fork."""

    def __init__(self, scope: Scope, rng: random.Random, make: MakeAgreement) -> None:
        super().__init__(STEPS_PER_MEMBER_LIMIT * scope.members)
        self._scope, self._rng = scope, rng
        self.members = members = Members(scope, make)
        self._two_faced = scope.liars > 0 and rng.random() < TWO_FACED
        # How likely a member hears, computes, proposes, moves, returns, or leaves.
        self._kinds: list[Callable[[int, int], list[Outcome]]] = [
            self._hears,
            members.computes,
            members.proposes,
            members.moves,
            members.returns,
            members.leaves,
        ]
        if scope.liars:
            self._weights = (20.0, 4.0, 4.0, rng.choice((0.02, 0.1, 0.5)), 0.2, 0.1)
            self._loss = self._vote_loss = LOSS_BESIDE_LIARS
        else:
            self._weights = (20.0, 6.0, 6.0, rng.choice((0.5, 1.0, 2.0)), 0.3, 0.1)
            self._loss, self._vote_loss = LOSS, rng.choice(VOTE_LOSS)
        self._honest = [position for position in range(scope.everyone) if position not in scope.lying]
        self._numbers = list(members.start)
        self._crashes, self._leaves = scope.crashes, scope.leaves
        self._bags: dict[int, list[tuple[int, Message]]] = {position: [] for position in self._honest}
        self._certified: set[bytes] = set()
        self._liars = [Liar(scope, members, position) for position in scope.lying]
        for liar in self._liars:
            liar.lent = tuple(value for other in self._liars if other is not liar for value in other.own)
        self._bad = {value: name for liar in self._liars for value, name in liar.bad.items()}
        self._sent: dict[int, set[Message]] = {position: set() for position in scope.lying}

    def step(self) -> str | None:
        """Let a liar say something, or an honest member do something; returns what must never happen and happened."""
        if self._liars and self._rng.random() < LYING:
            self._lies()
            return None
        position = self._rng.choice(self._honest)
        (kind,) = self._rng.choices(self._kinds, self._weights)
        possible = kind(position, self._numbers[position])
        possible = [o for o in possible if o.crashes <= self._crashes and o.leaves <= self._leaves]
        if not possible:
            return None
        outcome = possible[0] if self._rng.random() < 0.6 else self._rng.choice(possible)
        self.path.append(f"member {position} {outcome.text}")
        before, self._numbers[position] = self._numbers[position], outcome.after
        self._crashes -= outcome.crashes
        self._leaves -= outcome.leaves
        states = self.members.states
        for message in sorted(states[outcome.after].said - states[before].said, key=order_of):
            for receiver in self._honest:
                if receiver != position:
                    self._bags[receiver].append((position, message))
        return self._judged(outcome)

    def end(self) -> str | None:
        """Calm the network, and return what is wrong with the outcome, if anything is."""
        if self.over:
            return None
        machines = {position: self.members.states[self._numbers[position]].machine for position in self._honest}
        calm = Calm(self._scope, self.members, self._liars, machines, self._rng)
        wrong = calm.decides()
        self.path += calm.path if wrong else []
        return wrong

    def names_certified(self) -> frozenset[str]:
        """Name the values that have been certified."""
        return frozenset(map(self.members.values.name, self._certified))

    def _hears(self, position: int, number: int) -> list[Outcome]:
        if not self._bags[position]:
            return []
        sender, message = taken_from(self._bags[position], self._rng, repeat=REPEAT)
        loss = self._vote_loss if isinstance(message, Vote | Certificate) else self._loss
        return [] if self._rng.random() < loss else self.members.hears(position, number, sender, message)

    def _said(self, position: int) -> frozenset[Message]:
        return self.members.states[self._numbers[position]].said if position not in self._sent else frozenset()

    # -- lying -----------------------------------------------------------------------------------------------

    def _lies(self) -> None:
        receiver = self._rng.choice(self._honest)
        liar = self._liars[0] if len(self._liars) == 1 else self._rng.choice(self._liars)
        alphabet = liar.alphabet([self._said(i) for i in range(self._scope.everyone)])
        if self._rng.random() < TO_THE_POINT:
            alphabet = self._to_the_point(alphabet, receiver, liar)
        message = one_of(alphabet, self._rng)
        self._sent[liar.position].add(message)
        self._bags[receiver].append((liar.position, message))

    def _to_the_point(self, alphabet: frozenset[Message], receiver: int, liar: Liar) -> frozenset[Message]:
        view = self.members.states[self._numbers[receiver]].machine.view
        prepared = {m.value for m in self._said(receiver) if isinstance(m, Prepare) and m.view == view}
        hidden = liar.own[1 - self._honest.index(receiver) % 2].hash if self._two_faced else None
        return frozenset(
            m
            for m in alphabet
            if getattr(m, "view", NOWHERE) == view
            and not (isinstance(m, Propose) and m.value.hash == hidden)
            and (not prepared or not isinstance(m, Prepare | Vote) or m.value in prepared)
        )

    # -- judging ---------------------------------------------------------------------------------------------

    def _judged(self, outcome: Outcome) -> str | None:
        """Return what must never happen and happened in the step of a member, if anything did."""
        if outcome.violation is not None:
            return outcome.violation
        member = self.members.states[outcome.after]
        if member.machine.view >= self._scope.views:
            return "a member followed to a view far ahead"
        for message in member.said:
            if isinstance(message, Prepare | Vote) and message.value in self._bad:
                return f"an honest member signed {self._bad[message.value]}"
        for view, value in outcome.votes:
            self._count(view, value)
        certificate = outcome.certificate
        if certificate is not None:
            wrong = self._unfounded(certificate)
            if wrong is not None:
                return wrong
            self._certified.add(certificate.value.hash)
        if len(self._certified) < 2:
            return None
        self.over = self._scope.may_fork and any(map(evidence, self._sent.values()))
        return None if self.over else "fork"

    def _count(self, view: int, value: bytes) -> None:
        voters = {self.members.peers[i] for i in self._honest if _voted(self._said(i), view, value)}
        for position, sent in self._sent.items():
            if self._scope.faults is FaultModel.LYING or _voted(sent, view, value):
                voters.add(self.members.peers[position])
        leaves = self.members.values.by_hash[value].leaves
        if self.members.outweigh(voters, leaves):
            self._certified.add(value)

    def _unfounded(self, certificate: Certificate) -> str | None:
        value = certificate.value.hash
        if value in self._bad:
            return f"certified {self._bad[value]}"
        for position in self._honest:
            signed = self.members.peers[position] in certificate.signers
            if signed and not _voted(self._said(position), certificate.view, value):
                return "certified without votes"
        return None


def _voted(said: frozenset[Message] | set[Message], view: int, value: bytes) -> bool:
    return any(isinstance(m, Vote) and (m.view, m.value) == (view, value) for m in said)
