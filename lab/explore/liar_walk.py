"""Random schedules of the machines that nodes run, some members of which are replaced by liars (`liar.py`).

Messages lie in a bag for each receiver; one is lost, heard, or heard and kept for another time. A liar puts any
message of its alphabet into any bag at any moment, others to others. Checked at every step: what `member.py` checks of
honest members, that none of them signs a value that is false, moves to a view far ahead, or takes a certificate without
a quorum's votes, and that two values are certified in `crash` only if what the liar sent convicts it, in `lying` never.
At the end of each walk the network is calm, the liar goes on, and the first view with an honest lead has to decide.
"""

from __future__ import annotations

import random
from dataclasses import replace

from shoal.lab.explore.liar import Liar, evidence, one_of
from shoal.lab.explore.liar_calm import Calm
from shoal.lab.explore.member import MakeAgreement, Members, Outcome, plain_agreement
from shoal.lab.explore.scope import Scope
from shoal.lab.explore.search import Exploration, OnProgress, ignore_progress
from shoal.lab.explore.walk import AgreementWalk, walked
from shoal.protocol.messages import Certificate, Message, Prepare, Propose, Vote
from shoal.protocol.voting import FaultModel

LOSS, LYING = 0.05, 0.25
"""Probabilities that a message is lost, and that it is the liar who acts."""

TO_THE_POINT = 0.7
"""Probability that a liar's message is of the view that its hearer is in, and of what that prepared, if anything."""

TWO_FACED = 0.5
"""In how many walks the liar tells one half of the others one of its true values, and the other half the other."""

NOWHERE = -1
"""Of no view."""


def walk_with_liar(
    scope: Scope,
    steps: int,
    seed: int,
    make: MakeAgreement = plain_agreement,
    *,
    on_progress: OnProgress = ignore_progress,
) -> Exploration[Scope]:
    """Take `steps` random steps, in as many walks as it needs; planner and liars are others in each."""
    rng, liars = random.Random(seed), max(1, scope.liars)

    def begin() -> _LiarWalk:
        planner, liar = rng.randrange(scope.members), rng.randrange(scope.everyone - liars + 1)
        return _LiarWalk(replace(scope, reduced=False, planner=planner, liars=liars, liar=liar), rng, make)

    return walked(replace(scope, reduced=False, liars=liars), begin, steps, on_progress)


class _LiarWalk(AgreementWalk):
    """A walk that is over when a liar is convicted that may fork."""

    def __init__(self, scope: Scope, rng: random.Random, make: MakeAgreement) -> None:
        two_faced = rng.random() < TWO_FACED
        weights = (20.0, 4.0, 4.0, rng.choice((0.02, 0.1, 0.5)), 0.2, 0.1)
        honest = [position for position in range(scope.everyone) if position not in scope.lying]
        super().__init__(Members(scope, make), honest, rng, weights=weights, loss=LOSS, vote_loss=LOSS)
        self._scope = scope
        self._certified: set[bytes] = set()
        self._liars = [Liar(scope, self.members, position) for position in scope.lying]
        for liar in self._liars:
            liar.lent = tuple(value for other in self._liars if other is not liar for value in other.own)
        self._bad = {value: name for liar in self._liars for value, name in liar.bad.items()}
        self._two_faced = two_faced
        self._sent: dict[int, set[Message]] = {position: set() for position in scope.lying}

    def step(self) -> str | None:
        """Let a liar say something, or an honest member do something."""
        if self._rng.random() < LYING:
            self._lies()
            return None
        return super().step()

    def end(self) -> str | None:
        """Calm the network, and return what is wrong with the outcome, if anything is."""
        if self.over:
            return None
        machines = {position: self.members.states[self._numbers[position]].machine for position in self._honest}
        calm = Calm(self._scope, self.members, self._liars, machines, self._rng)
        wrong = calm.decides()
        self.path += calm.path if wrong else []
        return wrong

    def _said(self, position: int) -> frozenset[Message]:
        return self.members.states[self._numbers[position]].said if position not in self._sent else frozenset()

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

    def names_certified(self) -> frozenset[str]:
        return frozenset(map(self.members.values.name, self._certified))

    def _judged(self, position: int, outcome: Outcome) -> str | None:
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
