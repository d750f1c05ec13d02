"""What judges each step of a round with repairs: it passes what is right, and every single thing that must not be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest

from shoal.collectives.finals import Finals
from shoal.lab.explore.repair import RepairExplorer
from shoal.lab.explore.repair_judge import (
    Parcel,
    wrong_contribution,
    wrong_finals,
    wrong_held,
    wrong_report,
    wrong_revision,
    wrong_signature,
)
from shoal.lab.explore.repair_scope import RepairScope, ScopeSetup
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import ChunkResults, Held, OwnedRange, Plan, Vote, domain_hash
from shoal.protocol.planning import PlanOrder, reroute_plan, revise_plan

GONE = 2
"""The place of who is evicted; it owns chunk 2, and each of the others the chunk of its place."""
OTHER = domain_hash("another one")

Helds = Mapping[PeerId, list[Held]]


@dataclass(frozen=True)
class Round:
    """A plan, all its finals, and two revisions without the one who is gone: place 0 holds its final, or nobody."""

    explorer: RepairExplorer
    setup: ScopeSetup
    plan: Plan
    finals: Finals
    helds: Helds
    revised: Plan
    unheld: Helds
    dealt_anew: Plan

    @property
    def peers(self) -> list[PeerId]:
        return [participant.peer for participant in self.plan.participants]


def word(plan: Plan, *chunks: ChunkResults) -> Held:
    """What somebody says who takes nothing more from the one who is gone."""
    gone = (plan.participants[GONE].peer,)
    return Held(term=plan.term, round=plan.round, base=plan.base, lineage=plan.lineage, evicted=gone, chunks=chunks)


def revised(plan: Plan, helds: Helds, setup: ScopeSetup) -> Plan:
    planner, gone = plan.participants[0].peer, plan.participants[GONE].peer
    plan_order = PlanOrder(view=0, attempt=1, planner=planner, evicted=(gone,))
    return revise_plan(plan, plan_order, {peer: words[0] for peer, words in helds.items()}, setup.deal)


@pytest.fixture(scope="module")
def played() -> Round:
    explorer = RepairExplorer(RepairScope(members=3, views=1, attempts=1, chunks=3))
    assert explorer.run().violations == ()
    setup, members = explorer.members.setup, explorer.members
    plan = members.states[explorer.start[0]].machine.plan
    assert plan is not None
    finals = next(finals for finals in members.finals.values() if finals.plan == plan)
    one, other = (plan.participants[place].peer for place in (0, 1))
    held = {one: [word(plan, ChunkResults.of(GONE, {GONE: finals.chunks[GONE].result}))], other: [word(plan)]}
    unheld = {one: [word(plan)], other: [word(plan)]}
    return Round(
        explorer=explorer,
        setup=setup,
        plan=plan,
        finals=finals,
        helds=held,
        revised=revised(plan, held, setup),
        unheld=unheld,
        dealt_anew=revised(plan, unheld, setup),
    )


# -- revisions ---------------------------------------------------------------------------------------------------


def test_right_revisions_pass(played: Round) -> None:
    assert played.revised.standing == (ChunkResults.of(0, {GONE: played.finals.chunks[GONE].result}),)
    assert wrong_revision(played.plan, played.revised, played.helds) is None
    assert wrong_revision(played.plan, played.dealt_anew, played.unheld) is None
    rerouted = reroute_plan(played.plan, PlanOrder(view=0, attempt=1, planner=played.peers[0], evicted=()), ())
    assert wrong_revision(played.plan, rerouted, {}) is None
    assert wrong_revision(None, played.plan, {}) is None


def test_wrong_revisions_are_told(played: Round) -> None:
    plan, right, anew, helds = played.plan, played.revised, played.dealt_anew, played.helds
    change = msgspec.structs.replace
    result = played.finals.chunks[GONE].result
    first_heard = {peer: words for peer, words in helds.items() if peer == played.peers[0]}
    taken = (OwnedRange(1, 0, 2), OwnedRange(GONE, 2, 3))
    found = {
        "a revision of a plan that its lead does not follow": wrong_revision(None, right, helds),
        "a revision with other participants": wrong_revision(
            plan, change(right, participants=right.participants[::-1]), helds
        ),
        "revised without the word of one who remains": wrong_revision(plan, right, first_heard),
        "a chunk taken from an owner who remains": wrong_revision(plan, change(right, owners=taken), helds),
        "a final that stands and that its source does not hold": wrong_revision(
            plan, change(right, standing=(ChunkResults.of(1, {GONE: result}),)), helds
        ),
        "a final that someone holds was dropped": wrong_revision(plan, change(right, standing=()), helds),
        "a chunk dealt to the evicted": wrong_revision(plan, change(anew, owners=plan.owners), played.unheld),
    }
    assert found == {kind: kind for kind in found}


# -- finals ------------------------------------------------------------------------------------------------------


def test_right_finals_pass(played: Round) -> None:
    gone, result = played.peers[GONE], played.finals.chunks[GONE].result
    standing = (ChunkResults.of(0, {GONE: result}),)
    assert wrong_finals(played.setup, played.finals) is None
    plan = msgspec.structs.replace(played.plan, evicted=(gone,), standing=standing)
    assert wrong_finals(played.setup, replace(played.finals, plan=plan)) is None


CHANGED_PLANS: dict[str, Callable[[Plan], Plan]] = {
    "a plan with a contribution that nobody made": lambda plan: msgspec.structs.replace(
        plan, participants=(msgspec.structs.replace(plan.participants[0], root=OTHER), *plan.participants[1:])
    ),
    "another final than the one that stands": lambda plan: msgspec.structs.replace(
        plan, standing=(ChunkResults.of(1, {0: OTHER}),)
    ),
    "a final of the evicted that does not stand": lambda plan: msgspec.structs.replace(
        plan, evicted=(plan.participants[GONE].peer,)
    ),
}


@pytest.mark.parametrize("kind", CHANGED_PLANS)
def test_finals_that_do_not_suit_their_plan_are_told(played: Round, kind: str) -> None:
    assert wrong_finals(played.setup, replace(played.finals, plan=CHANGED_PLANS[kind](played.plan))) == kind


def test_wrong_finals_are_told(played: Round) -> None:
    first, *rest = played.finals.chunks
    encoded = np.frombuffer(bytes([*first.encoded[:-1], first.encoded[-1] ^ 1]), np.uint8)
    wrong = {
        "a final that counts who is not in the plan": replace(first, bitmap=b"\xff"),
        "finals that are not the mean of what they count": replace(first, encoded=encoded),
        "a final of who does not own its chunk": replace(first, owner=rest[0].owner),
    }
    found = {k: wrong_finals(played.setup, replace(played.finals, chunks=(c, *rest))) for k, c in wrong.items()}
    assert found == {kind: kind for kind in wrong}


def test_final_of_the_evicted_that_came_too_late_is_told(played: Round) -> None:
    finals, plan = played.finals, played.plan
    said = word(plan, ChunkResults.of(GONE, {GONE: finals.chunks[GONE].result}))
    elsewhere = msgspec.structs.replace(word(plan), lineage=OTHER)
    assert wrong_report([said, elsewhere], finals) is None
    assert wrong_report([said, word(plan)], finals) == "a final of the evicted that came after closing off"


# -- what one member says and posts ------------------------------------------------------------------------------


def test_what_is_signed_held_and_sent_must_be_what_it_was(played: Round) -> None:
    signed = frozenset({(played.plan.lineage, 0, b"\x07", OTHER)})
    assert wrong_signature(signed, played.plan.lineage, 0, b"\x07", OTHER) is None
    assert wrong_signature(signed, played.plan.lineage, 1, b"\x03", played.plan.hash) is None
    assert wrong_signature(signed, played.plan.lineage, 0, b"\x03", OTHER) == "two results signed for one chunk"
    said = word(played.plan, ChunkResults.of(GONE, {GONE: OTHER}))
    assert wrong_held(said, {GONE: (GONE, OTHER)}) is None
    assert (
        wrong_held(said, {}) == wrong_held(word(played.plan), {GONE: (GONE, OTHER)}) == "held finals that were not said"
    )
    payload = bytes(played.setup.contributions[0].payload(1))
    parcel = Parcel(0, 1, False, 1, (0, 0), played.plan.lineage, payload)
    assert wrong_contribution(played.setup, parcel) is None
    changed = replace(parcel, payload=payload[:-1] + bytes([payload[-1] ^ 1]))
    assert wrong_contribution(played.setup, changed) == "a contribution that was changed"


# -- what members did together -----------------------------------------------------------------------------------


def test_two_digests_of_one_plan_are_seen(played: Round) -> None:
    states = played.explorer.members.states
    number = next(number for number, state in enumerate(states) if state.finals)
    states.append(replace(states[number], finals=frozenset({(played.plan.hash, OTHER)})))
    assert not played.explorer._two_digests([number, number])
    assert played.explorer._two_digests([number, len(states) - 1])


def test_two_values_with_a_quorum_of_votes_are_seen(played: Round) -> None:
    plan, states = played.plan, played.explorer.members.states

    def voting(*votes: tuple[int, bytes]) -> int:
        cast = {
            Vote(term=plan.term, round=plan.round, base=plan.base, view=view, value=value, signature=bytes(64))
            for view, value in votes
        }
        states.append(replace(states[0], said=frozenset(cast)))
        return len(states) - 1

    one, other, both = voting((0, plan.hash)), voting((1, OTHER)), voting((0, plan.hash), (1, OTHER))
    assert not played.explorer._forked([one, one, other])
    assert not played.explorer._forked([one, one, voting((1, plan.hash))])
    assert played.explorer._forked([one, both, other])
    spread = [voting((0, OTHER)), voting((1, OTHER)), voting((2, OTHER))]
    played.explorer.certified.clear()
    assert not played.explorer._forked(spread)
    assert played.explorer.certified == set(), "votes of different views do not count together"
