from __future__ import annotations

import math

import pytest
import torch

from shoal.node.sapo.grpo import Batch, ExternalTerms, counts, group_advantages, grpo_loss, truncated_weights

ROWS, TOKENS = 12, 5


def some_batch(seed: int = 1) -> tuple[torch.Tensor, Batch]:
    """Logits (ROWS, TOKENS) whose sigmoid is the probability of the token, and a batch with all cases of the clip."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, TOKENS, generator=generator, dtype=torch.float64, requires_grad=True)
    old = torch.nn.functional.logsigmoid(logits.detach()) + 0.4 * torch.randn(
        ROWS, TOKENS, generator=generator, dtype=torch.float64
    )
    lengths = torch.randint(1, TOKENS + 1, (ROWS,), generator=generator)
    return logits, Batch(
        old=old,
        mask=torch.arange(TOKENS)[None, :] < lengths[:, None],
        advantages=torch.randn(ROWS, generator=generator, dtype=torch.float64),
        weights=2 * torch.rand(ROWS, TOKENS, generator=generator, dtype=torch.float64),
    )


def reference(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Token by token, from the formulas of the papers."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in range(ROWS):
        advantage = float(batch.advantages[row])
        for token in range(TOKENS):
            if not batch.mask[row, token]:
                continue
            count += 1
            probability = torch.sigmoid(logits[row, token])
            ratio = probability / math.exp(float(batch.old[row, token]))
            clipped = min(max(float(ratio.detach()), 0.8), 1.28) * advantage
            value = ratio * advantage if float(ratio.detach()) * advantage <= clipped else torch.tensor(clipped)
            total = total - float(batch.weights[row, token]) * value
    return total / count


@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_equal_a_reference(seed: int) -> None:
    logits, batch = some_batch(seed)
    loss = grpo_loss(torch.nn.functional.logsigmoid(logits), batch, tokens=int(batch.mask.sum()))
    (gradient,) = torch.autograd.grad(loss, logits)
    expected = reference(logits, batch)
    (expected_gradient,) = torch.autograd.grad(expected, logits)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
    assert torch.allclose(gradient, expected_gradient, atol=1e-6)
    assert gradient.abs().max() > 0.01


def test_ratio_is_clipped_low_for_bad_and_high_for_good() -> None:
    ratios = torch.tensor([0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 3.0], dtype=torch.float64)
    for sign, moved in ((1.0, ratios < 1.28), (-1.0, ratios > 0.8)):
        log_probs = ratios.log()[:, None].requires_grad_()
        batch = Batch(
            old=torch.zeros(7, 1, dtype=torch.float64),
            mask=torch.ones(7, 1, dtype=torch.bool),
            advantages=torch.full((7,), sign, dtype=torch.float64),
            weights=torch.ones(7, 1, dtype=torch.float64),
        )
        (gradient,) = torch.autograd.grad(grpo_loss(log_probs, batch, tokens=7), log_probs)
        assert torch.equal(gradient[:, 0] != 0, moved)


# Rule, what another's completion is worth to its group, and whether its tokens' probabilities are known.
@pytest.mark.parametrize(
    ("terms", "bad", "bad_and_known"), [("naive", True, True), ("positive", False, False), ("tis", False, True)]
)
def test_rule_says_which_completions_of_others_count(terms: ExternalTerms, bad: bool, bad_and_known: bool) -> None:
    for known in (False, True):
        assert counts(terms, 0.25, external=True, drawn=known)
        assert counts(terms, -0.25, external=False, drawn=known), "one's own always do"
        assert not counts(terms, 0.0, external=True, drawn=known)
    assert counts(terms, -0.25, external=True, drawn=False) is bad
    assert counts(terms, -0.25, external=True, drawn=True) is bad_and_known


def test_token_weighs_as_often_as_it_is_more_probable_here_and_twice_at_most() -> None:
    here, there = (torch.tensor(each).log() for each in ([0.1, 0.5, 0.9, 0.3, 1.0], [0.4, 0.5, 0.6, 0.1, 1e-30]))
    expected = [0.25, 1.0, 1.5, 2.0, 2.0]
    assert truncated_weights(here, there).tolist() == pytest.approx(expected)
    assert truncated_weights(here, there - 1e30).tolist() == pytest.approx([2.0] * 5)


def test_what_is_behind_a_completion_counts_nothing() -> None:
    logits, batch = some_batch()
    other = logits.detach().clone().masked_fill(~batch.mask, 50.0).requires_grad_()
    losses = [grpo_loss(torch.nn.functional.logsigmoid(values), batch, tokens=9) for values in (logits, other)]
    assert losses[0].item() == losses[1].item()


def test_mean_is_over_the_tokens_that_are_given() -> None:
    logits, batch = some_batch()
    log_probs = torch.nn.functional.logsigmoid(logits)
    total = grpo_loss(log_probs, batch, tokens=1).item()
    assert grpo_loss(log_probs, batch, tokens=100).item() == pytest.approx(total / 100)


def test_advantages_are_what_is_above_the_mean_of_the_group() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 1.0, 0.5]).tolist() == [0.5, -0.5, -0.5, 0.5, 0.0]


def test_a_share_of_the_reward_counts_as_much_as_it_is_worth() -> None:
    right, listed = group_advantages([1.0] + [0.0] * 7), group_advantages([0.125] + [0.0] * 7)
    assert listed.tolist() == (right / 8).tolist()


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
def test_equal_rewards_have_no_advantage(reward: float) -> None:
    assert group_advantages([reward] * 7).tolist() == [0.0] * 7
