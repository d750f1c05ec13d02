"""Liars among the machines that nodes run: what they cannot do, and that broken machines are found."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from shoal.lab.explore.liar import Liar, evidence
from shoal.lab.explore.liar_search import LiarExplorer
from shoal.lab.explore.member import Members
from shoal.lab.explore.scope import Scope, Values
from shoal.lab.explore.search import Exploration
from shoal.lab.explore.walk import walk
from shoal.protocol import agreement as agreement_module
from shoal.protocol import certificate as certificate_module
from shoal.protocol import view_change as view_change_module
from shoal.protocol.agreement import Agreement, AgreementEffect, Broadcast, NeedFinals
from shoal.protocol.messages import Certificate, Leave, Message, Prepare, Prepared, Propose, Value, ViewChange, Vote
from shoal.protocol.voting import FaultModel
from tests.protocol import seeded

CRASH, LYING = FaultModel.CRASH, FaultModel.LYING
WALK: dict[str, Any] = {"views": 4, "crashes": 2, "plans": 2, "liars": 1}
TWO_LIARS = Scope(members=7, faults=LYING, **WALK | {"liars": 2})


def walked(
    faults: FaultModel, members: int, steps: int, seed: int, bug: type[Agreement] = Agreement
) -> Exploration[Scope]:
    scope = Scope(members=members, faults=faults, **WALK)
    return walk(scope, steps, seed, partial(seeded.made_by, bug))


def explored(**scope: Any) -> Exploration[Scope]:
    return LiarExplorer(Scope(liars=1, **scope)).run()


def kinds(exploration: Exploration[Scope]) -> list[str]:
    return [finding.kind for finding in exploration.violations]


# -- what holds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("faults", "members"), [(CRASH, 2), (CRASH, 3), (LYING, 4)], ids=str)
def test_stranger_that_says_anything_beside_named_voters_has_no_say(faults: FaultModel, members: int) -> None:
    scope = Scope(members=members, strangers=1, views=2, liars=1, liar=members, faults=faults)
    explorer = LiarExplorer(scope)
    exploration = explorer.run(limit=1500)
    assert exploration.violations == ()
    assert exploration.certified <= {frozenset(), frozenset({"A0"}), frozenset({"A1"})}
    assert exploration.complete == (members == 2)
    assert explorer.forks == 0, "not in crash either"


@pytest.mark.parametrize(("faults", "members"), [(CRASH, 3), (LYING, 4)], ids=str)
def test_walks_beside_a_liar_that_may_be_a_voter_or_not_fork_nothing(faults: FaultModel, members: int) -> None:
    scope = Scope(members=members, strangers=2, faults=faults, **WALK | {"leaves": 0})
    exploration = walk(scope, 3000, 1)
    assert exploration.violations == ()
    assert any(exploration.certified)


@pytest.mark.parametrize("faults", [CRASH, LYING], ids=str)
def test_machine_that_follows_a_stranger_is_found(faults: FaultModel) -> None:
    members = 4 if faults is LYING else 3
    scope = Scope(members=members, strangers=1, views=1, liars=1, liar=members, faults=faults)
    exploration = LiarExplorer(scope, partial(seeded.made_by, seeded.FollowsAnybody)).run(limit=20_000)
    assert kinds(exploration) == ["an honest member signed what a stranger proposed"]


@pytest.mark.parametrize(("faults", "members"), [(LYING, 4), (CRASH, 3), (CRASH, 4), (LYING, 7)], ids=str)
def test_liar_among_real_machines_forks_nothing_and_takes_nothing_over(faults: FaultModel, members: int) -> None:
    exploration = walked(faults, members, 3000, seed=1)
    assert exploration.violations == ()
    assert exploration.states == 3000
    assert any(exploration.certified)


def test_two_liars_of_seven_fork_nothing() -> None:
    exploration = walk(TWO_LIARS, 1500, 1)
    assert (exploration.violations, exploration.states) == ((), 1500)
    assert any(exploration.certified)


def test_every_schedule_of_a_liar_that_leads_certifies_one_of_its_true_values() -> None:
    exploration = explored(members=4, views=1, liar=0, faults=LYING)
    assert (exploration.violations, exploration.complete) == ((), True)
    assert exploration.certified == {frozenset(), frozenset({"A0"}), frozenset({"B0"})}


@pytest.mark.parametrize("liar", [1, 3])
def test_every_schedule_of_one_view_beside_a_liar_certifies_what_the_lead_proposed(liar: int) -> None:
    exploration = explored(members=4, views=1, liar=liar, faults=LYING, plans=2)
    assert (exploration.violations, exploration.complete) == ((), True)
    names = {name for names in exploration.certified for name in names}
    assert names == {f"{plan}0{left}" for plan in "AB" for left in ("", f"-{liar}")}


def test_walk_of_a_seed_is_the_same_again() -> None:
    first, again = (walked(CRASH, 3, 800, seed=4) for _ in range(2))
    assert (first.certified, first.member_states) == (again.certified, again.member_states)


def test_every_schedule_beside_a_liar_of_crash_has_forks_and_takes_nothing_over() -> None:
    explorer = LiarExplorer(Scope(members=3, views=1, liars=1, liar=0))
    exploration = explorer.run()
    assert (exploration.violations, exploration.complete) == ((), True)
    assert exploration.certified == {frozenset(), frozenset({"A0"}), frozenset({"B0"})}
    assert explorer.forks > 0


# -- a fork, and what it costs -----------------------------------------------------------------------------------


def test_liar_of_crash_that_forks_a_round_is_convicted_by_what_it_sent() -> None:
    scope = Scope(members=3, views=1, liars=1, liar=0)
    members = Members(scope)
    identities, previous, values, liar = members.identities, members.previous, members.values, Liar(scope, members, 0)
    sent: list[Message] = []
    decided: dict[int, bytes] = {}
    for position, value in ((1, liar.own[0]), (2, liar.own[1])):
        machine = Agreement(identity=identities[position], previous=previous)
        said: set[Message] = set()
        tell(machine, identities[0].peer_id, spoken(liar, Propose, value), values, said, sent)
        tell(machine, identities[0].peer_id, spoken(liar, Prepare, value), values, said, sent)
        tell(machine, identities[0].peer_id, spoken(liar, Vote, value), values, said, sent)
        assert machine.certificate is not None
        decided[position] = machine.certificate.value.hash
    assert decided[1] != decided[2]
    assert evidence(sent) == "two Proposes in view 0"
    assert evidence(m for m in sent if isinstance(m, Vote)) == "two Votes in view 0"


def spoken(liar: Liar, kind: type[Propose | Prepare | Vote], value: Value) -> Message:
    said = [m for m in liar.alphabet([frozenset()] * 3) if isinstance(m, kind) and m.view == 0]
    return next(m for m in said if value.hash == (m.value.hash if isinstance(m, Propose) else m.value))


def tell(
    machine: Agreement, sender: Any, message: Message, values: Values, said: set[Message], sent: list[Message]
) -> None:
    sent.append(message)
    effects: list[AgreementEffect] = machine.receive(sender, message)
    while effects:
        effect = effects.pop(0)
        if isinstance(effect, NeedFinals):
            effects += machine.computed(values.report(effect.value))
        elif isinstance(effect, Broadcast):
            said.add(effect.message)


def test_evidence_takes_two_words_that_no_honest_member_gives() -> None:
    scope = Scope(members=3, views=3, liars=1, liar=0)
    liar = Liar(scope, Members(scope), 0)
    alphabet = liar.alphabet([frozenset()] * 3)
    moved = next(m for m in alphabet if isinstance(m, ViewChange) and m.view == 2 and m.prepared is None)
    voted = [next(m for m in alphabet if isinstance(m, Vote) and m.view == view) for view in range(3)]
    left = next(m for m in alphabet if isinstance(m, Leave))
    decided = next(m for m in alphabet if isinstance(m, Certificate))
    assert evidence([moved, voted[2]]) is None
    assert evidence([moved, voted[1]]) == "a ViewChange below its own vote"
    assert evidence([voted[0], voted[1], voted[2]]) is None
    assert evidence([left, decided]) is None
    assert evidence([left, moved]) == "a leave beside something signed"


# -- seeded bugs -------------------------------------------------------------------------------------------------


class FollowsOne(Agreement):
    """Goes along with whoever moved furthest."""

    def _try_follow(self) -> list[AgreementEffect]:
        ahead = max((view for view in self._changes if view > self.view), default=None)
        return [] if ahead is None else self.move_to(ahead)


class RefusesNobody(Agreement):
    """Takes any members that a lead names, if they signed."""

    def _refuse(self, view: int, value: Value) -> bool:
        return False


class VotesAtOnce(Agreement):
    """Takes any Prepare for a certificate."""

    def _certified(self, steps: Any, view: int, value: Value) -> Prepared | None:
        if steps is not self._prepares:
            return super()._certified(steps, view, value)
        row = steps.get((view, value.hash), {})
        return Prepared(view, tuple(sorted(row)), tuple(row[peer] for peer in sorted(row)))


FAR = "a member followed to a view far ahead"
STRANGER = "an honest member signed a stranger as a member"
LEAVES = "an honest member signed leaves that nobody signed"


def first_found(faults: FaultModel, bug: type[Agreement] = Agreement) -> str | None:
    """What walks of some seeds find."""
    members = 4 if faults is LYING else 3
    findings = (kinds(walked(faults, members, 6000, seed, bug)) for seed in range(2, 7))
    return next((kind for found in findings for kind in found), None)


@pytest.mark.parametrize(
    ("bug", "found"),
    [
        (FollowsOne, {FAR, "no decision"}),
        (RefusesNobody, {STRANGER}),
        (VotesAtOnce, {"an honest member was blamed", "fork"}),
    ],
)
def test_seeded_machine_is_found(bug: type[Agreement], found: set[str]) -> None:
    assert first_found(LYING, bug) in found


def test_seeded_machine_is_found_beside_two_liars() -> None:
    walks = (walk(TWO_LIARS, 3000, seed, partial(seeded.made_by, RefusesNobody)) for seed in range(1, 4))
    assert STRANGER in [kind for one in walks for kind in kinds(one)]


def anything(*_: object, **__: object) -> bool:
    return True


def compelled_by_anything(
    sender: object, view: int, value: Value, moves: object, prepared: object, *_: object, **__: object
) -> bool:
    return not isinstance(prepared, msgspec.UnsetType)


@pytest.mark.parametrize(
    ("module", "check", "without", "faults", "found"),
    [
        (agreement_module, "check_proposed", compelled_by_anything, LYING, {FAR, STRANGER, "no decision", "fork"}),
        (agreement_module, "has_proofs", anything, LYING, {LEAVES}),
        (certificate_module, "has_proofs", anything, CRASH, {"certified leaves that nobody signed"}),
        (view_change_module, "is_prepared", anything, LYING, {STRANGER, "fork"}),
        (view_change_module, "are_sound", anything, LYING, {FAR, "no decision", "fork"}),
    ],
    ids=["proposal", "proofs", "certificate", "prepared", "moves"],
)
def test_check_that_is_left_out_is_missed(
    module: Any,
    check: str,
    without: Callable[..., bool],
    faults: FaultModel,
    found: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, check, without)
    assert first_found(faults) in found
