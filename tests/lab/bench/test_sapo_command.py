"""`shoal bench sapo`: agents on real tasks, and what it says of them."""

from __future__ import annotations

import json

import pytest

from shoal.cli.main import execute


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--skills", "equal"], "--skills"),
        (["--attackers", "1"], "--attackers"),
        (["--terms", "hope"], "--terms"),
        (["--learning-rate", "0"], "--learning-rate"),
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
