"""This node's part in a round: the training it orders, its contribution, and what became of that.

train ─► contribute (encode, commit, note on disk) ─► Ready ─► plan: reduce ─► certificate ─► settle
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import trio

from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.fragments import Fragments
from shoal.collectives.state import CertifiedState
from shoal.node.rounds.engine_parts import EngineParts
from shoal.node.rounds.round_observer import RoundObserver
from shoal.node.state.contributions import Contributions, HandedWork, Made
from shoal.node.state.file_memory import FilePool, file_memory
from shoal.node.state.resumption import Found
from shoal.node.training import trainer_messages
from shoal.node.training.trainer import Restarted, TrainerEvent
from shoal.node.training.trainer_messages import Contribution
from shoal.protocol.chain import next_position
from shoal.protocol.effects import Train
from shoal.protocol.errors import LocalError, NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import Evaluated, Input, Trained, TrainerRestarted
from shoal.protocol.messages import Held, Plan, Ready
from shoal.protocol.planning import OBSERVER, absent_ready
from shoal.protocol.seats import are_few

PLAN_OUT_S = 0.05  # a lead begins its own part so much later at most

logger = logging.getLogger(__name__)


class Participation:
    """This node's part in the round after the head, whose state is here.

    It runs in the engine's task, but for `look_up`, which waits for peers.
    """

    def __init__(self, parts: EngineParts, fragments: Fragments, observer: Callable[[], RoundObserver]) -> None:
        manifest = parts.config.manifest
        self._p = parts
        self._observer = observer
        self._me = parts.identity.peer_id
        self._state_store = parts.state_store
        self._training_client = parts.training_client
        self._manifest = manifest
        """The settings that contributions and trainer keep to."""
        self._worked_on: int | None = None
        """The round of the state on which the trainer learnt something last."""
        self._found: Found | None = None
        self._spent = False
        few_seats = are_few(manifest.seats)
        self._contributions = Contributions(
            fragments,
            manifest.sync.plan_codec,
            manifest.round.staleness_rounds,
            sender=self._me,
            error_feedback=manifest.sync.error_feedback,
            mixing=manifest.sync.applied_mixing,
            gradients=manifest.sync.exchanges_gradients,
            allocate=partial(file_memory, parts.store.folder),
            vectors=FilePool(parts.store.folder, fragments.grid.chunk_values, together=1 + few_seats, kept=2),
            few_seats=few_seats,
        )

    @property
    def made(self) -> Made | None:
        """This node's contribution to the round under way, once it is made."""
        return self._contributions.made

    @property
    def encoded(self) -> EncodedContribution | None:
        """The contribution as the others get it, encoded; None as long as there is none."""
        return None if self.made is None else self.made.encoded

    async def find_work(self, *, countable: bool) -> bool:
        """Look for what this node had learnt and made before a restart, once the state at the head is here.

        countable: of the newest work on disk nothing can have been counted. Returns whether it is a contribution to the
        round under way. Raises StorageError.
        """
        chain, resumption = self._state_store.chain, self._p.resumption
        staleness = self._manifest.round.staleness_rounds
        found = await trio.to_thread.run_sync(
            lambda: resumption.find(chain, countable=countable, staleness_rounds=staleness)
        )
        if found is None:
            return False
        if found.work is not None:
            await self._keep_to(found.work.account.round)  # its codec is that of its own round
        again = found.work is not None and await trio.to_thread.run_sync(self._contributions.make_again, found.work)
        of_this_round = found.position == next_position(chain.head)
        if of_this_round and not again:
            return False  # what the trainer knows is ahead of what is going to be made
        is_passed_on = again and found.work is not None and found.work.account.passed_on is True
        if is_passed_on:
            await trio.to_thread.run_sync(self._contributions.pass_on)
        self._found, self._spent = found, not countable and not of_this_round
        return of_this_round and not is_passed_on

    async def resume_work(self) -> None:
        """Take up what was found. Raises StorageError."""
        # A vote of before the restart may be enough to go back, before the trainer is given any state.
        self._contributions.stand_on(self._state_store.chain)
        found, self._found = self._found, None
        if found is not None:
            await self.settle()
            await self._p.resumption.restore_trainer(found, spent=self._spent)

    def announcement(self) -> Ready:
        """Announcement of the contribution that is here."""
        assert self.made is not None
        return self._ready(self.made)

    async def stand_on_head(self) -> None:
        """Give the trainer the state at the head; what was learnt on one that was abandoned, or is old, is dropped."""
        self._p.reduce.prepare()
        state, chain = self._state_store.state, self._state_store.chain
        assert state is not None
        fresh = self._contributions.stand_on(chain)
        if self._is_too_old(state.round):
            self._contributions.drop()
            fresh = True
        self._p.resumption.stands_on(None)
        anchor = state.anchor if isinstance(state, CertifiedState) else state.anchor(self._p.cache.vectors)
        await self._training_client.stand_on(state, anchor, taken=self._contributions.taken, fresh=fresh)
        if not self._manifest.sync.exchanges_gradients:
            self._p.resumption.stands_on(chain.standing)
        await self._keep_to(chain.head.next_round)  # after the anchor, which was made under the settings before

    def _is_too_old(self, round: int) -> bool:
        """True if the trainer, which is to stand on the state of `round`, has learnt nothing for too many rounds.

        That is so of who slept meanwhile, was paused, or had no link: what it learnt amid a round goes along in its
        replica from state to state, and what no round counted in its residuals, and neither says how old it is.
        """
        before, is_paused = self._worked_on, self._training_client.paused
        is_too_old = before is not None and round - before > self._manifest.round.staleness_rounds
        if before is None or is_too_old or not is_paused:
            self._worked_on = round
        return is_too_old

    async def _keep_to(self, round: int) -> None:
        """Go on by the settings in force in `round`."""
        manifest = self._state_store.chain.amended(round) or self._p.config.manifest
        if manifest is self._manifest:
            return
        sync = manifest.sync
        self._contributions.retune(sync.plan_codec, manifest.round.staleness_rounds, mixing=sync.applied_mixing)
        await self._training_client.retune(manifest)
        self._manifest = manifest

    async def train(self, order: Train) -> None:
        """Have the trainer make this round's inner steps, and lanes brought up meanwhile."""
        state, client = self._state_store.state, self._training_client
        assert state is not None
        if order.beside:
            chunks = self._contributions.fragment(self._state_store.chain.head.next_round).grid.chunks
            self._p.reduce.bring_up_lanes(order.beside, chunks)
        if not order.at_once or client.balances:
            head = self._state_store.head
            await client.train(head, self._me, state.tokens, contribute=order.contribute, at_once=order.at_once)

    async def pause(self, paused: bool) -> None:
        """Stop the trainer, or let it go on."""
        await (self._training_client.pause() if paused else self._training_client.resume())

    async def contribute(self, event: Contribution, *, alone: bool, delegate: PeerId | None) -> Ready | None:
        """Encode what the trainer made for this round, commit to it, and have it on disk.

        alone: nobody else can have heard what this node announced. delegate: to whom it will be handed over; it is not
        on disk then. Else it has in it what others of the site handed over. Returns the announcement, None if this is
        not what was waited for. Raises StorageError.
        """
        if self.made is not None or not self._training_client.is_current(event):
            return None
        site = self._p.site
        handed = site.take(event.tokens, self._manifest.round.weight_cap) if delegate is None else []
        try:
            made = await trio.to_thread.run_sync(self._make, event, handed)
        except LocalError as error:
            site.contributed()
            logger.error("round %d: this node contributes nothing: %s", event.round, error)
            return absent_ready(OBSERVER, self._state_store.head, self._state_store.digest)
        finally:
            await self._training_client.give_back_contribution()
        if delegate is None:
            await self._keep(made, alone=alone)
        else:
            await self._p.resumption.forget_midway()
        site.contributed(made.handed)
        self._p.log.contributed(event, made.tokens - sum(work.tokens for work in handed))
        return self._ready(made)

    async def _keep(self, made: Made, *, alone: bool) -> None:
        """Have on disk what was made, and is about to be announced."""
        head = self._state_store.head
        await self._p.resumption.made(self._contributions.saved(made, head.next_term), alone=alone)
        await trio.to_thread.run_sync(self._p.audit.contribution, head.next_term, made)
        self._observer().contributed(made)

    def hand_over(self, delegate: PeerId) -> None:
        """Begin to hand over to the delegate of the site what was made."""
        assert self.made is not None
        self._p.site.hand_over(delegate, self.made)

    async def take_back(self) -> None:
        """Take back what was offered the delegate."""
        self._p.site.take_back()
        await trio.lowlevel.checkpoint()

    async def pass_on(self) -> None:
        """The delegate has what was made: note so on disk, beside what the trainer knows. Raises StorageError."""
        assert self.made is not None
        saved = self._contributions.saved(self.made, self._state_store.head.next_term, passed_on=True)
        await self._p.resumption.made(saved)
        await trio.to_thread.run_sync(self._contributions.pass_on)

    async def keep_own(self) -> Ready:
        """The delegate has it not: have it on disk, to be announced. Raises StorageError."""
        assert self.made is not None
        await self._keep(self.made, alone=False)
        return self._ready(self.made)

    def _ready(self, made: Made) -> Ready:
        upload, download = map(_at_most, self._p.caps(), self._p.reduce.rates)
        return made.ready(
            self._state_store.head,
            self._state_store.digest,
            sender=self._me,
            upload=upload,
            download=download,
            reaches=self._p.links.linked() - self._p.reduce.unreachable,
        )

    def _make(self, event: Contribution, handed: Sequence[HandedWork]) -> Made:
        if not event.tokens:
            raise LocalError("its inner steps counted no tokens; every loss may have been infinite or not a number")
        fragment, head = self._contributions.fragment(event.round), self._state_store.head
        values = self._training_client.pseudo_gradient(fragment.numel)
        state = self._state_store.state
        assert state is not None
        self._worked_on = state.round
        anchor = state.anchor if isinstance(state, CertifiedState) else None
        made = self._contributions.make(
            event.round, event.number, event.tokens, values, base=head.hash, handed=handed, anchor=anchor
        )
        self._p.audit.made_of(head.next_term, made, values)
        return made

    # -- the reduction ---------------------------------------------------------------------------------------

    async def reduce(self, plan: Plan) -> None:
        """Do this node's part of a plan, in place of what is under way."""
        await self._before(plan, "plan")
        self._p.reduce.start(plan, self.encoded)

    async def repair(self, plan: Plan, held: Mapping[PeerId, Held]) -> None:
        """Go on by a revised plan; `held` is what others said they hold."""
        await self._before(plan, "repair")
        self._p.reduce.repair(plan, self.encoded, held)

    async def _before(self, plan: Plan, phase: str) -> None:
        self._p.log.planned(plan)
        self._observer().planned(plan)
        await self._p.holds.at(plan.round, phase)
        if plan.planner == self._me:  # once the lanes are at work, what is queued waits for its turn
            await self._p.links.drain(deadline_s=PLAN_OUT_S)

    # -- what became of it -----------------------------------------------------------------------------------

    async def look_up(self, peers: Sequence[PeerId]) -> None:
        """Have the finals here by which `settle` counts, as far as `peers` can help. Runs beside the engine."""
        made, chain = self.made, self._state_store.chain
        if made is None or not self._contributions.awaits_finals(chain):
            return
        try:
            await self._state_store.finals(made.round, list(peers))
        except NetworkError as error:
            logger.info("whether this node's work of round %d was counted: %s", made.round, error)

    async def settle(self) -> None:
        """Count this node's contribution as the chain says, by finals that are here (`Contributions.settle_by`)."""
        made, chain, finals = self.made, self._state_store.chain, None
        if made is None or not self._contributions.is_over(chain):
            return
        is_passed_on = await self._p.site.outcome(made.base)
        if self._contributions.is_abandoned(chain):
            self._contributions.drop()
            return
        if is_passed_on:
            await trio.to_thread.run_sync(self._contributions.pass_on)
            return
        if self._contributions.awaits_finals(chain):
            with suppress(NetworkError):
                finals = await self._state_store.finals(made.round, [])
        await trio.to_thread.run_sync(self._contributions.settle_by, chain, finals)


def told_by_trainer(event: TrainerEvent) -> Input | None:
    """Input of a member that follows from what a trainer says, if any."""
    match event:
        case Contribution():
            return Trained(event.round, event)
        case trainer_messages.Evaluated():
            return Evaluated(event.round, event.value)
        case Restarted():
            return TrainerRestarted()
    return None


def _at_most(cap: int | None, measured: int) -> int:
    """A rate for others to plan with, in bytes/s: what was measured, under the cap; 0 if nothing is known."""
    return min((rate for rate in (cap, measured) if rate), default=0)
