"""Every schedule of a small agreement over the machines that nodes run, one member of which is a liar (`liar.py`).

The search is that of `agreement.py`. The liar takes no steps: whatever it may say, it has said, to everybody and to
each something else, as soon as honest members gave away what it takes. So it is one more member whose messages may be
heard at any moment, and whose votes and Prepares count for every value. Nothing that it could say earlier is lost to
it. Members hear of it what they hear of others, so the reasons for which schedules may be left out hold as before; that
honest members pass over a certificate without a quorum, and views far ahead, is for the walks (`walk.py`).
"""

from __future__ import annotations

from shoal.lab.explore.agreement import Explorer, Standing
from shoal.lab.explore.liar import Liar
from shoal.lab.explore.member import MakeAgreement, Member, Outcome, plain_agreement
from shoal.lab.explore.scope import Scope
from shoal.lab.explore.search import State
from shoal.lab.explore.word import Said
from shoal.protocol.errors import ConfigError
from shoal.protocol.messages import Certificate, Prepare, Vote


class LiarExplorer(Explorer):
    """Walks the schedules of a scope with a liar. In `crash` a second value may be certified, and is passed over."""

    def __init__(self, scope: Scope, make: MakeAgreement = plain_agreement) -> None:
        if scope.liars > 1:
            raise ConfigError("--liars: schedules are searched beside one liar; of more walk some with --walk")
        super().__init__(scope, make)
        self._liar = Liar(scope, self.members, scope.liar)
        self._machine = self.members.states[self.start[scope.liar]].machine
        self._liar_numbers: dict[Said, int] = {}
        self.forks = 0
        """Number of times that, in `crash`, a second value was certified."""
        self.start = self._with_liar(self.start, frozenset())

    def _with_liar(self, state: State, before: Said) -> State:
        """The state with all that the liar may say in it, beside what it could say before."""
        position, states = self.scope.liar, self.members.states
        said = [states[number].said if i != position else frozenset() for i, number in enumerate(state[:-1])]
        now = before | {m for m in self._liar.alphabet(said) if not isinstance(m, Certificate)}
        number = self._liar_numbers.setdefault(now, len(states))
        if number == len(states):
            states.append(Member(machine=self._machine, log=(), said=now, rank=0))
        return (*state[:position], number, *state[position + 1 :])

    def _possible(self, position: int, number: int, heard: tuple[int, ...]) -> list[Outcome]:
        return [] if position == self.scope.liar else super()._possible(position, number, heard)

    def _hears(self, position: int, number: int, sender: int, said: int) -> list[Outcome]:
        """Drop what a liar proposes and its hearer rejects: it only keeps that from accepting something else."""
        outcomes = super()._hears(position, number, sender, said)
        if sender != self.scope.liar:
            return outcomes
        states = self.members.states
        return [o for o in outcomes if o.violation or states[o.after].said != states[number].said]

    def after(self, state: State, position: int, outcome: Outcome) -> State | str:
        """The state after a step of an honest member, or what must never happen and happened in it."""
        reached = super().after(state, position, outcome)
        if isinstance(reached, str):
            return reached
        for message in self.members.states[outcome.after].said:
            if isinstance(message, Prepare | Vote) and message.value in self._liar.bad:
                return f"an honest member signed {self._liar.bad[message.value]}"
        return self._with_liar(reached, self.members.states[state[self.scope.liar]].said)

    def _stands(self, before: Standing, numbers: list[int], outcome: Outcome) -> Standing | str:
        standing = super()._stands(before, numbers, outcome)
        if standing == "fork" and self.scope.may_fork:
            self.forks += 1
            return before
        return standing
