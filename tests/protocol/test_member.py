"""A member by itself: what it says of its part, whose messages it takes up, what it asks of its driver, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shoal.collectives.partition import deal
from shoal.lab.box import Box, Surroundings
from shoal.lab.signed import report_of
from shoal.node.rounds.engine import PERFORMERS
from shoal.protocol.agreement import Broadcast
from shoal.protocol.catching_up import RETRY_S
from shoal.protocol.certificate import lead_order
from shoal.protocol.chain import Chain, Position
from shoal.protocol.chain_comparison import ALL_REBASES
from shoal.protocol.commitments import committed
from shoal.protocol.departure import LINGER_S
from shoal.protocol.donors import DonorScores
from shoal.protocol.durable import ABSTAIN, BINDING, DurableRecord
from shoal.protocol.effects import (
    Adopt,
    Append,
    Apply,
    BeginRound,
    Certified,
    Contribute,
    DrawGenesis,
    DropOrder,
    Examine,
    FindEarlierRounds,
    FindWork,
    FinishWork,
    Goodbye,
    KeepFork,
    KeepOrder,
    MemberEffect,
    PauseTrainer,
    Rejoin,
    ResumeWork,
    Seek,
    Send,
    SettleWork,
    SignRebase,
    StandOnHead,
    StopReduction,
    TakePart,
    Tell,
    Train,
    Watched,
    WatchReduction,
    WorkOut,
    Write,
)
from shoal.protocol.errands import AskEntries, AwaitEntries, FindEarlier, Request
from shoal.protocol.errors import ConfigError, LocalError, RemoteError
from shoal.protocol.following import VIEW_SYNC_S
from shoal.protocol.forks import Fork
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.inputs import (
    Amend,
    ChainCompared,
    GenesisFetched,
    GoBack,
    GoOnWithout,
    HeadMoved,
    Input,
    Linked,
    Loaded,
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
from shoal.protocol.member import ANSWER_PERIOD_S, CERTIFICATES_PASSED_ON, TRANSITIONS, Member, Standing
from shoal.protocol.messages import (
    NO_HASH,
    Certificate,
    Consent,
    Leave,
    Message,
    Ready,
    Rebase,
    Target,
    Term,
    Value,
)
from shoal.protocol.planning import CONTRIBUTOR, JOINER, OBSERVER, TRAINING, RoundSettings, absent_ready
from shoal.protocol.round import RoundMachine
from shoal.protocol.sites import WAIT_SHARE
from shoal.protocol.surroundings import Rules
from shoal.protocol.terms import make_rebase
from tests.node.ledger import AUTHORITY, GRID, Ledger, identity, plan_of
from tests.protocol.round_machines import contribution
from tests.protocol.test_chain_choice import invented

SETTINGS = RoundSettings(
    numel=GRID.numel,
    chunk_values=GRID.chunk_values,
    codec="fp32",
    grace_s=3.0,
    reduce_deadline_s=30.0,
    weight_cap=4.0,
)
ROOT = bytes(32)


@dataclass(frozen=True)
class Somewhere:
    """A state, as far as a member looks at it."""

    term: Term
    round: int


@dataclass
class Paper(Surroundings):
    """A member whose surroundings are plain fields; what it asks for is noted, and comes to what `results` says."""

    ledger: Ledger
    me: Identity
    rounds: int | None = None
    current: bool = True
    made: bool = False
    paused: bool = False
    stuck: bool = False
    follows: bool = False
    is_follower: bool = False
    takes_images: bool = False
    elsewhere: bool = False
    """Its key may be in use elsewhere."""
    forks: Sequence[Fork] = ()
    digest: bytes = NO_HASH
    peers: frozenset[PeerId] = frozenset()
    mates: frozenset[PeerId] = frozenset()
    held: Any = None
    records: list[DurableRecord] = field(default_factory=list)
    asked: list[MemberEffect] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.results: dict[type, Callable[[Any], Any]] = {
            BeginRound: lambda effect: {},
            WatchReduction: lambda effect: Watched(None, (NO_HASH, ())),
            Append: lambda effect: self.chain.extend(effect.entry),
            Write: lambda effect: self.records.extend(effect.records),
            PauseTrainer: lambda effect: setattr(self, "paused", effect.paused),
        }
        self.member = Member(identity=self.me, surroundings=self, deal=deal, rounds=self.rounds, scores=DonorScores())
        self.box = Box(self.member, self._do, lambda: self.now)

    # -- its surroundings ------------------------------------------------------------------------------------

    @property
    def chain(self) -> Chain:
        return self.ledger.chain

    def bound_in(self, position: Position) -> list[DurableRecord]:
        return [record for record in self.records if (record.term, record.round) == position]

    def alive(self) -> frozenset[PeerId]:
        return self.peers

    def linked(self) -> frozenset[PeerId]:
        return self.peers

    def site_mates(self) -> frozenset[PeerId]:
        return self.mates

    def key_is_elsewhere(self, head: Value) -> bool:
        return self.elsewhere

    def rules(self, round: int) -> Rules:
        return Rules(settings=SETTINGS, staleness_rounds=3)

    def new_life(self) -> bytes:
        return bytes(32)

    # -- its driver ------------------------------------------------------------------------------------------

    def feed(self, event: Input) -> list[MemberEffect]:
        """All that it asks for, in order."""
        before = len(self.asked)
        self.box.put(event)
        return self.asked[before:]

    def _do(self, effect: MemberEffect) -> Any:
        self.asked.append(effect)
        return self.results.get(type(effect), lambda _: None)(effect)

    def hear(self, peer: PeerId, message: Message) -> list[MemberEffect]:
        return self.feed(Received(peer, message))

    def record(self, kind: str, *, rounds_ago: int = 0) -> None:
        head = self.chain.head
        self.records.append(DurableRecord(kind=kind, term=head.next_term, round=head.next_round - rounds_ago))

    def begin(self) -> str:
        """Take part; as what."""
        asked = self.feed(Loaded())
        return next(effect.role for effect in asked if isinstance(effect, TakePart))


def paper(rounds: int = 3, *, me: Identity | None = None, **options: Any) -> Paper:
    ledger = Ledger(codec="fp32")
    if rounds:
        ledger.certify(rounds)
    return Paper(ledger, me or ledger.founders[0], **options)


def said(asked: list[MemberEffect]) -> list[str]:
    """The roles that are announced."""
    messages = [effect.message for effect in asked if isinstance(effect, Broadcast)]
    return [message.role for message in messages if isinstance(message, Ready)]


def kinds(asked: list[MemberEffect]) -> list[type]:
    return [type(effect) for effect in asked]


# -- the driver's side -----------------------------------------------------------------------------------------


def test_member_takes_no_input_before_the_last_effect_is_done() -> None:
    here = paper()
    assert isinstance(here.member.take(Tick(), 0.0), Seek)
    with pytest.raises(LocalError, match="before the last effect was done"):
        here.member.take(Tick(), 0.0)
    assert here.member.done(None, 0.0) is None
    with pytest.raises(LocalError, match="no effect is under way"):
        here.member.done(None, 0.0)


def test_every_input_has_its_transition_wherever_a_member_stands() -> None:
    inputs = set(Input.__args__)
    assert TRANSITIONS.keys() == inputs
    assert all(row.keys() == set(Standing) for row in TRANSITIONS.values())


def test_the_engine_does_everything_that_a_member_may_ask_for() -> None:
    assert PERFORMERS.keys() == set(MemberEffect.__args__)


def test_an_effect_of_a_round_that_no_member_knows_is_an_error() -> None:
    here = paper()
    here.begin()
    assert here.member.machine is not None
    here.member.machine.peers_alive = lambda *_, **__: [object()]  # type: ignore[method-assign, list-item]
    with pytest.raises(LocalError, match="object"):
        here.feed(Tick())


# -- at rest ---------------------------------------------------------------------------------------------------


def training() -> Paper:
    """A member that trains among others, who are all here."""
    here = paper(made=False)
    here.peers = frozenset(here.chain.head.members) - {here.me.peer_id}
    here.begin()
    here.feed(Tick())
    return here


def test_training_is_ordered_beside_those_alive_who_are_expected_to_contribute_too() -> None:
    here = paper(made=False)
    others = sorted(frozenset(here.chain.head.members) - {here.me.peer_id})
    here.peers = frozenset(others[1:])
    here.begin()
    assert [effect.beside for effect in here.asked if isinstance(effect, Train)] == [here.peers]


def test_member_that_trains_rests_and_time_alone_leads_to_nothing_but_what_it_said_before() -> None:
    here = training()
    assert here.member.rests
    before = here.member.machine.current() if here.member.machine is not None else []
    for here.now in range(1, 100):
        assert {type(effect) for effect in here.feed(Tick())} <= {WatchReduction, Broadcast}
    again = [effect.message for effect in here.asked if isinstance(effect, Broadcast)][-len(before) :]
    assert again == before
    assert here.member.rests


def all_others_die(here: Paper) -> None:
    here.peers = frozenset()
    here.feed(Tick())


def another_contributes(here: Paper) -> None:
    for founder in (1, 2):
        here.hear(here.ledger.founders[founder].peer_id, contribution_of(here, founder))


def somebody_claims_to_be_ahead(here: Paper) -> None:
    here.feed(Linked(min(here.peers), (Term(), 9)))


def somebody_may_have_another_chain(here: Paper) -> None:
    elsewhere = absent_ready(TRAINING, here.chain.head, here.digest)
    here.hear(min(here.peers), msgspec.structs.replace(elsewhere, base=bytes([9]) * 32))


def its_user_wants_it_to_leave(here: Paper) -> None:
    here.member.ask_to_leave(here.now)


def its_user_wants_an_earlier_state(here: Paper) -> None:
    here.results[FindEarlierRounds] = lambda effect: (1, 2)
    here.feed(GoBack(1))


@pytest.mark.parametrize(
    "happens",
    [
        all_others_die,
        another_contributes,
        somebody_claims_to_be_ahead,
        somebody_may_have_another_chain,
        its_user_wants_it_to_leave,
        its_user_wants_an_earlier_state,
    ],
)
def test_member_that_something_waits_for_does_not_rest(happens: Callable[[Paper], None]) -> None:
    here = training()
    assert here.member.rests
    happens(here)
    assert not here.member.rests


def test_member_that_waits_for_a_lead_does_not_rest_and_while_it_trains_it_waits_for_none() -> None:
    first = lead_order(paper(0).chain.head)[0]
    me, other = (one for one in Ledger().founders if one.peer_id != first)
    here = paper(0, me=me, peers=frozenset({other.peer_id}))
    here.begin()
    here.feed(Tick())
    assert here.member.machine is not None
    assert here.member.rests, "others train, and nothing is due"
    here.member.machine.receive(other.peer_id, contribution(here.member.machine), here.now)
    assert not here.member.rests, "half of them are done"
    here.now = VIEW_SYNC_S
    here.feed(Tick())
    assert here.member.machine.agreement.view == 1


def test_newcomer_without_a_quorum_trains_nothing_and_who_has_made_something_trains_on() -> None:
    here = paper()
    here.begin()
    assert not here.member.trains_alone, "nothing made, and nothing under way"
    here.resting = False
    assert here.member.trains_alone
    here.resting, here.made = True, True
    assert here.member.trains_alone
    here.paused = True
    assert not here.member.trains_alone


def test_member_without_a_round_does_not_rest() -> None:
    here = paper(current=False)
    here.feed(Loaded())
    assert here.member.machine is None
    assert not here.member.rests


# -- its part --------------------------------------------------------------------------------------------------


def test_pause_and_resume_in_one_round_lead_back_to_the_role_of_before() -> None:
    here = paper()
    assert here.begin() == TRAINING
    assert said(here.feed(SetPaused(True))) == [OBSERVER]
    asked = here.feed(SetPaused(False))
    assert said(asked) == [TRAINING]
    assert kinds(asked).count(Train) == 1
    here.made = True
    assert said([*here.feed(SetPaused(True)), *here.feed(SetPaused(False))]) == []


def contribution_of(here: Paper, founder: int) -> Ready:
    head = here.chain.head
    absent = absent_ready(OBSERVER, head, here.digest)
    ready = msgspec.structs.replace(absent, role=CONTRIBUTOR, root=ROOT, tokens=1, squares=(1.0,) * 3)
    return committed(here.ledger.founders[founder], ready, SETTINGS)


def hurried(here: Paper) -> list[list[Train]]:
    """What it tells its trainer, of three members, when one of the others has contributed, when both, and later."""
    here.peers = frozenset(here.chain.head.members) - {here.me.peer_id}
    here.feed(Tick())
    heard = [here.hear(here.ledger.founders[n].peer_id, contribution_of(here, n)) for n in (1, 2)]
    return [[one for one in asked if isinstance(one, Train)] for asked in (*heard, here.feed(Tick()))]


def test_member_that_only_follows_observes_every_round_and_never_has_its_trainer_train() -> None:
    here = paper(follows=True)
    here.peers = frozenset(here.chain.head.members) - {here.me.peer_id}
    assert here.begin() == OBSERVER
    here.feed(Tick())
    assert here.member.rests
    here.feed(SetPaused(True))
    here.feed(SetPaused(False))
    here.feed(TrainerRestarted())
    for founder in (1, 2):
        here.hear(here.ledger.founders[founder].peer_id, contribution_of(here, founder))
    here.peers = frozenset()  # without a quorum others train on
    for here.now in range(1, 100):
        here.feed(Tick())
    assert set(said(here.asked)) == {OBSERVER}
    assert Train not in kinds(here.asked)


def follower(rounds: int = 3, **options: Any) -> Paper:
    """A follower of three founders, to all of whom it is linked."""
    here = paper(rounds, me=identity(200), follows=True, is_follower=True, **options)
    here.peers = frozenset(here.chain.head.members)
    return here


def sought(asked: list[MemberEffect], here: Paper) -> list[Request | None]:
    """The first request of each errand that is begun."""
    return [effect.errand.go_on(None, here.now) for effect in asked if isinstance(effect, Seek)]


def test_follower_takes_part_in_no_round_says_nothing_and_has_its_agent_stand_on_each_state() -> None:
    here = follower()
    assert kinds(here.feed(Loaded())) == [FindWork, ResumeWork, StandOnHead]
    assert (here.member.standing, here.member.phase, here.member.rests) == (Standing.OUTSIDE, "following", True)
    for event in (TrainerRestarted(), SetPaused(True), SetPaused(False), Linked(here.ledger.peers[0], (Term(), 2))):
        here.feed(event)
    waits = [request for _ in range(3) for request in sought(here.feed(Tick()), here)]
    assert kinds(waits) == [AwaitEntries, AwaitEntries]  # type: ignore[arg-type]
    here.ledger.certify(1)
    here.current = False
    asked = here.feed(HeadMoved())
    assert kinds(asked) == [StopReduction, Seek]
    assert here.member.phase == "joining"
    assert not here.member.rests
    here.held, state = Somewhere(Term(), 3), Somewhere(Term(), 4)
    here.results[Adopt] = lambda effect: setattr(here, "current", True)
    assert kinds(here.feed(StateSought(state))) == [Adopt, SettleWork, Rejoin, StandOnHead]
    assert here.feed(StateSought(None)) == [], "it stands on it already"
    assert {Broadcast, TakePart, BeginRound, Train, Write}.isdisjoint(kinds(here.asked))


def test_certificate_that_a_follower_hears_is_a_claim_and_its_signatures_are_not_taken_from_who_said_it() -> None:
    here = follower()
    here.feed(Loaded())
    for _ in range(2):
        here.feed(Tick())
    before = here.chain.height
    ahead = paper(4).chain
    here.hear(here.ledger.peers[1], ahead.after(3, 1)[0])
    assert (here.chain.height, here.member.early) == (before, 0)
    assert sought(here.feed(Tick()), here) == [AskEntries(here.ledger.peers[1], 3, 0)]


def test_follower_whose_rounds_are_done_or_that_is_to_leave_goes_without_a_promise() -> None:
    here = follower(rounds=3)
    here.feed(Loaded())
    here.member.ask_to_leave(here.now)
    assert Goodbye in kinds(here.feed(Tick()))
    here = follower(3)
    here.member._departure._rounds = 3
    here.feed(Loaded())
    here.now = LINGER_S
    asked = [*here.feed(Tick()), *here.feed(Tick())]
    assert here.member.finished
    assert Goodbye in kinds(asked)


def test_who_came_while_the_others_trained_contributes_what_it_has_when_most_are_ready() -> None:
    here = paper()
    assert here.begin() == TRAINING
    assert hurried(here) == [[], [Train(at_once=True)], []]


def test_who_began_the_round_with_the_others_makes_all_its_steps() -> None:
    here = paper()
    here.begin()
    certify(here, computed=True)
    assert hurried(here) == [[], [], []]


def test_in_the_first_round_all_make_all_their_steps_whenever_they_came() -> None:
    here = paper(0)
    here.begin()
    assert hurried(here) == [[], [], []]


@pytest.mark.parametrize("what", ["made", "paused"])
def test_who_has_contributed_or_pauses_is_in_no_hurry(what: str) -> None:
    here = paper()
    assert here.begin() == TRAINING
    setattr(here, what, True)
    assert hurried(here) == [[], [], []]


def test_of_two_who_came_later_makes_all_its_steps() -> None:
    """Else the weight of the other would be capped by that of a few steps: the lower of two is the median."""
    here = paper()
    here.chain.extend(make_rebase(AUTHORITY, here.chain.head, sorted(here.ledger.peers[:2])))
    assert here.begin() == TRAINING
    other = next(n for n in (0, 1) if here.ledger.founders[n].peer_id != here.me.peer_id)
    here.peers = frozenset({here.ledger.founders[other].peer_id})
    here.feed(Tick())
    asked = here.hear(here.ledger.founders[other].peer_id, contribution_of(here, other))
    assert Train not in [*kinds(asked), *kinds(here.feed(Tick()))]


def test_node_that_lost_what_it_announced_stays_an_observer_through_a_pause() -> None:
    """Else it would train on the batches of the round a second time, and be counted for both."""
    here = paper()
    here.record("ready")
    assert here.begin() == OBSERVER
    asked = [*here.feed(SetPaused(True)), *here.feed(SetPaused(False))]
    assert said(asked) == [OBSERVER, OBSERVER]
    assert Train not in kinds(here.asked)


@pytest.mark.parametrize("kind", sorted(BINDING))
@pytest.mark.parametrize("alone", [True, False])
def test_node_that_is_bound_to_a_value_makes_no_other_contribution_to_its_round(kind: str, alone: bool) -> None:
    """Killed between its vote and the certificate, without its work on disk: what it made is in that value."""
    here = paper()
    if alone:
        here.chain.extend(make_rebase(AUTHORITY, here.chain.head, [here.me.peer_id]))
    here.record("ready")
    assert here.member._role() == (TRAINING if alone else OBSERVER)
    here.record(kind, rounds_ago=1)
    assert here.member._role() == (TRAINING if alone else OBSERVER)
    here.record(kind)
    assert here.member._role() == OBSERVER


@pytest.mark.parametrize("others", [0, 1, 2])
def test_who_announced_makes_another_contribution_only_where_nobody_else_can_have_heard(others: int) -> None:
    here = paper()
    members = sorted([here.me.peer_id, *(identity(100 + n).peer_id for n in range(others))])
    here.chain.extend(make_rebase(AUTHORITY, here.chain.head, members))
    here.record("ready")
    assert here.member._role() == (OBSERVER if others else TRAINING)


def test_node_that_came_back_is_a_joiner_after_a_pause_too() -> None:
    here = paper(me=identity(200))
    assert here.begin() == JOINER
    assert said([*here.feed(SetPaused(True)), *here.feed(SetPaused(False))]) == [OBSERVER, JOINER]
    assert Train not in kinds(here.asked)


def test_a_contribution_is_marked_on_disk_before_it_is_announced_and_once() -> None:
    here = paper()
    here.begin()
    head = here.chain.head
    absent = absent_ready(OBSERVER, head, NO_HASH)
    ready = msgspec.structs.replace(absent, role=CONTRIBUTOR, root=ROOT, tokens=1, squares=(1.0,) * 3)
    here.results[Contribute] = lambda effect: ready
    asked = here.feed(Trained(head.next_round, "work"))
    assert kinds(asked)[:3] == [Contribute, Write, Broadcast]
    assert asked[1].records[0].kind == "ready"  # type: ignore[union-attr]
    assert Write not in kinds(here.feed(Trained(head.next_round, "again")))
    assert here.feed(Trained(head.next_round + 1, "of another round")) == []


@pytest.mark.parametrize(
    ("before", "countable"),
    [((), True), (("vote",), True), (("ready",), False), (("ready", "vote"), False), ((ABSTAIN,), False)],
)
def test_what_is_on_disk_cannot_have_been_counted_since_by_who_announced_nothing_after_it(
    before: tuple[str, ...], countable: bool
) -> None:
    here = paper()
    for kind in before:
        here.record(kind)
    here.begin()
    (find,) = (effect for effect in here.asked if isinstance(effect, FindWork))
    assert find.countable == countable


def delegate_that_is_done(after: float, others_after: float) -> Paper:
    """A member of four, with one other of its site that trains on, where both others contributed `others_after`."""
    founders = tuple(sorted((identity(n) for n in (1, 2, 3, 4)), key=lambda one: one.peer_id))
    ledger = Ledger(founders, codec="fp32")
    ledger.certify(1)
    here = Paper(ledger, founders[0])
    here.peers, here.mates = frozenset(ledger.peers[1:]), frozenset({ledger.peers[1]})
    here.begin()
    here.hear(ledger.peers[1], absent_ready(TRAINING, here.chain.head, here.digest))
    for here.now, happens in sorted([(others_after, "others"), (after, "own")]):
        if happens == "own":
            here.feed(Trained(here.chain.head.next_round, "work"))
        else:
            for founder in (2, 3):
                here.hear(ledger.peers[founder], contribution_of(here, founder))
    return here


def contributes_at(here: Paper, seconds: float) -> bool:
    here.now = seconds
    here.feed(Tick())
    return Contribute in kinds(here.asked)


@pytest.mark.parametrize("others_after", [0.5, 1.4])
def test_delegate_waits_for_its_site_for_half_the_grace(others_after: float) -> None:
    here = delegate_that_is_done(0.0, others_after)
    half_s = WAIT_SHARE * SETTINGS.grace_s
    assert not contributes_at(here, half_s - 0.1)
    assert contributes_at(here, half_s)


@pytest.mark.parametrize("late_s", [0.5, 2.9])
def test_delegate_that_comes_late_does_not_wait_until_the_round_is_planned_without_it(late_s: float) -> None:
    here = delegate_that_is_done(late_s, 0.0)
    half_s = WAIT_SHARE * SETTINGS.grace_s
    assert contributes_at(here, max(late_s, half_s - 0.1)) is (late_s > half_s)
    assert contributes_at(here, max(late_s, half_s))


# -- what its user wants ---------------------------------------------------------------------------------------


def test_order_that_takes_a_round_is_refused_outside_of_one_and_a_withdrawal_is_not() -> None:
    here = paper()
    for order in (GoBack(1), Amend(("round.grace_s=1",)), GoOnWithout(frozenset())):
        with pytest.raises(ConfigError, match="this node is joining; try again when it takes part in the rounds"):
            here.feed(order)
    for kind in (Target, Wanted):
        assert here.feed(Withdraw(kind)) == [DropOrder(kind)]


def test_order_to_go_back_is_kept_and_the_state_that_it_takes_is_sought_at_once() -> None:
    here = paper()
    here.results[FindEarlierRounds] = lambda effect: [0, 1]
    here.begin()
    with pytest.raises(ConfigError, match="does not have the state of that round"):
        here.feed(GoBack(2))
    target = Target(1, here.chain.value(1).hash)
    found, kept, seek = here.feed(GoBack(1))
    assert (found, kept) == (FindEarlierRounds(), KeepOrder(target))
    assert isinstance(seek, Seek)
    assert seek.errand.go_on(None, here.now) == FindEarlier(1, NO_HASH)
    assert Seek not in kinds(here.feed(Tick()))
    assert here.feed(StateHeld(target, here.chain.digest(1))) == []
    said = [effect.message for effect in here.feed(Tick()) if isinstance(effect, Broadcast)]
    assert [message.target for message in said if isinstance(message, Consent)] == [target]


def test_order_of_an_earlier_life_stands_and_is_told() -> None:
    here = paper()
    target = Target(1, here.chain.value(1).hash)
    asked = here.feed(Loaded((target,)))
    assert [effect.text for effect in asked if isinstance(effect, Tell)] == [
        "still proposing to go back to round 1; `shoal rollback --withdraw` ends that"
    ]


# -- what others say -------------------------------------------------------------------------------------------


def looked_into(here: Paper) -> PeerId | None:
    """Whose claim to be ahead is looked into with the next tick."""
    seeks = [effect for effect in here.feed(Tick()) if isinstance(effect, Seek)]
    request = seeks[0].errand.go_on(None, here.now) if seeks else None
    return request.peer if isinstance(request, AskEntries) else None


def nothing_found() -> StateSought:
    return StateSought(None)


def test_what_is_early_waits_for_its_round_and_whoever_is_late_is_answered_once_a_second() -> None:
    here = paper()
    here.begin()
    peer = here.ledger.peers[1]
    behind = here.chain.value(1)
    late = absent_ready(OBSERVER, behind, NO_HASH)
    for now, answers in ((0.0, 1), (0.5, 0), (1.5, 1)):
        here.now = now
        assert kinds(here.hear(peer, late)).count(Send) == answers
    ahead = msgspec.structs.replace(late, round=here.chain.head.next_round + 1)
    assert looked_into(here) is None
    here.hear(peer, ahead)
    assert here.member.early == 1
    assert looked_into(here) == peer


def test_early_messages_are_taken_up_once_their_round_begins() -> None:
    here = paper()
    peer, head = here.ledger.peers[1], here.chain.head
    here.hear(peer, absent_ready(OBSERVER, head, NO_HASH))
    assert here.member.early == 1
    here.begin()
    assert here.member.early == 0
    assert here.member.machine is not None
    assert here.member.machine._gathering.get(peer) is not None


def test_first_founders_state_is_taken_as_long_as_nothing_binds() -> None:
    here = paper(0, me=identity(2))
    here.begin()
    founder, head = here.ledger.peers[0], here.chain.head
    assert founder == head.planner
    theirs = absent_ready(TRAINING, head, bytes([7]) * 32)
    assert Seek in kinds(here.hear(founder, theirs))
    assert Seek not in kinds(here.hear(founder, theirs)), "it is under way"
    before = here.member.machine
    assert here.feed(GenesisFetched(Somewhere(Term(), 1))) == []  # none of theirs
    assert here.member.machine is before
    initial = GenesisFetched(Somewhere(Term(), 0))
    asked = kinds(here.feed(initial))
    assert asked.index(Adopt) < asked.index(BeginRound)
    here.record("vote")
    assert here.feed(initial) == []
    here.member.catching_up._fetching_genesis = False
    assert Seek not in kinds(here.hear(founder, theirs))


def test_founder_draws_the_initial_state_and_others_wait_for_it() -> None:
    for me, draws in ((None, True), (identity(200), False)):
        here = paper(0, me=me, current=False)
        here.results[DrawGenesis] = lambda effect, here=here: setattr(here, "current", True)
        asked = here.feed(Loaded())
        assert ([DrawGenesis(NO_HASH)] == asked[:1]) is draws
        assert here.member.standing is (Standing.IN_ROUND if draws else Standing.OUTSIDE)
    here = paper(3, current=False)
    assert here.feed(Loaded()) == []


def test_what_was_found_is_held_before_a_round_begins_on_it_and_only_while_it_is_wanted() -> None:
    here = paper(current=False)
    found = StateSought(Somewhere(Term(), 3))
    here.held = Somewhere(Term(), 3)
    assert here.feed(found) == [], "another as old is here"
    here.held = Somewhere(Term(), 2)
    here.results[Adopt] = lambda effect: setattr(here, "current", True)
    asked = kinds(here.feed(found))
    assert asked.index(Adopt) < asked.index(BeginRound)
    assert here.feed(found) == []


def test_nothing_more_is_sought_while_an_attempt_is_under_way() -> None:
    here = paper(current=False)
    assert kinds(here.feed(Tick())) == [Seek]
    here.now = 10.0
    assert here.feed(Tick()) == []
    here.feed(nothing_found())
    assert kinds(here.feed(Tick())) == [Seek]
    here.feed(nothing_found())
    here.now += RETRY_S / 2
    assert here.feed(Tick()) == []
    here.now += RETRY_S / 2
    assert kinds(here.feed(Tick())) == [Seek]


# -- certified, and other chains -------------------------------------------------------------------------------


def certify(here: Paper, *, computed: bool) -> list[MemberEffect]:
    """The next round is certified by others; this node worked out its state, or not."""
    other = Ledger(codec="fp32")
    other.certify(here.chain.height + 1)
    certificate = other.chain.entries[-1]
    if computed:
        finals = other.finals[other.chain.head.round]
        value = certificate.value
        report = report_of(value)
        here.member._reports[finals.plan.hash] = report

    def append(effect: Append) -> bool:
        here.current = computed
        return here.chain.extend(effect.entry)

    here.results[Append] = append
    return here.hear(here.ledger.peers[1], certificate)


def test_a_certified_round_is_appended_told_applied_and_left_for_the_next_in_this_order() -> None:
    here = paper()
    here.begin()
    asked = [kind for kind in kinds(certify(here, computed=True)) if kind is not Train][1:]
    assert asked[:7] == [FinishWork, Append, Broadcast, Certified, StopReduction, SettleWork, Apply]
    assert asked.index(BeginRound) == 7
    assert asked[-1] is StandOnHead
    assert here.member.standing is Standing.IN_ROUND


@pytest.mark.parametrize("founder", [0, 1, 2])
@pytest.mark.parametrize("done", [False, True])
def test_certificate_is_told_to_all_by_two_and_by_who_is_done_and_passed_on_to_a_few_by_others(
    founder: int, done: bool
) -> None:
    here = paper(me=identity(founder + 1))
    here.member._departure._rounds = 4 if done else None
    strangers = [identity(number).peer_id for number in range(100, 110)]
    here.peers = frozenset({*here.ledger.peers, *strangers} - {here.me.peer_id})
    here.begin()
    assert here.member.machine is not None
    agreement = here.member.machine.agreement
    leads = {agreement.lead(view) for view in (0, 1)}
    asked = certify(here, computed=True)
    to_all = [e for e in asked if isinstance(e, Broadcast) and isinstance(e.message, Certificate)]
    passed = [e.peer for e in asked if isinstance(e, Send) and isinstance(e.message, Certificate)]
    if here.me.peer_id in leads or done:
        assert (len(to_all), passed) == (1, [])
    else:
        ring = sorted(here.peers, key=lambda peer: (peer < here.me.peer_id, peer))
        assert (to_all, passed) == ([], ring[:CERTIFICATES_PASSED_ON])


def test_what_comes_late_is_answered_with_the_certificate_but_not_while_all_count_the_same_votes() -> None:
    here = paper()
    here.begin()
    late = absent_ready(TRAINING, here.chain.head, here.digest)
    here.now = 5.0
    certify(here, computed=True)
    answers = []
    for here.now in (5.0, 5.0 + ANSWER_PERIOD_S, 5.1 + ANSWER_PERIOD_S):
        asked = here.hear(here.ledger.peers[1], late)
        answers.append([effect.message for effect in asked if isinstance(effect, Send)])
    assert answers == [[], [], [here.chain.entries[-1]]]


def test_what_was_certified_and_not_worked_out_here_is_caught_up_with() -> None:
    here = paper()
    here.begin()
    asked = kinds(certify(here, computed=False))
    assert Apply not in asked
    assert asked[-1] is StopReduction
    assert kinds(here.feed(Tick())) == [Seek]
    assert asked.index(Append) < asked.index(Broadcast)
    assert here.member.standing is Standing.OUTSIDE
    here.current = True
    assert here.begin() == TRAINING


def test_the_round_under_way_is_over_once_the_chain_went_on() -> None:
    here = paper()
    here.begin()
    assert here.feed(HeadMoved()) == []
    here.ledger.certify(1)
    here.current = False
    assert kinds(here.feed(HeadMoved())) == [StopReduction]
    assert here.member.standing is Standing.OUTSIDE


def test_a_head_that_went_back_to_a_state_that_is_here_is_gone_on_from_at_once() -> None:
    """Also while another state is being sought: nobody needs it any more."""
    here = paper(current=False)
    assert Seek in kinds(here.feed(Tick()))
    here.ledger.go_back(1)
    here.current = True
    assert BeginRound in kinds(here.feed(HeadMoved()))
    assert here.member.standing is Standing.IN_ROUND
    assert here.member.machine is not None
    assert here.member.machine.previous == here.ledger.chain.head


def test_a_rebase_that_does_not_follow_is_a_claim_to_be_ahead_from_a_peer_and_an_error_from_a_user() -> None:
    here = paper()
    here.begin()
    stranger = Ledger(codec="int8")
    stranger.certify(5)
    rebase: Rebase = make_rebase(AUTHORITY, stranger.chain.head, stranger.peers[:1])
    here.hear(here.ledger.peers[1], rebase)
    assert looked_into(here) == here.ledger.peers[1]
    here.results[SignRebase] = lambda effect: rebase
    with pytest.raises(RemoteError, match="not known here"):
        here.feed(GoOnWithout(frozenset()))
    assert here.member.standing is Standing.IN_ROUND
    assert here.feed(Tick()), "it goes on"


def test_finals_of_another_base_or_of_a_plan_that_the_settings_forbid_are_not_worked_out() -> None:
    here = paper()
    here.begin()
    founders = here.ledger.founders
    late = SimpleNamespace(plan=plan_of(founders, here.chain.value(2), codec="fp32"))
    assert here.feed(Reduced(late, 0.1)) == []  # type: ignore[arg-type]
    plan = plan_of(founders, here.chain.head, codec="int8")
    assert WorkOut not in kinds(here.feed(Reduced(SimpleNamespace(plan=plan), 0.1)))  # type: ignore[arg-type]


# -- standing still, finishing and going -----------------------------------------------------------------------


def test_member_that_may_sign_nothing_leaves_its_round_and_says_why() -> None:
    here = paper()
    here.begin()
    here.elsewhere = True
    assert kinds(here.feed(Tick())) == [StopReduction, Seek]
    assert (here.member.standing, here.member.phase) == (Standing.OUTSIDE, "abstaining")
    assert kinds(here.feed(nothing_found())) == []


def test_member_that_hears_of_a_fork_keeps_it_passes_it_on_and_signs_nothing_before_a_rebase() -> None:
    here = paper()
    lie = invented(here.chain, 2, rounds=1).entries[-1]
    here.results[KeepFork] = lambda effect: setattr(here, "forks", (effect.fork,))
    here.begin()
    asked = here.hear(here.ledger.peers[1], lie)
    assert kinds(asked) == [Examine, KeepFork, Broadcast, Broadcast, StopReduction]
    assert (here.member.standing, here.member.phase) == (Standing.OUTSIDE, "forked")
    assert kinds(here.hear(here.ledger.peers[2], lie)) == [Examine], "it is known"
    here.current = True
    assert kinds(here.feed(nothing_found())) == []
    here.hear(here.ledger.peers[1], make_rebase(AUTHORITY, here.chain.head, here.ledger.peers))
    assert here.member.standing is Standing.IN_ROUND


def test_member_compares_its_chain_with_who_speaks_of_another_beside_the_round() -> None:
    here = paper()
    here.begin()
    head = here.chain.head
    word = Leave(term=head.next_term, round=head.next_round, base=bytes(32), signature=bytes(64))
    here.hear(here.ledger.peers[1], word)
    (seek,) = (effect for effect in here.feed(Tick()) if isinstance(effect, Seek))
    assert seek.errand.go_on(None, here.now) == AskEntries(here.ledger.peers[1], 3, ALL_REBASES)
    lie = invented(here.chain, 2, rounds=1).entries[-1]
    assert isinstance(lie, Certificate)
    here.results[KeepFork] = lambda effect: setattr(here, "forks", (effect.fork,))
    assert KeepFork in kinds(here.feed(ChainCompared(here.ledger.peers[1], lie)))
    assert here.member.phase == "forked"


@pytest.mark.parametrize("told", ["certificate", "later round", ""])
def test_member_whose_rounds_are_done_lingers_until_the_others_know_and_no_longer_than_it_has_to(told: str) -> None:
    here = paper(rounds=3)
    here.member._departure._rounds = 3
    here.peers = frozenset(here.ledger.peers[1:2])
    here.feed(Loaded())
    assert (here.member.standing, here.member.phase) == (Standing.LINGERING, "done")
    assert here.feed(SetPaused(True)) == []
    if told == "certificate":
        here.hear(here.ledger.peers[1], here.chain.entries[-1])
    elif told:
        here.hear(here.ledger.peers[1], absent_ready(TRAINING, here.chain.head, here.digest))
    else:
        here.feed(Tick())
        assert here.member.standing is Standing.LINGERING
        here.now = LINGER_S
        here.feed(Tick())
    assert here.member.standing is Standing.IN_ROUND
    assert here.member.leaving


def test_member_that_is_gone_takes_nothing_any_more() -> None:
    here = paper()
    here.current = False
    here.member.ask_to_leave(0.0)
    assert Goodbye() in here.feed(Tick())
    assert here.member.standing is Standing.GONE
    for event in (Tick(), nothing_found(), Linked(here.ledger.peers[1], (Term(), 3)), StateHeld.__new__(StateHeld)):
        assert here.feed(event) == []


def test_machine_of_a_round_hears_who_is_alive_before_it_announces_anything() -> None:
    heard: list[str] = []

    class Listening(RoundMachine):
        def peers_alive(self, *arguments: Any, **options: Any) -> Any:
            heard.append("alive")
            return super().peers_alive(*arguments, **options)

        def ready(self, *arguments: Any) -> Any:
            heard.append("ready")
            return super().ready(*arguments)

    here = paper()
    here.member._make = Listening
    here.begin()
    assert heard == ["alive", "ready"]
