"""`shoal bench sapo`: agents on real tasks, and what it says of them."""

from __future__ import annotations

import json

import pytest

from shoal.cli.main import execute
from shoal.lab.bench.machine import this_machine
from shoal.lab.bench.sapo_spec import SapoResult
from shoal.lab.bench.sapo_table import summary


def test_sapo_prints_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench sapo --local 1 --external 1 --agents 2 --rounds 1 --seed 3 --warm-up-reward 0 --json"
    assert execute(words.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: found[name] for name in ("local", "external", "agents", "rounds")} == {
        "local": 1,
        "external": 1,
        "agents": 2,
        "rounds": 1,
    }
    assert found["seed"] == 3
    assert 0 <= found["final_reward"] <= found["cumulative_reward"] <= 2
    assert found["generated_tokens"] >= 2 * 8
    assert found["wire_bytes"] >= 0
    assert found["rejected"] == {}


def test_the_summary_says_what_was_measured() -> None:
    result = SapoResult(
        local=4,
        external=4,
        agents=4,
        rounds=20,
        cumulative_reward=18.5,
        final_reward=0.31,
        generated_tokens=40_000,
        wire_bytes=3_000_000,
        rejected={"hint": 3, "replayed": 9},
        reward_per_million_tokens=462.5,
        pulled_bytes=1_050_000,
        trained_bytes=1_000_000,
        informative_groups=6.1,
        external_groups=3.98,
        reward_by_round=(0.2, 0.22, *(0.31,) * 18),
        warm_up_updates=(100, 120, 80),
        warm_up_rewards=(0.2, 0.21, 0.22),
        skills="like",
        terms="naive",
        sampling="uniform",
        attackers=1,
        over_provision=1.0,
        learning_rate=1e-3,
        warm_up_reward=0.2,
        seed=1,
        cpu_s=9.0,
        machine=this_machine(),
        held_out_first=0.25,
        held_out_last=0.3755,
    )
    assert summary(result) == [
        "reward     18.5 in all, over 20 rounds of 3 agents; 0.210 at first, 0.310 at last",
        "tokens     40000 generated, 462 of reward for a million",
        "groups     4 of its own and 4 of others wanted a round; 3.98 came, 6.10 of all had unequal rewards",
        "bytes      3.0 MB in all, 1.1 MB pulled, 1.0 MB of groups trained on",
        "held out   0.250 at first, 0.376 at last, greedily",
        "attackers  1 of 4, whose rewards do not count",
        "rejected   3 hint, 9 replayed",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--agents", "0"], "--agents"),
        (["--rounds", "0"], "--rounds"),
        (["--skills", "equal"], "--skills"),
        (["--attackers", "1"], "--attackers"),
        (["--terms", "hope"], "--terms"),
        (["--rewards", "all"], "--rewards"),
        (["--sampling", "any"], "--sampling"),
        (["--local", "0"], "local"),
        (["--settings", "8"], "--settings"),
        (["--seeds", "1,x"], "--seeds"),
    ],
)
def test_wrong_options_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert execute(["bench", "sapo", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err
