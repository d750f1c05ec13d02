"""Which anchors a trainer is to evaluate: one of every so many rounds, and the last."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from shoal.collectives.state import CertifiedState
from shoal.node.training.shared_tensors import Vector
from shoal.node.training.trainer_messages import Applied, Apply, Command, Evaluate, Evaluated
from shoal.node.training.training_client import TrainingClient
from shoal.protocol.messages import Term


class Evaluating:
    """The trainer's side of a training client: it applies and evaluates at once, and notes which round's anchor."""

    def __init__(self) -> None:
        self.applied: list[int] = []
        self.evaluated: list[int] = []
        self.training_client: TrainingClient

    async def apply(self, order: Apply, anchor: Vector) -> None:
        self.applied.append(order.round)
        self.training_client.heard(Applied(round=order.round))

    async def send(self, command: Command) -> None:
        if isinstance(command, Evaluate):
            self.evaluated.append(command.round)
            self.training_client.heard(Evaluated(round=command.round, value=float(command.round)))


async def test_term_of_what_was_measured_is_that_of_the_state_also_when_another_was_ordered_meanwhile() -> None:
    trainer = Evaluating()
    client = trainer.training_client = TrainingClient(trainer, seed=0, inner_steps=1)  # type: ignore[arg-type]
    state = CertifiedState.initial(np.zeros(8, np.float32), bytes(32))
    told: list[Evaluated] = []
    trainer.training_client.heard, hear = told.append, client.heard  # type: ignore[method-assign,assignment]
    for round, term in ((50, Term()), (51, Term()), (40, Term()), (42, Term(0, 1))):
        hear(Applied(round=round))
        await client.stand_on(dataclasses.replace(state, round=round, term=term), state.anchor, taken=0)
    answers = [one for one in told if isinstance(one, Evaluated)]
    found = []
    for answer in (answers[0], answers[2], answers[3]):  # a loop passes over one that was replaced
        hear(answer)
        found.append((answer.round, client.measured_term))
    assert found == [(50, Term()), (40, Term()), (42, Term(0, 1))]


@pytest.mark.parametrize(
    ("every", "rounds", "meanwhile"),
    [
        (1, range(6), [0, 1, 2, 3, 4, 5]),
        (4, range(10), [0, 4, 8]),  # the last is still to be evaluated
        (4, range(9), [0, 4, 8]),
        (3, range(7, 9), []),  # joined in between
    ],
)
async def test_anchor_is_evaluated_every_so_many_rounds_and_at_the_end(
    every: int, rounds: range, meanwhile: list[int]
) -> None:
    trainer = Evaluating()
    trainer.training_client = TrainingClient(trainer, seed=0, inner_steps=1, evaluate_every=every)  # type: ignore[arg-type]
    state = CertifiedState.initial(np.zeros(8, np.float32), bytes(32))
    for round in rounds:
        await trainer.training_client.stand_on(dataclasses.replace(state, round=round), state.anchor, taken=0)
    assert trainer.applied == list(rounds)
    assert trainer.evaluated == meanwhile
    for _ in range(2):
        await trainer.training_client.evaluate_last(1.0)
        assert trainer.evaluated == sorted({*meanwhile, rounds[-1]})
        assert trainer.training_client.metric == rounds[-1]
