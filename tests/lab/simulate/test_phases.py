"""Faults that strike in a phase, peers that pause and go, and what must hold once nothing is wrong any more."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from shoal.lab.simulate.disk import Disk
from shoal.lab.simulate.obtaining import Obtaining
from shoal.lab.simulate.scenario import Fault, Phase, Scenario, random_scenario
from shoal.lab.simulate.simulation import Simulation, run_scenario
from shoal.protocol import departure as departure_module
from shoal.protocol.chain import Chain
from shoal.protocol.departure import Departure, LeaveStep
from shoal.protocol.facts import Gathering
from shoal.protocol.leading import Lead
from shoal.protocol.member import Member
from shoal.protocol.planning import TRAINING

CALM = Scenario(peers=4, rounds=4, seed=3, calm_rounds=3)

BEFORE: dict[str, tuple[Fault, ...]] = {
    "joining": (Fault(kind="join", at_s=6.0),),
    "repair": (Fault(kind="crash", peer=3, at_s=0.0, phase="reduce", duration_s=9.0),),
    "paused": (Fault(kind="pause", peer=1, at_s=0.5, duration_s=6.0),),
    "leaving": (Fault(kind="leave", peer=1, at_s=1.0),),
}
"""What brings a peer into a phase."""


def scenario(*faults: Fault) -> Scenario:
    return Scenario(peers=4, rounds=4, seed=3, calm_rounds=3, fault=tuple(sorted(faults, key=lambda one: one.at_s)))


@pytest.mark.parametrize("phase", get_args(Phase))
@pytest.mark.parametrize("kind", ["kill", "stop", "pause", "leave"])
def test_peer_is_struck_in_a_phase_and_everyone_is_there_again_in_the_end(kind: Any, phase: Phase) -> None:
    peer, at_s = (4, 6.0) if phase == "joining" else (1, 1.0)
    strike = Fault(kind=kind, peer=peer, at_s=at_s, phase=phase, duration_s=None if kind == "leave" else 3.0)
    outcome = run_scenario(scenario(*BEFORE.get(phase, ()), strike))
    assert (outcome.violation, outcome.detail) == ("", "")
    assert outcome.met.get(f"struck: {phase}", 0) >= 1
    assert outcome.met["calm rounds"] >= 3


def test_fault_whose_phase_does_not_come_strikes_all_the_same() -> None:
    simulation = Simulation(scenario(Fault(kind="leave", peer=1, at_s=1.0, phase="paused")))
    assert simulation.run().violation == ""
    assert simulation.peers[1].gone


@pytest.mark.parametrize("paused", [True, False])
def test_peer_that_hangs_says_nothing_and_pauses_or_goes_on_once_it_runs(paused: bool) -> None:
    simulation = Simulation(scenario())
    for peer in simulation.peers:
        simulation.start(peer)
    peer = simulation.peers[1]
    with simulation.keys.in_use():
        simulation.timeline.run(3.0, lambda: False)
        peer.pause(paused=not paused)
        peer.hung = True
        said: list[object] = []
        simulation.tell = lambda peer, to, message: said.append(message)  # type: ignore[method-assign]
        peer.pause(paused=paused)
        assert (said, peer.peer_rounds.paused) == ([], not paused)
        peer.wake()
    assert said
    assert peer.peer_rounds.paused == paused


def test_trainer_that_begins_anew_makes_its_contribution() -> None:
    outcome = run_scenario(scenario(Fault(kind="trainer", peer=1, at_s=0.5), Fault(kind="trainer", peer=1, at_s=5.0)))
    assert (outcome.violation, outcome.met["calm rounds"] >= 3) == ("", True)


def test_peer_whose_rounds_are_done_is_gone_and_the_others_go_on() -> None:
    simulation = Simulation(scenario(Fault(kind="finish", peer=2, at_s=0.0, round=2)))
    outcome = simulation.run()
    assert (outcome.violation, outcome.met["calm rounds"] >= 3) == ("", True)
    assert simulation.peers[2].gone
    assert simulation.peers[2].disk.height == 2


@pytest.mark.parametrize("phase", ["train", "plan", "reduce", "certify"])
@pytest.mark.parametrize("forgets", [True, False])
def test_swarm_goes_on_after_an_outage_in_a_phase(phase: Phase, forgets: bool) -> None:
    outage = Fault(kind="outage", peer=1, at_s=1.0, phase=phase, into_s=0.05, duration_s=2.0, forgets=forgets)
    outcome = run_scenario(scenario(outage))
    assert (outcome.violation, outcome.met["calm rounds"] >= 3) == ("", True)
    assert outcome.deaths_found == 0  # nobody was there to find any


def test_every_phase_is_named_within_two_hundred_seeds() -> None:
    faults = [fault for seed in range(200) for fault in random_scenario(seed).fault]
    assert {fault.phase for fault in faults} >= set(get_args(Phase))
    assert all(fault.peer is not None for fault in faults if fault.phase)


# -- seeded bugs: each promise can be seen broken ----------------------------------------------------------------


def test_seeded_pause_of_which_nobody_hears_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Member._role

    def trains(member: Member) -> str:
        return TRAINING if member._here.paused else plain(member)

    monkeypatch.setattr(Member, "_role", trains)
    assert run_scenario(scenario(Fault(kind="pause", peer=1, at_s=0.5, duration_s=6.0))).violation == "a pause"


def test_seeded_trainer_that_is_told_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Member, "_trainer_restarted", Member._ignore)
    table = "shoal.protocol.member.TRANSITIONS"
    from shoal.protocol.inputs import TrainerRestarted
    from shoal.protocol.member import TRANSITIONS

    ignored = dict.fromkeys(TRANSITIONS[TrainerRestarted], Member._ignore)
    monkeypatch.setattr(table, {**TRANSITIONS, TrainerRestarted: ignored})
    assert run_scenario(scenario(Fault(kind="trainer", peer=1, at_s=0.5))).violation == "a pause"


def test_seeded_leave_that_never_comes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Departure, "advise", lambda *_, **__: LeaveStep.STAY)
    assert run_scenario(scenario(Fault(kind="leave", peer=1, at_s=1.0, duration_s=40.0))).violation == "a leave"
    assert departure_module.LEAVE_TIMEOUT_S < 40


def test_seeded_round_that_is_slow_for_no_reason_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Lead._close_set

    def later(lead: Lead, now: float) -> Any:
        began = lead.__dict__.setdefault("began", now)
        return plain(lead, now) if now - began > 14 else None

    monkeypatch.setattr(Lead, "_close_set", later)
    assert run_scenario(CALM).violation == "quick rounds"


def test_seeded_plan_without_one_who_is_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Gathering.candidates

    def others(gathering: Gathering, *known: Any) -> Any:
        found = plain(gathering, *known)
        return {peer: found[peer] for peer in sorted(found)[:-1]}

    monkeypatch.setattr(Gathering, "candidates", others)
    assert run_scenario(CALM).violation == "everyone counts"


# -- other terms -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("back", [1, 2])
@pytest.mark.parametrize("phase", ["train", "certify"])
def test_swarm_goes_back_where_a_user_wants_it_and_on_from_there(back: int, phase: Phase) -> None:
    simulation = Simulation(scenario(Fault(kind="rollback", peer=1, at_s=9.0, phase=phase, back=back)))
    outcome = simulation.run()
    assert (outcome.violation, outcome.detail) == ("", "")
    chain = simulation.peers[0].disk.ledger
    (gone_back,) = (entry.value for entry in chain.entries if entry.value.rollback)
    assert back < gone_back.round - gone_back.state_round <= back + 2  # a round may have been certified meanwhile
    assert chain.head.term.rollbacks == 1
    assert outcome.met["calm rounds"] >= 3


ORDERED_ALONE = Scenario(
    peers=5,
    rounds=1,
    seed=3735,
    calm_rounds=3,
    fault=(
        Fault(kind="kill", at_s=0.0, duration_s=0.71, peer=1),
        Fault(kind="kill", at_s=9.55, duration_s=8.0, peer=4),
        Fault(kind="rollback", at_s=13.24, phase="train", peer=4),
    ),
)
"""When peer 4 is a member again, it alone has the state that was ordered before that; its disk too lets go of it unless
it is kept at once."""


def test_swarm_goes_back_to_a_state_that_only_who_ordered_it_still_has() -> None:
    outcome = run_scenario(ORDERED_ALONE)
    assert (outcome.violation, outcome.detail, outcome.met["rollback ordered"]) == ("", "", 1)


def test_seeded_order_for_a_state_that_is_not_served_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_memory(self: Obtaining, round: int) -> Any:
        return self.cache.begin_serving(round, self.now)

    monkeypatch.setattr(Obtaining, "begin_serving", from_memory)
    assert run_scenario(ORDERED_ALONE).violation == "orders"


LEFT_OUT = Scenario(
    peers=3,
    rounds=1,
    seed=89,
    calm_rounds=3,
    fault=(
        Fault(kind="kill", at_s=0.0, phase="plan", peer=2, duration_s=2.56, torn=1.0),
        Fault(kind="stop", at_s=0.0, phase="joining", into_s=0.228, peer=2, duration_s=5.5),
        Fault(kind="stop", at_s=9.65, peer=0, duration_s=1.43),
        Fault(kind="rollback", at_s=13.17, phase="reduce", peer=1, back=2),
        Fault(kind="stop", at_s=14.28, peer=2, duration_s=5.86),
    ),
)
"""Peer 1 is evicted from round 3, in which its user orders to go back, and is left out of the rounds 4 and 5."""


def test_order_of_a_peer_that_is_left_out_for_a_while_is_carried_out_once_it_votes_again() -> None:
    simulation = Simulation(LEFT_OUT)
    outcome = simulation.run()
    assert (outcome.violation, outcome.detail, outcome.met["rollback ordered"]) == ("", "", 1)
    peer = simulation.peers[1]
    first = max((one.disk.ledger for one in simulation.peers), key=lambda ledger: ledger.height)
    chain = [entry.value for entry in first.entries]
    assert [peer.id in value.members for value in chain] == [True, True, False, False, False, True, True]
    assert [value.state_round for value in chain] == [1, 2, 3, 4, 5, 6, 1]


WITHOUT_THE_STATE = Scenario(
    peers=3,
    rounds=1,
    seed=1,
    calm_rounds=3,
    fault=(
        Fault(kind="finish", at_s=0.0, peer=1, round=3),
        Fault(kind="join", at_s=3.97),
        Fault(kind="lossy", at_s=9.75, peer=0, duration_s=1.45, share=0.45),
        Fault(kind="join", at_s=11.88),
        Fault(kind="stop", at_s=13.64, peer=2, duration_s=13.62),
        Fault(kind="rollback", at_s=15.12, peer=0, back=2),
    ),
)
"""Peer 4 joined with the state of round 4, and has to fetch that of round 2, to which the others go back."""


def test_newcomer_that_fetches_the_state_gone_back_to_is_not_waited_for_and_becomes_a_member_next() -> None:
    simulation = Simulation(WITHOUT_THE_STATE)
    outcome = simulation.run()
    assert (outcome.violation, outcome.detail, outcome.met["rollback ordered"]) == ("", "", 1)
    first = max((one.disk.ledger for one in simulation.peers), key=lambda ledger: ledger.height)
    newcomer, members = simulation.peers[4].id, [entry.value.members for entry in first.entries]
    back = next(at for at, entry in enumerate(first.entries) if entry.value.rollback)
    assert [newcomer in there for there in members[back : back + 3]] == [False, False, True]


def test_no_round_is_calm_while_what_a_slow_connection_was_given_is_under_way() -> None:
    simulation = Simulation(CALM)
    simulation.network.slowed[1] = 100.0
    simulation.network.payload_delay_s(1, 2, 3e7)
    simulation.network.quicken(1)
    assert not simulation.network.slowed
    outcome = simulation.run()
    assert outcome.violation == ""
    assert simulation.network.cleared_at > simulation.timeline.now
    assert "calm rounds" not in outcome.met


def test_settings_are_amended_and_plans_are_made_by_them() -> None:
    ordered = Fault(kind="amend", peer=1, at_s=5.0, setting="round.weight_cap=1")
    simulation = Simulation(scenario(ordered))
    outcome = simulation.run()
    assert (outcome.violation, outcome.detail, outcome.met["amendment ordered"]) == ("", "", 1)
    chain = simulation.peers[0].disk.ledger
    (settled,) = (value for value in simulation.peers[0].disk.chain if value.amended)
    assert chain.in_force is not None
    assert chain.in_force.manifest.round.weight_cap == 1
    plans = [simulation.judge.plan_of(value)[0] for value in simulation.peers[0].disk.chain[1:]]
    uneven = [plan.round for plan in plans if len({p.weight for p in plan.participants if p.weight}) > 2]
    assert uneven
    assert max(uneven) <= settled.round


def test_authority_has_those_go_on_who_are_left() -> None:
    gone = tuple(Fault(kind="kill", peer=peer, at_s=9.0) for peer in (1, 2, 3))
    left = msgspec.structs.replace(scenario(*gone), rounds=8, rebases=True)
    simulation = Simulation(left)
    outcome = simulation.run()
    assert (outcome.violation, outcome.detail, outcome.met["rebased"]) == ("", "", 1)
    head = simulation.peers[0].disk.ledger.head
    assert (head.term.rebases, head.members) == (1, (simulation.peers[0].id,))
    assert run_scenario(msgspec.structs.replace(left, rebases=False)).rounds_certified < 8


def test_peer_that_had_no_vote_when_the_authority_went_on_is_a_newcomer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a member shortly before, yet none of those with whom the authority went on: its first round is one of
    weight zero."""
    faults = (
        Fault(kind="finish", at_s=0.0, peer=0, round=2),
        Fault(kind="kill", at_s=1.51, peer=1, duration_s=4.13),
        Fault(kind="outage", at_s=5.06, phase="plan", into_s=0.02, peer=0, duration_s=1.0),
    )
    rebased = Scenario(peers=3, rounds=5, seed=3471, fault=faults, rebases=True, calm_rounds=3)
    simulation = Simulation(rebased)
    outcome = simulation.run()
    assert (outcome.violation, outcome.detail, outcome.met["rebased"]) == ("", "", 1)
    _, back, staying = (peer.id for peer in simulation.peers)
    chain = [entry.value for entry in simulation.peers[2].disk.ledger.entries]
    assert [(value.term.rebases, value.round, value.members) for value in chain[2:4]] == [
        (1, 2, (staying,)),
        (1, 3, tuple(sorted((back, staying)))),
    ]
    weights = [{p.peer: p.weight for p in simulation.judge.plan_of(value)[0].participants} for value in chain[3:5]]
    assert weights[0][back] == 0 < weights[1][back]

    plain = Chain.recent_members
    monkeypatch.setattr(Chain, "recent_members", lambda chain, rounds: plain(chain, rounds) | chain._members_ever)
    assert run_scenario(rebased).violation == "newcomers wait"


def test_seeded_rollback_to_another_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Disk.earlier
    monkeypatch.setattr(Disk, "earlier", lambda disk, round: plain(disk, round + 1) if round else plain(disk, round))
    outcome = run_scenario(scenario(Fault(kind="rollback", peer=1, at_s=9.0, back=2)))
    assert outcome.violation in ("the reference", "progress")


ALL_LOSE_THEIR_WORK = (
    Scenario(
        peers=8,
        rounds=1,
        seed=7476,
        loss=0.05,
        fragments=2,
        fault=(
            Fault(kind="partition", at_s=1.09, duration_s=12.3, groups=((0, 1, 2, 7), (3, 4, 5, 6))),
            Fault(kind="outage", at_s=3.37, phase="certify", into_s=0.2, peer=5, duration_s=2.0, forgets=True),
            Fault(kind="kill", at_s=10.22, peer=1, duration_s=8.82, forgets=True),
        ),
    ),
    Scenario(
        peers=5,
        rounds=3,
        seed=5793,
        loss=0.0,
        fault=(
            Fault(kind="leave", at_s=5.38, peer=2),
            Fault(kind="pause", at_s=6.22, peer=3, duration_s=0.62),
            Fault(kind="stop", at_s=0.0, phase="paused", peer=3, duration_s=3.54),
            Fault(kind="crash", at_s=8.12, peer=1, duration_s=6.36, torn=1.0),
            Fault(kind="outage", at_s=13.12, peer=3, duration_s=2.0, forgets=True),
            Fault(kind="leave", at_s=15.55, peer=0),
        ),
    ),
)
"""All are started again without what they contributed, after a value was signed for. Nobody has a prepare certificate,
or who has it leaves for good."""


@pytest.mark.parametrize("lost", ALL_LOSE_THEIR_WORK, ids=lambda lost: str(lost.seed))
def test_round_whose_contributions_are_all_lost_is_made_again_and_counts_once(lost: Scenario) -> None:
    outcome = run_scenario(lost)
    assert (outcome.violation, outcome.detail) == ("", "")
    assert outcome.rounds_certified >= lost.rounds
