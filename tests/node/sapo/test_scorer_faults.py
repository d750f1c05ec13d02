"""Scorers of a user's own that raise, return what is no reward, or never answer: told in one line, without a text."""

from __future__ import annotations

import logging
import re
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.node.sapo import sandbox, sandbox_process, scoring
from shoal.node.sapo.sandbox_support import missing_sandbox
from shoal.node.sapo.scorer_faults import VERDICT_TEXTS, Faults
from shoal.node.sapo.scoring import Scorer, score_directly
from shoal.node.sapo.tasks import Task, TaskChoice, TaskSource
from shoal.protocol.errors import ConfigError
from tests.node.sapo.hostile_family import Hangs, Returns, ReturnsInSandbox, Stalls

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "tests" / "node" / "sapo" / "hostile_family.py"
RAISES_AT = 1 + FILE.read_text().splitlines().index("        return float(text)")
HANGS_AT = Hangs.score.__code__.co_firstlineno
SAFE = pytest.mark.skipif(missing_sandbox() is not None, reason=f"no sandbox: {missing_sandbox()}")

FAMILIES = [Returns, pytest.param(ReturnsInSandbox, marks=SAFE)]


def scorer_of(family: Returns, **limits: float) -> Scorer:
    return Scorer(TaskSource([TaskChoice(family=family, config={})]), **limits)


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records]


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(
    ("text", "said"),
    [("nan", "returned no number"), ("2.0", "returned 2"), ("-inf", "returned -inf"), ("\nred", "raised")],
)
def test_scorer_fault_is_one_line_and_worth_nothing(
    text: str, said: str, kind: type[Returns], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    family = kind()
    task = family.make({}, 1, 0)
    with scorer_of(family) as scorer:
        assert scorer.score_each([(task, text)] * 3 + [(task, "0.25")], own=True) == [0.0, 0.0, 0.0, 0.25]
    if said == "raised":
        said = f"raised{' ValueError' if kind is Returns else ''} at {FILE}, line {RAISES_AT}"
    assert told(caplog) == [
        (logging.WARNING, f"score() of family '{family.name}' {said}: a text is worth 0; correct it, to return 0 to 1")
    ]


@pytest.mark.parametrize("kind", FAMILIES)
def test_scorer_that_fails_for_its_own_solution_is_refused(
    kind: type[Returns], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    family = kind()
    with scorer_of(family) as scorer:
        scorer.check()
    monkeypatch.setattr(kind, "solution", lambda family, task: "nan")
    with scorer_of(family) as scorer, pytest.raises(ConfigError) as caught:
        scorer.check()
    assert str(caught.value) == (
        f"score() of family '{family.name}' returned no number for its own solution(); correct it, to return 0 to 1"
    )


def test_solution_that_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Returns, "solution", lambda family, task: 4)
    with scorer_of(Returns()) as scorer, pytest.raises(ConfigError) as caught:
        scorer.check()
    assert str(caught.value) == (
        f"solution() of family '{Returns.name}' returned int; correct it, to return a str, or None"
    )


def test_verdict_is_given_once_where_each_of_the_first_texts_failed(caplog: pytest.LogCaptureFixture) -> None:
    family, faults = Returns(), Faults()
    for _ in range(VERDICT_TEXTS + 5):
        assert faults.reward(family, 7.0) == 0.0
    (_, (level, line)) = told(caplog)
    assert level == logging.ERROR
    assert line == (
        f"score() of family 'returns' returned 7, and so did each of its first {VERDICT_TEXTS} texts: nothing can be "
        "learnt; correct it"
    )
    caplog.clear()
    faults = Faults()
    faults.reward(family, 1.0)
    for _ in range(VERDICT_TEXTS + 5):
        faults.reward(family, 7.0)
    assert [level for level, _ in told(caplog)] == [logging.WARNING]


def test_scores_in_range_are_taken_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    family, faults = Returns(), Faults()
    task = family.make({}, 1, 0)
    texts = ("0", "0.25", "1.0000000002", "-0.0000000002")
    assert [score_directly(faults, family, task, text) for text in texts] == [0.0, 0.25, 1.0, 0.0]
    assert not caplog.records


@pytest.mark.parametrize("text", Stalls.WAYS)
def test_direct_scorer_that_never_answers_is_interrupted_and_told_of_with_its_place(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    family = Stalls()
    task, other = (family.make({}, 1, index) for index in range(2))
    source = TaskSource([TaskChoice(family=family, config={})])
    with Scorer(source, text_limit_s=0.1) as scorer:
        texts = [(task, "0.25"), (task, text), (task, "0.5"), (other, "0.75")]
        assert scorer.score_each(texts, own=True) == [0.25, None, None, 0.75]
    ((level, line),) = told(caplog)
    assert level == logging.WARNING
    assert re.sub(r"line \d+", "line N", line) == (
        f"score() of family 'stalls', at {FILE}, line N, took more than 0.1 s, or 10 s for a task's texts: "
        "2 texts so far are left out; correct it, to return 0 to 1"
    )
    first = Stalls.score.__code__.co_firstlineno
    lines = FILE.read_text().splitlines()
    (at,) = map(int, re.findall(r"line (\d+)", line))
    assert first < at <= len(lines)


def test_direct_scorer_that_never_answers_for_its_own_solution_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stalls, "solution", lambda family, task: "sleeps")
    with scorer_of(Stalls(), text_limit_s=0.1) as scorer, pytest.raises(ConfigError) as caught:
        scorer.check()
    assert re.sub(r"line \d+", "line N", str(caught.value)) == (
        f"score() of family 'stalls', at {FILE}, line N, took more than 0.1 s, or 10 s for a task's texts for its own "
        "solution(); correct it, to return 0 to 1"
    )


def test_texts_that_a_direct_scorer_takes_long_for_share_the_time_of_their_task(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0

    class Lasts(Returns):
        def score(self, task: Task, text: str) -> float:
            nonlocal now
            now += 1.5
            return super().score(task, text)

    monkeypatch.setattr(scoring, "time", SimpleNamespace(monotonic=lambda: now), raising=False)
    task, other = (Lasts().make({}, 1, index) for index in range(2))
    with scorer_of(Lasts()) as scorer:
        found = scorer.score_each([(task, "0.5")] * 64 + [(other, "0.25")])
    assert found == [0.5] * 7 + [None] * 57 + [0.25]
    begins = Lasts.score.__code__.co_firstlineno
    assert told(caplog) == [
        (
            logging.WARNING,
            f"score() of family 'returns', at {__file__}, line {begins}, took more than 2 s, or 10 s for a task's "
            "texts: 57 texts so far are left out; correct it, to return 0 to 1",
        )
    ]


@SAFE
def test_scorer_that_never_answers_in_the_sandbox_is_told_of_and_its_texts_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(sandbox, "WARM_UP_LIMIT_S", 0.5)
    family = Hangs()
    task = family.make({"begun": str(tmp_path / "begun")}, 1, 0)
    source = TaskSource([TaskChoice(family=family, config={"begun": str(tmp_path / "begun")})])
    with Scorer(source, text_limit_s=0.5, task_limit_s=1.0) as scorer:
        assert scorer.score_each([(task, "1"), (task, "2")], own=True) == [None, None]
    assert told(caplog) == [
        (
            logging.WARNING,
            f"score() of family 'hangs', at {FILE}, line {HANGS_AT}, or its warm_up(), took more than 0.5 s to begin: "
            "2 texts so far are left out; correct it, to return 0 to 1",
        )
    ]


@SAFE
def test_scorer_that_never_answers_for_its_own_solution_in_the_sandbox_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(sandbox, "WARM_UP_LIMIT_S", 0.5)
    monkeypatch.setattr(Hangs, "solution", lambda family, task: "1")
    source = TaskSource([TaskChoice(family=Hangs(), config={"begun": str(tmp_path / "begun")})])
    with Scorer(source, text_limit_s=0.5, task_limit_s=1.0) as scorer, pytest.raises(ConfigError) as caught:
        scorer.check()
    assert str(caught.value) == (
        f"score() of family 'hangs', at {FILE}, line {HANGS_AT}, or its warm_up(), took more than 0.5 s to begin for "
        "its own solution(); correct it, to return 0 to 1"
    )


def test_what_takes_too_long_is_interrupted_and_a_limit_around_it_stands() -> None:
    never, alarms = threading.Event(), []
    before = signal.signal(signal.SIGALRM, lambda number, frame: alarms.append(number))
    left_s, again_s = signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with suppress(sandbox_process.Overdue), sandbox_process.limited(0.05):
            with suppress(Exception):
                never.wait(60)
            raise AssertionError("it was caught")
        with sandbox_process.limited(60):
            assert not never.wait(0)
        while not alarms:
            signal.pause()
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left_s, again_s)
    assert alarms == [signal.SIGALRM]


def test_limit_that_is_over_at_once_leaves_no_alarm_behind() -> None:
    before, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    try:
        with pytest.raises(sandbox_process.Overdue), sandbox_process.limited(sandbox_process.AT_ONCE_S):
            threading.Event().wait(60)
        after = signal.getsignal(signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)
    assert after is before
