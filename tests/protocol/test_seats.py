"""Seats: whose turn it is follows from the chain, plans and values keep to it, and who is passed over is missed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from shoal.lab.signed import certified, propose_of
from shoal.protocol.agreement import Agreement, Broadcast, Mismatch
from shoal.protocol.certificate import genesis
from shoal.protocol.chain import Chain
from shoal.protocol.errors import ConfigError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest import Manifest, parse_manifest, render_manifest
from shoal.protocol.messages import MEMBER_LIMIT, Plan, Prepare, Rollback, Target, Value
from shoal.protocol.planning import CONTRIBUTOR, PlanOrder, check_plan, make_plan
from shoal.protocol.round import RoundMachine
from shoal.protocol.seats import Line, Seating, first_by_group, longest_wait, may_count, rounds_to_turn
from tests.manifests import manifest_of
from tests.protocol.lab import SWARM, honest_report, paper_identities, plan_hash, value_of
from tests.protocol.round_lab import RoundLab
from tests.protocol.round_node import deal_evenly
from tests.protocol.test_planning import LEAD, PEERS, SETTINGS, START, ready

pytestmark = pytest.mark.usefixtures("paper_signatures")

IDENTITIES = paper_identities(7)
IDS = [identity.peer_id for identity in IDENTITIES]
FOUNDERS = [Identity.from_seed(bytes([number]) * 32).peer_id for number in range(5)]
SEATS = 2


def seated(
    founders: int = 1, seats: int = SEATS, *, staleness: int = 40, admission: str = "open", **sync: object
) -> Manifest:
    rounds, membership = {"staleness_rounds": staleness}, {"seats": seats}
    sections = {"sync": {"inner_steps": 1, **sync}, "round": rounds, "membership": membership}
    return manifest_of(FOUNDERS[:founders], sections, admission=admission)


def counting(previous: Value, members: Sequence[PeerId], counted: Sequence[PeerId]) -> Value:
    value = value_of(previous, plan_hash(f"{previous.next_round}"), IDS[0], tuple(sorted(members)), signing=IDENTITIES)
    return msgspec.structs.replace(value, counted=tuple(sorted(counted)))


def followed(*rounds: tuple[Sequence[PeerId], Sequence[PeerId]]) -> tuple[Line, Value]:
    """The line of four founders after values with these members, who counted these."""
    head = genesis(SWARM, IDS[:4])
    line = Line(head.members)
    for height, (members, counted) in enumerate(rounds, start=1):
        head = counting(head, members, counted)
        line.follow(head, height)
    return line, head


# -- the line ------------------------------------------------------------------------------------------------


def test_who_was_counted_goes_to_the_end_and_so_does_who_comes() -> None:
    a, b, c, d, e, *_ = IDS
    line, head = followed(((a, b, c, d), (a, b)), ((a, b, c, d, e), (c,)))
    order = line.after(head)
    assert order[0] == d
    assert set(order[1:3]) == {a, b}
    assert set(order[3:]) == {c, e}, "both by the same value"
    assert [rounds_to_turn(order, peer, SEATS) for peer in (d, order[2], order[4])] == [0, 1, 2]
    assert rounds_to_turn(order, IDS[6], SEATS) is None


def test_who_was_no_member_in_between_begins_at_the_end() -> None:
    a, b, c, d, *_ = IDS
    line, head = followed(((a, b, c), (a, b)), ((a, b, c, d), (b,)))
    assert line.after(head)[:2] == (c, a)
    assert set(line.after(head)[2:]) == {b, d}


def test_who_has_waited_as_long_stands_in_another_order_in_every_round() -> None:
    """So no key is at an advantage for ever."""
    firsts = set()
    head = genesis(SWARM, IDS)
    line = Line(head.members)
    for _ in range(40):
        firsts.add(line.after(head)[0])
        head = value_of(head, plan_hash("nobody"), IDS[0], head.members, signing=IDENTITIES)
    assert firsts == set(IDS)


@pytest.mark.parametrize("seats", [1, 2, 3, 5])
def test_whoever_is_ready_in_every_round_is_counted_within_the_bound_whoever_comes_and_goes(seats: int) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        peers = [PeerId(f"{number:052d}") for number in range(24)]
        head = msgspec.structs.replace(genesis(SWARM, peers[:8]), members=tuple(peers[:8]))
        line, waited, longest = Line(head.members), dict.fromkeys(peers, 0), 0
        for height in range(1, 60):
            unready = set(rng.sample(peers, 6)) - {peers[0]}
            here = [peer for peer in head.members if peer not in unready]
            counted = Seating(seats, line.after(head)).first(here)
            come_and_go = set(rng.sample(peers, 2)) - {peers[0]}
            members = tuple(sorted({*head.members} ^ come_and_go))
            longest = max(longest, len(members))
            waited[peers[0]] = 0 if peers[0] in counted else waited[peers[0]] + 1
            assert waited[peers[0]] < longest_wait(longest, seats), (seed, height)
            head = msgspec.structs.replace(
                head, round=height, base=head.hash, members=members, counted=tuple(sorted(counted)) or msgspec.UNSET
            )
            line.follow(head, height)


def test_of_more_than_can_take_part_those_do_whose_turn_it_is_and_who_votes() -> None:
    voter, member, returner, first, other = peers = [PeerId(name) for name in "vmrfo"]
    groups = (
        [voter],
        Seating(1, (first, voter, member, returner, other)).first([first, member, returner, other]),
        [member],
        [returner],
    )
    assert first_by_group(reversed(peers), groups, 4) == [voter, first, member, returner]
    assert first_by_group(peers, groups, 1) == [voter]


@pytest.mark.parametrize(("members", "seats", "rounds"), [(5, 2, 5), (64, 16, 6), (64, 64, 3), (1, 1, 3), (65, 16, 7)])
def test_longest_wait_is_the_members_by_the_seats_and_two(members: int, seats: int, rounds: int) -> None:
    assert longest_wait(members, seats) == rounds


# -- plans ---------------------------------------------------------------------------------------------------


def plan_of(line: Sequence[PeerId], seats: int) -> Plan:
    return make_plan(
        START,
        PlanOrder(view=0, attempt=0, planner=LEAD, evicted=()),
        {peer: ready(peer, CONTRIBUTOR, 10) for peer in PEERS},
        weightless=(),
        settings=replace(SETTINGS, seats=seats),
        deal=deal_evenly,
        line=tuple(line),
    )


def test_plan_counts_the_first_of_the_line_and_has_the_others_with_weight_zero() -> None:
    line = (PEERS[3], PEERS[1], PEERS[0], PEERS[2])
    plan = plan_of(line, 2)
    assert {plan.participants[place].peer for place in plan.contributors()} == {PEERS[3], PEERS[1]}
    assert [p.peer for p in plan.participants] == sorted(PEERS), "who has no seat hears the finals"
    assert len(plan_of(line, 5).contributors()) == 5


def test_member_has_a_seat_before_who_is_none() -> None:
    seated = Seating(1, (PEERS[2],))
    assert seated.first(PEERS) == {PEERS[2]}
    assert len(Seating(3, (PEERS[2],)).first(PEERS)) == 3


def test_plan_of_more_than_the_seats_is_refused() -> None:
    plan = plan_of((), 3)
    check_plan(plan, LEAD, START, replace(SETTINGS, seats=3))
    with pytest.raises(RemoteError, match="counts 3 for 2 seats"):
        check_plan(plan, LEAD, START, replace(SETTINGS, seats=2))


@pytest.mark.parametrize(
    ("seats", "ready", "passed_over"),
    [
        (2, (0, 1, 2, 3, 4), (0, 2)),
        (2, (1, 3, 4), ()),
        (2, (2, 4), (2,)),
        (3, (4,), ()),
        (3, (2, 3), (2,)),
        (5, (3,), ()),
    ],
)
def test_plan_passes_over_who_stands_before_the_last_it_counts_or_for_whom_it_has_a_seat(
    seats: int, ready: tuple[int, ...], passed_over: tuple[int, ...]
) -> None:
    """The line is 0, 1, 2, 3; 4 is no member; 1 and 3 are counted."""
    plan = plan_of((PEERS[1], PEERS[3]), 2)
    found = Seating(seats, tuple(PEERS[:4])).passed_over(plan, [PEERS[number] for number in ready])
    assert found == {PEERS[number] for number in passed_over}


# -- values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counted", "seats", "may"),
    [
        ((0, 1), 2, True),
        ((0,), 2, True),
        ((0, 1, 2), 2, False),
        ((1, 0), 2, False),
        ((0, 0), 2, False),
        ((), 2, False),
        (None, 2, False),
        ((0, 1), MEMBER_LIMIT, False),
        (None, MEMBER_LIMIT, True),
    ],
)
def test_result_names_whom_it_counted_where_seats_are_few_and_in_one_form(
    counted: tuple[int, ...] | None, seats: int, may: bool
) -> None:
    peers = sorted(IDS)
    named = msgspec.UNSET if counted is None else tuple(peers[number] for number in counted)
    value = msgspec.structs.replace(counting(genesis(SWARM, IDS[:4]), IDS[:4], IDS[:2]), counted=named)
    assert may_count(value, seats) == may


def test_rollback_counts_nobody() -> None:
    value = counting(genesis(SWARM, IDS[:4]), IDS[:4], IDS[:2])
    back = msgspec.structs.replace(value, rollback=Rollback(Target(0, bytes(32)), (), ()))
    assert not may_count(back, SEATS)
    assert may_count(msgspec.structs.replace(back, counted=msgspec.UNSET), SEATS)


def test_chain_takes_no_value_that_does_not_say_whom_it_counted_and_knows_the_line_by_those_that_do() -> None:
    manifest = seated()
    chain = Chain(genesis(SWARM, IDS[:4]), manifest=manifest)
    value = counting(chain.head, IDS[:4], IDS[:2])
    for wrong in (msgspec.UNSET, tuple(sorted(IDS[:3]))):
        with pytest.raises(RemoteError, match="whom its seats were for"):
            chain.extend(certified(msgspec.structs.replace(value, counted=wrong), *IDENTITIES[:4]))
    before = chain.snapshot()
    chain.extend(certified(value, *IDENTITIES[:4]))
    assert set(chain.line[:2]) == set(IDS[2:4])
    assert set(chain.line) == set(IDS[:4])
    assert before.line != chain.line or set(before.line[:2]) == set(IDS[2:4]), "what was copied stays"
    assert chain.back_to(before.head).line == before.line


@pytest.mark.parametrize("says", ["what it computed", "another instead", "nobody"])
def test_voter_signs_for_no_value_that_counts_others_than_it_computed(says: str) -> None:
    start = genesis(SWARM, IDS[:4])
    machine = Agreement(identity=IDENTITIES[0], previous=start, seats=SEATS)
    lead = next(one for one in IDENTITIES if one.peer_id == machine.lead(0))
    value = msgspec.structs.replace(counting(start, IDS[:4], IDS[1:3]), planner=lead.peer_id)
    if says == "another instead":
        value = msgspec.structs.replace(value, counted=tuple(sorted((IDS[1], IDS[3]))))
    if says == "nobody":
        value = msgspec.structs.replace(value, counted=msgspec.UNSET)
    machine.computed(honest_report(start, value.plan), IDS[:4], IDS[1:3])
    if says == "nobody":
        with pytest.raises(RemoteError, match="does not say whom it counted"):
            machine.receive(lead.peer_id, propose_of(lead, 0, value))
        return
    effects = machine.receive(lead.peer_id, propose_of(lead, 0, value))
    prepares = [e for e in effects if isinstance(e, Broadcast) and isinstance(e.message, Prepare)]
    assert bool(prepares) == (says == "what it computed")
    assert any(isinstance(effect, Mismatch) for effect in effects) != bool(prepares)


# -- rounds --------------------------------------------------------------------------------------------------


def counted(lab: RoundLab, round: int) -> set[int]:
    value = lab.value(round)
    assert not isinstance(value.counted, msgspec.UnsetType)
    return {lab.number(peer) for peer in value.counted}


def waits(lab: RoundLab, number: int, rounds: int) -> list[int]:
    """How long the node waited each time until it was counted, in rounds."""
    turns = [round for round in range(1, rounds + 1) if number in counted(lab, round)]
    return [after - before for before, after in zip([0, *turns], [*turns, rounds + 1], strict=True)]


def lab_of(nodes: int, founders: int | None = None, seed: int = 1, seats: int = SEATS) -> RoundLab:
    return RoundLab(nodes, founders=founders, seed=seed, manifest=seated(seats=seats))


def test_five_members_take_turns_at_two_seats_and_all_hold_the_state_of_every_round() -> None:
    lab = lab_of(5)
    lab.run_until(lab.height_of_all(10), 60.0)
    for round in range(1, 11):
        assert counted(lab, round) == lab.contributors(round)
        assert len(counted(lab, round)) == SEATS
        assert lab.members(round) == {0, 1, 2, 3, 4}, "who follows stays a member"
    for number in range(5):
        assert max(waits(lab, number, 10)) <= 3, "5 members on 2 seats"
    assert sum(len(counted(lab, round)) for round in range(1, 6)) == 10
    assert all(sum(number in counted(lab, round) for round in range(1, 11)) == 4 for number in range(5))


def favouring(victim: PeerId) -> Any:
    """A lead that has its own idea of the line: the victim comes last of all."""

    def make(*, line: tuple[PeerId, ...], **given: Any) -> RoundMachine:
        return RoundMachine(line=(*(peer for peer in line if peer != victim), victim), **given)

    return make


@pytest.mark.parametrize("seed", range(4))
def test_member_is_passed_over_by_leads_that_lie_in_no_two_rounds_one_after_the_other(seed: int) -> None:
    rounds, victim = 24, 0
    lab = lab_of(5, seed=seed)
    liars = (1, 2)
    for number in liars:
        node = lab.nodes[number]
        node.stop()
        node.make = favouring(lab.nodes[victim].peer)
        node.present = {other.peer: 1 for other in lab.nodes}
        lab.restart(number, seen=False)
    lab.run_until(lab.height_of((0, 3, 4), rounds), 300.0)
    chain = Chain(lab.start, manifest=lab.manifest)
    passed: list[bool] = []
    for round in range(1, rounds + 1):
        line = [lab.number(peer) for peer in chain.line]
        now = counted(lab, round)
        before = [number for number in now if line.index(number) > line.index(victim)]
        passed.append(victim not in now and bool(before))
        chain.extend(lab.nodes[victim].certificate(chain.head))
    assert any(passed), "the liars led, and did it once"
    assert not any(one and other for one, other in itertools.pairwise(passed))
    assert max(waits(lab, victim, rounds)) <= longest_wait(5, SEATS) + 2


# -- the manifest --------------------------------------------------------------------------------------------

FOUNDED = parse_manifest(
    f"[swarm]\nname = 'x'\nfounders = ['{FOUNDERS[0]}']\n[workload]\nname = 'regression'\n[sync]\ninner_steps = 1\n"
    "[membership]\nvoters = 'named'\n"
)


def test_swarm_of_before_seats_is_the_same_swarm_and_one_with_few_is_another() -> None:
    assert b"seats" not in FOUNDED.to_canonical()
    assert FOUNDED.seats == MEMBER_LIMIT
    ids = set()
    for seats in (1, 63, 64, 65, 256):
        manifest = seated(1, seats, staleness=99)
        assert parse_manifest(render_manifest(manifest)) == manifest
        assert Manifest.from_canonical(manifest.to_canonical(), manifest.swarm_id) == manifest
        assert (b"seats" in manifest.to_canonical()) == (seats != 64)
        ids.add(manifest.swarm_id)
    assert len(ids) == 5


@pytest.mark.parametrize(
    ("founders", "admission", "seats", "staleness", "least"),
    [(5, "open", 2, 33, 34), (5, "allowlist", 2, 4, 5), (2, "allowlist", 2, 0, None), (1, "open", 64, 0, None)],
)
def test_staleness_below_the_longest_wait_is_refused_in_one_line(
    founders: int, admission: str, seats: int, staleness: int, least: int | None
) -> None:
    if least is None:
        assert seated(founders, seats, staleness=staleness, admission=admission).longest_wait_rounds == 0
        return
    with pytest.raises(ConfigError, match=f"staleness_rounds = {least} or more, or more seats") as caught:
        seated(founders, seats, staleness=staleness, admission=admission)
    assert "\n" not in str(caught.value)
    assert seated(founders, seats, staleness=least, admission=admission).longest_wait_rounds == least


@pytest.mark.parametrize(
    "sync",
    [
        {"strategy": "ddp"},
        {"strategy": "streaming", "inner_steps": 8, "fragments": 4},
        {"strategy": "sparse"},
        {"strategy": "gossip"},
    ],
)
def test_few_seats_go_with_diloco_alone(sync: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"diloco|gossip"):
        seated(**sync)
