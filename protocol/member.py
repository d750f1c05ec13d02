"""One member of a swarm, across its rounds: everything that a node decides about them, sans-IO.

Theory. A member is fed one input after the other (inputs.py). To each it answers with one effect after the other
(effects.py): its driver does what an effect asks for, however long that takes, and tells the member what came of it,
before the next; only then comes the next input. So the order of a member's effects is the order in which things happen:
what is to be on disk before something is said is written before it. What waits for a peer, or takes long, goes on
beside, and comes back as an input.

    take(input, now) ─► effect ─► done(result, now) ─► effect ─► … ─► None        or failed(error, now) in place of done

Where a member stands, and what it takes there:

    stands        while                                    goes on with
    OUTSIDE       the state at the head is not here,       the state is here (StateSought)     -> IN_ROUND
                  or something forbids to sign
                  it follows                               the chain went on, by its errands   -> OUTSIDE
    IN_ROUND      a RoundMachine is under way              certified and applied               -> IN_ROUND, LINGERING
                                                           certified, and not computed here    -> OUTSIDE
                                                           the chain went on without it        -> OUTSIDE
    LINGERING     the rounds asked for are done            those who are linked know it        -> IN_ROUND, to leave
    GONE          it took its leave                        -

Between two rounds:

    Decided ─► own work on disk ─► append ─► tell ─► settle ─► apply ─► begin: restore the log, announce, give the
    trainer the state, train, then take up what was said early

The round machine (round.py) says what to do in a round; of its effects two wait for the others of their step: a
reduction is closed off when all before that is done, and what is decided is carried out last of all.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from shoal.protocol.agreement import Broadcast, Decided, Mismatch, NeedFinals, NeedState
from shoal.protocol.amendment_orders import Amending
from shoal.protocol.bans import NeedEvidence
from shoal.protocol.catching_up import CatchingUp
from shoal.protocol.chain import Position, next_position
from shoal.protocol.commitments import check_commitment
from shoal.protocol.departure import LINGER_S, Departure, LeaveStep
from shoal.protocol.donors import DonorScores
from shoal.protocol.durable import ABSTAIN, BINDING, DurableRecord
from shoal.protocol.early import EarlyMessages
from shoal.protocol.effects import (
    Adopt,
    Announce,
    Append,
    Apply,
    BeginRound,
    Blame,
    Certified,
    CloseOff,
    Contribute,
    DrawGenesis,
    Effect,
    Evicted,
    Examine,
    FetchFinals,
    FindWork,
    FinishWork,
    GiveWay,
    Goodbye,
    HandOver,
    KeepOwn,
    MemberEffect,
    PassOn,
    PauseTrainer,
    Rejoin,
    Repair,
    ResumeWork,
    Seek,
    Send,
    SettleWork,
    SignRebase,
    StandOnHead,
    StartReduce,
    Steps,
    StopReduction,
    TakeBack,
    TakePart,
    Tell,
    Train,
    Watched,
    WatchReduction,
    WorkOut,
    Write,
    batched,
)
from shoal.protocol.enlisting import Enlistments, Outside, enlist, is_signed
from shoal.protocol.errands import Errand
from shoal.protocol.errors import ConfigError, LocalError, RemoteError
from shoal.protocol.fork_watch import ForkWatch
from shoal.protocol.forks import Checkpoint, binding
from shoal.protocol.going_back import GoingBack
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.inputs import (
    Amend,
    ChainCompared,
    Evaluated,
    GenesisFetched,
    GoBack,
    GoOnWithout,
    HandedOver,
    HeadMoved,
    Input,
    Linked,
    Loaded,
    Offered,
    Proven,
    Received,
    Reduced,
    SetPaused,
    StateHeld,
    StateSought,
    Tick,
    Trained,
    TrainerRestarted,
    Wanted,
    Withdraw,
)
from shoal.protocol.messages import Certificate, Enlist, Leave, Ready, Rebase, Report, RoundMessage, Value
from shoal.protocol.newcomers import Newcomers
from shoal.protocol.no_quorum import NoQuorum, abstaining, no_quorum
from shoal.protocol.places import next_around
from shoal.protocol.planning import (
    CONTRIBUTOR,
    JOINER,
    OBSERVER,
    TRAINING,
    Deal,
    RoundSettings,
    absent_ready,
    check_plan,
)
from shoal.protocol.probation import Probation
from shoal.protocol.round import Phase, RoundMachine
from shoal.protocol.seats import PassedOver, are_few
from shoal.protocol.sites import WAIT_SHARE, SiteRound
from shoal.protocol.surroundings import USUAL, Policies, Rules, Surroundings

ANSWER_PERIOD_S = 1.0
"""Between two answers to one peer that is behind."""
ANSWERED_LIMIT_PEERS = 1024
CERTIFICATES_PASSED_ON = 3
"""By each member; the more, the more often a peer hears one again."""
FORKED, ABSTAINING = "forked", "abstaining"
"""Why a member stands still, as it is shown to the user."""
STUCK = "the trainer has made no step for minutes: no round waits for it until it does, and what it learnt counts then"
UNSTUCK = "the trainer makes steps again"


class Standing(enum.Enum):
    """Stage of a member's life: outside the rounds, in one, lingering until others know the last one, or gone."""

    OUTSIDE = "outside"
    IN_ROUND = "in round"
    LINGERING = "lingering"
    GONE = "gone"


class Member:
    """One member's decisions. `rounds`: how many to take part in; `newcomers`: who is on the way to a state.

    catching_up: what it looks for beside its rounds. scores: what is remembered of those who are asked. checkpoint: of
    the link by which it joins.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        surroundings: Surroundings,
        deal: Deal,
        scores: DonorScores,
        policies: Policies = USUAL,
        rounds: int | None = None,
        checkpoint: Checkpoint | None = None,
        make: Callable[..., RoundMachine] = RoundMachine,
    ) -> None:
        self._identity = identity
        self._me = identity.peer_id
        self._here = surroundings
        self._deal = deal
        self._make = make
        self._said: list[str] = []
        self._early = EarlyMessages()
        self._answered: dict[PeerId, float] = {}
        self._decided_at = float("-inf")
        self._departure = Departure(rounds=rounds, tell=self._said.append)
        self._no_quorum = NoQuorum()
        self._probation = Probation()
        self._passed_over = PassedOver()
        self.enlistments = Enlistments()
        self._told_stuck = False
        self._announced_stuck = False
        self._enlisted_on: tuple[bytes, frozenset[PeerId]] = b"", frozenset()
        self._reports: dict[bytes, Report] = {}
        self._settings: RoundSettings
        self._resumed = False
        self._came_midway = False
        self._linger_until: float | None = None
        self._still: str | None = None
        self._stands_on: bytes | None = None
        self._site = SiteRound(identity.peer_id)
        self._now = 0.0
        self._steps: Steps | None = None
        self.newcomers = Newcomers()
        self._fork_watch = ForkWatch(surroundings)
        self.catching_up = CatchingUp(self._me, surroundings, scores, self._fork_watch, checkpoint)
        self._going_back = GoingBack(self._me, surroundings, self.catching_up, policies.rollback)
        self._amending = Amending(self._me, surroundings, follows=policies.amendments)
        self.machine: RoundMachine | None = None

    # -- for drivers -----------------------------------------------------------------------------------------

    def take(self, event: Input, now: float) -> MemberEffect | None:
        """An input; the first effect that it has, None if it has none.

        Raises ConfigError for an order of the user's that cannot be.
        """
        if self._steps is not None:
            raise LocalError(f"{type(event).__name__} came before the last effect was done")
        self._now = now
        self._steps = TRANSITIONS[type(event)][self.standing](self, event)
        return self._next(None)

    def done(self, result: Any, now: float) -> MemberEffect | None:
        """The last effect is done, and came to `result`; the next one, None if there is none."""
        self._now = now
        return self._next(result)

    def failed(self, error: RemoteError | ConfigError, now: float) -> MemberEffect | None:
        """The last effect was refused; the next one, None if there is none. Raises what the member does not take."""
        self._now = now
        return self._next(error)

    def _next(self, came: Any) -> MemberEffect | None:
        steps = self._steps
        if steps is None:
            raise LocalError("no effect is under way")
        self._steps = None
        try:
            effect = steps.throw(came) if isinstance(came, RemoteError | ConfigError) else steps.send(came)
        except StopIteration:
            return None
        self._steps = steps
        return effect

    # -- questions -------------------------------------------------------------------------------------------

    @property
    def standing(self) -> Standing:
        """Stage of life that this member is in."""
        if self._departure.left:
            return Standing.GONE
        if self._linger_until is not None:
            return Standing.LINGERING
        return Standing.OUTSIDE if self.machine is None else Standing.IN_ROUND

    @property
    def phase(self) -> str:
        """One or two words for the user on what it does."""
        if self.leaving:
            return "leaving"
        if self.machine is None:
            return "done" if self.finished else self._still or ("following" if self.follows_head else "joining")
        if self.abstains is not None:
            return "abstaining"
        if self._no_quorum.without_quorum:
            return "no quorum"
        return "paused" if self._here.paused else self.machine.phase.value

    @property
    def trains_alone(self) -> bool:
        """True if its trainer goes on without a quorum, which one does that has something to contribute already."""
        here = self._here
        return not (here.waits_alone or self._trains_nothing) and (self._has_given or not here.resting)

    @property
    def claimed_behind(self) -> bool:
        """True if somebody claims that rounds are certified of which this node does not know."""
        return self.catching_up.has_claims

    @property
    def stands_still(self) -> bool:
        """True if something forbids it to sign, as far as was looked."""
        return self._still is not None

    @property
    def abstains(self) -> str | None:
        """Reason why it signs nothing in the round under way, and what helps; None if it may sign."""
        machine = self.machine
        return abstaining(machine.round) if machine is not None and machine.agreement.abstains else None

    @property
    def finished(self) -> bool:
        """True if the rounds asked for are done: the node stops by itself."""
        return self._departure.finished

    @property
    def leaving(self) -> bool:
        """True if leaving was asked for."""
        return self._departure.asked

    @property
    def needed(self) -> bool:
        """True if it is to leave, and stays for the sake of others who want what it has."""
        return self._departure.needed

    def overdue(self, now: float) -> bool:
        """True if it was asked to leave so long ago that it waits for nothing more."""
        return self._departure.overdue(now)

    @property
    def rests(self) -> bool:
        """True if time alone leads to nothing here but that standing messages are said again: all else takes an input.

        So it is while the members train: no claim to look into, no order of its user's, no leave.
        """
        machine = self.machine
        if machine is None and self.follows_head:
            return not (self.leaving or self._fork_watch.suspects_somebody or self.catching_up.has_claims)
        if machine is None or not machine.rests or self.leaving:
            return False
        if self._site.holds or self._site.handed_to is not None:
            return False
        contributes = machine.phase is Phase.TRAIN or self._has_given or self._trains_nothing
        claims = self._fork_watch.suspects_somebody or self.catching_up.has_claims
        orders = self._going_back.has_order or self._amending.has_order
        return contributes and not (claims or orders or self._no_quorum.without_quorum)

    @property
    def early(self) -> int:
        """Number of messages that wait for their round."""
        return len(self._early)

    def awaited(self) -> frozenset[PeerId]:
        """Peers for which it waits in the round under way: their silence is to be noticed first."""
        return frozenset() if self.machine is None else self.machine.awaited()

    def unready(self) -> frozenset[PeerId]:
        """Peers whose contributions this node waits for, having made its own."""
        return frozenset() if self.machine is None else self.machine.unready()

    def missing(self) -> tuple[PeerId, ...]:
        """The voters that are not here; a machine that has just begun has not heard who is."""
        alive = self._here.alive()
        return () if self.machine is None else tuple(p for p in self.machine.missing() if p not in alive)

    def check(self, order: Input) -> None:
        """Raises ConfigError for an order of the user's that takes a round, where this member takes part in none.

        The authority goes on from here, also where a fork or its key in use elsewhere keeps this node still.
        """
        if isinstance(order, Withdraw) or (isinstance(order, GoOnWithout) and self.stands_still):
            return
        if self.standing is not Standing.IN_ROUND:
            raise ConfigError(f"this node is {self.phase}; try again when it takes part in the rounds")

    def ask_to_leave(self, now: float) -> None:
        """Leave as soon as the round allows: looked at with the next tick."""
        self._departure.ask(now)

    @property
    def _head(self) -> Value:
        return self._here.chain.head

    @property
    def follows(self) -> bool:
        """True if it takes part in no round: never, or not in the one after its head, since it has no seat."""
        return self.catching_up.follows

    @property
    def follows_head(self) -> bool:
        """True if it follows, and has given the state at the head to its agent or trainer."""
        return self.follows and self._stands_on == self._head.hash

    # -- inputs ----------------------------------------------------------------------------------------------

    def _hear(self, heard: Received) -> Steps:
        yield from self._look_around()
        yield from self._take_message(heard)
        if self.machine is not None:
            yield from self._be_done(self.machine)

    def _take_message(self, heard: Received) -> Steps:
        message, position, head = heard.message, heard.position, self._head
        machine, current = self.machine, next_position(head)
        yield Examine(heard.peer, message)
        if isinstance(message, Enlist):
            yield from self._take_enlist(heard.peer, message)
            return
        if not isinstance(message, Rebase):
            yield from self._fork_watch.heard(heard.peer, message, position, self._now)
        if position <= current:  # who claims to be beyond this round is on its way to no state that there is
            self.newcomers.heard(heard.peer, message, self._now)
        if isinstance(message, Rebase):
            yield from self._take_rebase(heard.peer, message)
            return
        if self._may_not_sign() and machine is not None:
            yield from self._abandon_round()
            return
        decided = (head.term, head.round)
        if position > decided or (position == decided and isinstance(message, Certificate)):
            self._departure.has_certificate(heard.peer)
        if position < current:
            yield from self._answer_late(heard.peer, position, message)
        elif self.follows and isinstance(message, Certificate):
            self.catching_up.claimed(heard.peer, next_position(message.value))
        elif position > current or machine is None:
            self._early.keep(heard)
            if position > current:
                self.catching_up.claimed(heard.peer, position)
        elif isinstance(message, Ready) and self._is_another_genesis(heard.peer, message):
            self._early.keep(heard)
            yield from self._seek(self.catching_up.genesis(heard.peer, self._now))
        else:
            yield from self._receive(machine, heard)

    def _receive(self, machine: RoundMachine, heard: Received) -> Steps:
        try:
            if isinstance(heard.message, Ready):
                check_commitment(heard.peer, heard.message, self._settings)
            effects = machine.receive(heard.peer, heard.message, self._now)
        except RemoteError as error:
            yield Blame(heard.peer, f"round {machine.round}: {error}")
            return
        yield from self._carry_out(effects)

    def _answer_late(self, peer: PeerId, position: Position, message: object) -> Steps:
        """Anything of an older round is answered with its certificate, or with the rebase that abandoned it, at most
        once a second per peer. Just after it nobody is: they count the same votes."""
        told_at = max(self._decided_at, self._answered.get(peer, float("-inf")))
        due = self._now - told_at > ANSWER_PERIOD_S
        if due and isinstance(message, RoundMessage) and not isinstance(message, Leave):
            entry = self._here.chain.decided(position)
            if entry is not None:
                self._answered.pop(peer, None)
                self._answered[peer] = self._now
                if len(self._answered) > ANSWERED_LIMIT_PEERS:
                    del self._answered[next(iter(self._answered))]
                yield Send(peer, entry)

    def _is_another_genesis(self, peer: PeerId, ready: Ready) -> bool:
        """True if the first founder drew another S(0) than this machine, while its word still decides.

        The same seed may give other last bits on another CPU.
        """
        differs = peer != self._me and peer == self._head.planner and ready.state != self._here.digest
        return differs and self._genesis_is_open()

    def _genesis_is_open(self) -> bool:
        """True if the first founder's word decides which S(0) it is.

        Once something is bound here, others may have decided on a state that follows from the one here.
        """
        return not self._head.round and not self._is_bound()

    def _hear_of_link(self, event: Linked) -> Steps:
        self._no_quorum.links_return(self._now)
        yield from self._look_around()
        term, round = event.certified
        self.catching_up.claimed(event.peer, (term, round + 1))
        for message in () if self.machine is None else self.machine.current():
            yield Send(event.peer, message)

    def _tick(self, event: Tick) -> Steps:
        yield from self._look_around()
        yield from self._seek(self._fork_watch.due(self._now))
        yield from self._seek(self.catching_up.due(self._now, in_round=self.machine is not None))
        machine = self.machine
        if machine is None:
            yield from self._enlist()
            if self.leaving:
                yield from self._go()
            return
        here = self._here
        yield from self._carry_out(machine.peers_alive(here.alive(), self._now, suspected=here.suspected()))
        if self._goes_on(machine):
            yield from self._look_after_reduction(machine)
            yield from self._going_back.proposed(machine)
            yield from self._amending.proposed(machine)
            yield from self._carry_out(self._going_back.advise(machine, self._now))
            yield from self._seek(self._going_back.due(machine, self._now))
        if self._goes_on(machine):
            yield from self._carry_out(self._amending.advise(machine, self._now))
        if self._goes_on(machine):
            yield from self._contribute(machine)
            if self._site.is_to_take_back(self._now, WAIT_SHARE * self._settings.grace_s, machine.half_ready_at):
                yield TakeBack()
            yield from self._be_done(machine)
            yield from self._keep_busy(machine)
            yield from self._try_leave(machine)

    def _goes_on(self, machine: RoundMachine) -> bool:
        return self.machine is machine and machine.phase is not Phase.DECIDED

    def _look_after_reduction(self, machine: RoundMachine) -> Steps:
        watched: Watched = yield WatchReduction(machine.complete_at(), overdue=machine.is_overdue(self._now))
        if watched.stalled is not None:
            yield from self._carry_out(machine.stalled(*watched.stalled, self._now))
        yield from self._carry_out(machine.relayed(*watched.relayed, self._now))

    def _linger(self, event: Input) -> Steps:
        """Of all inputs, what others say alone is of interest until they know that the last round is certified."""
        if isinstance(event, Received):
            yield from self._take_message(event)
        yield from self._linger_on()

    def _trained(self, event: Trained) -> Steps:
        yield from self._look_around()
        machine = self.machine
        if machine is None and self.follows_head and event.round == self._head.next_round:
            yield Contribute(event.work, alone=False)  # it is carried on, until a round counts it
        if machine is None or machine.round != event.round or (self.leaving and machine.holds_alone()):
            return
        if self._site.passed_to is not None:
            return
        self._site.hold(event.work, self._now)
        yield from self._contribute(machine)

    def _contribute(self, machine: RoundMachine, *, at_once: bool = False) -> Steps:
        """Contribute what was trained, alone or with others of the site; or hand it over to the one that does so.

        at_once: without those of the site that have yet to hand over theirs.
        """
        if not self._site.holds:
            return
        training = machine.training(self._here.site_mates())
        delegate = self._site.delegate(training)
        wait_s = WAIT_SHARE * self._settings.grace_s
        if delegate is None and not at_once and self._site.waits(training, self._now, wait_s, machine.half_ready_at):
            return
        work = self._site.let_go()
        ready: Ready | None = yield Contribute(work, alone=self._is_alone(), delegate=delegate)
        if ready is None:
            return
        if ready.role == CONTRIBUTOR:
            yield from self._mark_announced()
        if ready.role == CONTRIBUTOR and delegate is not None:
            self._site.hand_over(delegate, self._now)
            yield HandOver(delegate)
        else:
            yield from self._carry_out(machine.ready(ready, self._now))

    def _offered(self, event: Offered) -> Steps:
        """Another of the site hands over what it made; it was the last for which this node waited, maybe."""
        yield from self._look_around()
        if self.machine is not None and event.base == self._site.base:
            self._site.offered.add(event.peer)
            yield from self._contribute(self.machine)

    def _handed_over(self, event: HandedOver) -> Steps:
        """Observe, where the delegate has what this node made, and will have the finals; else contribute it."""
        yield from self._look_around()
        machine, delegate = self.machine, self._site.handed_to
        if machine is None or delegate is None or event.base != self._site.base or not self._here.made:
            return
        self._site.handed_to, self._site.passed_to = None, delegate if event.taken else None
        if event.taken:
            yield PassOn()
            ready = self._absent(OBSERVER)
        else:
            ready = yield KeepOwn()
        yield from self._carry_out(machine.ready(ready, self._now))

    def _trainer_restarted(self, event: TrainerRestarted) -> Steps:
        yield from self._look_around()
        self._site.let_go()
        if (self.machine is not None or self.follows_head) and not (self._has_given or self._trains_nothing):
            yield Train()

    def _reduced(self, event: Reduced) -> Steps:
        yield from self._look_around()
        plan, machine = event.finals.plan, self.machine
        if machine is None or not self._here.current or plan.base != machine.previous.hash:
            return
        try:
            check_plan(plan, plan.planner, machine.previous, self._settings, voting=machine.agreement.voting)
        except RemoteError as error:  # one that was fetched no machine has looked at
            yield Blame(plan.planner, f"round {plan.round}: {error}")
            return
        machine.weigh(plan)
        report: Report = yield WorkOut(event.finals, event.seconds)
        self._reports[plan.hash] = report
        participants = [participant.peer for participant in plan.participants]
        counted = event.finals.counted if are_few(self._settings.seats) else ()
        yield from self._carry_out(machine.reduced(report, self._now, participants=participants, counted=counted))

    def _set_paused(self, event: SetPaused) -> Steps:
        """Pausing before the contribution is made makes this node an observer of the round; after it, of the next."""
        yield from self._look_around()
        yield PauseTrainer(event.paused)
        machine = self.machine
        if machine is not None:
            yield from self._contribute(machine, at_once=True)
        if machine is None or self._here.made:
            return
        role = self._role()
        yield from self._carry_out(machine.ready(self._absent(role), self._now))
        if role == TRAINING and self.machine is machine:
            yield Train()

    def _proven(self, event: Proven) -> Steps:
        yield from self._look_around()
        if self.machine is not None and self.machine.phase is not Phase.DECIDED:
            yield from self._carry_out(self.machine.proven(event.evidence, event.accused, self._now))

    def _state_held(self, event: StateHeld) -> Steps:
        yield from self._look_around()
        yield from self._carry_out(self._going_back.held(event, self.machine, self._now))

    def _evaluated(self, event: Evaluated) -> Steps:
        self._going_back.evaluated(event)
        yield from ()

    def _go_back(self, event: GoBack) -> Steps:
        self.check(event)
        yield from self._going_back.order(event.round)
        if self.machine is not None:  # as the check has it
            yield from self._seek(self._going_back.due(self.machine, self._now))

    def _amend(self, event: Amend) -> Steps:
        self.check(event)
        yield from self._amending.order(event.settings, by_authority=event.by_authority)

    def _withdraw(self, event: Withdraw) -> Steps:
        yield from (self._amending if event.kind is Wanted else self._going_back).withdraw()

    def _head_moved(self, event: HeadMoved) -> Steps:
        """Leave the round under way, and take part where the new head goes back to a state that is here."""
        yield from self._look_around()
        if self.machine is None or self.machine.previous.hash != self._head.hash:
            self.catching_up.head_moved(self._now)
            yield from self._abandon_round()
            yield from self._take_part()
            if self.follows:  # others wait for what it has
                yield from self._seek(self.catching_up.due(self._now, in_round=False))

    def _loaded(self, event: Loaded) -> Steps:
        """Begin; as a founder on S(0), which it draws, unless the swarm went back to another one."""
        self._going_back.loaded(event)
        self._amending.loaded(event)
        origin = self._here.chain.standing
        if origin.round == 0 and self._me in origin.members and not self._here.current:
            yield DrawGenesis(self._here.chain.digest(0))
        yield from self._look_around()
        yield from self._take_part()

    def _state_sought(self, event: StateSought) -> Steps:
        """Hold what was found, if it is still wanted, and take part from there."""
        if self.catching_up.over(event) and event.state is not None:
            yield Adopt(event.state)
            self.catching_up.adopted(self._now)
        yield from self._look_around()
        yield from self._take_part()

    def _sought_late(self, event: StateSought) -> Steps:
        self.catching_up.over(event)
        yield from self._linger_on()

    def _take_part(self) -> Steps:
        """Take part from here, if the state at the head is here, no round is under way and nothing is against it."""
        if self.machine is not None or not self._here.current or self._may_not_sign():
            return
        if self.follows_head:
            return
        if self._resumed:
            yield SettleWork()
            yield Rejoin(self._head)
        else:
            self._resumed = True
            yield from self._resume_work()
        self._came_midway = self._head.round > 0
        yield from self._begin_round_or_finish()

    def _chain_compared(self, event: ChainCompared) -> Steps:
        yield from self._fork_watch.compared(event)
        yield from self._look_around()

    def _genesis_fetched(self, event: GenesisFetched) -> Steps:
        """Hold the first founder's S(0), if its word still decides, and begin the first round again on it."""
        yield from self._look_around()
        if self._genesis_is_open() and not event.state.round:
            yield Adopt(event.state)
            yield from self._abandon_round()
            yield from self._begin_round()

    def _ignore(self, event: Input) -> Steps:
        yield from ()

    def _look_around(self) -> Steps:
        """A round that nothing may be signed in any more is not gone on with."""
        if self._may_not_sign() and self.machine is not None:
            yield from self._abandon_round()

    def _may_not_sign(self) -> bool:
        """True if this node may sign nothing in what comes after its head: a fork, or its key in use elsewhere."""
        if binding(self._here.forks, self._head) is not None:
            self._still = FORKED
        else:
            self._still = ABSTAINING if self._here.key_is_elsewhere(self._head) else None
        return self._still is not None

    # -- effects of the round --------------------------------------------------------------------------------

    def _carry_out(self, effects: Iterable[Effect]) -> Steps:
        decided: Certificate | None = None
        closing: list[CloseOff] = []
        needed: list[Value] = []
        for effect in batched(effects):
            if isinstance(effect, tuple):
                yield Write(effect)
            elif isinstance(effect, CloseOff):
                closing.append(effect)
            elif isinstance(effect, NeedFinals):
                if effect.value.plan not in self._reports:  # it was not reduced here: from those who did
                    yield FetchFinals(effect.value)
            elif isinstance(effect, NeedState):
                needed.append(effect.value)
            elif isinstance(effect, Decided):
                decided = effect.certificate
            elif isinstance(effect, Broadcast | StartReduce | Repair | Evicted | NeedEvidence | Mismatch):
                yield effect
            else:
                raise LocalError(f"no member carries out {type(effect).__name__}")
        for asked in closing:
            chunks = yield asked
            if self.machine is not None:
                yield from self._carry_out(self.machine.closed_off(asked, chunks, self._now))
        for value in needed:
            if self.machine is not None:
                yield from self._carry_out(self._going_back.need(value, self.machine, self._now))
        if decided is not None:
            yield from self._decided(decided)

    def _seek(self, errand: Errand | None) -> Steps:
        if errand is not None:
            yield Seek(errand)

    def _abandon_round(self) -> Steps:
        self.machine = None
        yield StopReduction()

    # -- rounds ----------------------------------------------------------------------------------------------

    def _begin_round_or_finish(self) -> Steps:
        """Go on, or, when the rounds asked for are done, see that the others know it and leave."""
        if not self._departure.rounds_done(self._head.state_round):
            yield from self._begin_round()
            return
        self._departure.finished = True
        self.machine = None
        self._linger_until = self._now + LINGER_S
        yield from self._linger_on()

    def _linger_on(self) -> Steps:
        if self._linger_until is None:
            return
        if self._departure.known_to(frozenset(self._here.linked())) or self._now >= self._linger_until:
            self._linger_until = None
            self._departure.ask(self._now)
            yield from self._begin_round()

    def _begin_round(self) -> Steps:
        """Start the round after the head of the chain, whose state is here, unless this node is to stand still."""
        if self._may_not_sign():
            yield from self._abandon_round()
            return
        if self.follows:
            yield from self._follow()
            return
        head, here = self._head, self._here
        rules = here.rules(head.next_round)
        self._settings = rules.settings
        machine = self.machine = self._machine_after(head, rules)
        self._site.begin(head.hash)
        unfinished = machine.restore(here.bound_in(next_position(head)))
        if self.abstains is not None:
            yield Tell(self.abstains, alarming=True)
        self._reports.clear()
        self._departure.begin_round()
        self._no_quorum.begin_round(self._now)
        accused: Mapping[bytes, PeerId] = yield BeginRound(head, rules.settings)
        yield from self._going_back.begin_round()
        yield from self._amending.begin_round()
        role = self._role()
        yield TakePart(head, role)
        alive = machine.peers_alive(here.alive(), self._now, suspected=here.suspected())
        proofs = [machine.proven(*one, self._now) for one in accused.items()]
        yield from self._carry_out([*unfinished, *alive, *(effect for effects in proofs for effect in effects)])
        if self.machine is not machine:  # its own vote of before a restart was enough
            return
        again = here.made and role == CONTRIBUTOR
        ready: Ready = (yield Announce()) if again else self._absent(role)
        yield from self._carry_out(machine.ready(ready, self._now))
        if self.machine is not machine:
            return
        yield GiveWay(self._announced_early(next_position(head)))
        yield StandOnHead()  # may take a while, in which the others know already that they have to wait
        if self._site.handed_to is not None and here.made:
            yield HandOver(self._site.handed_to)  # the answer may have come while no round was under way
        elif role == TRAINING:
            yield Train(beside=machine.trainers())
        for heard in self._early.take():
            yield from self._take_message(heard)

    def _follow(self) -> Steps:
        """Stand on the head without taking part in the round after it; who trains goes on with that."""
        self.machine, self._stands_on = None, self._head.hash
        yield StandOnHead()
        if not self._trains_nothing:
            yield Train()
        yield from self._enlist()

    def _machine_after(self, head: Value, rules: Rules) -> RoundMachine:
        chain = self._here.chain
        machine = self._make(
            identity=self._identity,
            previous=head,
            state=self._here.digest,
            life=self._here.new_life(),  # of what it signed in this round so far it knows nothing
            settings=rules.settings,
            deal=self._deal,
            returners=self._recent_members(),
            in_force=chain.in_force,
            banned=chain.banned,
            leads_back=chain.leads_back,
            may_join=self._here.may_join,
            voting=chain.voting,
            line=chain.line,
            outside=self._outside(),
        )
        machine.remember(self.newcomers, self._probation, self._passed_over)
        return machine

    def _outside(self) -> Outside | None:
        chain = self._here.chain
        if chain.admitted is None:
            return None
        return Outside(
            admitted=chain.admitted,
            height=chain.height,
            may_enlist=chain.may_enlist,
            book=self.enlistments,
            may_join=self._here.may_join,
        )

    # -- enlisting -------------------------------------------------------------------------------------------

    def _enlist(self) -> Steps:
        """Say at each head, to everybody at whom this node waits, that it wants a seat, until it is in the line."""
        if self._trains_nothing or self._may_not_sign() or not self.follows_head or self.leaving:
            return
        if self._here.chain.may_enlist(self._me, self._head.hash):
            yield from self._pass_on(Enlist(wish=enlist(self._identity, self._head)), said=True)

    def _take_enlist(self, peer: PeerId, message: Enlist) -> Steps:
        """Hold that somebody wants a seat, and pass it on: a follower to those at whom it waits, a member to voters."""
        wish, chain = message.wish, self._here.chain
        if not (chain.may_enlist(wish.peer, wish.since) and self._here.may_join(wish.peer)):
            return
        if not is_signed(wish):
            yield Blame(peer, f"tells an enlistment of {wish.peer} that does not hold")
        elif self.enlistments.take(
            wish, chain.height, chain.may_enlist, by=None if peer in chain.voting.named else peer
        ):
            yield from self._pass_on(message, besides=peer)

    def _pass_on(self, message: Enlist, *, said: bool = False, besides: PeerId | None = None) -> Steps:
        linked, voters = self._here.linked(), self._here.chain.voting.named
        upwards = self.catching_up.upwards(linked) if self.follows else [peer for peer in linked if peer in voters]
        told: frozenset[PeerId] = frozenset()
        if said and self._enlisted_on[0] == self._head.hash:
            told = self._enlisted_on[1]
        for peer in upwards:
            if peer not in told and peer != besides:
                yield Send(peer, message)
        if said:
            self._enlisted_on = self._head.hash, told.union(upwards)

    def _announced_early(self, position: Position) -> frozenset[PeerId]:
        early = (heard for heard in self._early if heard.position == position)
        return frozenset(heard.peer for heard in early if isinstance(heard.message, Ready))

    def _tell_certificate(self, certificate: Certificate) -> Steps:
        """Tell everyone, as one of the two who may be first to know it, or who is done and will say nothing more.

        All others count the votes themselves; lest both are gone, each tells a few, who tell a few.
        """
        machine, views = self.machine, (certificate.view, certificate.view + 1)
        leads = () if machine is None else map(machine.agreement.lead, views)
        if self._me in leads or self._departure.rounds_done(certificate.value.state_round):
            yield Broadcast(certificate)
            return
        for peer in next_around(sorted(self._here.linked()), self._me, CERTIFICATES_PASSED_ON):
            yield Send(peer, certificate)

    def _decided(self, certificate: Certificate) -> Steps:
        """The round is certified: extend the chain, apply, and go on."""
        value = certificate.value
        self._decided_at = self._now
        report = self._reports.get(value.plan)
        computed = report is not None and report.digest == value.digest
        yield FinishWork(value)
        yield Append(certificate)
        yield from self._tell_certificate(certificate)
        yield Certified(certificate)
        yield StopReduction()
        if value.rollback or not computed:
            self.machine = None  # after a rollback, the next term begins on a state of long ago
            yield from self._go_on_or_catch_up()
            return
        yield SettleWork()
        yield Apply(certificate)
        self._came_midway = False
        yield from self._begin_round_or_finish()

    # -- what this node gives --------------------------------------------------------------------------------

    @property
    def _has_given(self) -> bool:
        """True if its contribution to the round under way is made, and here, or with its delegate."""
        return self._here.made or self._site.passed_to is not None

    @property
    def _trains_nothing(self) -> bool:
        """True if nothing is trained here: the user has the accelerator, or this node only ever follows."""
        return self._here.paused or self._here.follows

    def _role(self) -> str:
        """As what it takes part in the round under way."""
        here = self._here
        # A contribution that was announced before a restart, and is not on disk, is not announced as another.
        lost = not here.made and (self._is_bound() or (self._is_announced() and not self._is_alone()))
        if lost or self._trains_nothing or self.finished or self.leaving:
            return OBSERVER
        if here.made and self._site.handed_to is None:
            return CONTRIBUTOR
        return TRAINING if self._me in self._recent_members() else JOINER

    def _absent(self, role: str) -> Ready:
        """The announcement that there is no contribution, or none yet; where the trainer is stuck, as an observer's."""
        self._announced_stuck = role == TRAINING and self._here.stuck
        absent = absent_ready(OBSERVER if self._announced_stuck else role, self._head, self._here.digest)
        named = role == OBSERVER and self._site.passed_to is not None  # also where it pauses, or leaves
        return msgspec.structs.replace(absent, delegate=self._site.passed_to) if named else absent

    def _recent_members(self) -> frozenset[PeerId]:
        """Members of the last rounds, who may come back as contributors; of those outside, whom the chain calls."""
        chain = self._here.chain
        recent = chain.recent_members(self._here.rules(self._head.next_round).staleness_rounds)
        if chain.admitted is None:
            return recent
        return (recent & chain.admitted).union(chain.admitted.difference(chain.voting.named, chain.banned))

    def _is_announced(self) -> bool:
        """True if a contribution to the round under way was announced, in this life or an earlier one."""
        return "ready" in self._kinds()

    def _is_bound(self) -> bool:
        """True if this node proposed or voted for a value of the round under way, or may have.

        It may then have what was contributed.
        """
        return not self._kinds().isdisjoint(BINDING)

    def _kinds(self) -> set[str]:
        """Of what is on disk about the round under way."""
        return {record.kind for record in self._here.bound_in(next_position(self._head))}

    def _is_alone(self) -> bool:
        """True if nobody else can have heard what this node announced."""
        return self._here.chain.voting.everyone(self._head) == {self._me}

    def _mark_announced(self) -> Steps:
        """Have it on disk that a contribution to the round under way is announced."""
        head = self._head
        if not self._is_announced():
            yield Write((DurableRecord(kind="ready", term=head.next_term, round=head.next_round),))

    def _resume_work(self) -> Steps:
        # What was announced after the newest work on disk may have taken the residual of that work along.
        announced = self._is_announced() or ABSTAIN in self._kinds()  # or that is not known any more
        countable = not announced or (self._is_alone() and not self._is_bound())
        again: bool = yield FindWork(countable)
        if again:
            yield from self._mark_announced()  # the node may have died between the two files
        yield ResumeWork()

    # -- other terms -----------------------------------------------------------------------------------------

    def _take_rebase(self, peer: PeerId, rebase: Rebase) -> Steps:
        try:
            yield from self._rebase(rebase)
        except RemoteError as error:
            yield Blame(peer, str(error))
            self.catching_up.claimed(peer, next_position(rebase.value))  # it may stand on what is not here yet

    def _go_on_without(self, event: GoOnWithout) -> Steps:
        self.check(event)
        rebase: Rebase = yield SignRebase(event.forget)
        yield from self._rebase(rebase)

    def _rebase(self, rebase: Rebase) -> Steps:
        """Go on in the term that the authority opened. Raises RemoteError if it cannot have."""
        new: bool = yield Append(rebase)
        if not new:
            return
        yield Broadcast(rebase)
        yield from self._abandon_round()
        yield from self._go_on_or_catch_up()

    def _go_on_or_catch_up(self) -> Steps:
        if not self._here.current or not self._resumed:
            self.catching_up.hurry(self._now)
            return
        yield SettleWork()
        yield from self._begin_round_or_finish()

    # -- alone, and leaving ----------------------------------------------------------------------------------

    def _keep_busy(self, machine: RoundMachine) -> Steps:
        """Do what is left to be done: train on without a quorum, or contribute where nobody does."""
        here = self._here
        if here.stuck != self._told_stuck:
            self._told_stuck = here.stuck
            yield Tell(STUCK if here.stuck else UNSTUCK)
        if here.stuck != self._announced_stuck and not here.made and self._role() == TRAINING:
            yield from self._carry_out(machine.ready(self._absent(TRAINING), self._now))
        may_train = not (self._trains_nothing or here.stuck) and self._departure.may_train(machine)
        cut_off = not machine.has_quorum() and here.cut_off  # which takes a look at the machine's interfaces
        if cut_off:
            self._no_quorum.links_return(self._now)  # at the earliest
        advice = self._no_quorum.advise(
            machine,
            self._now,
            contributed=self._has_given,
            may_train=may_train,
            resting=here.resting,
            cut_off=cut_off,
        )
        if advice.say_no_quorum and self.missing():
            missing = self.missing()
            revoked = [peer for peer in missing if here.is_revoked(peer)]
            yield Tell(no_quorum(missing, revoked=revoked, trains=self.trains_alone, cut_off=cut_off))
        if advice.train_on and not here.waits_alone:
            yield Train(contribute=False)
        if advice.contribute_after_all:
            yield from self._carry_out(machine.ready(self._absent(TRAINING), self._now))
            yield Train()

    def _be_done(self, machine: RoundMachine) -> Steps:
        """Contribute what is made so far, where this node came while the others trained, and most are ready before.

        Of as many that come late as others the little work would cap the weight of all: there all make their steps.
        """
        late = self._came_midway and machine.phase is Phase.TRAIN and not (self._here.made or self._site.holds)
        if late and machine.most_ready() and self._role() == TRAINING:
            self._came_midway = False
            yield Train(at_once=True)

    def _try_leave(self, machine: RoundMachine) -> Steps:
        """Promise to sign nothing more, where the round allows and somebody stays; then go."""
        leave_step = self._departure.advise(machine, self._now, leaving=self._here.leaving())
        while self._said:
            yield Tell(self._said.pop(0))
        if leave_step is LeaveStep.PROMISE:
            yield from self._carry_out(machine.leave(self._now))
        elif leave_step is LeaveStep.REST:
            yield from self._carry_out(machine.ready(self._absent(OBSERVER), self._now))
        elif leave_step is LeaveStep.GO:
            yield from self._go()

    def _go(self) -> Steps:
        self._departure.left = True
        yield Goodbye()


Transition = Callable[[Member, Any], Steps]


def _everywhere(step: Transition) -> dict[Standing, Transition]:
    """An input that is taken wherever a member takes part, or may do so later."""
    return {
        Standing.OUTSIDE: step,
        Standing.IN_ROUND: step,
        Standing.LINGERING: Member._linger,
        Standing.GONE: Member._ignore,
    }


def _order(step: Transition) -> dict[Standing, Transition]:
    """An order of the user's: carried out, or refused to who gave it."""
    return dict.fromkeys(Standing, step)


TRANSITIONS: Mapping[type[Input], Mapping[Standing, Transition]] = {
    Received: _everywhere(Member._hear),
    Tick: _everywhere(Member._tick),
    Linked: _everywhere(Member._hear_of_link),
    Trained: _everywhere(Member._trained),
    Offered: _everywhere(Member._offered),
    HandedOver: _everywhere(Member._handed_over),
    TrainerRestarted: _everywhere(Member._trainer_restarted),
    Reduced: _everywhere(Member._reduced),
    SetPaused: _everywhere(Member._set_paused),
    GoOnWithout: _order(Member._go_on_without),
    Proven: _everywhere(Member._proven),
    StateHeld: _everywhere(Member._state_held),
    Evaluated: {**_everywhere(Member._evaluated), Standing.LINGERING: Member._evaluated},
    GoBack: _order(Member._go_back),
    Amend: _order(Member._amend),
    Withdraw: {**_everywhere(Member._withdraw), Standing.LINGERING: Member._withdraw},
    HeadMoved: _everywhere(Member._head_moved),
    Loaded: _everywhere(Member._loaded),
    StateSought: {**_everywhere(Member._state_sought), Standing.LINGERING: Member._sought_late},
    ChainCompared: {**_everywhere(Member._chain_compared), Standing.LINGERING: Member._chain_compared},
    GenesisFetched: _everywhere(Member._genesis_fetched),
}
"""By input, what a member does with it where it stands."""
