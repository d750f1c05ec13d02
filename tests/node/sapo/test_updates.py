from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
import torch

from shoal.node.sapo.char_policy import CharModelSettings, CharPolicy
from shoal.node.sapo.generation import GeneratedGroup
from shoal.node.sapo.grpo import Batch, ExternalTerms, grpo_loss
from shoal.node.sapo.policy import Rollout, Sample, completion_mask
from shoal.node.sapo.updates import Row, Updater, UpdateSettings, external_rows, own_rows
from shoal.protocol.rollouts import Drawn, Sampling
from tests.node.sapo.draws import of_chance
from tests.node.sapo.sums import foreign_group, sum_task

SETTINGS = CharModelSettings(width=16, layers=1, heads=2, prompt_chars=8, completion_tokens=6, alphabet="0123456789+=")
RATE = 1e-2


def some_rows(policy: CharPolicy) -> list[Row]:
    """Own rows drawn by an earlier policy, and rows of others; some without advantage, some of known probability."""
    draws = of_chance(1)
    rollouts = [Rollout(prompt=policy.encode_prompt(text), draws=draws) for text in ("1+1=", "12+7=", "=", "5+5=")]
    CharPolicy(SETTINGS, seed=9).extend(rollouts)
    own = [
        Row(
            sample=Sample(prompt=one.prompt, completion=tuple(one.tokens)),
            advantage=advantage,
            drawn=tuple(one.log_probs),
        )
        for one, advantage in zip(rollouts, (1.5, -1.0, 0.0, 0.5), strict=True)
    ]
    texts, advantages = ["3", "44", "+=", "", "1", "12", "5=", "9"], (1.0, -2.0, -0.5, 0.0, 0.7, -1.1, 1.3, -0.9)
    others = external_rows(foreign_group(sum_task(0, 0), texts), policy)
    assert others is not None
    said = [None] * 4 + [(-9.0, -0.1), (-3.0, -2.0, -4.0), (-8.0, -9.0, -7.0), (-1e-3, -1e-3)]
    return own + [
        Row(sample=row.sample, advantage=advantage, drawn=drawn, external=True)
        for row, advantage, drawn in zip(others, advantages, said, strict=True)
    ]


def weight(row: Row, at: int, here: float, terms: str) -> float:
    """What a token of a row counts for: of others' bad completions all, nothing, or as much as it is probable."""
    if not row.external or terms == "naive":
        return 1.0
    if terms == "tis" and row.drawn is not None:
        return min(math.exp(here - row.drawn[at]), 2.0)
    return float(row.advantage > 0)


def plain_update(policy: CharPolicy, rows: list[Row], terms: ExternalTerms) -> None:
    """One update over all rows, those without gradient too, token by token as the formula has it."""
    samples = [row.sample for row in rows]
    with torch.no_grad():
        old = policy.log_probs(samples)
    weights = torch.zeros_like(old)
    for at, row in enumerate(rows):
        for token in range(len(row.sample.completion)):
            weights[at, token] = weight(row, token, float(old[at, token]), terms)
        if row.drawn is not None and not row.external:
            old[at, : len(row.drawn)] = torch.tensor(row.drawn)
    batch = Batch(
        old=old,
        mask=completion_mask(samples),
        advantages=torch.tensor([row.advantage for row in rows]),
        weights=weights,
    )
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-3)
    grpo_loss(policy.log_probs(samples), batch, tokens=int(batch.mask.sum())).backward()  # type: ignore[no-untyped-call]
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
    Updater(policies[0], UpdateSettings(learning_rate=RATE, terms=terms)).train(rows)
    plain_update(policies[1], rows, terms)
    fresh = CharPolicy(SETTINGS, seed=1)
    for one, other, before in zip(*(policy.parameters() for policy in (*policies, fresh)), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
        assert (one - before).abs().max() > 10 * 1e-6


@pytest.mark.usefixtures("_smooth_optimizer")
@pytest.mark.parametrize("terms", get_args(ExternalTerms))
def test_no_more_rows_are_in_memory_than_a_node_wants_and_the_update_is_the_same(
    terms: ExternalTerms, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parted = (CharPolicy(SETTINGS, seed=1) for _ in range(2))
    rows, passes = some_rows(whole), list[int]()
    log_probs = parted.log_probs

    def counting(samples: Sequence[Sample]) -> torch.Tensor:
        passes.append(len(samples))
        return log_probs(samples)

    monkeypatch.setattr(parted, "log_probs", counting)
    settings = UpdateSettings(learning_rate=RATE, terms=terms)
    expected = Updater(whole, settings).train(rows)
    update = Updater(parted, replace(settings, together=3)).train(rows)
    assert expected is not None
    assert update is not None
    assert max(passes) == 3
    assert len(passes) >= 2
    assert update.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-4)
    assert update.clipped == expected.clipped
    for one, other in zip(whole.parameters(), parted.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_own_rows_are_what_was_drawn_with_the_log_probs_of_that_time() -> None:
    policy = CharPolicy(SETTINGS, seed=1)
    draws = of_chance(1)
    rollouts = tuple(Rollout(prompt=policy.encode_prompt("1+1="), draws=draws) for _ in range(8))
    policy.extend(rollouts)
    rewards = [1.0, 0.0] * 4
    rows = own_rows(GeneratedGroup(task=sum_task(0, 0), round=0, rollouts=rollouts), rewards)
    for row, rollout, reward in zip(rows, rollouts, rewards, strict=True):
        assert row.sample == Sample(prompt=rollout.prompt, completion=tuple(rollout.tokens))
        assert (row.drawn, row.external) == (tuple(rollout.log_probs), False)
        assert row.advantage == (0.5 if reward else -0.5)


def test_anothers_text_gets_this_policys_tokens_and_end() -> None:
    policy = CharPolicy(SETTINGS, seed=1)
    group = foreign_group(sum_task(0, 0), ["7", "12345", "123456", ""])
    rows = external_rows(group, policy)
    assert rows is not None
    assert [row.sample.completion for row in rows] == [policy.encode_completion(text) for text in group.texts]
    assert [len(row.sample.completion) for row in rows] == [2, 6, 6, 1]
    assert all(
        row.sample.prompt == policy.encode_prompt(group.task.question) and (row.drawn, row.external) == (None, True)
        for row in rows
    )
    assert external_rows(foreign_group(sum_task(0, 0), ["7", "seven"]), policy) is None


def labelled_rows(policy: CharPolicy, *drawn: Drawn) -> list[Row]:
    """The rows of another's group of as many answers "12", with what it says of them."""
    group = foreign_group(sum_task(0, 0), ["12"] * len(drawn))
    rows = external_rows(replace(group, sampling=Sampling(policy="7-another", drawn=drawn)), policy)
    assert rows is not None
    return rows


def test_what_anothers_tokens_were_drawn_with_is_known_if_they_are_this_policys() -> None:
    policy = CharPolicy(SETTINGS, seed=1)
    tokens = policy.encode_completion("12")
    assert tokens is not None
    logs = (-0.5, -2.0, -0.25)
    rows = labelled_rows(
        policy,
        Drawn.of(logs, tokens),
        Drawn.of(logs[:2], tokens[:2]),  # an engine that leaves out the end
        Drawn.of(logs[:1], tokens[:1]),  # and what is no completion of the text
        Drawn.of(logs, ()),
        Drawn.of(logs, (*tokens[:2], 2**32 - 1)),  # of another tokenizer
        Drawn.of((*logs, -1.0), (*tokens, tokens[-1])),
    )
    assert [row.drawn for row in rows] == [logs, logs[:2], None, None, None, None]
    assert [row.sample.completion for row in rows] == [tokens, tokens[:2], *[tokens] * 4]
    assert all(row.external for row in rows)


def test_group_that_says_only_its_policy_is_taken_as_text() -> None:
    policy = CharPolicy(SETTINGS, seed=1)
    rows = external_rows(replace(foreign_group(sum_task(0, 0), ["12", "3"]), sampling=Sampling(policy="gpt")), policy)
    assert rows is not None
    assert [row.drawn for row in rows] == [None, None]
