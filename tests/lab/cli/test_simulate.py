"""`shoal simulate`: what it prints, what it reads, and how it ends."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from shoal.cli.main import execute
from shoal.lab.simulate import simulation as simulate_module
from tests.lab.simulate.seeded_bugs import BlamesEverything

KEYS = {
    "peers", "rounds_certified", "forks", "wrong_values", "stalled_rounds", "detect_s_p99",
    "control_bytes_per_peer_per_s", "events", "wall_s", "trace_digest",
}  # fmt: skip
FAULTS = """
loss = 0.01
[churn]
trace = "churn.csv"
[[fault]]
kind = "partition"
at_s = 1.0
duration_s = 3.0
groups = [[0], [1, 2]]
one_way = true
"""


def test_simulate_with_named_voters(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["simulate", "--peers", "5", "--rounds", "2", "--voters", "4", "--lying", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds_certified"] == 2
    assert execute(["simulate", "--peers", "5", "--rounds", "2", "--lying"]) == 2
    assert "lying takes 4 named voters or more" in capsys.readouterr().err


def test_simulate_as_json_has_the_keys_and_the_same_trace_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    documents = []
    for _ in range(2):
        assert execute(["simulate", "--peers", "3", "--rounds", "2", "--seed", "7", "--json"]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    assert documents[0].keys() >= KEYS
    assert documents[0]["rounds_certified"] == 2
    assert documents[0]["trace_digest"] == documents[1]["trace_digest"]


def test_simulate_reads_faults_and_a_trace_of_churn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "faults.toml").write_text(FAULTS)
    (tmp_path / "churn.csv").write_text("# seconds,peer,what\n0.5,2,down\n9.5,2,up\n")
    assert execute(["simulate", "--peers", "3", "--rounds", "2", "--faults", str(tmp_path / "faults.toml")]) == 0
    out = capsys.readouterr().out
    assert "violations none" in out
    assert "2 certified, 0 stalled, 0 forks" in out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[[fault]]\nkind = "kill"\nat_s = 1.0', "a kill needs the peer it strikes"),
        ('[[fault]]\nkind = "flood"\nat_s = 1.0', "Invalid enum value"),
        ('[[fault]]\nkind = "kill"\nat_s = 1.0\npeer = 9', "names a peer that there is not"),
        ('[churn]\ntrace = "absent.csv"', "cannot read the trace"),
        ("[churn]\nshare_per_round = 0.1", "churn at random is for more than 64 peers"),
        ("lost = 1", "unknown field"),
    ],
)
def test_simulate_refuses_what_it_cannot_carry_out(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "faults.toml").write_text(text)
    assert execute(["simulate", "--peers", "3", "--rounds", "1", "--faults", str(tmp_path / "faults.toml")]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--peers 0", "--peers: 0 is not in 1..20000"),
        ("--peers 20001", "--peers: 20001 is not in 1..20000"),
        ("--rounds 0", "--rounds: 0 is not in 1..10000"),
        ("--seed -1", f"--seed: -1 is not in 0..{2**62 - 1}"),
        ("--loss 1.5", "--loss: 1.5 is not in 0..1"),
        ("--loss nan", "--loss: nan is not in 0..1"),
        ("--churn 2 --peers 80", "--churn: 2.0 is not in 0..1"),
    ],
)
def test_simulate_names_the_option_that_is_out_of_range(
    arguments: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["simulate", *arguments.split()]) == 2
    assert capsys.readouterr() == ("", f"shoal: {told}\n")


def test_simulate_ends_with_one_and_the_shortest_test_after_a_violation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulate_module, "Components", partial(simulate_module.Components, judge=BlamesEverything))
    assert execute(["simulate", "--peers", "4", "--rounds", "3", "--shrink"]) == 1
    out, err = capsys.readouterr()
    assert "violations no fork: made up" in out
    assert "def test_seed_1_keeps_no_fork() -> None:" in err
    assert "Scenario(peers=1, rounds=1, seed=1" in err


def test_simulate_with_few_seats(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["simulate", "--peers", "4", "--rounds", "3", "--seats", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds_certified"] == 3
    assert execute(["simulate", "--peers", "4", "--seats", "0"]) == 2
    assert "--seats" in capsys.readouterr().err
