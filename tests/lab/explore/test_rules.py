"""The model of the rules: what liars cannot do, that the network's calm brings a decision, and that bugs are found."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.lab.explore.quorum_table import reached
from shoal.lab.explore.rules import RulesExplorer
from shoal.lab.explore.rules_bugs import Bug
from shoal.lab.explore.rules_liar import Liar
from shoal.lab.explore.rules_scope import RulesScope, outvotes
from shoal.lab.explore.rules_voter import NONE
from shoal.lab.explore.rules_walk import walk_rules
from shoal.lab.explore.search import Exploration
from shoal.protocol.errors import ConfigError

LYING: dict[str, Any] = {"quorum": "lying", "members": 4, "liars": 1, "views": 2}
CRASH: dict[str, Any] = {"quorum": "crash", "members": 3, "views": 2}
UNREDUCED = {"reduced": False}


def explore(bug: Bug | None = None, *, forks_only: bool = False, **scope: Any) -> Exploration[RulesScope]:
    return RulesExplorer(RulesScope(**scope), bug, forks_only=forks_only).run()


def kinds(exploration: Exploration[RulesScope]) -> list[str]:
    return [finding.kind for finding in exploration.violations]


def alone(*names: str) -> set[frozenset[str]]:
    """Nothing certified, or one of these values."""
    return {frozenset(), *(frozenset({name}) for name in names)}


# -- what holds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("liar", range(4))
def test_one_liar_of_four_never_forks_a_round_of_lying(liar: int) -> None:
    exploration = explore(**(LYING | {"views": 3, "liar": liar}))
    assert exploration.violations == ()
    assert exploration.complete
    assert exploration.certified == alone("A", "B")


@pytest.mark.long
def test_two_liars_of_seven_never_fork_a_round_of_lying_of_two_views() -> None:
    exploration = explore(quorum="lying", members=7, liars=2, views=2)
    assert (exploration.violations, exploration.complete) == ((), True)
    assert exploration.certified == alone("A", "B")


def test_walks_of_seven_with_two_liars_never_fork() -> None:
    exploration = walk_rules(RulesScope(quorum="lying", members=7, liars=2, views=4, crashes=2), 3000, seed=1)
    assert exploration.violations == ()
    assert (exploration.states, exploration.complete) == (3000, False)
    assert exploration.certified == alone("A", "B")


@pytest.mark.parametrize(
    "scope",
    [
        {"members": 1, "views": 3},
        {"members": 2, "views": 3},
        {"members": 2, "views": 3, "planner": 1, "leaves": 1},
        {"members": 3, "views": 3},
        {"members": 3, "views": 2, "leaves": 1},
        {"members": 4, "views": 2, "planner": 3},
        {"members": 4, "views": 2, "leaves": 1},
        {"members": 5, "views": 2},
    ],
    ids=lambda scope: " ".join(f"{value} {name}" for name, value in scope.items()),
)
def test_crash_without_liars_never_forks(scope: dict[str, int]) -> None:
    exploration = explore(quorum="crash", **scope)
    assert (exploration.violations, exploration.complete) == ((), True)
    gone = [f"{plan}-{scope['members'] - 1}" for plan in "AB"] if scope.get("leaves") else []
    assert exploration.certified == alone("A", "B", *gone)


@pytest.mark.parametrize("members", [3, 4])
@pytest.mark.parametrize("liar", [0, 1])
@pytest.mark.parametrize("planner", [0, 1])
def test_liar_of_crash_forks_only_at_the_price_of_evidence(members: int, liar: int, planner: int) -> None:
    exploration = explore(quorum="crash", members=members, views=2, liars=1, liar=liar, planner=planner)
    assert (exploration.violations, exploration.complete) == ((), True)
    assert exploration.certified == alone("A", "B", f"A-{liar}", f"B-{liar}")


def test_liar_of_crash_that_honest_members_leave_beside_forks_only_at_the_price_of_evidence() -> None:
    exploration = explore(quorum="crash", members=4, views=2, liars=1, leaves=1)
    assert (exploration.violations, exploration.complete) == ((), True)
    assert frozenset({"A-3-0"}) in exploration.certified


def test_leave_beside_another_signature_has_to_be_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a liar leaves for the planner, who is then a quorum by itself, and moves on with the third."""
    judged = Liar._judged
    monkeypatch.setattr(Liar, "_judged", lambda liar, used: used if judged(liar, used._replace(left=False)) else None)
    assert kinds(explore(**CRASH, liars=1, planner=1)) == ["a fork that convicts nobody"]


def test_liar_of_crash_may_fork_if_it_minds_no_evidence_and_yet_takes_nothing_over() -> None:
    """So the test above does not pass for want of forks."""
    exploration = explore(**CRASH, liars=1, careless=True)
    assert (exploration.violations, exploration.complete) == ((), True)
    assert {"A", "B"} in exploration.certified
    assert not {"unfair", "false", "taken"} & {name for names in exploration.certified for name in names}


def test_planner_of_two_is_a_quorum_and_forks_without_two_votes_in_a_view() -> None:
    """Its two votes are of two views, and no ViewChange need stand between them: two certificates are what there is."""
    assert kinds(explore(quorum="crash", members=2, views=2, liars=1, liar=0, planner=0)) == [
        "a fork that convicts nobody"
    ]
    assert kinds(explore(quorum="crash", members=2, views=2, liars=1, liar=1, planner=0)) == []


@pytest.mark.parametrize(("members", "liars"), [(4, 1), (7, 2)])
def test_voting_in_one_step_forks_a_round_of_lying(members: int, liars: int) -> None:
    """A vote that a quorum's ViewChanges carry says nothing of what others voted for in its view."""
    scope = RulesScope(quorum="lying", members=members, liars=liars, views=3)
    assert kinds(walk_rules(scope, 3000, 1, Bug.ONE_STEP, forks_only=True)) == ["fork"]


def test_more_liars_than_a_third_fork_a_round_of_lying() -> None:
    assert kinds(explore(**(LYING | {"liars": 2}), forks_only=True)) == ["fork"]


# -- what is left out --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scope",
    [
        LYING,
        LYING | {"liar": 3},
        LYING | {"disputed": True, "liar": 2},
        CRASH,
        CRASH | {"leaves": 1, "planner": 2},
        CRASH | {"liars": 1},
        CRASH | {"liars": 1, "liar": 1, "planner": 1, "careless": True},
        {"quorum": "crash", "members": 2, "views": 3},
    ],
    ids=str,
)
def test_reduced_schedules_certify_all_that_unreduced_ones_do(scope: dict[str, Any]) -> None:
    reduced, named, plain = explore(**scope), explore(**scope, exchanged=False), explore(**scope, reduced=False)
    assert reduced.violations == named.violations == plain.violations == ()
    assert reduced.complete
    assert plain.complete
    assert reduced.states < plain.states / 2
    assert reduced.certified == named.certified == plain.certified


def test_restart_brings_back_all_that_binds() -> None:
    without, restarted = (explore(**CRASH, crashes=crashes, **UNREDUCED) for crashes in (0, 2))
    assert restarted.violations == ()
    assert (restarted.states, restarted.certified) == (without.states, without.certified)


def test_search_that_reaches_its_limit_says_that_it_is_not_complete() -> None:
    exploration = RulesExplorer(RulesScope(**(LYING | {"views": 3}))).run(limit=1000)
    assert not exploration.complete
    assert 1000 <= exploration.states < 1100


# -- seeded bugs: each check can fail ----------------------------------------------------------------------------

RESTARTED = LYING | {"crashes": 1}
LEAVING = CRASH | {"leaves": 1} | UNREDUCED
UNFAIR = "certified unfair, which no honest member accepts"
FALSE = "certified false, which no honest member accepts"
FEWER = "certified by fewer than a quorum"

BUGS: list[tuple[Bug, dict[str, Any], str, str | None]] = [
    (Bug.ACCEPTS_WITHOUT_MOVES, LYING, "fork", "fork"),
    (Bug.IGNORES_CERTIFICATES, LYING, "fork", "fork"),
    (Bug.FOLLOWS_LOWEST, LYING | {"views": 3, "liar": 2}, "fork", "fork"),
    (Bug.BELIEVES_INVENTED, LYING, "no decision", UNFAIR),
    (Bug.ACCEPTS_UNFAIR, LYING, "an honest member signed what it does not accept", UNFAIR),
    (Bug.ACCEPTS_FALSE, LYING, "an honest member signed a digest that it did not compute", FALSE),
    (Bug.COMPARES_COMPELLED, LYING | {"disputed": True}, "no decision", None),
    (Bug.SMALL_CERTIFICATE, LYING, "fork", "fork"),
    (Bug.ONE_STEP, LYING, "no decision", "fork"),
    (Bug.MIXES_VIEWS, LYING | {"views": 3, "liar": 3}, "fork", "fork"),
    (Bug.MIXES_VOTES, LYING, FEWER, FEWER),
    (Bug.MIXES_VALUES, LYING, "no decision", UNFAIR),
    (Bug.SIGNER_TWICE, LYING, FEWER, FEWER),
    (Bug.STRANGERS, LYING, "no decision", FEWER),
    (Bug.UNPROVEN_LEAVES, CRASH | {"liars": 1}, "no decision", FEWER),
    (Bug.TIE_FOR_TWO, {"quorum": "crash", "members": 4, "views": 2}, FEWER, FEWER),
    (Bug.HALF, {"quorum": "crash", "members": 4, "views": 2}, FEWER, FEWER),
    (Bug.TWO_THIRDS_DOWN, LYING, FEWER, FEWER),
    (Bug.VOTES_TWICE, CRASH | {"liars": 1, "careless": True}, "two votes in one view", None),
    (Bug.PREPARES_TWICE, LYING, "two Prepares in one view", "fork"),
    (Bug.PREPARES_BELOW, LYING | UNREDUCED, "a signature below a promise", None),
    (Bug.VOTES_BELOW, LYING | UNREDUCED, "a signature below a promise", "fork"),
    (Bug.HIDES_CERTIFICATE, LYING, "a ViewChange below its own vote", "fork"),
    (Bug.SHOWS_LOWEST, CRASH | {"views": 3}, "a ViewChange below its own vote", "fork"),
    (Bug.SIGNS_AFTER_LEAVING, LEAVING, "signed after leaving", "fork"),
    (Bug.LEAVES_AFTER_SIGNING, LEAVING, "a leave after signing", "fork"),
    (Bug.FORGETS_PREPARE, RESTARTED, "two Prepares in one view", "fork"),
    (Bug.FORGETS_VOTE, RESTARTED, "a ViewChange below its own vote", "fork"),
    (Bug.FORGETS_PROMISE, RESTARTED | UNREDUCED, "a signature below a promise", "fork"),
    (Bug.FORGETS_LEAVE, LEAVING | {"crashes": 1}, "signed after leaving", "fork"),
    (Bug.FORGETS_PROPOSAL, CRASH | {"crashes": 1} | UNREDUCED, "two values in one view", None),
    (Bug.SENDS_FIRST, RESTARTED, "two Prepares in one view", "fork"),
    (Bug.LEAD_IGNORES_HIGHEST, CRASH, "no decision", None),
    (Bug.LEAD_TAKES_LOWEST, CRASH | {"views": 3}, "no decision", None),
    (Bug.LEAD_BELIEVES_INVENTED, LYING, "no decision", None),
    (Bug.FOLLOWS_ONE, LYING, "no decision", None),
]


SCOPES = [
    dict(one) for one in sorted({tuple(sorted((scope | {"reduced": True}).items())) for _, scope, *_ in BUGS}, key=str)
]


@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_scope_of_a_seeded_bug_is_clean_without_it(scope: dict[str, Any]) -> None:
    assert explore(**scope).violations == ()


def test_every_bug_is_planted() -> None:
    assert [bug for bug, *_ in BUGS] == list(Bug)
    assert len(BUGS) >= 20


@pytest.mark.parametrize(("bug", "scope", "kind", "fork"), BUGS, ids=[bug.name for bug, *_ in BUGS])
def test_seeded_bug_is_found(bug: Bug, scope: dict[str, Any], kind: str, fork: str | None) -> None:
    (finding,) = explore(bug, **scope).violations
    assert finding.kind == kind
    assert finding.schedule


@pytest.mark.parametrize(
    ("bug", "scope", "fork"),
    [(bug, scope, fork) for bug, scope, kind, fork in BUGS if fork not in (None, kind)],
    ids=[bug.name for bug, _, kind, fork in BUGS if fork not in (None, kind)],
)
def test_seeded_bug_leads_to_a_wrong_certificate(bug: Bug, scope: dict[str, Any], fork: str) -> None:
    """So what is forbidden before it comes to that is not forbidden for nothing."""
    assert kinds(explore(bug, **scope, forks_only=True)) == [fork]


def test_walks_find_bugs_and_a_seed_finds_the_same_again() -> None:
    scope = RulesScope(quorum="lying", members=7, liars=2, views=3)
    first, again = (walk_rules(scope, 3000, 5, Bug.SMALL_CERTIFICATE, forks_only=True) for _ in range(2))
    assert kinds(first) == ["fork"]
    assert first.violations == again.violations


def test_finding_is_told_with_names_that_were_not_exchanged() -> None:
    (finding,) = explore(Bug.HIDES_CERTIFICATE, **LYING, forks_only=True).violations
    voted = {step.split()[1] for step in finding.schedule if "votes for A in view 0" in step}
    other = {step.split()[1] for step in finding.schedule if "votes for B in view 1" in step}
    assert len(voted) == len(other) == 2  # with the liar, three of four
    assert "0" not in voted | other


# -- parts -------------------------------------------------------------------------------------------------------


def test_careful_liar_refuses_what_convicts_it() -> None:
    liar = Liar(3, careful=True)
    voted = liar.vote(liar.start, 1, 0)
    assert voted is not None
    assert liar.vote(voted, 1, 0) == voted
    assert liar.vote(voted, 1, 1) is None
    assert liar.vote(voted, 2, 1) is not None
    assert liar.move(voted, 2, 0) is None
    assert liar.move(voted, 2, 1) is not None
    assert liar.move(voted, 1, NONE) is not None
    assert liar.leave(voted) is None
    left = liar.leave(liar.start)
    assert left is not None
    assert liar.prepare(left, 0, 0) is None
    moved = liar.move(liar.start, 2, NONE)
    assert moved is not None
    assert liar.vote(moved, 1, 0) is None
    assert liar.vote(moved, 2, 0) is not None
    prepared = liar.prepare(liar.start, 0, 1)
    assert prepared is not None
    assert liar.prepare(prepared, 0, 0) is None
    proposed = liar.propose(liar.start, 0, 1)
    assert proposed is not None
    assert liar.propose(proposed, 0, 0) is None


def test_careless_liar_says_anything() -> None:
    liar = Liar(2, careful=False)
    assert liar.vote(liar.vote(liar.start, 0, 0) or liar.start, 0, 1) == liar.start


@pytest.mark.parametrize("quorum", ["crash", "lying"])
def test_quorum_rule_in_two_wordings_is_one(quorum: str) -> None:
    for members in range(4 if quorum == "lying" else 1, 8):
        for planner in range(members):
            scope = RulesScope(quorum=quorum, members=members, planner=planner)
            for supporters in range(1 << members):
                for leaves in (0, 1 << members - 1, 1):
                    told = reached(quorum, members, planner, supporters, leaves)
                    assert told == outvotes(scope, supporters, leaves)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"members": 0}, "--members 0"),
        ({"quorum": "majority"}, "--quorum majority: must be crash or lying"),
        ({"quorum": "lying", "members": 3}, "lying needs 4"),
        ({"liars": 4}, "--liars 4"),
        ({"liars": 1, "liar": 4}, "--liar 4"),
        ({"leaves": 3}, "--leaves 3"),
        ({"planner": -1}, "--planner -1"),
    ],
)
def test_scope_out_of_range_is_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        RulesScope(**wrong)
