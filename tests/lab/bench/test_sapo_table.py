"""Several settings and seeds of `shoal bench sapo` in one go: what is measured once, and the table of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import typer

from shoal.lab.bench import sapo_table as bench_sapo_table
from shoal.lab.bench.machine import this_machine
from shoal.lab.bench.sapo_spec import SapoBench, SapoResult
from shoal.lab.bench.sapo_table import (
    TABLE,
    SapoTableOptions,
    measure_all,
    rows_of,
    summary_table,
    to_lines,
)
from shoal.lab.case import CaseOptions
from shoal.lab.results_file import read_results
from shoal.protocol.errors import ConfigError

OPTIONS = SapoBench(agents=4, rounds=2, settings="8/0,4/4")
BENCHES = OPTIONS.benches


def result_of(bench: SapoBench, seed: int, *, reward: float = 10.0, tokens: int = 1000) -> SapoResult:
    return SapoResult(
        **bench.facts,  # type: ignore[arg-type]
        cumulative_reward=reward,
        final_reward=0.25,
        generated_tokens=tokens,
        wire_bytes=0,
        rejected={},
        reward_per_million_tokens=1e6 * reward / tokens,
        pulled_bytes=0,
        trained_bytes=0,
        informative_groups=0.0,
        external_groups=0.0,
        reward_by_round=(0.25, 0.25),
        warm_up_updates=(1,) * bench.honest,
        warm_up_rewards=(0.1,) * bench.honest,
        seed=seed,
        cpu_s=1.0,
        machine=this_machine(),
    )


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[SapoBench, int, object]]:
    """The runs that are made, each with the warm starts that it was given."""
    runs: list[tuple[SapoBench, int, object]] = []

    def measure(bench: SapoBench, *, seed: int, on_round: object, starts: object) -> SapoResult:
        runs.append((bench, seed, starts))
        return result_of(bench, seed)

    monkeypatch.setattr(bench_sapo_table, "measure_sapo", measure)
    return runs


def all_of(path: Path | None, benches: list[SapoBench], *seeds: int) -> list[SapoResult]:
    return list(measure_all(benches, seeds, results=path, on_run=lambda bench, seed: lambda made, reward: None))


def test_what_the_file_has_is_not_measured_again(tmp_path: Path, made: list[tuple[SapoBench, int, object]]) -> None:
    path = tmp_path / "runs.jsonl"
    first = all_of(path, BENCHES[:1], 1)
    assert all_of(path, BENCHES, 1, 2)[0] == first[0]
    assert [(bench, seed) for bench, seed, _ in made] == [
        (BENCHES[0], 1),
        (BENCHES[1], 1),
        (BENCHES[0], 2),
        (BENCHES[1], 2),
    ]
    assert len(read_results(path, SapoResult)) == 4
    other = replace(BENCHES[0], learning_rate=2e-3)
    all_of(path, [other], 1)
    assert made[-1][:2] == (other, 1)  # another setting of any kind is another run


def test_settings_of_one_seed_share_their_warm_starts(made: list[tuple[SapoBench, int, object]]) -> None:
    all_of(None, BENCHES, 1, 2)
    starts = [one for _, _, one in made]
    assert starts[0] is starts[1] is not starts[2] is starts[3]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text('{"reward": 3}\n')
    with pytest.raises(ConfigError, match="--results"):
        read_results(path, SapoResult)


def test_the_table_compares_with_the_first_setting_seed_by_seed() -> None:
    alone, shared = BENCHES
    attacked = replace(shared, attackers=0.25)
    results = [
        result_of(alone, 1, reward=10.0),
        result_of(shared, 1, reward=12.0, tokens=500),
        result_of(alone, 2, reward=20.0),
        result_of(shared, 2, reward=21.0, tokens=500),
        result_of(attacked, 1, reward=9.0, tokens=500),
    ]
    assert summary_table(results).splitlines()[2:] == [
        "| 8/0 | 15.0 | 1.00 (1.00 to 1.00) | 0.250 | 15000 | 1.00 (1.00 to 1.00) | 2 |",
        "| 4/4 | 16.5 | 1.12 (1.05 to 1.20) | 0.250 | 33000 | 2.25 (2.10 to 2.40) | 2 |",
        "| 4/4, 1 attack | 9.0 | 1.20 | 0.250 | 18000 | 1.80 | 1 |",  # three honest agents, in place of four
    ]


def test_runs_of_few_rounds_in_which_nobody_earned_anything_have_their_rows_too() -> None:
    alone, shared = BENCHES
    results = [result_of(alone, 1, reward=0.0), result_of(shared, 1, reward=0.5), result_of(alone, 2, reward=2.0)]
    assert summary_table(results).splitlines()[2:] == [
        "| 8/0 | 1.0 | 1.00 | 0.250 | 1000 | 1.00 | 2 |",
        "| 4/4 | 0.5 |  | 0.250 | 500 |  | 1 |",
    ]
    assert [row.measured for row in rows_of(results)] == [None, None, None]


def test_runs_of_other_tasks_are_another_swarm() -> None:
    alone, shared = BENCHES
    other = msgspec.structs.replace(result_of(shared, 1), tasks="echo default × 1")
    heads = [line for line in to_lines([result_of(alone, 1), other]) if line.endswith(":")]
    assert [head.endswith(", tasks echo default × 1:") for head in heads] == [False, True]


def test_results_of_several_runs_are_held_against_the_targets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, shared = BENCHES
    results = [
        result_of(alone, 1, reward=10, tokens=1000),
        result_of(shared, 1, reward=12, tokens=500),
        result_of(alone, 2, reward=20, tokens=1000),
        result_of(shared, 2, reward=21, tokens=500),
        result_of(replace(shared, agents=6, attackers=1 / 3), 1, reward=11.4),
    ]
    reward, per_token, attacked = rows_of(results)
    measured = [row.measured.median for row in (reward, per_token, attacked) if row.measured is not None]
    assert measured == pytest.approx([1.05, 2.1, 0.95])
    path = tmp_path / "runs.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in results))
    with pytest.raises(typer.Exit) as ended:
        TABLE(SapoTableOptions(results=[path]), CaseOptions(check=True))
    assert ended.value.exit_code == 1
    out, err = capsys.readouterr()
    assert "| 4/4 | 16.5 | 1.12 (1.05 to 1.20) |" in out
    assert err == "missed: reward of 4/4, like skills: 1.05 × that of 8/0, of the worst seed, wanted at least 1.1\n"
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="no results"):
        TABLE(SapoTableOptions(results=[path]))
