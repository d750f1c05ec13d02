"""Samples after evaluations are bounded in characters and in time, printable, and never in the way of training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from shoal.node.training.samples import TIME_LIMIT_S, TIME_SHARE, Sampler
from shoal.node.training.trainer import TrainerSpec
from shoal.node.training.trainer_messages import (
    PROMPT_LIMIT_CHARS,
    SAMPLE_LIMIT,
    SAMPLE_LIMIT_CHARS,
    Applied,
    Apply,
    Evaluate,
    Evaluated,
    Initial,
    Sample,
    WriteInitial,
)
from shoal.node.workloads.regression import RegressionWorkload
from shoal.node.workloads.text import PROMPTS
from tests.node.training.test_trainer import expect, running

HOSTILE = "\x1b]0;x\x07<script>\u202e\x00\ud800\u2028\x9b2J"


class Speaking(RegressionWorkload):
    """Says `piece` again and again, and counts how often; each takes `piece_s` on `clock`."""

    def __init__(self, piece: str = "ab", *, prompts: Sequence[str] = ("one", "two"), piece_s: float = 0.0) -> None:
        super().__init__()
        self.prompts = tuple(prompts)
        self.piece, self.piece_s = piece, piece_s
        self.now, self.drawn = 0.0, 0

    def clock(self) -> float:
        return self.now

    def continuations(self, model: torch.nn.Module, prompts: Sequence[str]) -> Iterator[list[str]]:
        texts = [""] * len(prompts)
        while True:
            self.now += self.piece_s
            self.drawn += 1
            texts = [text + self.piece for text in texts]
            yield texts


def sampled(workload: Speaking, *evaluated_s: float) -> list[tuple[Sample, ...]]:
    """What is taken after evaluations that took so long."""
    sampler, taken = Sampler(workload, clock=workload.clock), []
    for seconds in evaluated_s:
        sampler.sample(torch.nn.Linear(1, 1), evaluated_s=seconds)
        taken.append(sampler.take())
    return taken


def test_sample_ends_at_its_limit_of_characters_and_no_more_is_drawn() -> None:
    workload = Speaking("abc", prompts=["p" * 200, *"qrstuv"])
    (samples,) = sampled(workload, 1.0)
    assert [sample.prompt for sample in samples] == ["p" * PROMPT_LIMIT_CHARS, "q", "r", "s"]
    assert len(samples) == SAMPLE_LIMIT
    assert {sample.text for sample in samples} == {("abc" * SAMPLE_LIMIT_CHARS)[:SAMPLE_LIMIT_CHARS]}
    assert workload.drawn == SAMPLE_LIMIT_CHARS // 3


def test_sample_of_a_hostile_vocabulary_is_printable() -> None:
    (samples,) = sampled(Speaking(HOSTILE + "\n\t", prompts=[HOSTILE]), 1.0)
    (sample,) = samples
    shown = "\ufffd]0;x\ufffd<script>\ufffd\ufffd\ufffd\ufffd\ufffd2J"
    assert sample.prompt == shown
    assert sample.text == ((shown + "\n\t") * 10)[:SAMPLE_LIMIT_CHARS]
    sample.text.encode()  # no half of a surrogate pair


def test_slow_model_says_less_and_pays_for_it_by_a_share_of_later_evaluations() -> None:
    workload = Speaking("a", piece_s=0.3)
    pieces = 7  # of 0.3 s: the first at or beyond the limit
    paying = pieces * 0.3 / TIME_SHARE
    taken = sampled(workload, 1.0, paying / 2, paying / 2 - 0.1, 0.2, 1e6)
    assert TIME_LIMIT_S == 2.0
    assert [len(samples) for samples in taken] == [2, 0, 0, 2, 2]
    assert [sample.text for sample in taken[0]] == ["a" * pieces] * 2


def test_credit_is_not_saved_up() -> None:
    workload = Speaking("a", piece_s=0.3)
    assert [len(samples) for samples in sampled(workload, 1e6, 1.0)] == [2, 0]


def test_workload_that_raises_is_asked_no_more(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Speaking):
        asked = 0

        def continuations(self, model: torch.nn.Module, prompts: Sequence[str]) -> Iterator[list[str]]:
            self.asked += 1
            raise RuntimeError("no tongue")

    workload = Failing()
    assert sampled(workload, 1.0, 1e6) == [(), ()]
    assert workload.asked == 1
    (line,) = caplog.messages
    assert line.startswith(f"no more samples: RuntimeError: no tongue at {__file__}, line ")


def test_workload_without_prompts_says_nothing() -> None:
    sampler = Sampler(RegressionWorkload())
    sampler.sample(torch.nn.Linear(1, 1), evaluated_s=1.0)
    assert sampler.take() == ()
    assert sampled(Speaking(prompts=[]), 1.0) == [()]


async def test_trainer_says_what_the_anchor_says_with_its_evaluation(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox " * 400)
    (tmp_path / "b.txt").write_text("jumps over the dog " * 400)
    small = {"width": 16, "layers": 1, "heads": 1, "context": 32}
    spec = TrainerSpec(workload="text", options=small, data=str(tmp_path), device="cpu")
    async with running(spec) as trainer:
        await trainer.send(WriteInitial())
        await expect(trainer, Initial)
        await trainer.apply(Apply(round=7, fresh=True), trainer.contribution.copy())
        await expect(trainer, Applied)
        await trainer.send(Evaluate(round=7))
        evaluated = await expect(trainer, Evaluated)
    assert evaluated.round == 7
    assert [sample.prompt for sample in evaluated.samples] == list(PROMPTS)
    assert all(sample.text for sample in evaluated.samples)
