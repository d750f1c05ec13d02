"""Which state is sought, from whom, and when again: errands, stepped by hand."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.protocol.agreement import Broadcast
from shoal.protocol.catching_up import ASKED_LIMIT, PURSUE_AFTER_S, PURSUIT_LIMIT, RETRY_S, CatchingUp
from shoal.protocol.chain import Chain
from shoal.protocol.donors import DonorScores
from shoal.protocol.errands import (
    ANSWER_TIMEOUT_S,
    EMPTY_TIMEOUT_S,
    AskChain,
    AskHolders,
    CountLacking,
    Errand,
    FetchState,
    FindBegun,
    Holders,
    KeepEarlier,
    LookInto,
    LookUp,
    Replay,
    Request,
)
from shoal.protocol.identity import PeerId
from shoal.protocol.inputs import GenesisFetched, StateHeld, StateSought
from shoal.protocol.messages import NO_HASH, Target, Term
from shoal.protocol.newcomers import coming
from shoal.protocol.surroundings import Rules
from tests.node.ledger import Ledger, identity

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

    def __post_init__(self) -> None:
        self.ledger = Ledger()
        if self.rounds:
            self.ledger.certify(self.rounds)
        self.scores = DonorScores()
        self.catching_up = CatchingUp(self.me, self, self.scores)

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
        if isinstance(request, KeepEarlier):
            return self.chain.digest(request.state.round)
        return request == LookInto(ONE) if isinstance(request, LookInto) else None

    def carry_out(self, errand: Errand | None) -> Any:
        assert errand is not None
        self.asked.clear()
        request = errand.go_on(None, self.now)
        while request is not None:
            self.asked.append(request)
            request = errand.go_on(self._do(request), self.now)
        return errand.outcome

    def come(self) -> StateSought:
        """An attempt, as soon as one is due; what came of it is taken."""
        errand = self.catching_up.due(self.now, in_round=False)
        sought: StateSought = self.carry_out(errand)
        if self.catching_up.over(sought):
            self.held = sought.state
            self.catching_up.adopted(sought, self.now)
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
    assert here.every(AskChain)[0].peers == (THREE, member, TWO, ONE)


def test_the_others_are_waited_for_as_long_as_who_answered_is_worth() -> None:
    ask = AskChain(peers=(ONE, TWO), members=frozenset({ONE}))
    assert ask.wait_s(ONE, grew=False) == ANSWER_TIMEOUT_S
    assert ask.wait_s(TWO, grew=True) == ANSWER_TIMEOUT_S
    assert ask.wait_s(TWO, grew=False) == EMPTY_TIMEOUT_S
    assert AskChain(peers=(ONE,), members=frozenset(), until_one=True).wait_s(ONE, grew=False) == 0.0


def test_nobody_is_asked_for_certificates_when_the_head_is_of_just_now_unless_somebody_claims_more() -> None:
    here = Here(3, has={ONE: {3}})
    here.catching_up.head_moved(0.0)
    here.come()
    assert AskChain not in here.kinds()
    assert here.kinds()[-1] is LookUp
    here.held = None
    here.catching_up.head_moved(0.0)
    here.catching_up.claimed(TWO, (Term(), 99))
    here.come()
    assert here.kinds()[0] is AskChain


# -- when again ------------------------------------------------------------------------------------------------


def test_an_attempt_that_brought_nothing_is_made_again_after_a_while_and_one_that_did_at_once() -> None:
    here = Here(3)
    here.come()
    assert here.catching_up.due(RETRY_S / 2, in_round=False) is None
    here.now, here.has = RETRY_S, {ONE: {3}}
    here.come()
    assert here.current
    assert here.catching_up.due(here.now, in_round=False) is not None


def test_rounds_that_go_on_meanwhile_are_followed_if_it_took_long() -> None:
    for takes_s, follows in ((0.0, False), (PURSUE_AFTER_S, True)):
        here = Here(3, has={ONE: {3}}, takes_s=takes_s, donors=[TWO])
        more = iter([1])

        def certify(request: Request, here: Here = here, more: Any = more) -> None:
            if isinstance(request, Replay) and next(more, None):
                here.ledger.certify()

        here.meanwhile = certify
        assert here.come().state == At(4)
        assert [request.peers[0] for request in here.every(AskChain) if request.until_one] == [TWO] * follows


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
    assert here.every(AskChain)[-1].until_one
    here = Here(3, has={ONE: {3}}, takes_s=GRACE_S / 8)
    here.come()
    here.ledger.certify()
    here.come()
    assert Broadcast not in here.kinds()


def test_initial_state_is_fetched_from_the_founder_once_at_a_time() -> None:
    here = Here(0, has={ONE: {0}})
    errand = here.catching_up.genesis(ONE, 0.0)
    assert here.catching_up.genesis(ONE, 0.0) is None
    assert here.carry_out(errand) == GenesisFetched(At(0))
    assert here.every(AskHolders)[0].peers == (ONE,)
    assert here.catching_up.genesis(ONE, RETRY_S / 2) is None
    assert here.catching_up.genesis(ONE, RETRY_S) is not None


def test_an_earlier_state_is_of_its_round_or_none() -> None:
    here = Here(5, has={ONE: {3}, TWO: {2}})
    target = Target(3, here.chain.value(3).hash)
    assert here.carry_out(here.catching_up.earlier(target, NO_HASH)) == StateHeld(target, here.chain.digest(3))
    here.has, here.replays_to = {TWO: {2}}, 2
    assert here.carry_out(here.catching_up.earlier(target, NO_HASH)) == StateHeld(target, None)
