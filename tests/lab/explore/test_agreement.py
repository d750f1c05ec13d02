"""The explorer: every schedule of small agreements is without violation, it leaves out nothing, and it can find.

Larger scopes take minutes, and are for `shoal explore`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from subprocess import PIPE
from typing import Any

import pytest

from shoal.lab.explore.agreement import Explorer
from shoal.lab.explore.scope import Scope, Values, electorate
from shoal.lab.explore.search import Exploration
from shoal.lab.explore.walk import walk
from shoal.lab.explore.word import broken_promise, still_binding
from shoal.lab.quorum_rule import outweighs
from shoal.protocol import agreement as agreement_module
from shoal.protocol import certificate as certificate_module
from shoal.protocol import voting as voting_module
from shoal.protocol.agreement import Agreement, DurableRecord
from shoal.protocol.errors import ConfigError, LocalError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Leave, Message, Prepare, Prepared, PreparedValue, Propose, Value, ViewChange, Vote
from shoal.protocol.voting import FaultModel, is_quorum
from tests.protocol import seeded

IDENTITIES, PREVIOUS = electorate(3, planner=0)
VALUES = Values(PREVIOUS, [identity.peer_id for identity in IDENTITIES])
A, B = (VALUES.fresh(IDENTITIES[0].peer_id, plan, ()) for plan in range(2))


def explore(bug: type[Agreement] = Agreement, *, forks_only: bool = False, **scope: Any) -> Exploration[Scope]:
    return Explorer(Scope(**scope), partial(seeded.made_by, bug), forks_only=forks_only).run(limit=100_000)


def kinds(exploration: Exploration[Scope]) -> list[str]:
    return [finding.kind for finding in exploration.violations]


def certified_by(exploration: Exploration[Scope]) -> set[str]:
    """What was certified in some schedule, of all schedules: none has a violation, or certifies two."""
    assert exploration.violations == ()
    assert exploration.complete
    assert {len(names) for names in exploration.certified} == {0, 1}
    return {name for names in exploration.certified for name in names if "-" not in name}


# -- every schedule --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scope",
    [
        {"members": 2, "strangers": 1, "views": 3, "crashes": 1, "planner": 1},
        {"members": 2, "strangers": 3, "views": 2, "rollbacks": 1},
        {"members": 3, "strangers": 1, "views": 2, "plans": 2},
        {"members": 4, "strangers": 1, "views": 2, "faults": FaultModel.LYING},
    ],
    ids=lambda scope: " ".join(f"{value} {name}" for name, value in scope.items()),
)
def test_every_schedule_of_named_voters_certifies_one_value_by_their_votes(scope: dict[str, Any]) -> None:
    planned = {name.partition("/")[-1] or name[1:] for name in certified_by(explore(**scope))}
    assert planned == {str(lead) for lead in range(min(scope["members"], scope["views"]))}, "no stranger planned it"


@pytest.mark.parametrize(("members", "faults"), [(3, FaultModel.CRASH), (4, FaultModel.LYING)])
def test_contributor_that_votes_beside_named_voters_is_found(members: int, faults: FaultModel) -> None:
    exploration = explore(seeded.CountsContributors, members=members, strangers=3, views=2, faults=faults)
    assert kinds(exploration) == ["a word of who has no vote"]


@pytest.mark.parametrize(
    "scope",
    [
        {"members": 2, "strangers": 1, "views": 3, "crashes": 1, "plans": 2, "planner": 1},
        {"members": 3, "strangers": 2, "views": 2, "plans": 2},
        {"members": 4, "strangers": 1, "views": 2, "plans": 2, "faults": FaultModel.LYING},
    ],
    ids=lambda scope: " ".join(f"{value} {name}" for name, value in scope.items()),
)
def test_every_schedule_between_two_changes_of_voters_certifies_one_value_by_those_of_its_round(
    scope: dict[str, Any],
) -> None:
    explorer = Explorer(Scope(**scope, changing=True))
    names = certified_by(explorer.run(limit=100_000))
    assert names == {f"{plan}{lead}" for plan in "AB" for lead in range(min(scope["members"], scope["views"]))}
    members, values = explorer.members, explorer.members.values
    before, stranger = members.peers[: scope["members"]], members.peers[scope["members"]]
    changed = {*before[1:], stranger} if scope.get("faults") else set(before[-1:])
    for value in values.by_hash.values():
        after = members.voting.after(value).named
        assert set(after) == (changed if values.name(value.hash)[0] == "A" else set(before))


@pytest.mark.parametrize(
    ("bug", "members", "found"),
    [
        (seeded.ChangesVotersTooEarly, 2, {"a vote without a prepare certificate", "certified by a minority", "fork"}),
        (seeded.ChangesVotersTooEarly, 3, {"a vote without a prepare certificate", "certified by a minority", "fork"}),
        (seeded.CountsFormerVoters, 3, {"a word of who has no vote"}),
    ],
)
def test_voters_of_another_round_are_found(bug: type[Agreement], members: int, found: set[str]) -> None:
    exploration = explore(bug, members=members, strangers=1, views=2, plans=2, changing=True)
    assert set(kinds(exploration)) <= found
    assert kinds(exploration)


def test_scope_of_changing_voters_has_strangers_two_members_and_no_liar() -> None:
    for given, why in (({}, "--strangers 0"), ({"strangers": 1, "liars": 1}, "--liars 1")):
        with pytest.raises(ConfigError, match=why):
            Scope(members=3, views=1, changing=True, **given)
    with pytest.raises(ConfigError, match="--members 1"):
        Scope(members=1, strangers=1, views=1, changing=True)


def test_scope_of_named_voters_has_no_leaves_and_an_end() -> None:
    for scope, why in (({"leaves": 1, "strangers": 1}, "--leaves 1"), ({"strangers": 62}, "--strangers 62")):
        with pytest.raises(ConfigError, match=why):
            Scope(members=3, views=1, **scope)


@pytest.mark.parametrize(
    "scope",
    [
        {"members": 1, "views": 3, "crashes": 2, "plans": 2},
        {"members": 2, "views": 3, "crashes": 2, "plans": 2},
        {"members": 2, "views": 3, "crashes": 1, "leaves": 1, "planner": 1},
        pytest.param({"members": 3, "views": 3, "crashes": 1, "plans": 2}, marks=pytest.mark.long),
        {"members": 3, "views": 3, "plans": 2},
        {"members": 3, "views": 2, "crashes": 2, "plans": 2},
        {"members": 3, "views": 3, "leaves": 1, "planner": 1},
        {"members": 4, "views": 2, "planner": 3, "crashes": 1},
        pytest.param({"members": 5, "views": 2, "crashes": 1, "plans": 2}, marks=pytest.mark.long),
        {"members": 5, "views": 2, "plans": 2},
    ],
    ids=lambda scope: " ".join(f"{value} {name}" for name, value in scope.items()),
)
def test_every_schedule_keeps_every_promise_and_certifies_one_value(scope: dict[str, int]) -> None:
    # What was not broken was exercised: each value that some lead may plan is certified somewhere.
    leads = range(min(scope["members"], scope["views"]))
    assert certified_by(explore(**scope)) == {
        f"{'AB'[plan]}{lead}" for plan in range(scope.get("plans", 1)) for lead in leads
    }


@pytest.mark.parametrize(
    "scope",
    [
        {"members": 2, "views": 3},
        {"members": 2, "views": 2, "crashes": 1, "plans": 2},
        {"members": 2, "views": 2, "leaves": 1, "crashes": 1, "planner": 1},
        {"members": 3, "views": 1, "plans": 2, "leaves": 1},
        {"members": 2, "views": 2, "rollbacks": 1},
    ],
    ids=lambda scope: " ".join(f"{value} {name}" for name, value in scope.items()),
)
def test_reduced_schedules_say_and_certify_all_that_unreduced_ones_do(
    scope: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_signatures(monkeypatch)
    reduced, plain = (Explorer(Scope(**scope, reduced=reduced)) for reduced in (True, False))
    left, right = reduced.run(), plain.run()
    assert left.violations == right.violations == ()
    assert left.complete
    assert right.complete
    assert left.states < right.states / 2
    assert left.certified == right.certified
    assert reduced.sayings() == {(who, text) for who, text in plain.sayings() if "certificate" not in text}


def remember_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unreduced schedules hear the same votes in many states; each is checked once."""
    known: dict[tuple[PeerId, bytes, bytes, bytes], bool] = {}
    verify = certificate_module.verify

    def remembered(*signed: Any) -> bool:
        if signed not in known:
            known[signed] = verify(*signed)
        return known[signed]

    monkeypatch.setattr(certificate_module, "verify", remembered)


@pytest.mark.parametrize("plans", [1, pytest.param(2, marks=pytest.mark.long)])
def test_exchanging_members_that_nothing_tells_apart_finds_the_same(plans: int) -> None:
    scope = {"members": 5, "views": 2, "plans": plans}
    exchanged, named = explore(**scope), explore(**scope, exchanged=False)
    assert exchanged.states < named.states / 2
    assert exchanged.certified == named.certified
    assert (exchanged.violations, named.violations) == ((), ())
    assert [Scope(**scope, planner=planner).first_alike for planner in range(4)] == [2, 2, 3, 5]
    assert Scope(**scope, leaves=1).first_alike == 5


def test_search_that_reaches_its_limit_says_that_it_is_not_complete() -> None:
    calls: list[tuple[int, int]] = []
    exploration = Explorer(Scope(members=4, views=3)).run(limit=9000, on_progress=lambda *at: calls.append(at))
    assert not exploration.complete
    assert 9000 <= exploration.states < 9100
    assert calls
    assert calls == sorted(calls)


@pytest.mark.parametrize("wrong", [{"members": 0}, {"views": 0}, {"crashes": -1}, {"planner": 3}, {"leaves": 4}])
def test_scope_out_of_range_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Scope(**({"members": 3, "views": 3} | wrong))


@pytest.mark.parametrize(("members", "planner"), [(2, 1), (4, 2), (5, 0)])
def test_electorate_leads_in_the_order_of_its_members(members: int, planner: int) -> None:
    identities, previous = electorate(members, planner)
    order = [voting_module.lead(previous, view) for view in range(members)]
    assert order == [identity.peer_id for identity in identities]
    assert previous.planner == identities[planner].peer_id
    for mask in range(1 << members):
        some = [peer for i, peer in enumerate(order) if mask >> i & 1]
        assert outweighs(previous, some) == is_quorum(previous, some)


# -- going back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scope",
    [
        {"members": 1, "views": 2, "crashes": 2, "rollbacks": 2},
        {"members": 2, "views": 3, "crashes": 1, "leaves": 1, "rollbacks": 1},
        {"members": 3, "views": 3, "rollbacks": 1},
        {"members": 3, "views": 2, "crashes": 2, "rollbacks": 1},
        {"members": 3, "views": 2, "crashes": 1, "rollbacks": 2},
    ],
    ids=lambda scope: " ".join(f"{value} {name}" for name, value in scope.items()),
)
def test_a_result_and_a_rollback_of_one_round_are_never_both_certified(scope: dict[str, int]) -> None:
    leads = range(min(scope["members"], scope["views"]))
    back = {f"R{target}/{lead}" for target in range(1, scope["rollbacks"] + 1) for lead in leads}
    assert certified_by(explore(**scope)) == {f"A{lead}" for lead in leads} | back


def test_a_rollback_takes_the_place_of_a_plan_and_changes_nothing_else() -> None:
    """So what was walked for two values holds for a value and a rollback."""
    plans, rollback = (
        explore(members=3, views=2, crashes=1, plans=2),
        explore(members=3, views=2, crashes=1, rollbacks=1),
    )
    assert (plans.states, plans.transitions) == (rollback.states, rollback.transitions)


@pytest.mark.parametrize(
    ("bug", "kind"),
    [
        (seeded.GoesBackAnyway, "fork"),
        (seeded.StaysAnyway, "fork"),
        (seeded.VainLead, "fork"),
        (seeded.RemembersAbandoned, "an honest member was blamed"),
        (seeded.GrowsBack, "a rollback with another electorate"),
    ],
)
def test_seeded_bug_of_going_back_is_found(bug: type[Agreement], kind: str) -> None:
    in_order = bug is not seeded.RemembersAbandoned  # which returns to a view that it was never in
    scope = {"members": 3 if in_order else 2, "views": 2, "crashes": 1, "rollbacks": 1}
    assert kinds(explore(bug, **scope, reduced=in_order)) == [kind]


# -- random schedules --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("members", "steps"), [(3, 1500), (7, 3000), (16, 9000)])
def test_walks_of_more_members_keep_every_promise(members: int, steps: int) -> None:
    exploration = walk(Scope(members=members, views=5, crashes=4, leaves=1, plans=2), steps, seed=1)
    assert exploration.violations == ()
    assert exploration.states == steps
    assert any(exploration.certified)


@pytest.mark.parametrize("bug", [seeded.ForgetfulLead, seeded.VainLead])
def test_walks_find_forks_and_a_seed_finds_the_same_again(bug: type[Agreement]) -> None:
    scope = Scope(members=3, views=3, crashes=1, plans=2)
    first, again = (walk(scope, 6000, 1, partial(seeded.made_by, bug)) for _ in range(2))
    assert kinds(first) == ["fork"]
    assert first.violations == again.violations


def test_walk_of_a_seed_is_the_same_in_another_process() -> None:
    """Where the hashes of what is said are others, and so the order of what lies in a set."""
    command = [
        sys.executable,
        "-m",
        "shoal.cli.main",
        "explore",
        "agreement",
        "--members",
        "4",
        "--walk",
        "1500",
        "--json",
    ]
    said = [
        json.loads(subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": hashes}, stdout=PIPE, check=True).stdout)
        for hashes in ("1", "2")
    ]
    first, again = ({name: one[name] for name in one if not name.endswith(("seconds", "_per_s"))} for one in said)
    assert first == again


# -- seeded bugs: each check can fail ----------------------------------------------------------------------------

SMALL = {"members": 3, "views": 2}
BUGS: list[tuple[type[Agreement], dict[str, Any], str]] = [
    (seeded.ForgetfulLead, SMALL, "fork"),
    (seeded.LowestVoteLead, {"members": 3, "views": 3}, "fork"),
    (seeded.VainLead, SMALL, "fork"),
    (seeded.WaveringLead, SMALL | {"plans": 2}, "two values in one view"),
    (seeded.BreaksPromises, SMALL, "a prepare below a promise"),
    (seeded.HidesVotes, SMALL, "a vote that was not carried"),
    (seeded.SpeaksFirst, SMALL, "sent before it was written"),
    (seeded.SpeaksFirst, SMALL | {"crashes": 1}, "a view went back"),
    (seeded.ForgetsVotes, SMALL | {"crashes": 1}, "a view went back"),
    (seeded.ForgetsPrepares, SMALL | {"crashes": 1}, "a view went back"),
    (seeded.ForgetfulLeadSeen, SMALL, "an honest member was blamed"),
    (seeded.ForgetsPromises, SMALL | {"crashes": 1}, "a view went back"),
    (seeded.ForgetsProposals, SMALL | {"crashes": 1, "plans": 2}, "two values in one view"),
    (seeded.ForgetsLeaving, SMALL | {"crashes": 1, "leaves": 1}, "signed after leaving"),
    (seeded.LeavesAnyway, SMALL | {"leaves": 1, "planner": 1}, "a leave after signing"),
    (seeded.VotesAfterLeaving, SMALL | {"leaves": 1, "planner": 1}, "signed after leaving"),
    (seeded.CountsPrepares, {"members": 3, "views": 1, "reduced": False}, "a certificate that does not hold"),
]


ALONE_HARMLESS = (
    seeded.CountsPrepares,  # who believes it decided; no certificate says so
    seeded.WaveringLead,  # of two proposals in a view one at most is prepared by a quorum
    seeded.ForgetsProposals,
    seeded.ForgetsPrepares,  # three are too few for a fork of it
    seeded.ForgetfulLeadSeen,  # refused by who looks at the view changes
    seeded.BreaksPromises,  # walks find its fork (tests/protocol): states are told apart from their view on
)


@pytest.mark.parametrize(("bug", "scope", "kind"), BUGS, ids=[f"{bug.__name__} {kind}" for bug, _, kind in BUGS])
def test_seeded_bug_is_found(bug: type[Agreement], scope: dict[str, Any], kind: str) -> None:
    assert kinds(explore(bug, **scope)) == [kind]


@pytest.mark.parametrize(
    ("bug", "scope"),
    [(bug, scope) for bug, scope, kind in BUGS if kind != "fork" and bug not in ALONE_HARMLESS],
    ids=lambda of: of.__name__ if isinstance(of, type) else "",
)
def test_broken_promise_leads_to_a_fork(bug: type[Agreement], scope: dict[str, Any]) -> None:
    """So what the test above forbids is not forbidden for nothing."""
    crashes = max(scope.get("crashes", 0), bug is seeded.SpeaksFirst)
    assert kinds(explore(bug, **(scope | {"crashes": crashes}), forks_only=True)) == ["fork"]


def test_seeded_quorum_of_any_half_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement_module, "is_quorum", seeded.half_is_enough)
    assert kinds(explore(members=2, views=2, planner=1)) == ["certified by a minority"]
    assert kinds(explore(members=2, views=2, forks_only=True)) == ["fork"]


def test_seeded_certificate_without_votes_is_found() -> None:
    scope = {"members": 3, "views": 1, "reduced": False}
    assert kinds(explore(seeded.CountsPrepares, **scope, forks_only=True)) == ["certified without votes"]


def test_seeded_blame_of_the_honest_is_found() -> None:
    (finding,) = explore(seeded.Suspicious, **SMALL).violations
    assert finding.kind == "an honest member was blamed"
    assert "moved too far" in finding.schedule[-1]


def test_machine_that_reductions_do_not_hold_for_is_refused() -> None:
    with pytest.raises(LocalError, match="explore without reducing"):
        explore(seeded.TardyLead, **SMALL)


def test_finding_tells_the_fewest_steps_that_lead_to_it() -> None:
    (finding,) = explore(seeded.BreaksPromises, **SMALL).violations
    assert finding.schedule == (
        "member 0 proposes A0 in view 0",
        "member 0 moves to view 1",
        "member 0 computes A0",
    )


def test_finding_among_members_that_were_exchanged_is_told_with_their_names() -> None:
    (finding,) = explore(seeded.HastyLead, members=5, views=2).violations
    assert finding.kind == "fork"
    voters = {step.split()[1] for step in finding.schedule if "propose A0 in view 0" in step}
    movers = {step.split()[1] for step in finding.schedule if "moves to view 1" in step}
    assert len(voters) == 2  # with member 0, three of five
    assert voters.isdisjoint(movers)


# -- a member's word ---------------------------------------------------------------------------------------------


def round_of(kind: type[Any], **fields: Any) -> Any:
    return kind(term=PREVIOUS.term, round=1, base=PREVIOUS.hash, **fields)


def vote(view: int, value: Value) -> Vote:
    return round_of(Vote, view=view, value=value.hash, signature=b"")


def prepare(view: int, value: Value) -> Prepare:
    return round_of(Prepare, view=view, value=value.hash, signature=b"")


def change(view: int, of: int | None = None, value: Value = A) -> ViewChange:
    """A move to `view`; of: the view of the prepare certificate of `value` that it carries."""
    carried = None if of is None else PreparedValue(value, Prepared(of, (), ()))
    return round_of(ViewChange, view=view, prepared=carried, signature=b"")


def written(kind: str, view: int = 0, value: Value | None = None) -> DurableRecord:
    return DurableRecord(kind=kind, term=PREVIOUS.term, round=1, view=view, value=value)


LEAVE = round_of(Leave, signature=b"")
PROPOSE = round_of(Propose, view=0, value=A, signature=b"")


@pytest.mark.parametrize(
    ("log", "said", "message", "broken"),
    [
        ([written("prepare", 0, A)], [], prepare(0, A), None),
        ([written("prepare", 0, B)], [], prepare(0, A), "sent before it was written"),
        ([written("prepare", 0, A)], [prepare(0, B)], prepare(0, A), "two prepares in one view"),
        ([written("prepare", 0, A)], [change(1)], prepare(0, A), "a prepare below a promise"),
        ([written("prepare", 1, A)], [LEAVE], prepare(1, A), "signed after leaving"),
        ([written("leave")], [prepare(0, A)], LEAVE, "a leave after signing"),
        ([written("vote", 0, A)], [prepare(0, A)], vote(0, A), None),
        ([written("vote", 0, A)], [prepare(0, B)], vote(0, A), "a vote for what was not prepared"),
        ([written("vote", 0, B)], [prepare(0, A)], vote(0, A), "sent before it was written"),
        ([], [], change(1), "sent before it was written"),
        ([written("propose", 1, A)], [], PROPOSE, "sent before it was written"),
        ([], [], LEAVE, "sent before it was written"),
        ([written("leave")], [], LEAVE, None),
        ([written("vote", 0, A)], [prepare(0, A), vote(0, B)], vote(0, A), "two votes in one view"),
        ([written("vote", 0, A)], [prepare(0, A), change(1)], vote(0, A), "a vote below a promise"),
        ([written("vote", 1, A)], [change(1), prepare(1, A)], vote(1, A), None),
        ([written("vote", 1, A)], [LEAVE], vote(1, A), "signed after leaving"),
        ([written("promise", 1)], [LEAVE], change(1), "signed after leaving"),
        ([written("leave")], [change(1)], LEAVE, "a leave after signing"),
        (
            [written("propose", 0, A)],
            [round_of(Propose, view=0, value=B, signature=b"")],
            PROPOSE,
            "two values in one view",
        ),
        ([written("promise", 1)], [change(2)], change(1), "a view went back"),
        ([written("promise", 1)], [vote(1, A)], change(1), "a view went back"),
        ([written("promise", 2)], [vote(0, A)], change(2), "a vote that was not carried"),
        ([written("promise", 2)], [vote(0, A), vote(1, B)], change(2, 0), "a vote that was not carried"),
        ([written("promise", 2)], [vote(0, A), vote(1, B)], change(2, 1, B), None),
    ],
)
def test_word_that_breaks_an_earlier_one_is_told(
    log: list[DurableRecord], said: Iterable[Message], message: Message, broken: str | None
) -> None:
    assert broken_promise(tuple(log), frozenset(said), message) == broken


def test_word_that_still_binds_is_the_last_view_and_the_highest_vote() -> None:
    early = [PROPOSE, prepare(0, A), vote(0, A), change(1, 0)]
    said = frozenset([*early, prepare(1, B), vote(1, B), change(2, 1, B)])
    assert still_binding(said) == {PROPOSE, vote(1, B), change(2, 1, B)}
    assert still_binding(said | {prepare(2, A)}) == {PROPOSE, vote(1, B), change(2, 1, B), prepare(2, A)}
