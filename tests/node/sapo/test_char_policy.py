from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from shoal.node.sapo.char_policy import END, PACKED_SAMPLES, SPECIAL, CharModelSettings, CharPolicy
from shoal.node.sapo.policy import Rollout, Sample
from shoal.protocol.errors import ConfigError
from tests.node.sapo.draws import of_chance
from tests.node.sapo.policy_contract import assert_draws_and_scores_as

SMALL = CharModelSettings(width=16, layers=2, heads=2, prompt_chars=12, completion_tokens=8, alphabet="0123456789+= -")
PROMPTS = ("1+2=", "7+12=", "0=", "123456789+1=")


def trained_apart(policy: CharPolicy, *, scale: float = 6.0) -> CharPolicy:
    """The policy with weights large enough that what it draws depends on every token before."""
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale)
    return policy


def whole_forward(policy: CharPolicy, prompt: tuple[int, ...], completion: list[int]) -> torch.Tensor:
    """Log-probabilities of a completion's tokens: one sequence alone and without a cache."""
    logs = distributions(policy, (*prompt, *completion))[len(prompt) - 1 :]
    return logs.gather(1, torch.tensor(completion)[:, None])[:, 0]


def distributions(policy: CharPolicy, ids: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities (len(ids) - 1, vocabulary) of each next token, one sequence alone and without a cache."""
    with torch.no_grad():
        logits = policy.model.head(policy.model.hidden(torch.tensor([ids[:-1]])))[0] / policy.settings.temperature
    allowed = torch.zeros(logits.shape[1], dtype=torch.bool)
    allowed[[END, *range(SPECIAL, logits.shape[1])]] = True
    return torch.log_softmax(logits.masked_fill(~allowed, -math.inf), dim=1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_generation_and_log_probs_equal_a_forward_of_each_alone(temperature: float) -> None:
    settings = replace(SMALL, temperature=temperature)
    policy = trained_apart(CharPolicy(settings, seed=1))
    copies = PACKED_SAMPLES + 4  # more than share a row in training
    forward = partial(whole_forward, policy)
    assert_draws_and_scores_as(forward, policy, PROMPTS, end=END, limit=settings.completion_tokens, copies=copies)


def test_generation_draws_from_the_distribution_of_the_forward_without_a_cache() -> None:
    policy = trained_apart(CharPolicy(SMALL, seed=2))
    prompt = policy.encode_prompt("1+2=")
    draws = of_chance(1)
    rollouts = [Rollout(prompt=prompt, draws=draws) for _ in range(2000)]
    policy.extend(rollouts)
    expected = distributions(policy, (*prompt, END))[-1].exp()
    counts = torch.bincount(torch.tensor([rollout.tokens[0] for rollout in rollouts]), minlength=len(expected))
    assert torch.allclose(counts / len(rollouts), expected, atol=0.04)


def test_log_probs_have_the_gradient_of_every_sample() -> None:
    policy = trained_apart(CharPolicy(SMALL, seed=4))
    samples = [Sample(prompt=policy.encode_prompt(text), completion=(SPECIAL + 3, END)) for text in PROMPTS]
    policy.log_probs(samples).sum().backward()
    together = [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]
    policy.model.zero_grad()
    for sample in samples:
        policy.log_probs([sample]).sum().backward()
    apart = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    assert len(together) == len(apart) == len(policy.parameters())
    for one, other in zip(together, apart, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_completions_are_encoded_with_an_end_where_there_is_room() -> None:
    policy = CharPolicy(SMALL, seed=1)
    ids = policy.encode_completion("12")
    assert ids is not None
    assert ids[-1] == END
    assert policy.decode(ids) == "12"
    assert policy.encode_completion("") == (END,)
    fits, long = policy.encode_completion("1234567"), policy.encode_completion("12345678")
    assert fits is not None
    assert long is not None
    assert (len(fits), fits[-1]) == (8, END)
    assert (len(long), policy.decode(long)) == (8, "12345678")
    assert policy.encode_completion("1x") is None
    assert policy.encode_completion("1" * 20 + "x") is None


def test_prompts_keep_their_end_and_mark_unknown_characters() -> None:
    policy = CharPolicy(SMALL, seed=1)
    assert policy.encode_prompt("9" * 50 + "1+2=") == policy.encode_prompt("9" * 8 + "1+2=")
    assert policy.encode_prompt("1x2") != policy.encode_prompt("12")
    assert policy.encode_prompt("1x2") == policy.encode_prompt("1€2")
    assert policy.encode_prompt("")


def test_parameters_follow_from_the_seed() -> None:
    torch.manual_seed(99)
    state = torch.random.get_rng_state()
    one, same, other = CharPolicy(SMALL, seed=1), CharPolicy(SMALL, seed=1), CharPolicy(SMALL, seed=2)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.model.head.weight, other.model.head.weight)


@pytest.mark.parametrize(
    "wrong", [{"width": 10, "heads": 4}, {"layers": 0}, {"temperature": 0.0}, {"alphabet": "aa"}, {"alphabet": ""}]
)
def test_settings_that_make_no_model_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        CharModelSettings(**wrong)  # type: ignore[arg-type]
