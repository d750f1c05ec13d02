"""What every policy keeps to: what it draws, and says of it, is that of a forward of each sequence alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shoal.node.sapo.policy import Policy, Rollout, Sample
from tests.node.sapo.draws import assigned

Forward = Callable[[tuple[int, ...], list[int]], torch.Tensor]
"""Log-probabilities of a completion's tokens after a prompt: one sequence, without padding, packing and cache."""


def assert_draws_and_scores_as(
    forward: Forward, policy: Policy, prompts: Sequence[str], *, end: int, limit: int, copies: int
) -> None:
    """Draw `copies` completions of each prompt, in two calls, and check every token against `forward`.

    Their parameters must make it likely that some come to an end and some to the limit, and that all are different: a
    cache in which rows are confused would pass if all rows were alike.
    """
    texts = [text for text in prompts for _ in range(copies)]
    draws = [assigned(2)(0, row, 0) for row in range(len(texts) + 1)]
    rollouts = [Rollout(prompt=policy.encode_prompt(text), draws=one) for text, one in zip(texts, draws, strict=False)]
    steps = iter((False, True))
    first = policy.extend(rollouts, enough=lambda: next(steps))
    before = [([*rollout.tokens], [*rollout.log_probs]) for rollout in rollouts]
    assert first == sum(len(tokens) for tokens, _ in before)
    assert any(not rollout.done for rollout in rollouts)
    rollouts.append(Rollout(prompt=policy.encode_prompt("="), draws=draws[-1]))  # a fresh one beside those that go on
    more = policy.extend(rollouts)
    assert first + more == sum(len(rollout.tokens) for rollout in rollouts)
    assert policy.extend(rollouts) == 0
    for rollout, (tokens, log_probs) in zip(rollouts, before, strict=False):
        assert rollout.tokens[: len(tokens)] == tokens
        assert rollout.log_probs[: len(log_probs)] == log_probs
    assert len({tuple(rollout.tokens) for rollout in rollouts}) > len(rollouts) // 2
    assert {rollout.tokens[-1] == end for rollout in rollouts} == {True, False}

    found = policy.log_probs([Sample(prompt=one.prompt, completion=tuple(one.tokens)) for one in rollouts])
    assert found.requires_grad
    for row, rollout in zip(found.detach(), rollouts, strict=True):
        assert rollout.done
        assert end not in rollout.tokens[:-1]
        assert len(rollout.tokens) == limit or rollout.tokens[-1] == end
        expected = forward(rollout.prompt, rollout.tokens)
        assert torch.allclose(torch.tensor(rollout.log_probs), expected, atol=1e-4)
        assert torch.allclose(row[: len(expected)], expected, atol=1e-4)
        assert not row[len(expected) :].any()

    spans = policy.drawn_by([Sample(prompt=one.prompt, completion=tuple(one.tokens)) for one in rollouts])
    for span, rollout, one in zip(spans, rollouts, draws, strict=True):
        length = len(rollout.tokens)
        shares = (span[:length, 1] - span[:length, 0]).float()
        assert torch.allclose(shares, torch.tensor(rollout.log_probs).exp(), atol=1e-4)
        drawn_by = torch.tensor([one(place) for place in range(length)], dtype=torch.float64)
        assert bool((span[:length, 0] - 1e-5 <= drawn_by).all())
        assert bool((drawn_by < span[:length, 1] + 1e-5).all())
        assert span[length:].tolist() == [[0.0, 1.0]] * (spans.shape[1] - length)
