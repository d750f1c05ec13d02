"""The explorer of rounds with repairs: small scopes are without violation, it leaves out nothing, and it can find.

Larger scopes take minutes, and are for `shoal explore repair`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from shoal.cli.main import execute
from shoal.collectives import reduce as reduce_module
from shoal.collectives.aggregate import combine
from shoal.collectives.finals import FinalChunk, FinalFormat
from shoal.collectives.reduce import Kept, Reduction
from shoal.lab.explore.repair import RepairExploration, RepairExplorer
from shoal.lab.explore.repair_run import Components
from shoal.lab.explore.repair_scope import RepairScope
from shoal.lab.signed import report_of
from shoal.protocol import leading as leading_module
from shoal.protocol import round as round_module
from shoal.protocol.agreement import Agreement, AgreementEffect
from shoal.protocol.effects import CloseOff, Effect
from shoal.protocol.errors import ConfigError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH, ChunkResults, Held, Plan, Propose
from shoal.protocol.planning import Deal, PlanOrder, make_plan, revise_plan
from shoal.protocol.round import RoundMachine
from shoal.swarm.lanes.frame import FrameKind
from tests.protocol import seeded

# The lead owns a chunk, and so does one of the others; or one chunk is all there is.
SMALL = {"views": 1, "attempts": 2}
ONE_CHUNK = SMALL | {"chunks": 1}


def explore(components: Components | None = None, limit: int | None = 60_000, **scope: Any) -> RepairExploration:
    return RepairExplorer(RepairScope(**scope), components).run(limit=limit)


def kinds(exploration: RepairExploration) -> list[str]:
    return [finding.kind for finding in exploration.violations]


# -- every schedule --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scope",
    [
        {"members": 2, "views": 2, "attempts": 2, "codec": "fp32"},
        {"members": 3, "views": 1, "attempts": 1, "shift": 1},
        {"members": 3, "views": 1, "attempts": 1, "late": 2, "shift": 2},
        pytest.param({"members": 2, "views": 1, "attempts": 2, "crashes": 1, "chunks": 1}, marks=pytest.mark.long),
        {"members": 2, "views": 1, "attempts": 1, "crashes": 1, "chunks": 1},
        pytest.param(
            {"members": 2, "views": 1, "attempts": 2, "crashes": 1, "chunks": 1, "late": 0}, marks=pytest.mark.long
        ),
        {"members": 2, "views": 1, "attempts": 1, "crashes": 1, "chunks": 1, "late": 0},
    ],
    ids=lambda scope: " ".join(f"{name} {value}" for name, value in scope.items()),
)
def test_every_schedule_keeps_every_promise(scope: dict[str, Any]) -> None:
    exploration = explore(**scope)
    assert exploration.violations == ()
    assert exploration.complete
    assert exploration.certified


@pytest.mark.parametrize(
    ("members", "chunks", "revisions"), [(2, 2, 2), (2, 1, 1), pytest.param(3, 1, 2, marks=pytest.mark.long)]
)
def test_repairs_are_made_and_certified(members: int, chunks: int, revisions: int) -> None:
    explorer = RepairExplorer(RepairScope(members=members, views=1, attempts=2, chunks=chunks))
    exploration = explorer.run(limit=60_000)
    assert exploration.violations == ()
    assert exploration.complete
    # What was not broken was exercised.
    assert exploration.revisions >= revisions
    assert exploration.repaired >= revisions
    assert exploration.certified >= 2
    steps = {outcome.text for possible in explorer._possible.values() for outcome in possible}
    assert "copies the finals that lack" in steps


def test_arrivals_that_are_put_off_leave_nothing_out() -> None:
    scope = {"members": 2, "views": 1, "attempts": 2}
    reduced, plain = (RepairExplorer(RepairScope(**scope, reduced=reduced)) for reduced in (True, False))
    left, right = reduced.run(), plain.run()
    assert left.violations == right.violations == ()
    assert left.complete
    assert right.complete
    assert left.states < right.states
    assert reduced.sayings() == plain.sayings()


def test_parts_by_who_returns_are_together_the_whole() -> None:
    scope: dict[str, Any] = {"members": 2, "views": 1, "attempts": 1, "chunks": 1, "crashes": 1}
    whole = RepairExplorer(RepairScope(**scope))
    assert whole.run().complete
    said: set[tuple[int, str]] = set()
    for returning in ((0,), (1,)):
        part = RepairExplorer(RepairScope(**scope, returning=returning))
        assert part.run().complete
        lives = {(m, part.members.states[n].life) for state in part._order for m, n in enumerate(state[:-1])}
        assert lives == {(member, life) for member in (0, 1) for life in range(returning.count(member) + 1)}
        said |= part.sayings()
    assert said == whole.sayings()


@pytest.mark.parametrize(
    "wrong",
    [
        {"members": 9},
        {"views": 0},
        {"attempts": 0},
        {"crashes": -1},
        {"late": 3},
        {"codec": "fp8"},
        {"returning": (3,), "crashes": 1},
        {"returning": (0, 1), "crashes": 1},
    ],
)
def test_scope_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RepairScope(**wrong)


# -- seeded bugs: each check can fail ----------------------------------------------------------------------------


class OpenAfterClosing(Reduction):
    """Takes finals of the evicted although it said what it holds of them."""

    def close_off(self, evicted: Iterable[PeerId]) -> tuple[ChunkResults, ...]:
        before = self._closed_to
        told = super().close_off(evicted)
        self._closed_to = before
        return told


class CopiesRegardless(Reduction):
    """Takes copies of finals of the evicted although it said what it holds of them."""

    def take_copy(self, final: FinalChunk) -> None:
        before, self._closed_to = self._closed_to, frozenset()
        super().take_copy(final)
        self._closed_to = before


class SignsAgain(Reduction):
    """Sums its chunks anew under every revision."""

    def _follow(self, final_format: FinalFormat) -> None:
        for chunk in self._signed:
            self._finals.pop(chunk, None)
        self._signed.clear()
        super()._follow(final_format)


class KeepsNothing(Reduction):
    """Begins again as if nothing had been signed in the lineage before."""

    def __init__(self, *, kept: Kept, **rest: Any) -> None:
        super().__init__(**rest)


class DividesByThePlan(Reduction):
    """Divides by the weights of all participants, whoever is in the sum."""

    def _sum(self, final_format: FinalFormat, chunk: int, inbox: Any) -> FinalChunk:
        everyone = np.float32(sum(p.weight for p in final_format.plan.participants))

        def mean(how: Any, terms: Any, aggregate: Any, out: Any) -> Any:
            told = combine(how, terms, aggregate, out)
            out *= np.float32(sum(term.weight for term in terms)) / everyone
            return told

        reduce_module.combine = mean  # type: ignore[assignment]
        try:
            return super()._sum(final_format, chunk, inbox)
        finally:
            reduce_module.combine = combine


class ChangesContribution(Reduction):
    """Sends another contribution after a repair than before."""

    def _send(self, to: PeerId, kind: FrameKind, chunk: int, payload: memoryview) -> None:
        if kind is FrameKind.CONTRIBUTION and self.plan.lineage != self.plan.hash:
            payload = memoryview(bytes([payload[0] ^ 1, *payload[1:]]))
        super()._send(to, kind, chunk, payload)


class PostsAnother(Reduction):
    """Posts another final than the one that it signed."""

    def _post_to_all(self, final_format: FinalFormat, chunk: int, final: FinalChunk) -> None:
        payload = np.frombuffer(bytes([final.payload[0] ^ 1, *final.payload[1:]]), np.uint8)
        super()._post_to_all(final_format, chunk, replace(final, payload=payload))


class HoldsBack(RoundMachine):
    """Says that it holds nothing, whatever it holds."""

    def closed_off(self, asked: CloseOff, chunks: tuple[ChunkResults, ...], now: float) -> list[Effect]:
        return super().closed_off(asked, (), now)


class FollowsAnyLife(RoundMachine):
    """Reduces under a plan that names it as it was before a restart, if it does not lack what the plan counts on."""

    def _is_of_earlier_life(self, plan: Plan) -> bool:
        mine = self._gathering.get(self.me)
        return any(p.peer == self.me and p.weight and p.root != (mine and mine.root) for p in plan.participants)


class HastyLead(leading_module.Lead):
    """Revises the plan as if who has not answered yet held nothing."""

    def _repair(self, plan: Plan, eviction: Any, lost: Any, now: float) -> Any:
        facts = self._facts
        for peer in facts.remaining(plan) - eviction.evicted - lost:
            if not eviction.answered_by(facts.held.get(peer)):
                mine = facts.held[facts.me]
                facts.held[peer] = msgspec.structs.replace(mine, chunks=())
        return super()._repair(plan, eviction, lost, now)


class VotesBlindly(Agreement):
    """Votes for whatever is proposed, finals or not."""

    def _receive_propose(self, sender: PeerId, message: Propose) -> list[AgreementEffect]:
        self._computed.setdefault(message.value.plan, report_of(message.value))
        return super()._receive_propose(sender, message)


def forgets_finals(plan: Plan, plan_order: PlanOrder, helds: Mapping[PeerId, Held], deal: Deal) -> Plan:
    """Has everything of the evicted summed again, although somebody holds it."""
    return revise_plan(plan, plan_order, {p: msgspec.structs.replace(h, chunks=()) for p, h in helds.items()}, deal)


BUGS: list[tuple[type, dict[str, Any], str]] = [
    (OpenAfterClosing, ONE_CHUNK, "a final of the evicted counted after closing off"),
    (CopiesRegardless, ONE_CHUNK, "a final of the evicted counted after closing off"),
    (SignsAgain, SMALL | {"members": 2}, "two results signed for one chunk"),
    (DividesByThePlan, ONE_CHUNK, "finals that are not the mean of what they count"),
    (ChangesContribution, ONE_CHUNK, "a contribution that was changed"),
    (PostsAnother, SMALL, "a final that its owner did not sign"),
    (HoldsBack, SMALL, "held finals that were not said"),
    (HastyLead, SMALL, "revised without the word of one who remains"),
    (VotesBlindly, SMALL | {"attempts": 1}, "a vote without the finals"),
    (seeded.ForgetsProposals, SMALL | {"members": 2, "crashes": 1}, "two values in one view"),
    (seeded.SpeaksFirst, SMALL | {"members": 2}, "sent before it was written"),
]


@pytest.mark.parametrize(("bug", "scope", "kind"), BUGS, ids=[bug.__name__ for bug, _, _ in BUGS])
def test_seeded_bug_is_found(bug: type, scope: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    components = Components()
    if issubclass(bug, Reduction):
        components = Components(reduction=bug)
    elif issubclass(bug, RoundMachine):
        components = Components(machine=bug)
    else:
        monkeypatch.setattr(round_module, "Lead" if issubclass(bug, leading_module.Lead) else "Agreement", bug)
    assert kinds(explore(components, **scope)) == [kind]


# Member 2 owns the chunk and signs it. The lead of view 0 returns in another life and plans anew, which member 2
# follows; the lead of view 1, who did not hear of that, repairs the first plan.
TAKEN_UP_AGAIN = (
    "member 1 hears member 0 plan 0.0",
    "member 2 hears member 0 plan 0.0",
    "member 2 gets contribution to 0 of member 0, contribution to 0 of member 1",
    "member 0 is killed and returns with its contribution",
    "member 0 hears member 1 ready",
    "member 0 hears member 2 ready",
    "member 2 hears member 0 plan 0.0, which was away",
    "member 1 finds nobody dead, and gives up the view",
    "member 2 finds nobody dead, and gives up the view",
    "member 1 with word from member 2 finds member 0 dead, and waits no longer for them",
    "member 2 hears member 1 evict member 0 for 1.0",
    "member 1 with word from member 2 finds member 0 dead",
)


def led(explorer: RepairExplorer, steps: Iterable[str]) -> RepairExplorer:
    """An explorer that begins after these steps."""
    for step in steps:
        possible = [(p, o) for p, o in explorer._steps(explorer.start) if f"member {p} {o.text}" == step]
        assert possible, step
        after = explorer.after(explorer.start, *possible[0])
        assert not isinstance(after, str), after
        explorer.start = after
    return explorer


@pytest.mark.parametrize(
    ("bug", "found"), [(KeepsNothing, ["two results signed for one chunk"]), (Reduction, [])], ids=["seeded", "product"]
)
def test_owner_whose_reduction_is_taken_up_again_signs_what_it_signed(bug: type[Reduction], found: list[str]) -> None:
    scope = RepairScope(members=3, views=2, attempts=2, chunks=1, shift=2, crashes=1)
    exploration = led(RepairExplorer(scope, Components(reduction=bug)), TAKEN_UP_AGAIN).run(limit=400)
    assert kinds(exploration) == found
    assert exploration.repaired


# Member 2 owns the chunk, sums what both others sent, and is killed; meanwhile member 1 is evicted.
KILLED_AFTER_SIGNING = (
    "member 0 finds member 1 dead, and waits no longer for them",
    "member 1 hears member 0 plan 0.0",
    "member 2 hears member 0 plan 0.0",
    "member 2 gets contribution to 0 of member 0, contribution to 0 of member 1; hears member 0 evict member 1 for 0.1",
    "member 0 with word from member 2 finds member 1, member 2 dead",
)
WITH_IT, WITHOUT_ANY = "member 2 is killed and returns with its contribution", "member 2 is killed and returns"


@pytest.mark.parametrize(
    ("bug", "found"),
    [(FollowsAnyLife, ["two results signed for one chunk"]), (RoundMachine, [])],
    ids=["seeded", "product"],
)
@pytest.mark.parametrize(
    ("late", "returns"), [(None, WITH_IT), (2, WITHOUT_ANY)], ids=["contributor", "without weight"]
)
def test_owner_that_is_killed_and_returns_signs_nothing_twice(
    late: int | None, returns: str, bug: type[RoundMachine], found: list[str]
) -> None:
    scope = RepairScope(members=3, views=1, attempts=2, chunks=1, shift=2, crashes=1, late=late)
    exploration = led(RepairExplorer(scope, Components(machine=bug)), (*KILLED_AFTER_SIGNING, returns)).run(limit=400)
    assert kinds(exploration) == found


def test_plan_that_names_no_lives_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_lives(*rest: Any, **named: Any) -> Plan:
        plan = make_plan(*rest, **named)
        nobody = tuple(msgspec.structs.replace(p, life=NO_HASH) for p in plan.participants)
        return msgspec.structs.replace(plan, participants=nobody)

    monkeypatch.setattr(leading_module, "make_plan", without_lives)
    exploration = explore(Components(machine=FollowsAnyLife), members=2, views=1, crashes=1, chunks=1, late=0)
    assert kinds(exploration) == ["two results signed for one chunk"]


def test_seeded_revision_that_drops_finals_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading_module, "revise_plan", forgets_finals)
    (finding,) = explore(**ONE_CHUNK).violations
    assert finding.kind == "a final that someone holds was dropped"
    assert any("evict" in step for step in finding.schedule)


# -- the command -------------------------------------------------------------------------------------------------

COMMAND = ["explore", "repair", "--members", "2", "--views", "1", "--crashes", "0"]


def test_command_tells_what_was_visited_and_exercised(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(COMMAND) == 0
    out = capsys.readouterr().out
    assert "2 members, views 0 to 0, at most 0 restarts, 2 plans in a view, int8" in out
    assert out.splitlines()[-1] == "violations none in any schedule"
    assert execute([*COMMAND, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["complete"] is True
    assert document["violations"] == []
    assert document["revisions"] == document["repaired"] == 2  # with and without a final that stands
    assert execute([*COMMAND, "--returning", "one"]) == 2
    assert execute([*COMMAND, "--walk", "0"]) == 2
