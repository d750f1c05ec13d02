"""Waiting outside: enlistments get into the line, the chain calls, and who is counted follows again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shoal.lab.signed import certified, moves_of, propose_of
from shoal.node.state.catchup import ANSWER_LIMIT_BYTES
from shoal.protocol import enlisting, seats
from shoal.protocol.agreement import Agreement, Broadcast
from shoal.protocol.certificate import genesis
from shoal.protocol.chain import ENLISTED_IN_ANSWER_LIMIT, Chain
from shoal.protocol.effects import (
    Blame,
    Contribute,
    FindWork,
    MemberEffect,
    Rejoin,
    ResumeWork,
    Send,
    SettleWork,
    StandOnHead,
    StopReduction,
    TakePart,
    Train,
)
from shoal.protocol.enlisting import (
    BOOK_LIMIT,
    BROUGHT_LIMIT,
    CALLED_LIMIT,
    CALLED_VALUES,
    FRESH_VALUES,
    HELD_ROUNDS,
    PASSED_VALUES,
    RENEWED_VALUES,
    VALID_VALUES,
    Enlistments,
    Outside,
    OutsideLine,
    enlist,
    is_signed,
)
from shoal.protocol.errors import ConfigError, RemoteError
from shoal.protocol.facts import Gathering
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.inputs import HeadMoved, Loaded, Tick, Trained
from shoal.protocol.manifest import Manifest, parse_manifest, render_manifest
from shoal.protocol.member import Standing
from shoal.protocol.messages import ENLISTED_LIMIT, MEMBER_LIMIT, Enlist, Enlisted, Prepare, Value, domain_hash
from shoal.protocol.peering import ChainPart
from shoal.protocol.planning import TRAINING, PlanOrder, absent_ready, make_plan
from shoal.protocol.seats import Seating, longest_wait
from shoal.protocol.voting import Voting
from shoal.protocol.wire import canonical, decode
from tests.manifests import manifest_of
from tests.protocol.lab import SWARM, honest_report, plan_hash, value_of
from tests.protocol.round_node import deal_evenly
from tests.protocol.test_member import SETTINGS, Paper, kinds
from tests.protocol.test_planning import ready

IDENTITIES = [Identity.from_seed(bytes([number]) * 32) for number in range(9)]
IDS = [identity.peer_id for identity in IDENTITIES]
VOTERS, OTHERS = IDS[:3], IDS[3:]
OF = dict(zip(IDS, IDENTITIES, strict=True))
START = genesis(SWARM, VOTERS)


def swarm(founders: Sequence[PeerId] = VOTERS, **membership: object) -> Manifest:
    sections = {
        "sync": {"inner_steps": 1},
        "round": {"staleness_rounds": 40},
        "membership": {"voters": "named", "seats": 2, "waiting": "outside", **membership},
    }
    return manifest_of(list(founders), sections, admission="open")


def result(
    previous: Value, members: Sequence[PeerId], counted: Sequence[PeerId], enlisted: Sequence[Enlisted] = ()
) -> Value:
    value = value_of(
        previous, plan_hash(f"{previous.next_round}"), VOTERS[0], tuple(sorted(members)), signing=IDENTITIES
    )
    wishes = tuple(sorted(enlisted, key=lambda one: one.peer)) or msgspec.UNSET
    return msgspec.structs.replace(value, counted=tuple(sorted(counted)), enlisted=wishes)


class Rounds:
    """A chain of a swarm where who has no seat waits outside."""

    def __init__(self) -> None:
        self.chain = Chain(START, manifest=swarm())

    def decide(self, counted: Sequence[PeerId], enlisted: Sequence[PeerId] = (), also: Sequence[PeerId] = ()) -> None:
        """A round counts these and takes these into the line; `also` are members beside the voters and the counted."""
        head = self.chain.head
        value = result(head, {*VOTERS, *counted, *also}, counted, [enlist(OF[peer], head) for peer in enlisted])
        self.chain.extend(certified(value, *(OF[peer] for peer in VOTERS)))

    @property
    def called(self) -> set[PeerId]:
        assert self.chain.admitted is not None
        return set(self.chain.admitted) - set(VOTERS)


# -- the line ------------------------------------------------------------------------------------------------


def test_who_enlists_stands_in_the_line_behind_all_and_is_called_and_out_of_it_once_counted() -> None:
    rounds = Rounds()
    assert rounds.chain.admitted == set(VOTERS)
    a, b, c = OTHERS[:3]
    rounds.decide(VOTERS[:2], enlisted=[a])
    assert rounds.called == {a}
    assert rounds.chain.line[0] == VOTERS[2], "nobody counted it yet"
    assert set(rounds.chain.line[1:]) == {*VOTERS[:2], a}
    rounds.decide([VOTERS[2]], enlisted=[b, c], also=[a])
    assert rounds.chain.line.index(a) < min(rounds.chain.line.index(peer) for peer in (b, c))
    rounds.decide([a, VOTERS[0]])
    assert a not in rounds.chain.line
    assert a not in rounds.called
    assert a in rounds.chain.head.members, "it reported, and takes part no more all the same"


def test_no_more_are_called_than_come_to_the_seats_of_two_rounds_and_the_others_when_these_were_counted() -> None:
    rounds = Rounds()
    rounds.decide(VOTERS[:2], enlisted=OTHERS)
    first = rounds.called
    assert len(first) == 2 * 2, "by voters of whom nothing was counted yet no place is taken"
    rounds.decide(sorted(first)[:2], also=sorted(first))
    assert rounds.called >= set(sorted(first)[2:])
    rounds.decide(sorted(first)[2:], also=sorted(first))
    assert rounds.called == set(OTHERS) - first


def test_who_is_called_and_does_not_come_is_out_of_the_line_and_keeps_nobody_out_meanwhile() -> None:
    rounds = Rounds()
    gone, there = OTHERS[:4], OTHERS[4:]
    rounds.decide(VOTERS[:2], enlisted=gone)
    rounds.decide(VOTERS[1:], enlisted=there)
    assert rounds.called == {*gone, *there}
    for _ in range(CALLED_VALUES - 2):
        rounds.decide(VOTERS[:1], also=there)
    assert set(gone) < rounds.called
    rounds.decide(VOTERS[:1], also=there)
    assert rounds.called == set(there)
    assert not set(gone) & set(rounds.chain.line)
    rounds.decide(VOTERS[:1], enlisted=gone[:1], also=there)
    assert gone[0] in rounds.chain.line, "it may enlist anew"


def test_who_is_near_signs_again_keeps_its_place_and_is_called_and_who_does_not_is_out_of_the_line() -> None:
    rounds = Rounds()
    others = sorted(OTHERS)
    rounds.decide(VOTERS[:2], enlisted=others)
    waiting = set(others) - rounds.called
    lives, gone = sorted(waiting)
    assert not rounds.chain.may_enlist(lives, rounds.chain.head.hash), "it has just signed"
    there = sorted(rounds.called)
    while rounds.chain.height < RENEWED_VALUES - 1:
        rounds.decide(VOTERS[:2], also=there)
    early = rounds.chain.head
    assert not rounds.chain.may_enlist(lives, early.hash)
    rounds.decide(VOTERS[:1], also=there)
    assert rounds.chain.may_enlist(lives, rounds.chain.head.hash)
    assert not rounds.chain.may_enlist(lives, early.hash), "a new enlistment stands on a newer value"
    assert not rounds.chain.may_enlist(there[0], rounds.chain.head.hash), "it is called"
    rounds.decide(VOTERS[:1], enlisted=[lives], also=there)
    assert rounds.chain.line.index(lives) < rounds.chain.line.index(VOTERS[1]), "it waits since before that was counted"
    assert PASSED_VALUES < FRESH_VALUES
    while rounds.chain.height < FRESH_VALUES:
        rounds.decide(VOTERS[:1], also=there)
    assert gone in rounds.chain.line
    rounds.decide(VOTERS[:1], also=there)
    assert gone not in rounds.chain.line
    assert lives in rounds.chain.line
    back = rounds.chain.head
    rounds.decide(VOTERS[:1], enlisted=[gone], also=there)
    assert rounds.chain.line.index(gone) < rounds.chain.line.index(VOTERS[1]), "it lives, and stands where it stood"
    assert not rounds.chain.may_enlist(gone, back.hash)
    rounds.decide(there[:2], also=there)
    assert lives in rounds.called


def test_the_dead_in_the_line_leave_few_seats_empty() -> None:
    rng = random.Random(1)
    voters = [PeerId(f"voter{number:047d}") for number in range(4)]
    line, seats, born, alive, filled = OutsideLine(voters, 40), 40, 0, set[PeerId](), list[int]()
    head = msgspec.structs.replace(genesis(SWARM, voters), members=tuple(voters))
    line.follow(head, 0, voters)
    for height in range(1, 60):
        alive -= {peer for peer in sorted(alive) if rng.random() < 0.1}
        while len(alive) < 900:
            alive.add(PeerId(f"{born:052d}"))
            born += 1
        here = [*voters, *sorted(line.called & alive)]
        counted = Seating(seats, line.after(head)).first(here)
        filled.append(len(counted))
        asking = sorted(peer for peer in alive if line.may_enlist(peer, height - 1))
        signed = dict.fromkeys(asking[:ENLISTED_LIMIT], height - 1)
        head = msgspec.structs.replace(head, members=tuple(here), counted=tuple(sorted(counted)))
        line.follow(head, height, voters, signed)
    assert sum(filled[10:]) >= 0.87 * seats * len(filled[10:]), filled


def test_rebase_and_snapshot_keep_the_line() -> None:
    rounds = Rounds()
    rounds.decide(VOTERS[:2], enlisted=OTHERS[:1])
    before = rounds.chain.snapshot()
    rounds.decide([OTHERS[0], VOTERS[0]])
    assert before.admitted == {*VOTERS, OTHERS[0]}
    assert rounds.chain.up_to(1).admitted == before.admitted


@pytest.mark.parametrize("seats", [2, 5])
def test_whoever_lives_is_counted_within_the_bound_whoever_else_enlists_and_dies(seats: int) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        peers = [PeerId(f"{number:052d}") for number in range(40)]
        voters, others = peers[:4], peers[4:]
        head = msgspec.structs.replace(genesis(SWARM, voters), members=tuple(voters))
        line, since, longest = OutsideLine(voters, seats), dict.fromkeys(others[:0], 0), 0
        dead: set[PeerId] = set()
        line.follow(head, 0, voters)
        for height in range(1, 80):
            dead |= {peer for peer in others if rng.random() < 0.02}
            new = [
                peer
                for peer in others
                if line.may_enlist(peer, height - 1) and (peer not in dead or rng.random() < 0.1)
            ]
            here = [*voters, *sorted(line.called - dead)]
            ready = [peer for peer in here if peer in line.called or rng.random() < 0.8]
            counted = Seating(seats, line.after(head)).first(ready)
            longest = max(longest, len(line.after(head)))
            since = dict.fromkeys(new, height) | since
            for peer in set(since) - dead:
                assert height - since[peer] <= longest_wait(longest, seats), (seed, height)
            since = {peer: at for peer, at in since.items() if peer not in counted}
            wishes = tuple(Enlisted(peer, bytes(32), bytes(64)) for peer in sorted(new)[:ENLISTED_LIMIT])
            head = msgspec.structs.replace(
                head,
                round=height,
                base=head.hash,
                members=tuple(sorted(here)),
                counted=tuple(sorted(counted)) or msgspec.UNSET,
                enlisted=wishes or msgspec.UNSET,
            )
            line.follow(head, height, voters, {one.peer: height - 1 for one in wishes})
            assert len(line.called) <= CALLED_LIMIT - len(voters)
            assert not set(since) - dead - set(line.after(head)), "who lives is in the line until it is counted"


# -- values --------------------------------------------------------------------------------------------------


def wish(peer: PeerId, head: Value = START, *, by: PeerId | None = None) -> Enlisted:
    return msgspec.structs.replace(enlist(OF[by or peer], head), peer=peer)


@pytest.mark.parametrize(
    "wishes",
    [
        (wish(OTHERS[0], by=OTHERS[1]),),
        (wish(VOTERS[0]),),
        (wish(OTHERS[0]), wish(OTHERS[0])),
        tuple(sorted((wish(OTHERS[0]), wish(OTHERS[1])), key=lambda one: one.peer, reverse=True)),
        (wish(OTHERS[0], msgspec.structs.replace(START, round=9)),),
    ],
    ids=["another's key", "a voter", "twice", "out of order", "on another chain"],
)
def test_value_takes_nobody_into_the_line_who_may_not_be_there(wishes: tuple[Enlisted, ...]) -> None:
    chain = Chain(START, manifest=swarm())
    value = msgspec.structs.replace(result(START, VOTERS, VOTERS[:2]), enlisted=wishes)
    with pytest.raises(RemoteError, match=r"into the line|out of place"):
        chain.extend(certified(value, *(OF[peer] for peer in VOTERS)))
    assert chain.height == 0


def test_enlistment_is_good_once_and_for_some_values_only() -> None:
    rounds = Rounds()
    old = rounds.chain.head
    rounds.decide(VOTERS[:2], enlisted=OTHERS[:1])
    assert not rounds.chain.may_enlist(OTHERS[0], rounds.chain.head.hash), "it stands in the line"
    rounds.decide([OTHERS[0]])
    assert not rounds.chain.may_enlist(OTHERS[0], old.hash), "told again"
    assert rounds.chain.may_enlist(OTHERS[0], rounds.chain.head.hash)
    signed_on = rounds.chain.head
    for _ in range(VALID_VALUES - 1):
        rounds.decide(VOTERS[:1])
    assert rounds.chain.may_enlist(OTHERS[1], signed_on.hash)
    rounds.decide(VOTERS[:1])
    assert not rounds.chain.may_enlist(OTHERS[1], signed_on.hash)


def test_line_has_so_many_places_and_who_stood_in_it_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds()
    monkeypatch.setattr(enlisting, "LINE_LIMIT", len(VOTERS) + 2)
    rounds.decide(VOTERS[:2], enlisted=OTHERS[:2])
    head = rounds.chain.head
    assert not rounds.chain.may_enlist(OTHERS[2], head.hash)
    with pytest.raises(RemoteError, match="into the line"):
        rounds.decide(VOTERS[:2], enlisted=[OTHERS[2]])
    rounds.decide(OTHERS[:1])
    assert rounds.chain.may_enlist(OTHERS[2], head.hash), "one was counted, and left its place"
    line = OutsideLine(VOTERS, 2)
    line._stood = {OTHERS[0]: 1, OTHERS[1]: 1}
    assert line.may_enlist(OTHERS[1], 3)
    assert not line.may_enlist(OTHERS[2], 3)


def test_line_is_put_in_order_once_for_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    placed, rounds = list[bytes](), Rounds()

    def noted(domain: str, *parts: bytes) -> bytes:
        placed.append(parts[-1])
        return domain_hash(domain, *parts)

    monkeypatch.setattr(seats, "domain_hash", noted)
    for counted, enlisted in ((VOTERS[:2], OTHERS[:3]), (VOTERS[1:], OTHERS[3:])):
        placed.clear()
        rounds.decide(counted, enlisted=enlisted)
        line = rounds.chain.line
        assert sorted(placed) == sorted(peer.encode() for peer in line)
        assert rounds.chain.line == line
        assert len(placed) == len(line) > len(VOTERS)


def test_swarm_whose_members_wait_inside_takes_no_enlistment() -> None:
    chain = Chain(START, manifest=swarm(waiting="inside"))
    assert chain.admitted is None
    value = result(START, VOTERS, VOTERS[:2], [wish(OTHERS[0])])
    with pytest.raises(RemoteError, match="into the line"):
        chain.extend(certified(value, *(OF[peer] for peer in VOTERS)))


# -- what a node holds ---------------------------------------------------------------------------------------


def test_of_enlistments_those_held_longest_come_first_and_no_more_than_a_value_takes() -> None:
    book, peers = Enlistments(), [PeerId(f"{number:052d}") for number in range(ENLISTED_LIMIT + 9)]
    for height, peer in enumerate(reversed(peers)):
        assert book.take(Enlisted(peer, bytes(32), bytes(64)), height, lambda peer, since: True)
    assert not book.take(Enlisted(peers[3], bytes(32), bytes(64)), 99, lambda peer, since: True), "no news"
    assert [one.peer for one in book.due(lambda peer, since: True)] == peers[9:]
    assert [one.peer for one in book.due(lambda peer, since: peer < peers[2])] == peers[:2]


def test_a_node_holds_so_many_enlistments_and_forgets_those_that_are_in_the_line() -> None:
    book, in_line = Enlistments(), set[PeerId]()

    def take(number: int) -> bool:
        return book.take(
            Enlisted(PeerId(f"{number:052d}"), bytes(32), bytes(64)), 1, lambda peer, since: peer not in in_line
        )

    assert all(take(number) for number in range(BOOK_LIMIT))
    assert not take(BOOK_LIMIT)
    in_line.add(PeerId(f"{7:052d}"))
    assert take(BOOK_LIMIT)
    assert len(book) == BOOK_LIMIT


def outside(book: Enlistments, height: int = HELD_ROUNDS) -> Outside:
    return Outside(
        admitted=frozenset({*VOTERS, OTHERS[0]}),
        height=height,
        may_enlist=lambda peer, since: True,
        book=book,
        may_join=lambda peer: True,
    )


@pytest.mark.parametrize(
    ("held_at", "named", "view", "signs"),
    [(0, False, 0, False), (1, False, 0, True), (0, True, 0, True), (0, False, 1, False), (0, False, 2, True)],
    ids=["forgotten", "just heard", "in the value", "in the next view", "beyond what a minority leads"],
)
def test_voter_refuses_a_value_that_forgets_whom_it_has_held_for_two_rounds(
    held_at: int, named: bool, view: int, signs: bool
) -> None:
    book = Enlistments()
    one = wish(OTHERS[1])
    assert is_signed(one)
    book.take(one, held_at, lambda peer, since: True)
    voting = Voting(named=tuple(sorted(VOTERS)))
    voter = Agreement(identity=OF[sorted(VOTERS)[0]], previous=START, voting=voting, seats=2, outside=outside(book))
    value = result(START, VOTERS, VOTERS[:2], [one] if named else ())
    lead = voter.lead(view)
    value = msgspec.structs.replace(value, planner=lead)
    voter.computed(honest_report(START, value.plan), VOTERS, VOTERS[:2])
    moves = moves_of([OF[peer] for peer in VOTERS], START, view) if view else msgspec.UNSET
    effects = voter.receive(lead, propose_of(OF[lead], view, value, moves))
    signed = [e for e in effects if isinstance(e, Broadcast) and isinstance(e.message, Prepare)]
    assert bool(signed) == signs
    assert voter.refuses != signs


def test_wish_of_one_who_is_admitted_no_more_is_neither_named_nor_missed() -> None:
    """Else each value would be refused, with it and without."""
    book = Enlistments()
    book.take(wish(OTHERS[1]), 0, lambda peer, since: True)
    waiting, value = outside(book), result(START, VOTERS, VOTERS[:2], ())
    assert (waiting.due(), waiting.forgotten(value)) == ((wish(OTHERS[1]),), {OTHERS[1]})
    revoked = replace(waiting, may_join=lambda peer: peer != OTHERS[1])
    assert (revoked.due(), revoked.forgotten(value)) == (msgspec.UNSET, frozenset())


@pytest.mark.parametrize(("admitted", "view", "signs"), [(True, 0, True), (False, 0, False), (False, 2, True)])
def test_voter_refuses_a_value_with_the_wish_of_one_whom_the_swarm_does_not_admit(
    admitted: bool, view: int, signs: bool
) -> None:
    """Else one lying lead fills the line with keys that it made up; but others may have heard of an invite before."""
    voter = Agreement(
        identity=OF[sorted(VOTERS)[0]],
        previous=START,
        voting=Voting(named=tuple(sorted(VOTERS))),
        seats=2,
        outside=outside(Enlistments()),
        may_join=lambda peer: admitted or peer in VOTERS,
    )
    lead = voter.lead(view)
    value = msgspec.structs.replace(result(START, VOTERS, VOTERS[:2], [wish(OTHERS[1])]), planner=lead)
    voter.computed(honest_report(START, value.plan), VOTERS, VOTERS[:2])
    moves = moves_of([OF[peer] for peer in VOTERS], START, view) if view else msgspec.UNSET
    effects = voter.receive(lead, propose_of(OF[lead], view, value, moves))
    signed = [e for e in effects if isinstance(e, Broadcast) and isinstance(e.message, Prepare)]
    assert (bool(signed), voter.refuses) == (signs, not signs)


@pytest.mark.parametrize(
    ("left_out_at", "others_at", "forgotten"),
    [(5, 6, False), (5, 7, True), (7, 5, False), (5, None, True), (8, None, False)],
    ids=["about as long", "two rounds longer", "for less long", "of whom this node never heard", "just heard itself"],
)
def test_full_value_is_refused_if_it_has_newer_wishes_in_place_of_an_older_one(
    left_out_at: int, others_at: int | None, forgotten: bool
) -> None:
    book, others = (
        Enlistments(),
        [enlist(Identity.from_seed((100 + n).to_bytes(32, "little")), START) for n in range(ENLISTED_LIMIT)],
    )
    old = wish(OTHERS[1])
    book.take(old, left_out_at, lambda peer, since: True)
    for n, one in enumerate(others):
        if n or others_at is not None:
            book.take(one, left_out_at if others_at is None else others_at, lambda peer, since: True)
    full = result(START, VOTERS, VOTERS[:2], others)
    assert (old.peer in book.forgotten(full, 9, lambda peer, since: True)) == forgotten
    assert not book.forgotten(full, 9, lambda peer, since: peer != old.peer)


def test_answer_about_the_chain_ends_before_its_enlistments_are_more_than_a_message_holds() -> None:
    chain = Chain(START, manifest=swarm())
    whole, left = divmod(ENLISTED_IN_ANSWER_LIMIT, ENLISTED_LIMIT)
    for height in range(whole + 2):
        head = chain.head
        keys = (
            Identity.from_seed((ENLISTED_LIMIT * height + n + 10).to_bytes(32, "big")) for n in range(ENLISTED_LIMIT)
        )
        value = result(head, VOTERS, VOTERS[:2], [enlist(key, head) for key in keys])
        chain.extend(certified(value, *(OF[peer] for peer in VOTERS)))
    parts = [decode(canonical(chain.part(after)), ChainPart, limit_bytes=ANSWER_LIMIT_BYTES) for after in (0, whole)]
    assert [(len(part.certificates), part.head, left) for part in parts] == [(whole, whole + 2, 0), (2, whole + 2, 0)]
    assert sum((part.certificates for part in parts), ()) == chain.after(0, chain.height)


def test_who_waits_outside_is_not_heard_in_a_round() -> None:
    gathering = Gathering(
        members=VOTERS, voters=VOTERS, returners=VOTERS, state=START.digest, admitted=frozenset(IDS[:4])
    )
    for peer in IDS[:5]:
        gathering.receive(peer, absent_ready(TRAINING, START, START.digest))
    assert set(gathering) == set(IDS[:4])


# -- a member ------------------------------------------------------------------------------------------------


def member(rounds: Rounds, peer: PeerId, *linked: PeerId, **options: Any) -> Paper:
    """A member that trains, on a chain of these rounds."""
    return Paper(SimpleNamespace(chain=rounds.chain), OF[peer], peers=frozenset(linked), **options)  # type: ignore[arg-type]


def told(asked: list[MemberEffect]) -> list[tuple[PeerId, PeerId]]:
    """Who is sent whose enlistment."""
    sent = [effect for effect in asked if isinstance(effect, Send) and isinstance(effect.message, Enlist)]
    return [(effect.peer, effect.message.wish.peer) for effect in sent if isinstance(effect.message, Enlist)]


def test_who_trains_outside_follows_trains_and_enlists_through_two_that_it_is_linked_with_until_it_is_in_line() -> None:
    rounds = Rounds()
    rounds.decide(VOTERS[:2])
    me, other, parent = OTHERS[:3]
    here = member(rounds, me, other, parent, VOTERS[0])
    asked = here.feed(Loaded())
    assert kinds(asked)[:4] == [FindWork, ResumeWork, StandOnHead, Train]
    assert (here.member.standing, here.member.phase) == (Standing.OUTSIDE, "following")
    assert told(asked) == [(VOTERS[0], me), (min(other, parent), me)]
    wish = next(e.message.wish for e in asked if isinstance(e, Send) and isinstance(e.message, Enlist))
    assert is_signed(wish)
    assert told(here.feed(Tick())) == [], "not twice at one head"
    learnt = here.feed(Trained(2, "work"))
    assert [effect.alone for effect in learnt if isinstance(effect, Contribute)] == [False]
    rounds.decide(VOTERS[:2])
    asked = here.feed(HeadMoved())
    assert kinds(asked)[:5] == [StopReduction, SettleWork, Rejoin, StandOnHead, Train]
    assert len(told(asked)) == 2, "it may have been lost"
    assert not [effect for effect in here.asked if isinstance(effect, Broadcast | TakePart)]
    rounds.decide(VOTERS[:2], enlisted=[me])
    assert told(here.feed(HeadMoved())) == [], "it is in the line"


def test_who_is_called_takes_part_with_what_it_learnt_and_follows_again_once_it_was_counted() -> None:
    rounds = Rounds()
    me = OTHERS[0]
    here = member(rounds, me, *VOTERS)
    here.feed(Loaded())
    rounds.decide(VOTERS[:2], enlisted=[me])
    asked = here.feed(HeadMoved())
    assert [effect.role for effect in asked if isinstance(effect, TakePart)] == [TRAINING]
    assert here.member.standing is Standing.IN_ROUND
    rounds.decide([me, VOTERS[2]])
    asked = here.feed(HeadMoved())
    assert here.member.standing is Standing.OUTSIDE
    assert not [effect for effect in asked if isinstance(effect, TakePart)]
    assert told(asked), "it enlists anew"


def test_enlistment_of_another_is_passed_on_once_and_not_back_and_a_forged_one_is_blamed_on_who_tells_it() -> None:
    rounds = Rounds()
    me, other, child, far = OTHERS[:4]
    here = member(rounds, me, other, child, VOTERS[0], follows=True, is_follower=True)
    here.feed(Loaded())
    real = Enlist(wish=wish(far))
    assert told(here.hear(VOTERS[0], real)) == [(min(other, child), far)]
    assert told(here.hear(child, real)) == [], "no news"
    asked = here.hear(child, Enlist(wish=wish(other, by=far)))
    assert [effect.peer for effect in asked if isinstance(effect, Blame)] == [child]
    assert told(asked) == []
    assert len(here.member.enlistments) == 1


def test_voter_passes_enlistments_on_to_voters_alone_and_hears_of_nobody_whom_the_swarm_does_not_admit() -> None:
    rounds = Rounds()
    here = member(rounds, VOTERS[0], *VOTERS[1:], *OTHERS)
    here.digest = START.digest
    here.feed(Loaded())
    assert here.member.standing is Standing.IN_ROUND
    assert set(told(here.hear(OTHERS[0], Enlist(wish=wish(OTHERS[1]))))) == {(peer, OTHERS[1]) for peer in VOTERS[1:]}
    here.may_join = lambda peer: False  # type: ignore[method-assign]
    assert told(here.hear(OTHERS[0], Enlist(wish=wish(OTHERS[2])))) == []


def test_who_brings_enlistments_of_many_keys_fills_a_small_part_of_the_book_and_none_of_a_voters() -> None:
    rounds, book = Rounds(), Enlistments()
    height, may_enlist = rounds.chain.height, rounds.chain.may_enlist
    many = [Enlisted(PeerId(f"made up {number}"), START.hash, bytes(64)) for number in range(BROUGHT_LIMIT + 2)]
    liar, honest = OTHERS[:2]
    taken = [book.take(one, height, may_enlist, by=liar) for one in many]
    assert taken == [True] * BROUGHT_LIMIT + [False] * 2
    assert book.take(many[-1], height, may_enlist, by=honest)
    assert book.take(many[-2], height, may_enlist), "a voter brings it"
    rounds.decide(VOTERS[:2])
    later = [enlist(OF[peer], rounds.chain.head) for peer in OTHERS[2:4]]
    assert not book.take(later[0], rounds.chain.height, may_enlist, by=liar)
    for _ in range(VALID_VALUES):
        rounds.decide(VOTERS[:2])
    newest = enlist(OF[OTHERS[2]], rounds.chain.head)
    assert book.take(newest, rounds.chain.height, may_enlist, by=liar), "those before are too old"


def test_plan_with_somebody_who_waits_outside_is_blamed_on_its_lead() -> None:
    rounds = Rounds()
    here = member(rounds, VOTERS[0], *VOTERS[1:])
    here.digest = START.digest
    here.feed(Loaded())
    machine = here.member.machine
    assert machine is not None
    lead = machine.agreement.lead(1)

    def plan_with(*peers: PeerId) -> list[MemberEffect]:
        readies = {peer: msgspec.structs.replace(ready(peer), base=START.hash, state=START.digest) for peer in peers}
        order = PlanOrder(view=1, attempt=0, planner=lead, evicted=())
        plan = make_plan(START, order, readies, weightless=(), settings=replace(SETTINGS, seats=2), deal=deal_evenly)
        moves = moves_of([OF[peer] for peer in VOTERS], START, 1)
        return here.hear(lead, msgspec.structs.replace(plan, moves=moves))

    blamed = [effect.text for effect in plan_with(*VOTERS[1:], OTHERS[0]) if isinstance(effect, Blame)]
    assert blamed == [f"round 1: a plan with somebody who waits outside (from {lead})"]
    assert [effect for effect in plan_with(*VOTERS[1:]) if isinstance(effect, Blame)] == []


# -- the manifest --------------------------------------------------------------------------------------------


def test_who_waits_outside_is_said_by_the_manifest_and_left_out_where_nobody_does() -> None:
    manifest = swarm()
    assert manifest.waits_outside
    assert parse_manifest(render_manifest(manifest)).swarm_id == manifest.swarm_id
    assert b"waiting" not in swarm(waiting="inside").to_canonical()
    assert b"waiting" in manifest.to_canonical()


@pytest.mark.parametrize(
    ("membership", "says"),
    [
        ({"voters": "contributors"}, 'goes with voters = "named" and few seats'),
        ({"seats": MEMBER_LIMIT}, 'goes with voters = "named" and few seats'),
        ({"seats": MEMBER_LIMIT - 2}, "are more than the 64 that take part"),
    ],
)
def test_manifest_where_nobody_could_be_called_is_refused(membership: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        swarm(**membership)
