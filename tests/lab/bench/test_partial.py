"""`shoal bench partial`: what the model computes is real, and where a completion ends is set."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from shoal.cli.main import execute
from shoal.lab.bench import partial
from shoal.lab.bench.machine import one_thread, this_machine
from shoal.lab.bench.partial import PartialBench, PartialResult, Window, lengths_of, measure, to_lines
from shoal.node.sapo.char_policy import CharModelSettings, CharPolicy

TINY = CharModelSettings(width=8, layers=1, heads=1)
SMALL = PartialBench(groups=2, group_size=4, median_tokens=4, most_tokens=40, rounds=20, before=10)


def window(seconds: float) -> Window:
    return Window(groups=10, seconds=seconds, steps=200, tokens=900, handed_out=890)


def test_lengths_are_log_normal_cut_and_the_same_whenever_they_are_asked_for() -> None:
    bench = PartialBench(median_tokens=24, most_tokens=512)
    lengths = [length for prompt in range(400) for length in lengths_of(bench, (prompt, 7))]
    assert lengths_of(bench, (3, 7)) == lengths[24:32]
    lengths.sort()
    assert 22 <= lengths[len(lengths) // 2] <= 26
    assert lengths[0] >= 1
    assert lengths[-1] > 10 * 24
    assert max(lengths_of(PartialBench(most_tokens=30), (prompt,))[0] for prompt in range(100)) == 30


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(partial, "MODEL", TINY)
    with one_thread():
        yield


@pytest.mark.usefixtures("_tiny")
def test_long_completions_that_go_on_take_fewer_steps_for_as_many_tokens() -> None:
    whole, unfinished = (measure(SMALL, over_provision, seed=1) for over_provision in (1.0, 3.0))
    assert (whole.groups, unfinished.groups) == (40, 40)
    assert whole.tokens == whole.handed_out
    assert unfinished.steps < 0.7 * whole.steps
    # Of a group the steps are those of its longest completion, if it is alone.
    alone = measure(PartialBench(groups=1, group_size=2, median_tokens=4, most_tokens=40, rounds=5, before=0), 1.0, 2)
    prompts = [policy_prompt(f"2:{index}") for index in range(1, 6)]
    bench = PartialBench(groups=1, group_size=2, median_tokens=4, most_tokens=40)
    lengths = [lengths_of(bench, prompt) for prompt in prompts]
    assert alone.tokens == sum(map(sum, lengths))
    assert alone.steps == sum(map(max, lengths))


def policy_prompt(question: str) -> tuple[int, ...]:
    return CharPolicy(TINY, seed=0).encode_prompt(question)


def test_gain_of_the_median_seed_stands_beside_its_target() -> None:
    result = PartialResult(
        bench=PartialBench(),
        whole=(window(12.0), window(13.0), window(30.0)),
        partial=(window(10.0), window(10.0), window(10.0)),
        machine=this_machine(),
    )
    (row,) = result.rows
    assert row.measured is not None
    assert (row.measured.median, row.measured.least, row.measured.most) == pytest.approx((1.3, 1.2, 3.0))
    assert (row.target, row.met, row.aim_met) == (1.2, True, False)
    assert to_lines(result)[0] == (
        "over-provision 1, seed 0: 0.83 groups/s, 20.0 steps and 90 tokens a group; 89 tokens in one"
    )


@pytest.mark.usefixtures("_tiny")
def test_command_prints_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench partial --groups 1 --group-size 2 --median-tokens 2 --most-tokens 4 --rounds 2 --before 0 --seeds 1"
    assert execute([*words.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(found[name]) for name in ("whole", "partial")] == [1, 1]
    assert found["whole"][0]["groups"] == 2
