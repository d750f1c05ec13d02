"""Random walks through rounds with repairs that are too large to walk whole."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from shoal.cli.main import execute
from shoal.lab.explore.repair_run import Components
from shoal.lab.explore.repair_scope import RepairScope
from shoal.lab.explore.repair_walk import _Walk, walk_repair
from tests.lab.explore.test_repair import ChangesContribution, DividesByThePlan, HoldsBack, OpenAfterClosing

FOUR = RepairScope(members=4, chunks=4, views=3, crashes=2, attempts=3)


@pytest.mark.parametrize("states", [1000, pytest.param(3000, marks=pytest.mark.long)])
def test_walks_of_four_members_keep_every_promise_and_repair(states: int) -> None:
    exploration = walk_repair(FOUR, states, seed=1)
    assert exploration.violations == ()
    assert exploration.states == states
    assert not exploration.complete
    assert exploration.revisions >= 2
    assert exploration.repaired >= 1
    assert exploration.certified >= 2


BUGS = {
    "close-off": (Components(reduction=OpenAfterClosing), "a final of the evicted counted after closing off"),
    "divisor": (Components(reduction=DividesByThePlan), "finals that are not the mean of what they count"),
    "contribution": (Components(reduction=ChangesContribution), "a contribution that was changed"),
    "held": (Components(machine=HoldsBack), "held finals that were not said"),
}


@pytest.mark.parametrize(("components", "kind"), BUGS.values(), ids=BUGS)
def test_seeded_bug_is_found(components: Components, kind: str) -> None:
    (finding,) = walk_repair(FOUR, 20_000, seed=2, components=components).violations
    assert finding.kind == kind
    assert len(finding.schedule) >= 2


@pytest.mark.parametrize(
    "bug", ["held", *(pytest.param(bug, marks=pytest.mark.long) for bug in ("close-off", "divisor", "contribution"))]
)
def test_a_seed_finds_the_same_again_and_another_finds_it_elsewhere(bug: str) -> None:
    components, kind = BUGS[bug]
    first, again, other = (walk_repair(FOUR, 20_000, seed=seed, components=components) for seed in (2, 2, 3))
    assert (again.states, again.violations) == (first.states, first.violations)
    assert [found.kind for found in other.violations] == [kind]
    assert other.violations != first.violations


@pytest.mark.parametrize(("crashes", "walks"), [(0, 20), pytest.param(0, 200, marks=pytest.mark.long), (2, 200)])
def test_so_many_return_as_may(crashes: int, walks: int) -> None:
    most, rng = 0, random.Random(1)  # few walks have so many
    for _ in range(walks):
        one = _Walk(replace(FOUR, crashes=crashes, reduced=False), rng, None)
        while not one.over and len(one.path) < 300:
            assert one.step() is None
        lives = [one.explorer.members.states[number].life for number in one.state[:-1]]
        assert sum(lives) == sum("is killed" in step for step in one.path) <= crashes
        most = max(most, sum(lives))
        if most == crashes > 0:
            break
    assert most == crashes


def test_command_walks_a_repair_at_random(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explore", "repair", "--members", "4", "--chunks", "4", "--walk", "200", "--json"]
    assert execute(command) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["states"], first["complete"], first["violations"]) == (200, False, [])
    assert execute([*command, "--seed", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["member_states"] != first["member_states"]
