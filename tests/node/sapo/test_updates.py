from __future__ import annotations

from typing import get_args

import pytest
import torch

from shoal.node.sapo.char_policy import CharModelSettings, CharPolicy
from shoal.node.sapo.generation import GeneratedGroup
from shoal.node.sapo.grpo import Batch, ExternalTerms, GrpoSettings, grpo_loss
from shoal.node.sapo.policy import Rollout, Sample, completion_mask
from shoal.node.sapo.updates import Row, Updater, UpdateSettings, external_rows, own_rows
from tests.node.sapo.sums import foreign_group, sum_task

SETTINGS = CharModelSettings(width=16, layers=1, heads=2, prompt_chars=8, completion_tokens=6, alphabet="0123456789+=")
RATE = 1e-2


def some_rows(policy: CharPolicy) -> list[Row]:
    """Own rows drawn by an earlier policy, and rows of others; some without advantage."""
    rollouts = [Rollout(prompt=policy.encode_prompt(text)) for text in ("1+1=", "12+7=", "=", "5+5=")]
    CharPolicy(SETTINGS, seed=9).extend(rollouts, generator=torch.Generator().manual_seed(1))
    own = [
        Row(
            sample=Sample(prompt=one.prompt, completion=tuple(one.tokens)),
            advantage=advantage,
            old=tuple(one.log_probs),
        )
        for one, advantage in zip(rollouts, (1.5, -1.0, 0.0, 0.5), strict=True)
    ]
    others = external_rows(foreign_group(sum_task(0, 0), ["3", "44", "+=", ""]), policy)
    assert others is not None
    advantages = (1.0, -2.0, -0.5, 0.0)
    return own + [
        Row(sample=row.sample, advantage=advantage, old=None) for row, advantage in zip(others, advantages, strict=True)
    ]


def plain_update(policy: CharPolicy, rows: list[Row], settings: GrpoSettings) -> None:
    """One update over all rows, those without gradient too, as the formula has it."""
    samples = [row.sample for row in rows]
    with torch.no_grad():
        old = policy.log_probs(samples)
    for at, row in enumerate(rows):
        if row.old is not None:
            old[at, : len(row.old)] = torch.tensor(row.old)
    batch = Batch(
        old=old,
        mask=completion_mask(samples),
        advantages=torch.tensor([row.advantage for row in rows]),
        external=torch.tensor([row.old is None for row in rows]),
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-3)
    grpo_loss(policy.log_probs(samples), batch, settings).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


@pytest.fixture
def _smooth_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epsilon that does not turn rounding of a gradient near zero into a step of full size."""
    plain = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda *args, **keys: plain(*args, **{"eps": 1e-3} | keys))


@pytest.mark.usefixtures("_smooth_optimizer")
@pytest.mark.parametrize("terms", get_args(ExternalTerms))
def test_an_update_is_that_of_the_whole_batch_though_rows_without_gradient_are_left_out(terms: ExternalTerms) -> None:
    policies = [CharPolicy(SETTINGS, seed=1) for _ in range(2)]
    rows = some_rows(policies[0])
    settings = UpdateSettings(learning_rate=RATE, grpo=GrpoSettings(external=terms))
    Updater(policies[0], settings).train(rows)
    plain_update(policies[1], rows, settings.grpo)
    fresh = CharPolicy(SETTINGS, seed=1)
    for one, other, before in zip(*(policy.parameters() for policy in (*policies, fresh)), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
        assert (one - before).abs().max() > 10 * 1e-6


def test_own_rows_are_what_was_drawn_with_the_log_probs_of_that_time() -> None:
    policy = CharPolicy(SETTINGS, seed=1)
    rollouts = tuple(Rollout(prompt=policy.encode_prompt("1+1=")) for _ in range(8))
    policy.extend(rollouts, generator=torch.Generator().manual_seed(1))
    rewards = [1.0, 0.0] * 4
    rows = own_rows(GeneratedGroup(task=sum_task(0, 0), round=0, rollouts=rollouts), rewards)
    for row, rollout, reward in zip(rows, rollouts, rewards, strict=True):
        assert row.sample == Sample(prompt=rollout.prompt, completion=tuple(rollout.tokens))
        assert row.old == tuple(rollout.log_probs)
        assert row.advantage == (0.5 if reward else -0.5)


def test_anothers_text_gets_this_policys_tokens_and_end() -> None:
    policy = CharPolicy(SETTINGS, seed=1)
    group = foreign_group(sum_task(0, 0), ["7", "12345", "123456", ""])
    rows = external_rows(group, policy)
    assert rows is not None
    assert [row.sample.completion for row in rows] == [policy.encode_completion(text) for text in group.texts]
    assert [len(row.sample.completion) for row in rows] == [2, 6, 6, 1]
    assert all(row.sample.prompt == policy.encode_prompt(group.prompt) and row.old is None for row in rows)
    assert external_rows(foreign_group(sum_task(0, 0), ["7", "seven"]), policy) is None
