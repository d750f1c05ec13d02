"""Relays chosen: which third is tried next for two that cannot reach each other, or of whom one accuses the other."""

from __future__ import annotations

import msgspec

from shoal.protocol.accusations import THIRDS_LIMIT, RelayChoice, pack_relays
from shoal.protocol.messages import Relay
from tests.protocol.test_accusations import ALIVE, PEERS, pair, plan_of

ME = plan_of(2).planner


def test_thirds_are_tried_one_after_the_other_until_there_is_none() -> None:
    relay_choice, plan, tried = RelayChoice(ME), plan_of(4), []
    for _ in range(3):
        relays, without = relay_choice.around(plan, {pair(0, 2)}, ALIVE)
        tried.append((relays, without))
        plan = plan_of(4, relays=relays)
        relay_choice.note(plan)
    first, second = (Relay(0, 2, 1),), (Relay(0, 2, 3),)
    assert tried == [(first, set()), (second, set()), (second, {pair(0, 2)})]


def test_a_pair_gets_so_many_thirds_however_many_there_are() -> None:
    relay_choice, plan = RelayChoice(ME), plan_of(6)
    for _ in range(THIRDS_LIMIT):
        relays, without = relay_choice.around(plan, {pair(0, 2)}, ALIVE)
        assert not without
        relay_choice.note(plan_of(6, relays=relays))
    assert len(PEERS) - 2 > THIRDS_LIMIT
    assert relay_choice.around(plan, {pair(0, 2)}, ALIVE) == ((), {pair(0, 2)})
    assert relay_choice.around(plan, {pair(1, 3)}, ALIVE) == ((Relay(1, 3, 0),), set())


def test_what_another_lead_tried_is_tried_no_less() -> None:
    """It may have led the pair through itself, or through nobody for long enough to show anything."""
    relay_choice, plan = RelayChoice(ME), plan_of(4)
    for via in (1, 3):
        relay_choice.note(msgspec.structs.replace(plan, planner=PEERS[1], relays=(Relay(0, 2, via),)))
    assert relay_choice.around(plan, {pair(0, 2)}, ALIVE) == ((Relay(0, 2, 1),), set())


def test_relays_of_other_pairs_stay_as_they_are() -> None:
    relay_choice, plan = RelayChoice(ME), plan_of(5, relays=(Relay(0, 1, 2), Relay(3, 4, 2)))
    relay_choice.note(plan)
    assert relay_choice.around(plan, {pair(0, 1)}, ALIVE) == ((Relay(0, 1, 3), Relay(3, 4, 2)), set())
    assert relay_choice.around(plan, set(), ALIVE) == (plan.relays, set())


def test_pairs_are_spread_over_thirds_who_are_in_no_trouble_themselves() -> None:
    relays, _ = RelayChoice(ME).around(plan_of(6), {pair(0, 1), pair(0, 2), pair(1, 2)}, ALIVE)
    assert relays == (Relay(0, 1, 3), Relay(0, 2, 4), Relay(1, 2, 5))
    # Where there is nobody else, one of another pair has to do.
    relays, _ = RelayChoice(ME).around(plan_of(4), {pair(0, 1), pair(2, 3)}, ALIVE)
    assert relays == (Relay(0, 1, 2), Relay(2, 3, 0))


def test_who_does_not_reach_one_of_the_two_is_no_relay_for_them() -> None:
    plan = plan_of(4, relays=(Relay(1, 2, 3),))
    assert RelayChoice(ME).around(plan, {pair(0, 2)}, ALIVE) == ((Relay(0, 2, 3), Relay(1, 2, 3)), set())
    assert RelayChoice(ME).around(plan, {pair(0, 2)}, ALIVE - {PEERS[3]}) == (plan.relays, {pair(0, 2)})
    both = {pair(0, 2), pair(1, 2)}
    assert RelayChoice(ME).around(plan_of(3), both, ALIVE) == ((), both)


def test_third_is_alive_and_not_evicted() -> None:
    plan = plan_of(5, evicted=(1,))
    for dead, found in (((), (Relay(0, 2, 3),)), ((3,), (Relay(0, 2, 4),)), ((3, 4), ())):
        relays, without = RelayChoice(ME).around(plan, {pair(0, 2)}, ALIVE - {PEERS[n] for n in dead})
        assert (relays, bool(without)) == (found, not found)


def test_pair_without_a_third_leaves_no_other_without() -> None:
    relay_choice = RelayChoice(ME)
    for via in (1, 3):
        relay_choice.note(plan_of(4, relays=(Relay(0, 2, via),)))
    assert relay_choice.around(plan_of(4), {pair(0, 2), pair(1, 3)}, ALIVE) == ((Relay(1, 3, 0),), {pair(0, 2)})


def test_relays_are_packed_by_place_and_in_order() -> None:
    backwards = [PEERS[3], PEERS[2], PEERS[1], PEERS[0]]
    relays = {pair(0, 1): PEERS[2], pair(2, 3): PEERS[0]}
    assert pack_relays(backwards, relays) == (Relay(0, 1, 3), Relay(2, 3, 1))
