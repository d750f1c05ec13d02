"""Which state is sought, from whom, and when again: errands, stepped by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.protocol.agreement import Broadcast
from shoal.protocol.catching_up import (
    ANSWER_TIMEOUT_S,
    ASKED_LIMIT,
    EMPTY_TIMEOUT_S,
    PURSUE_AFTER_S,
    PURSUIT_LIMIT,
    RETRY_S,
    CatchingUp,
)
from shoal.protocol.chain import Chain
from shoal.protocol.donors import HEDGE_S, DonorScores
from shoal.protocol.errands import (
    AskEntries,
    AskHolders,
    AwaitEntries,
    CountLacking,
    Errand,
    FetchState,
    FindBegun,
    Holders,
    InTurn,
    KeepEarlier,
    LookElsewhere,
    LookUp,
    ReplaceChain,
    Replay,
    Request,
    TakeEntries,
    TakeImage,
)
from shoal.protocol.errors import NetworkError, RemoteError
from shoal.protocol.followers import AGAIN_S, AWAITED_LIMIT
from shoal.protocol.fork_watch import ForkWatch
from shoal.protocol.forks import Fork
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import GenesisFetched, StateHeld, StateSought
from shoal.protocol.messages import NO_HASH, Target, Term
from shoal.protocol.newcomers import coming
from shoal.protocol.peering import ChainPart
from shoal.protocol.surroundings import Rules
from shoal.protocol.terms import make_rebase
from tests.node.ledger import AUTHORITY, Ledger, forged, identity
from tests.protocol.test_chain_choice import invented

GRACE_S = 4.0
TERM = Term()
LIMIT = 3
"""Rounds whose finals are fewer bytes than a state."""
ONE, TWO, THREE = (PeerId(name) for name in ("one", "two", "three"))


@dataclass(frozen=True)
class At:
    """A state."""

    round: int
    term: Term = TERM


@dataclass(frozen=True)
class Header:
    digest: bytes


@dataclass
class Here:
    """A newcomer beside a chain of so many rounds. What errands ask for is noted, and comes to what is said here."""

    rounds: int
    held: Any = None
    me: PeerId = field(default_factory=lambda: identity(50).peer_id)
    peers: Collection[PeerId] = (ONE, TWO, THREE)
    donors: Collection[PeerId] = ()
    is_follower: bool = False
    takes_images: bool = False
    images: Iterator[At | None] = field(default_factory=lambda: iter(()))
    replayed_rounds: int = LIMIT
    has: dict[PeerId, set[int]] = field(default_factory=dict)
    begun: list[tuple[int, bytes]] = field(default_factory=list)
    lacking: int | None = None
    replays_to: int = 10**6
    fetches: bool = True
    now: float = 0.0
    asked: list[Request] = field(default_factory=list)
    takes_s: float = 0.0
    meanwhile: Callable[[Request], None] = lambda request: None
    serves: dict[PeerId, Chain | None] = field(default_factory=dict)
    """Chains of peers that have another than the one here; None of who does not answer."""
    worth_s: list[tuple[PeerId, float | None]] = field(default_factory=list)
    """For how long the others were worth waiting for, once a peer had answered."""
    forks: Sequence[Fork] = ()

    def __post_init__(self) -> None:
        self.ledger = Ledger()
        if self.rounds:
            self.ledger.certify(self.rounds)
        self.scores = DonorScores()
        self.fork_watch = ForkWatch(self)
        self.catching_up = CatchingUp(self.me, self, self.scores, self.fork_watch)

    @property
    def chain(self) -> Chain:
        return self.ledger.chain

    @property
    def current(self) -> bool:
        return self.held is not None and self.held.round == self.chain.standing.round

    def linked(self) -> Collection[PeerId]:
        return self.peers

    def rules(self, round: int) -> Rules:
        settings: Any = SimpleNamespace(grace_s=GRACE_S)
        return Rules(settings=settings, staleness_rounds=3)

    def _do(self, request: Request) -> Any:
        self.now += self.takes_s
        self.meanwhile(request)
        if isinstance(request, FindBegun):
            return self.begun
        if isinstance(request, CountLacking):
            return len(request.plans) if self.lacking is None else self.lacking
        if isinstance(request, AskHolders):
            holders = {
                p: Header(request.value.digest) for p in request.peers if request.value.round in self.has.get(p, ())
            }
            return Holders(holders, [peer for peer in request.peers if peer not in holders])
        if isinstance(request, FetchState):
            return At(request.value.round) if self.fetches else None
        if isinstance(request, Replay):
            reached = min(request.chain.standing.round, self.replays_to)
            return At(reached) if reached > request.state.round else request.state
        if isinstance(request, TakeImage):
            return next(self.images, None)
        if isinstance(request, KeepEarlier):
            return self.chain.digest(request.state.round)
        if isinstance(request, AskEntries | AwaitEntries):
            served = self.serves.get(request.peer, self.chain)
            if served is None:
                return NetworkError("does not answer")
            return ChainPart(certificates=served.after(request.after, 2, request.rebases), head=served.height)
        if isinstance(request, LookElsewhere):
            return {}
        if isinstance(request, TakeEntries):
            return self._take(request)
        return None

    def _take(self, request: TakeEntries) -> int | RemoteError:
        try:
            return sum(entry.value not in self.chain and self.chain.extend(entry) for entry in request.entries)
        except RemoteError as error:
            return error

    def carry_out(self, errand: Errand | None) -> Any:
        assert errand is not None
        self.asked.clear()
        self.worth_s.clear()
        return self._carry_out(errand)

    def _carry_out(self, errand: Errand) -> Any:
        request = errand.go_on(None, self.now)
        while request is not None:
            self.asked.append(request)
            came = self._do(request)
            if isinstance(request, InTurn):
                self.worth_s += [(peer, self._carry_out(request.errand(peer))) for peer in request.peers]
            request = errand.go_on(came, self.now)
        return errand.outcome

    def come(self) -> StateSought:
        """An attempt, as soon as one is due; what came of it is taken."""
        errand = self.catching_up.due(self.now, in_round=False)
        sought: StateSought = self.carry_out(errand)
        if self.catching_up.over(sought):
            self.held = sought.state
            self.catching_up.adopted(self.now)
        return sought

    def kinds(self) -> list[type]:
        return [type(request) for request in self.asked]

    def every(self, kind: type) -> list[Any]:
        return [request for request in self.asked if isinstance(request, kind)]


# -- which state ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("behind", "lacking", "replays"), [(LIMIT, None, True), (5, 5, False), (5, LIMIT, True)])
def test_rounds_are_replayed_while_the_finals_that_lack_are_fewer_bytes_than_a_state(
    behind: int, lacking: int | None, replays: bool
) -> None:
    here = Here(8, held=At(8 - behind), lacking=lacking, has={ONE: {8}})
    assert here.come().state == At(8)
    assert (FetchState not in here.kinds()) is replays


def test_nothing_is_replayed_before_the_model_is_built() -> None:
    here = Here(4, held=At(3), replayed_rounds=0, has={ONE: {4}})
    assert here.come().state == At(4)
    assert here.kinds().index(FetchState) < here.kinds().index(Replay)


@pytest.mark.parametrize(
    ("has", "fetched"),
    [
        ({ONE: {8}, TWO: {7}}, 8),
        ({ONE: {8}, TWO: {7}, THREE: {7}}, 7),
        ({TWO: {7}}, 7),
        ({ONE: {8}, TWO: {7, 8}, THREE: {7}}, 8),
    ],
)
def test_of_the_newest_two_states_the_one_that_more_hold_is_fetched(has: dict[PeerId, set[int]], fetched: int) -> None:
    here = Here(8, has=has)
    assert here.come().state == At(8)
    (request,) = here.every(FetchState)
    assert request.value.round == fetched
    assert request.holders == {peer for peer in has if fetched in has[peer]}


def test_state_that_came_in_part_is_fetched_on_while_it_leads_to_the_head_and_somebody_holds_it() -> None:
    digests = [Here(8).chain.digest(round) for round in range(9)]
    for begun, has, fetched in (
        ([(6, digests[6])], {ONE: {6}, TWO: {8}}, 6),
        ([(6, digests[6])], {TWO: {8}}, 8),
        ([(4, digests[4])], {ONE: {4}, TWO: {8}}, 8),
        ([(6, b"of another chain")], {ONE: {6}, TWO: {8}}, 8),
    ):
        here = Here(8, begun=begun, has=has)
        here.come()
        assert here.every(FetchState)[0].value.round == fetched


def test_no_state_is_fetched_that_is_no_newer_than_what_is_here() -> None:
    here = Here(8, held=At(7), replays_to=7, has={ONE: {7}})
    assert here.come().state is None
    assert FetchState not in here.kinds()
    assert [request.value.round for request in here.every(AskHolders)] == [8]


def test_of_others_than_founders_none_is_asked_for_the_initial_state_until_it_is_certified() -> None:
    here = Here(0)
    founder = here.ledger.peers[1]
    newcomers = [identity(number).peer_id for number in range(100, 100 + ASKED_LIMIT)]
    here.peers, here.has = (*newcomers, founder), {peer: {0} for peer in (*newcomers, founder)}
    assert here.come().state == At(0)
    assert [request.peers for request in here.every(AskHolders)] == [(founder,)]
    here.peers = newcomers
    here.held = None
    here.now += 60.0
    assert here.come().state is None
    assert [request.peers for request in here.every(AskHolders)] == [()]


def test_initial_state_is_the_first_founders_if_founders_differ() -> None:
    here = Here(0)
    first, second = here.ledger.peers[:2]
    here.peers, here.has = (second, first), {first: {0}, second: {0}}
    headers = {first: Header(b"first"), second: Header(b"second")}
    here._do = lambda request: (  # type: ignore[method-assign]
        []
        if isinstance(request, FindBegun)
        else Holders(headers, [])
        if isinstance(request, AskHolders)
        else At(0)
        if isinstance(request, FetchState)
        else ChainPart(certificates=(), head=0)
        if isinstance(request, AskEntries)
        else getattr(request, "state", None)
    )
    here.come()
    assert here.every(FetchState)[0].holders == {first}


def test_so_many_are_asked_what_they_hold_and_nobody_who_lied() -> None:
    here = Here(3, peers=[PeerId(f"peer{number:02}") for number in range(ASKED_LIMIT + 8)])
    here.scores.offended(PeerId("peer00"), 0.0)
    here.come()
    asked = here.every(AskHolders)[0].peers
    assert len(asked) == ASKED_LIMIT
    assert "peer00" not in asked


# -- whom to ask for certificates ------------------------------------------------------------------------------


def test_who_claims_to_be_ahead_is_asked_first_then_members_and_who_did_not_answer_lately_last() -> None:
    here = Here(3)
    member = here.chain.head.members[0]
    here.peers = (ONE, TWO, member, THREE)
    here.scores.disappointed(ONE, 0.0)
    here.catching_up.claimed(THREE, (Term(), 99))
    here.come()
    assert here.every(InTurn)[0].peers == (THREE, member, TWO, ONE)


def test_the_others_are_waited_for_as_long_as_who_answered_is_worth() -> None:
    here = Here(4)
    longer, member = here.chain.up_to(4), here.chain.head.members[0]
    here.ledger.chain = here.chain.up_to(3)
    here.peers = (ONE, member, TWO, THREE)
    here.serves = {TWO: longer, THREE: None}
    here.come()
    assert dict(here.worth_s) == {
        member: ANSWER_TIMEOUT_S,
        ONE: EMPTY_TIMEOUT_S,
        TWO: ANSWER_TIMEOUT_S,
        THREE: None,
    }
    assert here.chain.height == 4
    assert [here.scores.resting(peer, here.now) for peer in (ONE, TWO, THREE)] == [False, False, True]


def test_newcomer_takes_no_entry_before_it_has_chosen_among_the_chains() -> None:
    here = Here(3)
    served, here.ledger.chain = here.chain, here.chain.up_to(0)
    here.serves = dict.fromkeys((ONE, TWO, THREE), served)
    here.come()
    (taken,) = here.every(TakeEntries)
    assert taken == TakeEntries(served.entries, trusted=True)
    asked = [request.peer for request in here.asked[: here.asked.index(taken)] if isinstance(request, AskEntries)]
    assert {ONE, TWO, THREE} <= set(asked)


def test_claim_of_who_lacks_an_entry_is_looked_into_by_choosing_too() -> None:
    here = Here(3)
    served, here.ledger.chain = here.chain, here.chain.up_to(0)
    here.serves = {ONE: served, TWO: served, THREE: None}
    here.catching_up.claimed(THREE, (Term(), 9))
    here.carry_out(here.catching_up.due(0.0, in_round=True))
    assert here.chain.entries == served.entries


def test_another_chain_is_gone_over_to_beneath_a_later_rebase_alone() -> None:
    here = Here(6)
    real = here.chain
    mine = here.ledger.chain = invented(real, 2, rounds=3)
    rebased = real.up_to(6)
    rebased.extend(make_rebase(AUTHORITY, rebased.head, here.ledger.peers[:2]))
    here.peers, here.serves = (ONE,), {ONE: real}
    here.come()
    assert here.every(ReplaceChain) == []
    assert here.chain.entries == mine.entries, "nobody has decided which one it is"
    assert here.fork_watch.due(here.now) is not None, "but it is looked at"
    here.now += RETRY_S
    here.serves = {ONE: rebased}
    here.come()
    (replaced,) = here.every(ReplaceChain)
    assert (replaced.theirs.entries, replaced.height) == (rebased.entries, 2)


def test_nobody_is_asked_for_certificates_when_the_head_is_of_just_now_unless_somebody_claims_more() -> None:
    here = Here(3, has={ONE: {3}})
    here.catching_up.head_moved(0.0)
    here.come()
    assert InTurn not in here.kinds()
    assert here.kinds()[-1] is LookUp
    here.held = None
    here.catching_up.head_moved(0.0)
    here.catching_up.claimed(TWO, (Term(), 99))
    here.come()
    assert here.kinds()[0] is InTurn


# -- when again ------------------------------------------------------------------------------------------------


def test_an_attempt_that_brought_nothing_is_made_again_after_a_while_and_one_that_did_at_once() -> None:
    here = Here(3)
    here.come()
    assert here.catching_up.due(RETRY_S / 2, in_round=False) is None
    here.now, here.has = RETRY_S, {ONE: {3}}
    here.come()
    assert here.current
    assert here.catching_up.due(here.now, in_round=False) is not None


def test_user_is_told_once_of_a_state_that_nobody_has_and_again_of_another(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    here = Here(3)
    for _ in range(3):
        here.come()
        here.now += RETRY_S
    here.ledger.certify()
    here.come()
    assert caplog.messages == ["no peer has the state of round 3", "no peer has the state of round 4"]


def test_rounds_that_go_on_meanwhile_are_followed_if_it_took_long() -> None:
    for takes_s, follows in ((0.0, False), (PURSUE_AFTER_S, True)):
        here = Here(3, has={ONE: {3}}, takes_s=takes_s, donors=[TWO], me=identity(1).peer_id)  # a member
        more = iter([1])

        def certify(request: Request, here: Here = here, more: Any = more) -> None:
            if isinstance(request, Replay) and next(more, None):
                here.ledger.certify()

        here.meanwhile = certify
        assert here.come().state == At(4)
        assert [peer for peer, worth_s in here.worth_s if worth_s == 0.0][:1] == [TWO] * follows


def test_each_attempt_asks_who_is_linked_by_then() -> None:
    """A newcomer's first link may be gone while rounds go on: who came since has the state, and is asked for it."""
    here = Here(3, peers=(ONE,))

    def go_on(request: Request) -> None:
        if isinstance(request, AskHolders) and here.peers == (ONE,):
            here.ledger.certify()
            here.peers, here.has = (TWO,), {TWO: {4}}

    here.meanwhile = go_on
    assert here.come().state == At(4)
    assert here.every(LookUp)[-1].peers == (TWO,)


def test_a_chain_that_never_stands_still_is_not_followed_for_ever() -> None:
    here = Here(3, held=At(2))

    def certify(request: Request) -> None:
        if isinstance(request, Replay):
            here.ledger.certify()

    here.meanwhile = certify
    sought = here.come()
    assert len(here.every(Replay)) == PURSUIT_LIMIT
    assert sought.state == At(here.chain.standing.round - 1)


def test_who_came_quickly_once_says_that_it_comes_and_looks_whether_more_was_certified() -> None:
    here = Here(3, has={ONE: {3}})
    here.come()
    assert Broadcast not in here.kinds(), "a first state may take long"
    here.ledger.certify()
    head = here.chain.head
    here.come()
    assert here.every(Broadcast) == [Broadcast(coming(head))]
    assert here.worth_s[-1][1] == 0.0
    here = Here(3, has={ONE: {3}}, takes_s=GRACE_S / 6)
    here.come()
    here.ledger.certify()
    here.come()
    assert Broadcast not in here.kinds()


@pytest.mark.parametrize("takes_s", [0.0, 0.9 * GRACE_S])
def test_who_is_overtaken_on_its_way_says_anew_that_it_comes_if_the_last_step_was_quick(takes_s: float) -> None:
    here = Here(3, has={ONE: {3}})
    more = iter(range(3))

    def certify(request: Request) -> None:
        if isinstance(request, Replay) and next(more, None) is not None:
            here.ledger.certify()
            here.now += takes_s

    here.meanwhile = certify
    assert here.come().state == At(6)
    said = [coming(here.chain.value(round)) for round in (4, 5, 6)]
    assert [request.message for request in here.every(Broadcast)] == (said if takes_s == 0.0 else [])


def test_who_gets_an_older_state_of_its_peers_does_not_say_anew_that_it_comes() -> None:
    here = Here(3, has={ONE: {2}}, replays_to=2)
    assert here.come().state == At(2)
    assert here.every(Broadcast) == []
    here.replayed_rounds = 0
    here.come()
    assert len(here.every(Broadcast)) == 1


def test_initial_state_is_fetched_from_the_founder_once_at_a_time() -> None:
    here = Here(0)
    founder = here.ledger.peers[0]
    here.has = {founder: {0}}
    errand = here.catching_up.genesis(founder, 0.0)
    assert here.catching_up.genesis(founder, 0.0) is None
    assert here.carry_out(errand) == GenesisFetched(At(0))
    assert here.every(AskHolders)[0].peers == (founder,)
    assert here.catching_up.genesis(founder, RETRY_S / 2) is None
    assert here.catching_up.genesis(founder, RETRY_S) is not None


def test_an_earlier_state_is_of_its_round_or_none() -> None:
    here = Here(5, has={ONE: {3}, TWO: {2}})
    target = Target(3, here.chain.value(3).hash)
    assert here.carry_out(here.catching_up.earlier(target, NO_HASH)) == StateHeld(target, here.chain.digest(3))
    here.has, here.replays_to = {TWO: {2}}, 2
    assert here.carry_out(here.catching_up.earlier(target, NO_HASH)) == StateHeld(target, None)


# -- an image in place of a state ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "image", "asked"),
    [
        (At(7), [At(8)], [TakeImage]),
        (None, [At(8)], [TakeImage]),
        (At(7), [None], [TakeImage, Replay]),
        (At(7), [None, At(8)], [TakeImage, Replay, FindBegun, AskHolders, TakeImage]),
    ],
)
def test_image_is_taken_in_place_of_a_state_if_it_is_cheapest_or_nothing_else_is_to_be_had(
    held: At | None, image: list[At | None], asked: list[type]
) -> None:
    images = iter(image)
    here = Here(8, held=held, takes_images=True, images=images, replays_to=7 if len(image) > 1 else 8)
    assert here.come().state == At(8)
    assert [kind for kind in here.kinds() if kind in {*asked, FetchState}] == asked
    taken = here.every(TakeImage)
    assert [one.cheapest for one in taken] == [True, False][: len(taken)]
    for one in taken:
        assert (one.certified, one.before) == (here.chain.digest(8), here.chain.digest(7))
        assert (one.value, one.held) == (here.chain.value(8), held)


def test_state_that_nobody_certified_has_no_image_and_who_takes_part_wants_none() -> None:
    assert TakeImage not in _kinds_of(Here(0, takes_images=True))
    assert TakeImage not in _kinds_of(Here(8, held=At(7)))
    (first,) = [one for one in _requests_of(Here(1, held=At(0), takes_images=True)) if isinstance(one, TakeImage)][:1]
    assert first.before == NO_HASH


def _requests_of(here: Here) -> list[Request]:
    here.come()
    return here.asked


def _kinds_of(here: Here) -> set[type]:
    return {type(one) for one in _requests_of(here)}


# -- a follower ------------------------------------------------------------------------------------------------


def follower(rounds: int, *, ahead: int) -> tuple[Here, Chain]:
    """One that has the state of so many rounds, and the chain of those who are so many ahead."""
    here = Here(rounds + ahead, held=At(rounds), is_follower=True)
    theirs, here.ledger.chain = here.chain, here.ledger.chain_to(rounds)
    here.serves = dict.fromkeys(here.peers, here.chain)
    return here, theirs


def begins(here: Here) -> list[PeerId]:
    """Whom it begins to wait at now; the waits are left under way."""
    found = []
    for _ in range(AWAITED_LIMIT):
        errand = here.catching_up.due(here.now, in_round=False)
        request = None if errand is None else errand.go_on(None, here.now)
        if isinstance(request, AwaitEntries):
            found.append(request.peer)
    return found


def next_wait(here: Here) -> PeerId:
    """Whom it waits at next; that wait is over, with what the peer serves."""
    here.carry_out(here.catching_up.due(here.now, in_round=False))
    (request,) = here.every(AwaitEntries)
    assert isinstance(request.peer, str)
    return request.peer


def test_follower_takes_all_that_it_waited_for_however_many_answers_that_takes() -> None:
    here, theirs = follower(3, ahead=5)
    here.serves = dict.fromkeys(here.peers, theirs)
    parent = next_wait(here)
    assert here.kinds() == [AwaitEntries, TakeEntries, AskEntries, TakeEntries, AskEntries, TakeEntries]
    assert here.chain.entries == theirs.entries
    here.held = At(8)
    assert begins(here)[0] == parent
    assert here.catching_up.due(here.now, in_round=False) is None, "two are under way"


def test_follower_seeks_the_state_at_its_head_of_its_parent_first_and_waits_on_meanwhile() -> None:
    here, theirs = follower(3, ahead=1)
    here.serves[TWO] = theirs
    while here.chain.height == 3:
        next_wait(here)
        here.now += AGAIN_S
    assert begins(here)[0] == TWO
    here.lacking = LIMIT
    here.catching_up.head_moved(here.now)
    here.come()
    (replayed,) = here.every(Replay)
    assert replayed.peers[0] == TWO
    assert here.current


@pytest.mark.parametrize("lie", ["skips one", "forged", "refuses"])
def test_parent_that_lies_costs_a_follower_a_wait_elsewhere_and_nothing_of_it_stays(lie: str) -> None:
    here, theirs = follower(3, ahead=2)
    liar = SimpleNamespace(height=5, after=lambda after, limit, rebases: theirs.after(after + 1, limit, rebases))
    if lie == "forged":
        liar.after = lambda after, limit, rebases: tuple(map(forged, theirs.after(after, limit, rebases)))  # type: ignore[arg-type]
    told: dict[PeerId, Any] = dict.fromkeys(here.peers, theirs)
    first = begins(follower(3, ahead=2)[0])[0]
    told[first] = None if lie == "refuses" else liar
    here.serves = told
    assert next_wait(here) == first
    assert here.chain.height == 3
    assert here.scores.resting(first, here.now)
    assert next_wait(here) != first
    assert here.chain.entries == theirs.entries


def test_follower_looks_into_claims_and_waits_nowhere_before_it_has_chosen_its_chain() -> None:
    here = Here(0, held=At(0), is_follower=True, serves=dict.fromkeys((ONE, TWO, THREE)))
    assert begins(here) == []
    here.ledger.certify(1)
    here.held = At(1)
    here.catching_up.claimed(TWO, (TERM, 9))
    assert len(begins(here)) == AWAITED_LIMIT
    errand = here.catching_up.due(here.now + HEDGE_S, in_round=False)
    assert errand is not None
    assert errand.go_on(None, here.now) == AskEntries(TWO, 1, 0)


def test_follower_that_was_overtaken_tells_nobody_that_it_comes() -> None:
    for follows in (False, True):
        here = Here(3, held=At(2), is_follower=follows)
        here.catching_up._took_s = GRACE_S / 2
        here.catching_up.head_moved(0.0)
        while (errand := here.catching_up.due(0.0, in_round=False)) is not None:
            here.carry_out(errand)
            if here.every(Replay):
                break
        assert (here.every(Broadcast) == []) is follows
