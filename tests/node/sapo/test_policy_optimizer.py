"""Optimizers of policies: the same steps as a workload's, and a restart that changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.node.sapo import learner_state
from shoal.node.sapo.char_policy import CharModelSettings, CharPolicy
from shoal.node.sapo.learner import Alone, Learner, LearnerSettings
from shoal.node.sapo.policy import trained_parameters
from shoal.node.sapo.policy_optimizer import PolicyMuon, policy_optimizer
from shoal.node.sapo.updates import UpdateSettings
from shoal.node.training.muon import Muon
from tests.node.sapo.draws import assigned
from tests.node.sapo.sums import score, sum_task

SETTINGS = CharModelSettings(
    width=16, layers=1, heads=2, prompt_chars=4, completion_tokens=3, alphabet="01234+=", style="rotary"
)
RATE = 1e-2


def give_gradients(policy: CharPolicy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def values(policy: CharPolicy) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trained_parameters(policy).values()]


def test_muon_moves_a_policy_as_it_moves_a_workload() -> None:
    ours, theirs = (CharPolicy(SETTINGS, seed=1) for _ in range(2))
    begun = values(ours)
    optimizer = policy_optimizer(ours, RATE, "muon")
    other = Muon(theirs.model, list(theirs.model.parameters()), betas=(0.9, 0.95), weight_decay=0.0)
    for seed in range(3):
        give_gradients(ours, seed)
        give_gradients(theirs, seed)
        optimizer.step()
        other.step(RATE)
    assert all(torch.equal(*pair) for pair in zip(values(ours), values(theirs), strict=True))
    assert not any(torch.equal(*pair) for pair in zip(values(ours), begun, strict=True))


def test_a_parameter_without_a_gradient_stays() -> None:
    policy = CharPolicy(SETTINGS, seed=1)
    before = values(policy)
    optimizer = PolicyMuon(policy, RATE)
    assert optimizer.step(lambda: 2.5) == 2.5
    assert all(torch.equal(*pair) for pair in zip(values(policy), before, strict=True))
    assert not optimizer.state


def test_it_counts_as_an_optimizer_of_torch_whose_steps_a_hook_sees() -> None:
    policy = CharPolicy(SETTINGS, seed=1)
    optimizer = policy_optimizer(policy, RATE, "muon")
    seen: list[object] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    give_gradients(policy, 1)
    optimizer.step()
    assert seen == [1]


def learner(optimizer: str) -> Learner:
    updates = UpdateSettings(learning_rate=RATE, optimizer=optimizer)
    return Learner(
        CharPolicy(SETTINGS, seed=1),
        LearnerSettings(local=4, group_size=8, updates=updates),
        draw=lambda round, index: sum_task(round, index, most=1),
        # The reward of one's own first character keeps rewards varied without a warm-up.
        score=lambda pairs: [
            max(one, float(text[:1] > "2")) for one, (_, text) in zip(score(pairs), pairs, strict=True)
        ],
        sharing=Alone(),
        draws=assigned(3),
    )


@pytest.mark.parametrize("optimizer", ["muon", "adamw", "adamw8bit"])
def test_an_agent_that_is_started_again_goes_on_to_the_bit(tmp_path: Path, optimizer: str) -> None:
    one = learner(optimizer)
    for _ in range(3):
        one.run_round()
    learner_state.save(one, tmp_path, policy="p")
    again = learner(optimizer)
    assert learner_state.restore(again, tmp_path, policy="p") == (3, [])
    for both in (one, again):
        for _ in range(2):
            both.run_round()
    assert all(torch.equal(*pair) for pair in zip(values(one.policy), values(again.policy), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(("saved", "begun"), [("muon", "adamw"), ("adamw", "muon")])
def test_moments_of_another_optimizer_are_not_taken_over(tmp_path: Path, saved: str, begun: str) -> None:
    one = learner(saved)
    for _ in range(3):
        one.run_round()
    learner_state.save(one, tmp_path, policy="p")
    other = learner(begun)
    assert learner_state.restore(other, tmp_path, policy="p") == (3, [])
    assert all(torch.equal(*pair) for pair in zip(values(one.policy), values(other.policy), strict=True))  # type: ignore[arg-type]
    assert not other.optimizer.state
    assert other.run_round().gradient_norm is not None
