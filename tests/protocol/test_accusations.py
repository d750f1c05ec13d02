"""Accusations: who is believed, who is in dispute with whom, and what relays say of it."""

from __future__ import annotations

import msgspec
import pytest

from shoal.protocol.accusations import EARLY_WAYS_LIMIT, ON_ITS_WAY_S, WORDS_LIMIT, Accusations
from shoal.protocol.excuses import EXCUSED_S, SETTLED_S
from shoal.protocol.messages import (
    NO_HASH,
    OwnedRange,
    Participant,
    Plan,
    Relay,
    Relayed,
    RelayedWay,
    Stalled,
    Term,
    domain_hash,
)
from tests.protocol.lab import paper_identities
from tests.round_messages import plan_with

PEERS = [identity.peer_id for identity in paper_identities(10)]
ALIVE = frozenset(PEERS[:6])

LEFT_AT = 10.0

Said = dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
"""Per accuser: whom it accuses directly, and of late finals."""


def plan_of(count: int, *, evicted: tuple[int, ...] = (), relays: tuple[Relay, ...] = ()) -> Plan:
    return plan_with(
        (Participant(peer, 1, 1, NO_HASH) for peer in PEERS[:count]),
        owners=(OwnedRange(0, 0, 1),),
        evicted=tuple(PEERS[n] for n in evicted),
        origin=bytes(range(32)) if evicted else NO_HASH,
        relays=relays,
    )


def stalled(plan: Plan, peers: tuple[int, ...], late: tuple[int, ...] = ()) -> Stalled:
    return Stalled(
        term=Term(),
        round=1,
        base=NO_HASH,
        plan=plan.hash,
        peers=tuple(PEERS[n] for n in peers),
        late=tuple(PEERS[n] for n in late),
    )


def heard(plan: Plan, said: Said) -> Accusations:
    accusations = Accusations()
    for accuser, (peers, late) in said.items():
        accusations.take(PEERS[accuser], stalled(plan, peers, late))
    return accusations


def numbers(peers: set[str]) -> set[int]:
    return {PEERS.index(peer) for peer in peers}  # type: ignore[arg-type]


def pair(one: int, other: int) -> tuple[str, str]:
    return PEERS[one], PEERS[other]


# -- who is believed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "said", "believed"),
    [
        (4, {}, set()),
        (4, {1: ((3,), ())}, set()),  # a lone accuser
        (4, {1: ((3,), ()), 2: ((3,), ())}, {3}),
        (4, {1: ((3,), ()), 2: ((0,), ())}, set()),
        (4, {1: ((3, 0), ()), 2: ((3, 0), ())}, {0, 3}),
        (4, {1: ((3,), ()), 3: ((3,), ())}, set()),  # nobody accuses himself
        (2, {0: ((1,), ())}, {1}),  # the only other one
        (2, {0: ((1,), ()), 1: ((0,), ())}, {0, 1}),
        (4, {1: ((), (3,)), 2: ((), (3,))}, {3}),  # late finals, if there is no direct word at all
        (4, {1: ((), (3,))}, set()),
        (2, {0: ((), (1,))}, {1}),
        (4, {0: ((), (3,)), 1: ((), (3,)), 3: ((2,), ())}, set()),  # the late owner waits for 2
        (4, {0: ((), (3,)), 1: ((2,), (3,)), 3: ((2,), ())}, {2}),
        (4, {1: ((3,), ()), 2: ((), (3,))}, set()),  # a direct word and a late final do not add up
    ],
)
def test_two_are_believed_or_the_only_other_one(count: int, said: Said, believed: set[int]) -> None:
    plan = plan_of(count)
    assert numbers(set(heard(plan, said).believed(plan, ALIVE))) == believed


@pytest.mark.parametrize(
    ("said", "suspected", "believed", "disputes"),
    [
        ({1: ((), (3,)), 2: ((), (3,))}, (), {3}, set()),
        ({1: ((), (3,)), 2: ((), (3,)), 3: ((), (3,))}, (), set(), set()),  # 3 waits for what does come
        ({1: ((), (3,)), 3: ((), (3,))}, (), set(), set()),  # no other path would help it
        ({1: ((), (2, 3)), 2: ((), ()), 3: ((), (3,))}, (), set(), {pair(1, 2)}),
        ({1: ((), (3,)), 2: ((), (3,)), 3: ((), (3,))}, (3,), {3}, set()),  # it said so, and is silent since
        ({1: ((3,), ()), 2: ((3,), ()), 3: ((), (3,))}, (), {3}, set()),  # that it waits excuses late finals only
    ],
)
def test_owner_that_waits_for_what_does_come_is_not_blamed(
    said: Said, suspected: tuple[int, ...], believed: set[int], disputes: set[tuple[str, str]]
) -> None:
    plan = plan_of(4)
    accusations = heard(plan, said)
    assert numbers(set(accusations.believed(plan, ALIVE, {PEERS[n] for n in suspected}))) == believed
    if not suspected:
        assert accusations.disputes(plan, ALIVE) == disputes


def test_words_of_the_dead_the_evicted_and_strangers_are_not_heard() -> None:
    plan = plan_of(5, evicted=(4,))
    for silent in ({1: ((3,), ()), 4: ((3,), ())}, {1: ((3,), ()), 5: ((3,), ())}):
        assert heard(plan, silent).believed(plan, ALIVE) == set()
    both: Said = {1: ((3,), ()), 2: ((3,), ())}
    assert heard(plan, both).believed(plan, ALIVE) == {PEERS[3]}
    assert heard(plan, both).believed(plan, ALIVE - {PEERS[2]}) == set()
    assert heard(plan, both).believed(plan, ALIVE - {PEERS[3]}) == set()  # it is dead already


def test_where_two_of_many_are_left_one_accuser_is_enough() -> None:
    plan = plan_of(4, evicted=(3,))
    assert heard(plan, {1: ((2,), ())}).believed(plan, ALIVE) == set()
    assert heard(plan, {1: ((2,), ())}).believed(plan, ALIVE - {PEERS[0]}) == {PEERS[2]}


@pytest.mark.parametrize(
    ("said", "suspected", "believed"),
    [
        ({1: ((3,), ())}, {3}, {3}),  # the detector, which asked others too, is the second
        ({1: ((3,), ())}, {2}, set()),
        ({1: ((3,), ()), 2: ((0,), ())}, {3}, {3}),
        ({1: ((), (3,))}, {3}, {3}),
        ({1: ((), (3,)), 3: ((2,), ())}, {3}, set()),  # it waits itself, whatever the detector says
        ({3: ((3,), ())}, {3}, set()),
        ({}, {3}, set()),  # suspicion alone is no accusation
    ],
)
def test_suspicion_of_the_detector_stands_for_a_second_accuser(
    said: Said, suspected: set[int], believed: set[int]
) -> None:
    plan = plan_of(4)
    found = heard(plan, said).believed(plan, ALIVE, {PEERS[n] for n in suspected})
    assert numbers(set(found)) == believed


def test_newest_word_of_each_stands_and_is_about_one_plan() -> None:
    plan, other = plan_of(4), plan_of(5)
    accusations = heard(plan, {1: ((3,), ()), 2: ((3,), ())})
    assert accusations.believed(other, ALIVE) == set()
    accusations.take(PEERS[2], stalled(plan, ()))
    assert accusations.believed(plan, ALIVE) == set()
    accusations.take(PEERS[2], stalled(plan, (3,)))
    assert accusations.believed(plan, ALIVE) == {PEERS[3]}


def test_nobody_fills_memory_with_plans_that_do_not_exist() -> None:
    plan = plan_of(4)
    accusations = heard(plan, {1: ((3,), ())})
    for number in range(3 * WORDS_LIMIT):
        invented = domain_hash("invented", number.to_bytes(4, "little"))
        accusations.take(PEERS[2], msgspec.structs.replace(stalled(plan, (3,)), plan=invented))
    assert accusations.believed(plan, ALIVE) == set()
    assert len(accusations._said) == WORDS_LIMIT + 1
    accusations.take(PEERS[2], stalled(plan, (3,)))  # it is that peer's own oldest words that make room
    assert accusations.believed(plan, ALIVE) == {PEERS[3]}
    assert len(accusations._said) == WORDS_LIMIT


def test_of_the_plan_that_is_followed_who_takes_no_part_in_it_accuses_nobody() -> None:
    plan = plan_of(4, evicted=(2,))
    accusations = Accusations()
    for accuser in (2, 5):
        accusations.take(PEERS[accuser], stalled(plan, (3,)), plan)
    assert accusations._said == {}
    accusations.take(PEERS[1], stalled(plan, (3,)), plan)
    accusations.take(PEERS[5], stalled(plan_of(5), (3,)), plan)  # that one may be about to come
    assert {one: set(row) for one, row in accusations._said.items()} == {
        plan.hash: {PEERS[1]},
        plan_of(5).hash: {PEERS[5]},
    }


@pytest.mark.parametrize(
    ("count", "said", "believed"),
    [
        (4, {1: ((3,), ()), 2: ((3,), ()), 3: ((1,), ())}, set()),  # 1 and 3 are cut off, and 2 lies
        (4, {1: ((3,), ()), 2: ((3,), ()), 3: ((1, 2), ())}, set()),  # nor if 3 names both: another path tells
        (4, {0: ((3,), ()), 1: ((3,), ()), 2: ((3,), ()), 3: ((0, 1, 2), ())}, {3}),  # all the others are cut off
        (6, {1: ((3,), ()), 2: ((3,), ()), 3: ((1, 2), ())}, set()),
        (
            6,
            {0: ((3,), ()), 1: ((3,), ()), 2: ((3,), ()), 3: ((0, 1, 2), ())},
            {3},
        ),  # 3 is the end of three
        (4, {0: ((3,), ()), 1: ((3,), ()), 2: ((3,), ()), 3: ((1,), ())}, {3}),
        (4, {1: ((3,), ()), 3: ((1,), ())}, set()),
        # Who is believed to be at fault itself is no second voice: 3 goes, and 2 has 1 against it alone.
        (5, {1: ((2, 3), ()), 2: ((1, 3), ()), 3: ((0, 1, 2, 4), ()), 4: ((3,), ())}, {3}),
    ],
)
def test_broken_link_and_a_liar_are_not_two_voices(count: int, said: Said, believed: set[int]) -> None:
    plan = plan_of(count)
    assert numbers(set(heard(plan, said).believed(plan, ALIVE))) == believed


@pytest.mark.parametrize(
    ("relay", "said", "believed"),
    [
        (Relay(1, 3, 2), {1: ((3,), ()), 2: ((3,), ())}, set()),  # 2 is in both: it may be 2 that drops what it passes
        (Relay(1, 3, 0), {1: ((3,), ()), 2: ((3,), ())}, {3}),
        (Relay(1, 3, 2), {1: ((3,), ()), 0: ((3,), ())}, {3}),
    ],
)
def test_relay_and_who_is_relayed_by_it_are_one_voice(relay: Relay, said: Said, believed: set[int]) -> None:
    plan = plan_of(4, relays=(relay,))
    assert numbers(set(heard(plan, said).believed(plan, ALIVE))) == believed


def test_overdue_excuses_nobody_and_believes_no_lone_accuser() -> None:
    plan = plan_of(4)
    waits: Said = {1: ((), (3,)), 2: ((), (3,)), 3: ((), (3,))}
    assert heard(plan, waits).believed(plan, ALIVE) == set()
    assert heard(plan, waits).believed(plan, ALIVE, overdue=True) == {PEERS[3]}
    for lone in ({1: ((3,), ())}, {1: ((), (3,))}, {1: ((), (3,)), 3: ((), (3,))}):
        assert heard(plan, lone).believed(plan, ALIVE, overdue=True) == set()


# -- who says that it waits ----------------------------------------------------------------------------------

WAITS: Said = {1: ((), (3,)), 2: ((), (3,)), 3: ((), (3,))}


def look_for(accusations: Accusations, plan: Plan, seconds: float, *, since: float = 0.0, ran_s: float = 0.0) -> None:
    """Ticks, half a second apart, over so long, and one more."""
    for step in range(int(2 * seconds) + 1):
        accusations.look(plan, ALIVE, since + step / 2, ran_s=ran_s + step / 2)


@pytest.mark.parametrize(("ran_s", "excused_s"), [(3.0, EXCUSED_S), (40.0, 120.0)])
def test_owner_that_waits_is_excused_for_thrice_as_long_as_the_reduction_had_run_and_for_a_while_at_least(
    ran_s: float, excused_s: float
) -> None:
    plan, later = plan_of(4), plan_of(4, evicted=(3,))
    accusations = heard(plan, WAITS)
    look_for(accusations, plan, excused_s - 0.5, ran_s=ran_s)
    assert accusations.believed(plan, ALIVE) == set()
    accusations.look(plan, ALIVE, excused_s, ran_s=ran_s + excused_s)
    assert accusations.believed(plan, ALIVE) == {PEERS[3]}
    assert accusations.losers(plan, later, ALIVE, (), me=PEERS[1]) == set(), "it may be slow, and is no liar for that"


@pytest.mark.parametrize(
    "said",
    [
        {0: ((), (0, 3)), 1: ((), (3,)), 2: ((), (2, 3)), 3: ((), (3,))},  # who waits too says nothing against it
        {1: ((), (3,)), 2: ((0,), (3,)), 3: ((), (3,))},  # what is said directly is settled first
        {1: ((), (3,)), 3: ((), (3,))},
    ],
)
def test_excuse_holds_while_no_two_miss_its_finals_that_wait_for_nobody_and_accuse_nobody_else(said: Said) -> None:
    plan = plan_of(4)
    accusations = heard(plan, said)
    look_for(accusations, plan, 10 * EXCUSED_S)
    assert PEERS[3] not in accusations.believed(plan, ALIVE)
    accusations.take(PEERS[1], stalled(plan, (), (3,)))
    accusations.take(PEERS[2], stalled(plan, (), (3,)))
    assert accusations.believed(plan, ALIVE) == set(), "its time begins"


@pytest.mark.parametrize(("count", "slow"), [(2, (1,)), (4, (2, 3)), (6, (3, 4, 5))])
def test_half_of_all_are_excused_to_the_end(count: int, slow: tuple[int, ...]) -> None:
    """They are slow, or the others quick; without them nobody may go on."""
    plan = plan_of(count)
    said: Said = dict.fromkeys(range(count), ((), slow))
    accusations = heard(plan, said)
    look_for(accusations, plan, 10 * EXCUSED_S)
    assert accusations.believed(plan, ALIVE) == set()
    fewer: Said = dict.fromkeys(range(count), ((), slow[1:]))
    for accuser, (peers, late) in fewer.items():
        accusations.take(PEERS[accuser], stalled(plan, peers, late))
    assert numbers(set(accusations.believed(plan, ALIVE))) == set(slow[1:])


def test_in_a_reduction_begun_anew_an_owner_is_excused_for_twice_as_long() -> None:
    plan, anew = plan_of(4), plan_of(5)
    accusations = heard(plan, WAITS)
    look_for(accusations, plan, EXCUSED_S)
    assert accusations.believed(plan, ALIVE) == {PEERS[3]}
    for accuser, (peers, late) in WAITS.items():
        accusations.take(PEERS[accuser], stalled(anew, peers, late))
    look_for(accusations, anew, EXCUSED_S - 2, since=1000.0)
    assert accusations.believed(anew, ALIVE) == set()
    look_for(accusations, anew, 2, since=2000.0)
    assert accusations.believed(anew, ALIVE) == {PEERS[3]}


def test_excuse_goes_on_from_plan_to_plan_and_not_while_this_node_was_suspended() -> None:
    plan = plan_of(4)
    other = msgspec.structs.replace(plan, relays=(Relay(0, 1, 2),), attempt=1, origin=plan.hash)
    accusations = heard(plan, WAITS)
    look_for(accusations, plan, EXCUSED_S - 2)
    for accuser, (peers, late) in WAITS.items():
        accusations.take(PEERS[accuser], stalled(other, peers, late))
    accusations.look(other, ALIVE, 1000.0, ran_s=1.0)
    assert accusations.believed(other, ALIVE) == set()
    accusations.look(other, ALIVE, 1001.0, ran_s=2.0)
    assert accusations.believed(other, ALIVE) == {PEERS[3]}


@pytest.mark.parametrize("waits", [True, False])
def test_lead_whose_finals_are_missed_while_a_dispute_is_not_settled_is_left_and_loses_no_place(waits: bool) -> None:
    plan = plan_of(5)  # 0 leads
    said: Said = {1: ((), (0,)), 2: ((), (0,)), 0: ((4,), (0,) if waits else ())}
    accusations = heard(plan, said)
    look_for(accusations, plan, SETTLED_S - 0.5)
    assert not accusations.speak_against_lead(plan, ALIVE, (), ())
    accusations.look(plan, ALIVE, SETTLED_S, ran_s=SETTLED_S)
    assert accusations.speak_against_lead(plan, ALIVE, (), ())
    assert accusations.believed(plan, ALIVE) == set()
    accusations.take(PEERS[2], stalled(plan, (), ()))
    assert not accusations.speak_against_lead(plan, ALIVE, (), ()), "one misses it"


@pytest.mark.parametrize("accused", [3, 4, 5])
def test_word_about_oneself_or_who_is_not_in_the_plan_any_more_holds_nothing_up(accused: int) -> None:
    plan = plan_of(5, evicted=(4,))
    said: Said = {1: ((), (3,)), 2: ((), (3,)), 3: ((accused,), ())}
    assert heard(plan, said).believed(plan, ALIVE) == {PEERS[3]}
    assert heard(plan, {1: ((), (3,)), 0: ((accused if accused != 3 else 0,), ())}).disputes(plan, ALIVE) == {
        pair(1, 3)
    }


# -- disputes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "said", "disputes"),
    [
        (4, {}, set()),
        (4, {3: ((1,), ())}, {(3, 1)}),
        (4, {3: ((1,), ()), 1: ((3,), ())}, {(1, 3), (3, 1)}),
        (4, {3: ((1,), ()), 0: ((2,), ())}, {(3, 1), (0, 2)}),
        (4, {3: ((), (1,))}, {(3, 1)}),  # only its finals do not come through
        (4, {3: ((), (1,)), 0: ((2,), ())}, {(0, 2)}),  # 1 may be waiting
        (4, {2: ((1,), ()), 3: ((1,), ())}, set()),  # the fault is 1's
        (4, {2: ((1,), ()), 3: ((1,), ()), 0: ((2,), ())}, set()),  # one thing after the other
        (4, {3: ((3,), ())}, set()),
        (2, {0: ((1,), ())}, set()),  # there is no third
    ],
)
def test_lone_accusation_is_a_dispute(count: int, said: Said, disputes: set[tuple[int, int]]) -> None:
    plan = plan_of(count)
    assert heard(plan, said).disputes(plan, ALIVE) == {pair(*both) for both in disputes}


def test_dispute_with_the_dead_or_evicted_is_none() -> None:
    plan = plan_of(5, evicted=(4,))
    assert heard(plan, {0: ((4,), ())}).disputes(plan, ALIVE) == set()
    assert heard(plan, {0: ((3,), ())}).disputes(plan, ALIVE - {PEERS[3]}) == set()
    assert heard(plan, {0: ((3,), ())}).disputes(plan, ALIVE - {PEERS[1], PEERS[2]}) == set()  # and no third is left


# -- what relays say -----------------------------------------------------------------------------------------

Ways = dict[tuple[int, int], tuple[bool, bool, bool]]
"""From whom to whom: came, taken, finals."""
FINE, NO_FINALS = (True, True, True), (True, True, False)
NOTHING_CAME, NOT_TAKEN = (False, True, False), (True, False, False)


def relayed(plan: Plan, ways: Ways) -> Relayed:
    told = tuple(RelayedWay(one, other, *what) for (one, other), what in ways.items())
    return Relayed(term=Term(), round=1, base=NO_HASH, plan=plan.hash, ways=told)


@pytest.mark.parametrize(
    ("said", "ways", "blamed"),
    [
        ({1: ((3,), ())}, {}, set()),
        ({1: ((3,), ())}, {(1, 3): FINE}, set()),
        ({1: ((3,), ())}, {(1, 3): FINE, (3, 1): FINE}, {1}),  # both cleared: who speaks
        ({1: ((3,), ())}, {(1, 3): NO_FINALS, (3, 1): NO_FINALS}, {1}),  # that was about contributions
        ({1: ((), (3,))}, {(1, 3): FINE, (3, 1): NO_FINALS}, set()),
        ({1: ((), (3,))}, {(1, 3): NO_FINALS, (3, 1): FINE}, {1}),
        ({1: ((3,), ())}, {(3, 1): NOTHING_CAME}, {3}),
        ({1: ((3,), ())}, {(1, 3): NOT_TAKEN}, {3}),
        ({1: ((3,), ())}, {(1, 3): NOTHING_CAME}, {1}),
        ({1: ((3,), ())}, {(3, 1): NOT_TAKEN}, {1}),
        ({1: ((3,), ())}, {(1, 3): NOT_TAKEN, (3, 1): NOTHING_CAME}, {3}),
        ({1: ((3,), ())}, {(1, 3): NOTHING_CAME, (3, 1): NOTHING_CAME}, set()),  # it reaches neither
        ({1: ((3,), ()), 3: ((1,), ())}, {(1, 3): FINE, (3, 1): FINE}, set()),  # both miss it
        ({1: ((3,), ()), 3: ((1,), ())}, {(3, 1): NOTHING_CAME}, {3}),
        ({}, {(3, 1): NOTHING_CAME}, set()),  # nobody asked
        ({0: ((3,), ())}, {(3, 0): NOTHING_CAME}, set()),  # it is no relay for these
    ],
)
def test_relay_speaks_against_one_of_the_two(said: Said, ways: Ways, blamed: set[int]) -> None:
    plan = plan_of(5, relays=(Relay(1, 3, 2),))
    accusations = heard(plan, said)
    accusations.take_relayed(PEERS[2], relayed(plan, ways))
    assert accusations.believed(plan, ALIVE) == set(), "one relay of several"
    assert numbers(set(accusations.relays_against(plan, ALIVE))) == blamed
    assert any(accusations.spoken_of(plan, pair(*two), ALIVE) for two in ((1, 3), (3, 1)) if two[0] in said) == bool(
        blamed
    )


def test_claims_of_others_than_the_relay_the_dead_and_the_evicted_are_not_heard() -> None:
    plan = plan_of(5, relays=(Relay(1, 3, 2),))
    ways = {(3, 1): NOTHING_CAME, (9, 60): FINE}
    for sender, alive in ((4, ALIVE), (3, ALIVE), (2, ALIVE - {PEERS[2]})):
        accusations = heard(plan, {1: ((3,), ())})
        accusations.take_relayed(PEERS[sender], relayed(plan, ways))
        assert accusations.relays_against(plan, alive) == {}


def test_relay_of_the_plan_that_is_followed_speaks_of_its_own_pairs_once_and_who_is_none_of_nothing() -> None:
    plan = plan_of(5, relays=(Relay(1, 3, 2), Relay(0, 4, 1)))
    accusations = heard(plan, {1: ((3,), ())})
    many = tuple(RelayedWay(3, 1, False, True, False) for _ in range(40))
    ways = {(1, 3): FINE, (0, 4): NOT_TAKEN, (1, 63): FINE, (3, 1): FINE}
    told = msgspec.structs.replace(relayed(plan, ways), ways=relayed(plan, ways).ways + many)
    for sender in (2, 3, 5):
        accusations.take_relayed(PEERS[sender], told, plan)
    (kept,) = accusations._relayed[plan.hash].items()
    assert kept == (PEERS[2], relayed(plan, {(1, 3): FINE, (3, 1): NOTHING_CAME}))
    assert numbers(set(accusations.relays_against(plan, ALIVE))) == {3}


def test_of_what_a_relay_says_before_its_plan_is_here_little_is_kept_and_counts_once_the_plan_is() -> None:
    plan, other = plan_of(5, relays=(Relay(1, 3, 2),)), plan_of(4)
    accusations = heard(plan, {1: ((3,), ())})
    ways = (RelayedWay(3, 1, False, True, False), *[RelayedWay(0, 2, True, True, True)] * 4000)
    for followed in (None, other):
        accusations.take_relayed(PEERS[2], msgspec.structs.replace(relayed(plan, {}), ways=ways), followed)
        assert len(accusations._relayed[plan.hash][PEERS[2]].ways) == EARLY_WAYS_LIMIT
    assert numbers(set(accusations.relays_against(plan, ALIVE))) == {3}
    for number in range(3 * WORDS_LIMIT):
        invented = domain_hash("invented", number.to_bytes(4, "little"))
        accusations.take_relayed(PEERS[2], msgspec.structs.replace(relayed(plan, {}), plan=invented), other)
    assert len(accusations._relayed) == WORDS_LIMIT


def test_one_relay_decides_where_three_live() -> None:
    plan = plan_of(3, relays=(Relay(0, 2, 1),))
    for ways, gone in (({(2, 0): NOTHING_CAME}, 2), ({(0, 2): FINE, (2, 0): FINE}, 0)):
        accusations = heard(plan, {0: ((2,), ())})
        accusations.take_relayed(PEERS[1], relayed(plan, ways))
        assert accusations.believed(plan, ALIVE) == {PEERS[gone]}


@pytest.mark.parametrize(
    ("first", "second", "believed", "loser"),
    [
        ({(3, 1): NOTHING_CAME}, {(3, 1): NOTHING_CAME}, {3}, 3),
        ({(1, 3): FINE, (3, 1): FINE}, {(1, 3): NOTHING_CAME}, {1}, 1),
        ({(3, 1): NOTHING_CAME}, {(1, 3): FINE, (3, 1): FINE}, set(), 1),  # they disagree: who speaks
        ({(3, 1): NOTHING_CAME}, {}, set(), 3),
        ({}, {}, set(), 1),
    ],
)
def test_two_relays_that_say_the_same_decide(first: Ways, second: Ways, believed: set[int], loser: int) -> None:
    plan, later = plan_of(4, relays=(Relay(1, 3, 0),)), plan_of(4, relays=(Relay(1, 3, 2),))
    accusations = heard(plan, {1: ((3,), ())})
    accusations.take_relayed(PEERS[0], relayed(plan, first))
    accusations.leave(plan, ALIVE, now=10.0)
    accusations.take(PEERS[1], stalled(later, (3,)))
    accusations.take_relayed(PEERS[2], relayed(later, second))
    assert numbers(set(accusations.believed(later, ALIVE))) == believed
    assert accusations.loser(later, pair(1, 3), ALIVE) == PEERS[loser]
    accusations.take(PEERS[1], stalled(later, ()))
    assert accusations.believed(later, ALIVE) == set(), "nobody accuses any more"


def followed_two(pair_of_both: tuple[int, int]) -> tuple[Accusations, Plan, Plan]:
    """A plan that was left and the one in its place: each leads the pair through another."""
    one, other = pair_of_both
    thirds = [n for n in range(4) if n not in pair_of_both]
    first, later = (plan_of(4, relays=(Relay(one, other, third),)) for third in thirds)
    return Accusations(), first, later


def comes(accusations: Accusations, plan: Plan, accusers: dict[int, int], ways: Ways, at: float) -> None:
    """At that moment these accuse, each one other, and the relay of `plan` says this of its ways."""
    for accuser, accused in accusers.items():
        accusations.take(PEERS[accuser], stalled(plan, (accused,)))
        accusations.note_late(plan.hash, ALIVE, at)
    if ways:
        (relay,) = plan.relayed.values()
        accusations.take_relayed(relay, relayed(plan, ways))
        accusations.note_late(plan.hash, ALIVE, at)


@pytest.mark.parametrize(("after_s", "counts"), [(0.0, True), (ON_ITS_WAY_S, True), (ON_ITS_WAY_S + 0.1, False)])
@pytest.mark.parametrize("late", ["relay", "accuser", "both"])
def test_word_of_a_plan_that_was_left_counts_if_it_was_on_its_way(after_s: float, counts: bool, late: str) -> None:
    accusations, first, later = followed_two((1, 3))
    accuses, says = {1: 3}, {(3, 1): NOTHING_CAME}
    comes(accusations, first, {} if late != "relay" else accuses, {} if late != "accuser" else says, LEFT_AT - 1)
    accusations.leave(first, ALIVE, LEFT_AT)
    comes(accusations, first, accuses if late != "relay" else {}, says if late != "accuser" else {}, LEFT_AT + after_s)
    comes(accusations, later, accuses, says, LEFT_AT + 3)
    assert numbers(set(accusations.believed(later, ALIVE))) == ({3} if counts else set())
    accusations.leave(later, ALIVE, LEFT_AT + 4)
    last = plan_of(4)
    accusations.take(PEERS[1], stalled(last, (3,)))
    assert numbers(set(accusations.believed(last, ALIVE))) == ({3} if counts else set()), "it is remembered"


def test_late_words_alone_cost_nobody_its_place_but_a_lead_its_view() -> None:
    accusations, first, later = followed_two((0, 1))
    accuses, says = {1: 0}, {(0, 1): NOTHING_CAME}
    for plan, left_at in ((first, LEFT_AT), (later, LEFT_AT + 4)):
        comes(accusations, plan, accuses, {}, left_at - 1)
        accusations.leave(plan, ALIVE, left_at)
        comes(accusations, plan, {}, says, left_at + 1)
    last = plan_of(4)
    accusations.take(PEERS[1], stalled(last, (0,)))
    assert accusations.believed(last, ALIVE) == set()
    assert accusations.loser(last, pair(1, 0), ALIVE) == PEERS[1], "as if the relays had said nothing"
    ruling = msgspec.structs.replace(plan_of(4, evicted=(0,)), planner=PEERS[1])
    assert accusations.losers(last, ruling, ALIVE, (), me=PEERS[2]) == set(), "nor is the accuser borne out"
    assert last.planner == PEERS[0]
    assert accusations.speak_against_lead(last, ALIVE, (), ())
    accusations.take(PEERS[1], stalled(last, ()))
    assert not accusations.speak_against_lead(last, ALIVE, (), ()), "nobody accuses any more"


def test_plans_that_follow_each_other_at_once_keep_no_word_of_an_earlier_one_from_being_heard() -> None:
    accusations, first, later = followed_two((0, 1))
    comes(accusations, first, {1: 0}, {}, LEFT_AT - 1)
    accusations.leave(first, ALIVE, LEFT_AT)
    for number in range(2 * WORDS_LIMIT):
        accusations.leave(msgspec.structs.replace(later, attempt=number + 2), ALIVE, LEFT_AT + 0.01 * number)
    comes(accusations, first, {}, {(0, 1): NOTHING_CAME}, LEFT_AT + 1)
    comes(accusations, later, {1: 0}, {(0, 1): NOTHING_CAME}, LEFT_AT + 1)
    assert accusations.believed(later, ALIVE) == {PEERS[0]}


def test_plan_that_is_followed_again_is_spoken_about_however_long_ago_it_was_left() -> None:
    accusations, first = Accusations(), plan_of(4)
    accusations.leave(first, ALIVE, LEFT_AT)
    comes(accusations, first, {1: 0, 2: 0}, {}, LEFT_AT + 100)
    assert accusations.believed(first, ALIVE) == {PEERS[0]}


@pytest.mark.parametrize(
    ("speaks", "ahead", "leaves"),
    [
        (True, (), False),
        (True, (3,), True),
        (True, (2,), False),  # the relay itself: one voice, however it leaves
        (True, (2, 3), True),
        (True, (1,), True),  # its accuser, who is no relay
        (True, (0,), False),  # the lead
        (True, (5,), False),  # takes no part
        (False, (1, 2, 3), False),  # one liar that is ahead, and one without a way to the lead
    ],
)
def test_who_left_the_view_of_a_lead_is_the_second_voice_beside_a_relay(
    speaks: bool, ahead: tuple[int, ...], leaves: bool
) -> None:
    plan = plan_of(4, relays=(Relay(0, 1, 2),))
    accusations = heard(plan, {1: ((0,), ())})
    if speaks:
        accusations.take_relayed(PEERS[2], relayed(plan, {(0, 1): NOTHING_CAME}))
    assert plan.planner == PEERS[0]
    assert accusations.speak_against_lead(plan, ALIVE, (), {PEERS[n] for n in ahead}) == leaves
    assert accusations.believed(plan, ALIVE) == set(), "nobody loses its place for that"


def test_who_is_accused_by_others_too_loses_where_no_path_is_left() -> None:
    plan = plan_of(4)
    accusations = heard(plan, {1: ((3,), ()), 2: ((3,), ()), 3: ((1,), ())})
    assert accusations.loser(plan, pair(1, 3), ALIVE) == PEERS[3]


@pytest.mark.parametrize("excused", [(), (3,)])
def test_that_finals_are_late_supports_nobody_who_says_that_a_contribution_does_not_come(
    excused: tuple[int, ...],
) -> None:
    """It keeps its own from the owner, whose finals are late for that."""
    plan = plan_of(4)
    accusations = heard(plan, {1: ((3,), ()), 2: ((), (3,)), 3: ((), excused)})
    assert accusations.loser(plan, (PEERS[1], PEERS[3]), ALIVE) == PEERS[1]
    accusations.take(PEERS[1], stalled(plan, (), (3,)))
    assert accusations.loser(plan, (PEERS[1], PEERS[3]), ALIVE) == PEERS[3], "two miss the same"


# -- who lost ------------------------------------------------------------------------------------------------


def lost(
    said: Said, *, evicted: tuple[int, ...], planner: int = 0, me: int = 3, suspected: tuple[int, ...] = ()
) -> set[int]:
    """Of four, who lost a dispute by a later plan as `me` sees it; the plan is `planner`'s."""
    plan = plan_of(4)
    later = msgspec.structs.replace(plan_of(4, evicted=evicted), planner=PEERS[planner])
    found = heard(plan, said).losers(plan, later, ALIVE, {PEERS[n] for n in suspected}, me=PEERS[me])
    return numbers(found)


@pytest.mark.parametrize("loser", [1, 2])
def test_who_goes_for_a_lone_accusation_lost(loser: int) -> None:
    assert lost({1: ((2,), ())}, evicted=(loser,)) == {loser}
    assert lost({1: ((), (2,))}, evicted=(loser,)) == {loser}


def test_who_goes_for_another_reason_lost_nothing() -> None:
    assert lost({1: ((2,), ())}, evicted=(3,)) == set()
    assert lost({}, evicted=(2,)) == set()
    assert lost({1: ((2,), ()), 3: ((2,), ())}, evicted=(2,)) == set(), "two speak against it"
    assert lost({1: ((2,), ())}, evicted=(2,), suspected=(2,)) == set(), "it hangs"
    assert lost({1: ((2,), ())}, evicted=(1, 2)) == set(), "both went, and one need not be at fault"


def test_who_is_cut_off_from_three_lost_no_dispute() -> None:
    """Of ten; three are too few to evict it at once, and enough to say that its links are to blame."""
    plan, alive = plan_of(10), frozenset(PEERS[:10])
    later = plan_of(10, evicted=(1,))
    links = {1: ((2, 3, 4), ()), **dict.fromkeys((2, 3, 4), ((1,), ()))}
    assert heard(plan, links).believed(plan, alive) == set()
    assert heard(plan, links).losers(plan, later, alive, (), me=PEERS[9]) == set()
    assert heard(plan, {1: ((2, 3), ()), **dict.fromkeys((2, 3), ((1,), ()))}).losers(
        plan, later, alive, (), me=PEERS[9]
    ) == {PEERS[1]}


def test_word_of_a_lead_in_its_own_dispute_counts_for_itself_alone() -> None:
    for said in ({1: ((2,), ())}, {2: ((1,), ())}):
        assert lost(said, evicted=(1,), planner=2, me=3) == set()
        assert lost(said, evicted=(1,), planner=2, me=2) == {1}


def test_lead_in_its_own_dispute_is_borne_out_by_relays() -> None:
    plan = plan_of(3, relays=(Relay(0, 1, 2),))
    accusations = heard(plan, {0: ((1,), ())})
    later = plan_of(3, evicted=(1,))
    assert accusations.losers(plan, later, ALIVE, (), me=PEERS[2]) == set()
    accusations.take_relayed(PEERS[2], relayed(plan, {(1, 0): NOTHING_CAME}))
    assert accusations.losers(plan, later, ALIVE, (), me=PEERS[2]) == {PEERS[1]}
