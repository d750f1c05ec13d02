"""The norm clip: what the lead works out of the Readies, anyone can, and a plan that says otherwise is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from math import isqrt

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.effects import StartReduce
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import CLIP_UNIT, SQUARES_LIMIT, OwnedRange, Plan, Ready, domain_hash
from shoal.protocol.planning import (
    CONTRIBUTOR,
    OBSERVER,
    TRAINING,
    PlanOrder,
    RoundSettings,
    check_norms,
    check_plan,
    make_plan,
    norm_clips,
)
from shoal.protocol.round import RoundMachine
from shoal.protocol.wire import canonical, decode
from tests.protocol import round_node
from tests.protocol.round_machines import contribution, machines_of
from tests.protocol.round_node import deal_evenly
from tests.protocol.test_planning import GOOD, LEAD, PEERS, SETTINGS, START, ready

CLIPPING = replace(SETTINGS, norm_clip=True)
CHUNKS = 11


def readies_of(*norms: float, roles: dict[int, str] | None = None) -> dict[PeerId, Ready]:
    """Contributors of these norms, the squares spread over the chunks unevenly."""
    readies = {}
    for number, norm in enumerate(norms):
        shares = [norm**2 * (chunk + 1) / 66 for chunk in range(CHUNKS)]
        announced = ready(PEERS[number], (roles or {}).get(number, CONTRIBUTOR), 10 + number)
        readies[PEERS[number]] = msgspec.structs.replace(announced, squares=tuple(shares))
    return readies


def plan_of(
    readies: dict[PeerId, Ready], *, weightless: tuple[int, ...] = (), settings: RoundSettings = CLIPPING
) -> Plan:
    return make_plan(
        START,
        PlanOrder(view=0, attempt=0, planner=LEAD, evicted=()),
        readies,
        weightless={PEERS[number] for number in weightless},
        settings=settings,
        deal=deal_evenly,
    )


def clips_of(*norms: float) -> list[int]:
    clips = norm_clips({PeerId(str(i)): (norm**2,) for i, norm in enumerate(norms)})
    return [clips[PeerId(str(i))] for i in range(len(norms))]


# -- the number ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norms", "clips"),
    [
        ((), []),
        ((3,), [65536]),
        ((1, 2), [65536, 32768]),  # of an even count the lower median
        ((2, 4, 8), [65536, 65536, 32768]),
        ((4, 2, 8, 2), [32768, 65536, 16384, 65536]),
        ((5, 5, 5), [65536] * 3),
        ((0, 0, 0, 3), [65536] * 4),  # whoever has nothing to say does not silence the others
        ((0, 0), [65536] * 2),
        ((1, 1, 3), [65536, 65536, 21845]),  # rounded down
        ((1e-3, 1e-3, 1e9), [65536, 65536, 0]),
    ],
)
def test_clip_is_median_norm_over_norm(norms: tuple[float, ...], clips: list[int]) -> None:
    assert clips_of(*norms) == clips


@given(st.lists(st.lists(st.floats(0, SQUARES_LIMIT), min_size=1, max_size=5), min_size=1, max_size=9))
def test_clip_is_the_exact_number_and_whoever_is_not_above_the_median_keeps_all(squares: list[list[float]]) -> None:
    clips = norm_clips({PeerId(str(i)): parts for i, parts in enumerate(squares)})
    norms = [float(sum(map(Fraction, parts), Fraction(0))) for parts in squares]
    counted = sorted(norm for norm in norms if norm)
    for i, norm in enumerate(norms):
        clip = clips[PeerId(str(i))]
        median = counted[(len(counted) - 1) // 2] if counted else 0.0
        if norm <= median:
            assert clip == CLIP_UNIT
        else:
            ratio = Fraction(median) / Fraction(norm)
            exact = isqrt(CLIP_UNIT**2 * ratio.numerator // ratio.denominator)
            assert exact - 1 <= clip <= exact + 1  # two roundings of a double
            assert 0 <= clip <= CLIP_UNIT


def test_squares_are_added_up_exactly_in_any_order() -> None:
    # One after the other, 2^-53 would be lost each time.
    parts = (1.0, *[2.0**-53] * 64)
    low, high = PeerId("a"), PeerId("b")
    assert norm_clips({low: parts, high: parts[::-1]}) == {low: CLIP_UNIT, high: CLIP_UNIT}


# -- the plan ------------------------------------------------------------------------------------------------


def test_lead_puts_everyones_clip_into_the_plan_and_members_get_the_same_from_the_readies() -> None:
    readies = readies_of(2.0, 1.0, 16.0, 100.0, 0.5, roles={3: OBSERVER})
    plan = plan_of(readies)
    assert plan.clips == (32768, 65536, 4096, 65536, 65536)
    assert [plan.clip(place) for place in range(5)] == list(plan.clips)
    check_plan(plan, LEAD, START, CLIPPING)
    counted = {plan.participants[place].peer: place for place in plan.contributors()}
    again = norm_clips({p: readies[p].squares for p in counted})
    assert {p: plan.clip(place) for p, place in counted.items()} == again
    assert decode(canonical(plan), Plan) == plan


def test_who_does_not_count_does_not_move_the_median() -> None:
    readies = readies_of(1.0, 8.0, 1.0, 1.0, roles={3: TRAINING})
    assert plan_of(readies).clips == (65536, 8192, 65536, 65536)
    assert plan_of(readies, weightless=(0, 2)).clips == (65536, 65536, 65536, 65536)


def test_contributor_without_a_square_per_chunk_counts_nothing() -> None:
    readies = readies_of(1.0, 8.0, 1.0)
    readies[PEERS[1]] = msgspec.structs.replace(readies[PEERS[1]], squares=(64.0,))
    plan = plan_of(readies)
    assert plan.contributors() == (0, 2)
    assert plan.clips == (65536,) * 3
    assert plan_of(readies, settings=SETTINGS).contributors() == (0, 1, 2)


def test_plans_that_clip_nothing_are_encoded_as_if_there_were_no_clips() -> None:
    assert b"clips" not in canonical(GOOD)
    assert GOOD.clips is msgspec.UNSET
    assert [GOOD.clip(place) for place in range(3)] == [CLIP_UNIT] * 3
    assert decode(canonical(GOOD), Plan) == GOOD
    assert b"clips" in canonical(plan_of(readies_of(1.0, 1.0)))


def test_plan_hash_covers_the_clips() -> None:
    plan = plan_of(readies_of(1.0, 8.0, 1.0))
    hashes = {msgspec.structs.replace(plan, clips=clips).hash for clips in (msgspec.UNSET, (65536,) * 3, (65536, 1, 2))}
    assert len({*hashes, plan.hash}) == 4


@pytest.mark.parametrize(
    ("clips", "says"),
    [
        (msgspec.UNSET, "does not clip"),
        ((1, 2, 65536), "clips all"),  # the one left whole contributes nothing
        ((65536, 65536, 7), "contributes nothing"),
    ],
)
def test_plan_with_clips_that_cannot_be_is_refused(clips: object, says: str) -> None:
    plan = plan_of(readies_of(1.0, 8.0, 1.0, roles={2: OBSERVER}))
    check_plan(plan, LEAD, START, CLIPPING)
    with pytest.raises(RemoteError, match=says) as error:
        check_plan(msgspec.structs.replace(plan, clips=clips), LEAD, START, CLIPPING)
    assert error.value.peer == LEAD


def test_clips_where_norms_are_not_clipped_are_refused() -> None:
    with pytest.raises(RemoteError, match="which the manifest does not"):
        check_plan(msgspec.structs.replace(GOOD, clips=(65536,) * 3), LEAD, START, SETTINGS)


def planned_with_clips(monkeypatch: pytest.MonkeyPatch) -> tuple[list[RoundMachine], Plan]:
    """Three machines that heard all announcements, each of twice the norm before, and the plan of their lead."""
    monkeypatch.setattr(round_node, "SETTINGS", replace(round_node.SETTINGS, norm_clip=True))
    _, machines = machines_of(3)
    readies = [contribution(machine, squares=(4.0**number,) * 10) for number, machine in enumerate(machines)]
    effects = []
    for sender, announced in zip(machines, readies, strict=True):
        effects += sender.ready(announced, 1.0)
        for machine in machines:
            if machine is not sender:
                effects += machine.receive(sender.me, announced, 1.0)
    (plan,) = [effect.plan for effect in effects if isinstance(effect, StartReduce)]
    return machines, plan


def test_round_is_planned_with_clips_and_a_revision_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    machines, plan = planned_with_clips(monkeypatch)
    clips = {machine.me: 65536 >> max(0, number - 1) for number, machine in enumerate(machines)}
    assert plan.clips == tuple(clips[p.peer] for p in plan.participants)
    member = next(machine for machine in machines if machine.me != plan.planner)
    assert StartReduce(plan) in member.receive(plan.planner, plan, 1.1)
    gone = next(p for p in plan.participants if p.peer not in (member.me, plan.planner))
    place = plan.number(plan.planner)
    assert place is not None
    revised = msgspec.structs.replace(
        plan, attempt=1, origin=plan.hash, evicted=(gone.peer,), owners=(OwnedRange(place, 0, plan.chunks),)
    )
    member._gathering.forget(gone.peer)  # of whom nothing is known may be clipped to anything, but not otherwise now
    other = msgspec.structs.replace(revised, clips=tuple(7 if p == gone else clips[p.peer] for p in plan.participants))
    with pytest.raises(RemoteError, match="revised plan with other participants"):
        member.receive(plan.planner, other, 1.2)
    member.receive(plan.planner, revised, 1.2)
    assert member.plan == revised


# -- what a Ready may say ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1e-300, -1.0, SQUARES_LIMIT * 2, 1e308, math.nan, math.inf])
def test_squares_that_are_none_are_refused_on_arrival(bad: float) -> None:
    announced = msgspec.structs.replace(ready(PEERS[0]), squares=(1.0, bad))
    with pytest.raises(RemoteError):
        decode(msgspec.msgpack.encode(announced), Ready)
    good = msgspec.structs.replace(announced, squares=(0.0, SQUARES_LIMIT))
    assert decode(msgspec.msgpack.encode(good), Ready) == good


@pytest.mark.parametrize("clips", [[65536, 65537], [65536, -1], [65536], [65536] * 3, []])
def test_clips_that_are_too_large_or_not_one_for_each_are_refused_on_arrival(clips: list[int]) -> None:
    plain = msgspec.msgpack.decode(canonical(plan_of(readies_of(1.0, 8.0))))
    assert decode(canonical(plain | {"clips": [65536, 0]}), Plan).clips == (65536, 0)
    with pytest.raises(RemoteError):
        decode(canonical(plain | {"clips": clips}), Plan)


# -- what members hold against a plan ------------------------------------------------------------------------


def squares_of(readies: dict[PeerId, Ready], *known: int) -> dict[PeerId, tuple[float, ...]]:
    return {PEERS[number]: readies[PEERS[number]].squares for number in known}


@pytest.mark.parametrize("known", [(), (1,), (0, 3), (0, 1, 2, 3)])
def test_right_clips_are_taken_whatever_is_known(known: tuple[int, ...]) -> None:
    readies = readies_of(2.0, 1.0, 16.0, 4.0)
    check_norms(plan_of(readies), LEAD, squares_of(readies, *known))


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=5), st.data())
def test_clips_of_an_honest_lead_are_never_refused(norms: list[float], data: st.DataObject) -> None:
    readies = readies_of(*norms)
    known = data.draw(st.lists(st.integers(0, len(norms) - 1), unique=True))
    check_norms(plan_of(readies), LEAD, squares_of(readies, *known))


@pytest.mark.parametrize(
    ("false", "known", "victim"),
    [
        ({3: 65535}, (0, 1, 2, 3), 3),  # of the median norm, by the least there is
        ({2: 65536}, (0, 1, 2, 3), 2),  # a favourite that is left whole
        ({0: 32768}, (0, 1, 2, 3), 0),
        ({2: 8300}, (0, 1, 2), 2),  # the median lies between 1 and 2 whatever the fourth norm is: 4096 to 8192
        ({2: 4000}, (0, 1, 2), 2),
        ({0: 32000}, (0, 1, 2), 0),
    ],
)
def test_false_clip_is_refused_with_its_reason(false: dict[int, int], known: tuple[int, ...], victim: int) -> None:
    readies = readies_of(2.0, 1.0, 16.0, 2.0)
    plan = plan_of(readies)
    assert plan.clips == (65536, 65536, 8192, 65536)
    clips = tuple(false.get(place, clip) for place, clip in enumerate((65536, 65536, 8192, 65536)))
    with pytest.raises(RemoteError, match=f"clips {PEERS[victim]} to {clips[victim]} of 65536") as error:
        check_norms(msgspec.structs.replace(plan, clips=clips), LEAD, squares_of(readies, *known))
    assert error.value.peer == LEAD


def test_who_told_no_norms_may_not_be_counted() -> None:
    readies = readies_of(2.0, 1.0, 4.0)
    known = squares_of(readies, 0, 1, 2) | {PEERS[1]: (1.0,)}
    with pytest.raises(RemoteError, match=f"counts {PEERS[1]}, which told no norm"):
        check_norms(plan_of(readies), LEAD, known)


def heard_by_member(monkeypatch: pytest.MonkeyPatch) -> tuple[RoundMachine, Plan]:
    """A member that heard the announcements of all, and an honest plan over them that has not reached it."""
    machines, plan = planned_with_clips(monkeypatch)
    return next(machine for machine in machines if machine.me != plan.planner), plan


def test_member_refuses_a_plan_with_a_false_clip_and_takes_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    member, plan = heard_by_member(monkeypatch)
    assert isinstance(plan.clips, tuple)
    least = min(plan.clips)
    clips = tuple(clip if clip != least else clip - 1 for clip in plan.clips)
    with pytest.raises(RemoteError, match="by the norms that were announced"):
        member.receive(plan.planner, msgspec.structs.replace(plan, clips=clips), 1.1)
    assert member.plan is None
    assert StartReduce(plan) in member.receive(plan.planner, plan, 1.2)


def test_what_a_proven_liar_told_or_a_restarted_node_tells_is_held_against_no_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A contributor that tells its norm in two ways must not keep an honest lead's plan from being followed."""
    member, plan = heard_by_member(monkeypatch)
    liar = next(p for p in plan.participants if p.peer not in (member.me, plan.planner))
    told = member._gathering.get(liar.peer)
    assert told is not None
    member._gathering._readies[liar.peer] = msgspec.structs.replace(told, squares=(4.0**5,) * 10)
    with pytest.raises(RemoteError, match="by the norms that were announced"):
        member.receive(plan.planner, plan, 1.1)
    member._gathering._readies[liar.peer] = msgspec.structs.replace(told, squares=(4.0**5,) * 10, life=domain_hash("2"))
    assert liar.peer not in member._gathering.squares(plan)
    member._gathering._readies[liar.peer] = msgspec.structs.replace(told, squares=(4.0**5,) * 10)
    member.proven(domain_hash("evidence"), liar.peer, 1.2)
    assert StartReduce(plan) in member.receive(plan.planner, plan, 1.3)
