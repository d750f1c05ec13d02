"""An agent as the training loop of its node: what it contributes, and where its policy stands; to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from shoal.node.loops.external_trainer import Detached
from shoal.node.pipe import Stop
from shoal.node.sapo.agent_messages import RoundReport
from shoal.node.sapo.averaging import METRIC, Averaging
from shoal.node.sapo.char_policy import CharModelSettings, CharPolicy
from shoal.node.sapo.learner import Alone, Learner, LearnerSettings
from shoal.node.sapo.policy import module_of
from shoal.node.sapo.updates import UpdateSettings
from shoal.node.training.trainer_messages import Evaluate, Evaluated
from tests.node.loop_ends import DaemonEnd, Ends, flat
from tests.node.sapo.draws import assigned
from tests.node.sapo.sums import score, sum_task

RATE = np.float32(0.7)
GROUPS, SIZE = 3, 4
SETTINGS = CharModelSettings(width=16, layers=1, heads=2, prompt_chars=4, completion_tokens=3, alphabet="01234+=")


def new_learner(*, rewarding: bool = True) -> Learner:
    """Rewards vary without a warm-up, or never do."""
    return Learner(
        CharPolicy(SETTINGS, seed=1),
        LearnerSettings(local=GROUPS, group_size=SIZE, updates=UpdateSettings(learning_rate=1e-2)),
        draw=lambda round, index: sum_task(round, index, most=1),
        score=lambda pairs: [
            max(found, float(text[:1] > "2")) if rewarding else 0.0
            for found, (_, text) in zip(score(pairs), pairs, strict=True)
        ],
        sharing=Alone(),
        draws=assigned(1),
    )


class Joined(Averaging):
    """With the trainer of `Ends` in place of a daemon's process."""

    def _found(self) -> Any:
        found = super()._found()
        found.status = lambda: {"round": 0, "phase": "train"}  # type: ignore[method-assign]
        return found


def joined(folder: Path, learner: Learner, *, replays: bool = False) -> Joined:
    return Joined(learner, folder, replays=replays)


def model_of(learner: Learner) -> torch.nn.Module:
    assert isinstance(learner.policy, CharPolicy)
    return learner.policy.model


def test_what_the_agent_learns_between_two_averages_is_contributed_once(tmp_path: Path) -> None:
    learner = new_learner()
    bases, deltas, locals_ = [], [], []
    reports: list[RoundReport] = []

    async def daemon(end: DaemonEnd) -> None:
        anchor = await end.initial()
        bases.append(anchor)
        await end.apply(anchor, 0, fresh=True)
        for round in (1, 2, 3):
            await end.train(round, steps=2)
            event, delta = await end.contribution()
            made = reports[-2:]
            assert (event.steps, event.tokens) == (2, 2 * GROUPS * SIZE)
            assert event.loss == pytest.approx(1 - sum(report.reward for report in made) / 2)
            deltas.append(delta)
            anchor = anchor - RATE * delta
            bases.append(anchor)
            await end.apply(anchor, round, taken=event.number)
        await end.send(Evaluate(round=3))
        assert (await end.expect(Evaluated)).value == pytest.approx(1 - sum(r.reward for r in reports[-2:]) / 2)
        assert end.trainer.started.metric == METRIC
        await end.send(Stop())

    start = flat(model_of(learner))
    with Ends(tmp_path, daemon), joined(tmp_path, learner, replays=True) as averaging:
        assert np.array_equal(start, bases[0])  # the swarm begins where its first founder's warm-up ended
        while True:
            reports.append(learner.run_round())
            assert reports[-1].informative > 0
            local = flat(model_of(learner))
            going = averaging.count(reports[-1], group_size=SIZE)
            if len(reports) % 2 == 0:
                locals_.append(local)
                assert np.array_equal(flat(model_of(learner)), bases[-1])  # in place, for learner and optimizer alike
                assert averaging.past.rounds == (len(bases) - 2, len(bases) - 1) if len(bases) > 1 else (0,)
                with averaging.past.standing_on(len(bases) - 1):
                    image = torch.from_numpy(bases[-1]).bfloat16().float().numpy()
                    assert np.array_equal(flat(model_of(learner)), image)
            else:
                assert np.array_equal(flat(model_of(learner)), local)
            if not going:
                break
        assert averaging.over
    for base, delta, local in zip(bases, deltas, locals_, strict=False):
        assert np.array_equal(delta, base - local)
        assert np.abs(delta).max() > 0


def test_a_round_of_whose_completions_none_was_scored_tells_no_loss(tmp_path: Path) -> None:
    learner = new_learner()
    rewards: list[float | None] = []

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=2)
        assert (await end.contribution())[0].loss == pytest.approx(1 - (rewards[0] or 0.0))
        await end.send(Stop())

    with Ends(tmp_path, daemon), joined(tmp_path, learner) as averaging:
        going = True
        while going:
            report = learner.run_round()
            rewards.append(report.reward)
            unscored = msgspec.structs.replace(report, reward=None)
            going = averaging.count(report if len(rewards) == 1 else unscored, group_size=SIZE)
    assert rewards[0]


def test_a_round_that_teaches_nothing_is_no_step(tmp_path: Path) -> None:
    learner = new_learner(rewarding=False)

    async def daemon(end: DaemonEnd) -> None:
        await end.apply(await end.initial(), 0, fresh=True)
        await end.train(1, steps=1)
        await end.expect(Detached)  # and no contribution before

    with Ends(tmp_path, daemon), joined(tmp_path, learner) as averaging:
        for _ in range(3):
            assert averaging.count(learner.run_round(), group_size=SIZE)
        assert averaging.round == 0


def test_a_policy_without_a_module_is_averaged_by_its_parameters() -> None:
    policy = CharPolicy(SETTINGS, seed=1)
    assert module_of(policy) is policy.model

    class Parts:
        """Parameters, of which no module knows all."""

        def __init__(self) -> None:
            self.model = torch.nn.Linear(2, 2)
            self.other = torch.nn.Parameter(torch.zeros(3))

        def parameters(self) -> list[torch.nn.Parameter]:
            return [*self.model.parameters(), self.other]

    parts = Parts()
    module = module_of(parts)  # type: ignore[arg-type]
    assert [id(value) for value in module.parameters()] == [id(value) for value in parts.parameters()]
