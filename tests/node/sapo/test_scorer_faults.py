"""Scorers of a user's own that raise, or return what is no reward: one line, without the text of a model."""

from __future__ import annotations

import logging

import pytest

from shoal.node.sapo.scoring import Faults
from shoal.node.sapo.tasks import Task
from tests.node.sapo.hostile_family import Executes


class Returns(Executes):
    """Returns the text as a number."""

    def score(self, task: Task, text: str) -> float:
        return float(text)


@pytest.mark.parametrize(
    ("text", "said"), [("nan", "returned nan"), ("2.0", "returned 2"), ("\nred", "raised ValueError at")]
)
def test_scorer_fault_is_one_line_and_worth_nothing(text: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    family, faults = Returns(), Faults()
    task = family.make({}, 1, 0)
    with caplog.at_level(logging.WARNING):
        assert [faults.score(family, task, text) for _ in range(3)] == [0.0] * 3
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith(f"score() of family 'executes' {said}")
    assert "red" not in line
    assert "\n" not in line


def test_scores_in_range_are_taken_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    family, faults = Returns(), Faults()
    task = family.make({}, 1, 0)
    assert [faults.score(family, task, text) for text in ("0", "0.25", "1.0000000002")] == [0.0, 0.25, 1.0]
    assert not caplog.records
