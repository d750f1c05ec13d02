"""Rollbacks as one node sees them: what its user ordered, what others want, and the state that it takes.

    its user ordered it, or others want it and the policy agrees  ─► have S(k) on disk ─► Consent, anew in each round
    a rollback was proposed that it has to vote on                ─► have S(k) on disk ─► its vote

Having the state comes first: members that consent can then decide it at once. It is looked for on this node's disk,
then asked of peers, beside the rounds, which go on meanwhile. An order is on disk too (`rollback.order`), until it is
carried out, withdrawn, or can no longer be: a restart does not forget it.

The policy for what others' users want: `never` and `always`; `spike`, where the held-out loss that this node measured
last is worse than that of round k by SPIKE_SHARE, or is no number any more. A consent that follows a policy is no
reason for another to follow: only what a user ordered is.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

import trio

from shoal.collectives.state import CertifiedState
from shoal.node.outcome import Notice
from shoal.node.reporting.event_files import LOG_NAME
from shoal.node.rounds.engine_parts import EngineParts
from shoal.node.rounds.evaluations import past_losses
from shoal.node.rounds.inbox import Own
from shoal.node.rounds.order_file import OrderFile
from shoal.node.training.trainer import TrainerEvent
from shoal.node.training.trainer_messages import Evaluated
from shoal.protocol.effects import Effect
from shoal.protocol.errors import ConfigError
from shoal.protocol.inputs import StateHeld
from shoal.protocol.messages import NO_HASH, Target, Value
from shoal.protocol.round import RoundMachine

NAME = "rollback.order"
SPIKE_SHARE = 0.05
"""So much worse, as a share of the loss before, is a spike."""
RETRY_S = 2.0
"""Between two attempts to have a state that neither disk nor peers gave."""
HELD_LIMIT = 2
"""States that are kept in order to go back to them, as long as nothing came of it."""
EVALUATIONS_KEPT = 4096
ROUNDS_SHOWN = 12

logger = logging.getLogger(__name__)


class GoingBack:
    """What this node does about rollbacks. `run` is a task of the daemon's; the rest runs in the engine's task.

    fetch: the state that a value led to, from peers, None if it is not to be had now; with the digest of S(0), should
    that be wanted and known, else NO_HASH.
    """

    def __init__(
        self,
        parts: EngineParts,
        *,
        put: Callable[[Own], None],
        fetch: Callable[[Value, bytes], Awaitable[CertifiedState | None]],
    ) -> None:
        self._p = parts
        self._state_store = parts.state_store
        self._put = put
        self._fetch = fetch
        self._policy = parts.config.rollback
        self._order = OrderFile(parts.store.folder / NAME, Target, again="shoal rollback --to")
        self._asked = self._order.read()
        self._held: dict[Target, bytes] = {}
        self._getting: Target | None = None
        self._needed: tuple[Target, bytes] | None = None
        self._begun = False
        self._losses = past_losses(parts.store.folder / LOG_NAME)
        self._jobs, self._job_queue = trio.open_memory_channel[tuple[Target, bytes]](1)

    async def run(self) -> None:
        """Get states, one after the other. Raises StorageError. Cancellation: what is on disk already stays there."""
        async for target, digest in self._job_queue:
            await self._obtain(target, digest)

    # -- the user's order ------------------------------------------------------------------------------------

    async def order(self, round: int) -> None:
        """This node's user wants to go back to `round`. On disk when this returns.

        Raises ConfigError where it cannot be proposed, StorageError.
        """
        chain = self._state_store.chain
        if not 0 <= round < chain.standing.round:
            raise ConfigError(
                f"--to {round}: the swarm is at round {chain.standing.round} and can go back to rounds before that"
            )
        held = await trio.to_thread.run_sync(self._state_store.earlier.rounds)
        if round not in held:
            raise ConfigError(f"--to {round}: this node does not have the state of that round, but of {_listed(held)}")
        if self._p.identity.peer_id not in chain.head.members:
            raise ConfigError(
                "this node is no member of the next round; only members roll back: wait until it has joined"
            )
        asked = Target(round, chain.value(round).hash)
        await trio.to_thread.run_sync(self._order.write, asked)
        self._asked = asked

    async def withdraw(self) -> None:
        """Its user does not want to go back any more; what was said in this round stays said. Raises StorageError."""
        self._asked = None
        await trio.to_thread.run_sync(self._order.remove)

    # -- the round -------------------------------------------------------------------------------------------

    async def begin_round(self) -> None:
        """Another round begins: forget what cannot be gone back to any more. Raises StorageError."""
        newest = self._state_store.chain.standing.round
        self._losses = {round: loss for round, loss in self._losses.items() if round <= newest}
        self._needed = None
        if self._asked is not None and not self._possible(self._asked):
            await self.withdraw()
        if self._asked is not None and not self._begun:
            text = f"still proposing to go back to round {self._asked.round}; `shoal rollback --withdraw` ends that"
            self._p.on_progress(Notice(text=text))
        kept = [target for target in self._held if self._possible(target)][-HELD_LIMIT:]
        self._held = {target: self._held[target] for target in kept}
        if self._begun and self._getting is None:  # what is there at the start may be what was voted for before
            await self._state_store.earlier.forget(besides={target.round for target in kept})
        self._begun = True

    def _possible(self, target: Target) -> bool:
        chain = self._state_store.chain
        return target.round < chain.standing.round and chain.value(target.round).hash == target.certificate

    def note(self, event: TrainerEvent) -> None:
        """The trainer evaluated a state."""
        if isinstance(event, Evaluated):
            self._losses[event.round] = event.value
            while len(self._losses) > EVALUATIONS_KEPT:
                del self._losses[min(self._losses)]

    def advise(self, machine: RoundMachine, now: float) -> list[Effect]:
        """What this node has to say about going back in this round."""
        if self._needed is not None:
            self._get(*self._needed)
        wanted = self._wanted(machine) if machine.agreement.member else None
        if wanted is None:
            return []
        if wanted not in self._held:
            self._get(wanted)
            return []
        asked = wanted == self._asked
        return [*self._show(machine, wanted, now), *machine.consent(wanted, asked=asked, now=now)]

    def _wanted(self, machine: RoundMachine) -> Target | None:
        if self._asked is not None:
            return self._asked
        consents = machine.consents().items()
        ordered = {consent.target for peer, consent in consents if consent.asked and peer != machine.me}
        return next((target for target in sorted(ordered, key=_age) if self._agrees(target)), None)

    def _agrees(self, target: Target) -> bool:
        if self._policy == "never" or not self._possible(target):
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

    def need(self, value: Value) -> None:
        """This rollback was proposed, and this node cannot vote before it has the state."""
        assert value.rollback
        target = value.rollback.target
        if self._held.get(target) == value.digest:
            self._put(StateHeld(target, value.digest))
        elif self._possible(target):
            self._needed = target, value.digest
        else:
            logger.error("round %d: a rollback was proposed to a round that is not certified here", value.round)

    def held(self, event: StateHeld, machine: RoundMachine | None) -> Sequence[Effect]:
        """A state is on disk, or was not to be had this time."""
        if event.target == self._getting:
            self._getting = None
        if event.digest is None or not self._possible(event.target):
            return ()
        if not self._may_be(event.target, event.digest):
            return ()
        self._held[event.target] = event.digest
        if self._needed == (event.target, event.digest):
            self._needed = None
        return () if machine is None else self._show(machine, event.target, trio.current_time())

    def _may_be(self, target: Target, digest: bytes) -> bool:
        """Whether a state of this digest is that of `target`: the certified one, or an S(0) that nobody certified."""
        certified = self._state_store.chain.digest(target.round)
        return digest == certified or (target.round == 0 and certified == NO_HASH)

    def _get(self, target: Target, digest: bytes = NO_HASH) -> None:
        if self._getting is None:
            self._getting = target
            self._jobs.send_nowait((target, digest))

    async def _obtain(self, target: Target, wanted: bytes) -> None:
        """Have the state on disk; tell the engine its digest, or nothing after a while, so that it may ask again.

        wanted: the digest that was proposed. Of S(0) this disk may have another one.
        """
        digest = None
        state = None
        if self._possible(target):
            state = await self._state_store.earlier.find(target.round)
            if state is not None and state.round == 0 and wanted != NO_HASH:
                state = state if await trio.to_thread.run_sync(self._p.cache.digest, state) == wanted else None
            if state is None:
                state = await self._fetch(self._state_store.chain.value(target.round), wanted)
        if state is not None:
            digest = await self._state_store.earlier.keep(state)
        else:
            await trio.sleep(RETRY_S)
        self._put(StateHeld(target, digest))


def _age(target: Target) -> tuple[int, bytes]:
    return target.round, target.certificate


def _listed(rounds: Sequence[int]) -> str:
    shown = ", ".join(str(round) for round in rounds[-ROUNDS_SHOWN:])
    return f"round {shown}" if rounds else "none before the newest"
