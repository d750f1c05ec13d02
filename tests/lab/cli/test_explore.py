"""`shoal explore agreement`: what it prints, and how it ends."""

from __future__ import annotations

import json
from functools import partial

import pytest

from shoal.cli.main import execute
from shoal.lab.cli.explore import ProgressLines
from shoal.lab.explore import agreement as explore_module
from shoal.lab.explore.agreement import Explorer
from shoal.lab.explore.scope import Scope
from tests.protocol import seeded

SMALL = ["explore", "agreement", "--members", "3", "--views", "2"]


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Explorers look at members with a bug."""

    class Buggy(Explorer):
        def __init__(self, scope: Scope) -> None:
            super().__init__(scope, partial(seeded.made_by, seeded.ForgetfulLead))

    monkeypatch.setattr(explore_module, "Explorer", Buggy)


def test_explore_without_violation_ends_with_zero_and_says_what_was_visited(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(SMALL) == 0
    out, err = capsys.readouterr()
    assert "3 members, views 0 to 1, at most 1 restart and 0 promises to leave, 2 plans" in out
    assert "certified  A0, A1, B0, B1: each in some schedule" in out
    assert out.splitlines()[-1] == "violations none in any schedule"
    assert err == ""  # no terminal, no progress


def test_explore_as_json_has_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute([*SMALL, "--crashes", "0", "--plans", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    figures = {key: document[key] for key in ("members", "views", "crashes", "leaves", "plans", "planner", "reduced")}
    assert figures == {
        "members": 3, "views": 2, "crashes": 0, "leaves": 0, "plans": 1, "planner": 0, "reduced": True
    }  # fmt: skip
    assert document["complete"] is True
    assert document["violations"] == []
    assert document["certified"] == ["A0", "A1"]
    assert document["transitions"] >= document["states"] - 1 > document["member_states"] > 10
    assert document["seconds"] > 0
    assert document["states_per_s"] > 0


def test_explore_of_named_voters_says_who_has_no_vote(capsys: pytest.CaptureFixture[str]) -> None:
    named = ["explore", "agreement", "--members", "2", "--strangers", "1", "--views", "2", "--crashes", "0"]
    assert execute([*named, "--liars", "1", "--liar", "2"]) == 0
    out = capsys.readouterr().out
    assert "quorums of `crash`, member 2 lies, 1 stranger beside 2 members, views 0 to 1" in out
    assert "violations none in any schedule" in out


def test_explore_that_was_cut_short_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute([*SMALL, "--limit", "50"]) == 0
    assert "none in what was visited, which is not all" in capsys.readouterr().out
    assert execute([*SMALL, "--limit", "50", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["complete"] is False


@pytest.mark.usefixtures("forgetful")
def test_explore_that_finds_a_fork_ends_with_one_and_shows_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute([*SMALL, "--crashes", "0", "--plans", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("VIOLATION  fork, by these steps:")
    assert lines[at + 1] == "        1  member 0 proposes A0 in view 0"
    assert len(lines) == at + 15
    assert execute([*SMALL, "--crashes", "0", "--plans", "1", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["violations"]
    assert (finding["kind"], len(finding["schedule"])) == ("fork", 14)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["explore", "everything"], "no 'everything' to explore"),
        ([*SMALL, "--planner", "3"], "--planner 3: must be from 0 to 2"),
        ([*SMALL, "--limit", "0"], "--limit 0: must be 1 or more"),
        ([*SMALL, "--walk", "-1"], "--walk -1: must be 1 or more"),
        ([*SMALL, "--quorum", "most"], "--quorum most: must be crash or lying"),
        ([*SMALL, "--liars", "2"], "--liars: schedules are searched beside one liar"),
    ],
)
def test_explore_with_wrong_options_says_what_to_write(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(arguments) == 2
    assert told in capsys.readouterr().err


def test_progress_is_told_once_a_second_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [10.0]
    monkeypatch.setattr("shoal.lab.cli.explore.time.monotonic", lambda: now[0])
    ProgressLines()(1, 1)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    progress = ProgressLines()
    for states in (1000, 2000, 3000):
        now[0] += 0.6
        progress(states, 2 * states)
    assert capsys.readouterr().err == "2,000 states, 4,000 transitions\n"


def test_explore_agreement_with_a_liar(capsys: pytest.CaptureFixture[str]) -> None:
    one_view = ["--members", "4", "--views", "1", "--crashes", "0", "--liars", "1", "--quorum", "lying"]
    assert execute(["explore", "agreement", *one_view]) == 0
    out = capsys.readouterr().out
    assert "quorums of `lying`, member 0 lies, 4 members, views 0 to 0" in out
    assert "certified  A0, B0: each in some schedule" in out
    assert out.splitlines()[-1] == "violations none in any schedule"


def test_explore_agreement_with_a_liar_by_random_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["explore", "--members", "4", "--liars", "1", "--walk", "300", "--seed", "3", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    figures = {key: document[key] for key in ("states", "complete", "violations", "liars", "faults")}
    assert figures == {"states": 300, "complete": False, "violations": [], "liars": 1, "faults": "crash"}
