"""What every policy keeps to: what it draws, and says of it, is that of a forward of each sequence alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shoal.node.sapo.policy import Policy, Rollout, Sample

Forward = Callable[[tuple[int, ...], list[int]], torch.Tensor]
"""Log-probabilities of a completion's tokens after a prompt: one sequence, without padding, packing and cache."""


def assert_draws_and_scores_as(
    forward: Forward, policy: Policy, prompts: Sequence[str], *, end: int, limit: int, copies: int
) -> None:
    """Draw `copies` completions of each prompt, in two calls, and check every token against `forward`.

    Their parameters must make it likely that some come to an end and some to the limit, and that all are different: a
    cache in which rows are confused would pass if all rows were alike.
    """
    rollouts = [Rollout(prompt=policy.encode_prompt(text)) for text in prompts for _ in range(copies)]
    generator = torch.Generator().manual_seed(2)
    steps = iter((False, True))
    first = policy.extend(rollouts, generator=generator, enough=lambda: next(steps))
    before = [([*rollout.tokens], [*rollout.log_probs]) for rollout in rollouts]
    assert first == sum(len(tokens) for tokens, _ in before)
    assert any(not rollout.done for rollout in rollouts)
    rollouts.append(Rollout(prompt=policy.encode_prompt("=")))  # a fresh one beside those that go on
    more = policy.extend(rollouts, generator=generator)
    assert first + more == sum(len(rollout.tokens) for rollout in rollouts)
    assert policy.extend(rollouts, generator=generator) == 0
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
