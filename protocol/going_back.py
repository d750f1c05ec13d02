"""Rollbacks as one member sees them: what its user ordered, what others want, and the state that it takes.

    its user ordered it, or others want it and the policy agrees  ─► have S(k) on disk ─► Consent, anew in each round
                                                                      of which this node is a member
    a rollback was proposed that it has to vote on                ─► have S(k) on disk ─► its vote

Having the state comes first: members that consent can then decide it at once. It is looked for on this node's disk,
then asked of peers, by an errand beside the rounds, which go on meanwhile. For an order that is at once, member or not:
the state was on disk when it was ordered, and gives way to newer ones unless it is kept. An order is on disk too, until
it is carried out, withdrawn, or can no longer be: a restart does not forget it.

The policy for what others' users want: `never` and `always`; `spike`, where the held-out loss that this node measured
last is worse than that of round k by SPIKE_SHARE, or is no number any more. A consent that follows a policy is no
reason for another to follow: only what a user ordered is.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from shoal.protocol.catching_up import CatchingUp
from shoal.protocol.chain import Chain
from shoal.protocol.effects import DropOrder, Effect, FindEarlierRounds, ForgetEarlier, KeepOrder, Steps, Tell
from shoal.protocol.errands import Errand
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import Evaluated, Loaded, StateHeld
from shoal.protocol.messages import NO_HASH, Target, Value
from shoal.protocol.round import RoundMachine
from shoal.protocol.surroundings import Surroundings
from shoal.protocol.terms import RollbackPolicy

SPIKE_SHARE: Final = 0.05
"""So much worse, as a share of the loss before, is a spike."""
RETRY_S: Final = 2.0
"""Between two attempts to have a state that neither disk nor peers gave."""
TOLD_LIMIT: Final = 1024
HELD_LIMIT: Final = 2
"""States that are kept in order to go back to them, as long as nothing came of it."""
EVALUATIONS_KEPT: Final = 4096
ROUNDS_SHOWN: Final = 12

logger = logging.getLogger(__name__)


class GoingBack:
    """Rollbacks as one member handles them, in whose hands it is; times are the member's."""

    def __init__(self, me: PeerId, here: Surroundings, catching_up: CatchingUp, policy: RollbackPolicy) -> None:
        self._me = me
        self._here = here
        self._catching_up = catching_up
        self._policy = policy
        self._asked: Target | None = None
        self._held: dict[Target, bytes] = {}
        self._getting: Target | None = None
        self._needed: tuple[Target, bytes] | None = None
        self._begun = False
        self._not_before = float("-inf")
        self._losses: dict[int, float] = {}
        self._told: set[tuple[PeerId, Target]] = set()  # who ordered what, as this node's user was told

    @property
    def _chain(self) -> Chain:
        return self._here.chain

    def loaded(self, event: Loaded) -> None:
        """Take up what was ordered and measured in earlier lives."""
        self._asked = next((order for order in event.orders if isinstance(order, Target)), None)
        self._losses = dict(event.losses)

    def evaluated(self, event: Evaluated) -> None:
        """The trainer evaluated a state."""
        self._losses[event.round] = event.loss
        while len(self._losses) > EVALUATIONS_KEPT:
            del self._losses[min(self._losses)]

    # -- the user's order ------------------------------------------------------------------------------------

    def order(self, round: int) -> Steps:
        """Its user wants to go back to `round`. On disk when this is over.

        Raises ConfigError where it cannot be proposed.
        """
        chain = self._chain
        if not 0 <= round < chain.standing.round:
            raise ConfigError(
                f"--to {round}: the swarm is at round {chain.standing.round} and can go back to rounds before that"
            )
        held: Sequence[int] = yield FindEarlierRounds()
        if round not in held:
            raise ConfigError(f"--to {round}: this node does not have the state of that round, but of {_listed(held)}")
        if self._me not in chain.voters:
            raise ConfigError("this node has no vote in the next round: do it at one of the voters, see `shoal status`")
        asked = Target(round, chain.value(round).hash)
        yield KeepOrder(asked)
        self._asked = asked

    def withdraw(self) -> Steps:
        """Its user does not want to go back any more; what was said in this round stays said."""
        self._asked = None
        yield DropOrder(Target)

    @property
    def has_order(self) -> bool:
        """True if a rollback is wanted here: its state may have to be sought."""
        return self._asked is not None or self._needed is not None

    # -- the round -------------------------------------------------------------------------------------------

    def begin_round(self) -> Steps:
        """Another round begins: forget what cannot be gone back to any more."""
        newest = self._chain.standing.round
        self._losses = {round: loss for round, loss in self._losses.items() if round <= newest}
        self._needed = None
        if self._asked is not None and not self._chain.can_go_back_to(self._asked):
            yield from self.withdraw()
        if self._asked is not None and not self._begun:
            yield Tell(
                f"still proposing to go back to round {self._asked.round}; `shoal rollback --withdraw` ends that"
            )
        kept = [target for target in self._held if self._chain.can_go_back_to(target)][-HELD_LIMIT:]
        self._held = {target: self._held[target] for target in kept}
        if self._begun and self._getting is None:  # what is there at the start may be what was voted for before
            asked = () if self._asked is None else (self._asked,)
            yield ForgetEarlier(frozenset(target.round for target in (*kept, *asked)))
        self._begun = True

    def advise(self, machine: RoundMachine, now: float) -> Sequence[Effect]:
        """Consent to the rollback that this node wants in this round, once its state is held, and show it to others."""
        wanted = self._wanted(machine)
        if wanted is None or wanted not in self._held:
            return ()
        asked = wanted == self._asked
        return [*self._show(machine, wanted, now), *machine.consent(wanted, asked=asked, now=now)]

    def proposed(self, machine: RoundMachine) -> Steps:
        """Tell this node's user once to which round another's ordered to go back, and how to agree."""
        if not machine.agreement.votes:
            return
        for peer, consent in sorted(machine.consents().items()):
            known = consent.target == self._asked or (peer, consent.target) in self._told
            if peer == self._me or not consent.asked or known:
                continue
            if len(self._told) >= TOLD_LIMIT:
                self._told.clear()
            self._told.add((peer, consent.target))
            to = consent.target.round
            yield Tell(f"{peer} proposes to go back to round {to}; `shoal rollback --to {to}` here agrees")

    def due(self, machine: RoundMachine, now: float) -> Errand | None:
        """Return the errand for the state to seek now: the one that a vote takes, else the one for a consent."""
        if self._getting is not None or now < self._not_before:
            return None
        wanted, sought = self._wanted(machine), self._needed
        if sought is None and wanted is not None and wanted not in self._held:
            sought = wanted, NO_HASH
        if sought is None:
            return None
        self._getting = sought[0]
        return self._catching_up.earlier(*sought)

    def _wanted(self, machine: RoundMachine) -> Target | None:
        if self._asked is not None or not machine.agreement.votes:
            return self._asked
        consents = machine.consents().items()
        ordered = {consent.target for peer, consent in consents if consent.asked and peer != machine.me}
        return next((target for target in sorted(ordered, key=_age) if self._agrees(target)), None)

    def _agrees(self, target: Target) -> bool:
        if self._policy == "never" or not self._chain.can_go_back_to(target):
            return False
        return self._policy == "always" or self._spiked(target.round)

    def _spiked(self, round: int) -> bool:
        """Not every state is evaluated: what counts is the last that was, up to `round`."""
        known = [one for one in self._losses if one <= round]
        newest = max(self._losses, default=round)
        if not known or newest <= round:
            return False
        before = self._losses[max(known)]
        return not self._losses[newest] <= before + SPIKE_SHARE * abs(before)

    def _show(self, machine: RoundMachine, target: Target, now: float) -> Sequence[Effect]:
        if machine.agreement.digest_of(target) == self._held[target]:
            return ()
        return machine.holds(target, self._held[target], now)

    # -- the state -------------------------------------------------------------------------------------------

    def need(self, value: Value, machine: RoundMachine, now: float) -> Sequence[Effect]:
        """This rollback was proposed, and this node cannot vote before it has the state."""
        assert value.rollback
        target = value.rollback.target
        if self._held.get(target) == value.digest:
            return self._show(machine, target, now)
        if self._chain.can_go_back_to(target):
            self._needed = target, value.digest
        else:
            logger.error("round %d: a rollback was proposed to a round that is not certified here", value.round)
        return ()

    def held(self, event: StateHeld, machine: RoundMachine | None, now: float) -> Sequence[Effect]:
        """A state is on disk, or was not to be had this time."""
        if event.target == self._getting:
            self._getting = None
        if event.digest is None:
            self._not_before = now + RETRY_S
            return ()
        if not self._chain.can_go_back_to(event.target) or not self._may_be(event.target, event.digest):
            return ()
        self._held[event.target] = event.digest
        if self._needed == (event.target, event.digest):
            self._needed = None
        return () if machine is None else self._show(machine, event.target, now)

    def _may_be(self, target: Target, digest: bytes) -> bool:
        """True if a state of this digest is that of `target`: the certified one, or an S(0) that nobody certified."""
        certified = self._chain.digest(target.round)
        return digest == certified or (target.round == 0 and certified == NO_HASH)


def _age(target: Target) -> tuple[int, bytes]:
    return target.round, target.certificate


def _listed(rounds: Sequence[int]) -> str:
    shown = ", ".join(str(round) for round in rounds[-ROUNDS_SHOWN:])
    return f"round {shown}" if rounds else "none before the newest"
