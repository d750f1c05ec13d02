"""Ours beside others: how a rival's time is read, which ratios are taken, and a miss is shown as a miss."""

from __future__ import annotations

import json
import re
import sys
from functools import partial

import pytest
import trio
import typer

from shoal.cli.main import execute
from shoal.lab.bench.allreduce import Allreduce, FaultResult
from shoal.lab.bench.compare import CASE, Compare, Comparison, Sample, rows_of
from shoal.lab.bench.machine import this_machine
from shoal.lab.bench.rivals import Rival, gloo, parse_rivals, read_time, run_rival
from shoal.lab.case import LongCaseOptions, Numbers
from shoal.lab.targets import Row
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.testnet.lane_rate import LaneSpeed

MIB = 1 << 20
NUMEL = 25_000_000

HIVEMIND = """\
start: 4 DHT+p2pd 2.1s, averagers 0.50s
round 0: group=[4, 4, 4, 4] total 4.00s (matchmaking etc 1.00s) allreduce max 2.90s min 2.80s span 3.00s -> 33 MB/s
round 1: group=[4, 4, 4, 4] total 3.00s (matchmaking etc 1.00s) allreduce max 1.90s min 1.80s span 2.00s -> 50 MB/s
round 2: group=[4, 4, 4, 4] total 3.00s (matchmaking etc 1.00s) allreduce max 1.90s min 1.80s span 1.50s -> 66 MB/s
"""


# --- rivals ---


def test_a_rivals_time_is_its_last_json_line_or_what_its_pattern_says() -> None:
    plain = Rival(name="x", command="x")
    assert read_time(plain, 'starting\n{"median_s": 2.0}\n{"median_s": 1.5, "more": [1]}\n{"other": 1}\nbye\n') == 1.5
    text = Rival(name="hivemind", command="x", pattern=re.compile(r"span ([0-9.]+)s"))
    assert read_time(text, HIVEMIND) == 1.75  # the first warms up
    assert read_time(text, HIVEMIND.splitlines()[1]) == 3.0
    for rival in (plain, text):
        with pytest.raises(NetworkError, match="printed no time"):
            read_time(rival, "nothing\n")


def test_rivals_are_named_commands() -> None:
    rivals = parse_rivals(["a=run {peers}", "b=b --x=1"], [r"b=took ([0-9.]+)"])
    assert [(r.name, r.command, r.pattern is not None) for r in rivals] == [
        ("a", "run {peers}", False),
        ("b", "b --x=1", True),
    ]


@pytest.mark.parametrize(
    ("commands", "patterns"),
    [(["nameless"], []), (["a="], []), (["a b=c"], []), (["a=c"], ["a=no group"]), (["a=c"], ["a=("]), ([], ["b=(x)"])],
)
def test_rivals_that_cannot_be_run_are_refused(commands: list[str], patterns: list[str]) -> None:
    with pytest.raises(ConfigError, match="--rival"):
        parse_rivals(commands, patterns)


@pytest.mark.parametrize("name", ["gloo", "fp32", "twice"])
def test_rivals_cannot_take_a_name_that_is_taken(name: str) -> None:
    with pytest.raises(ConfigError, match="names must differ"):
        Compare(rival=[f"{name}=x", "twice=y"])


def test_a_rival_is_run_with_the_numbers_filled_in() -> None:
    script = "import sys, json; print(json.dumps({'median_s': float(sys.argv[1]) + float(sys.argv[2])}))"
    rival = Rival(name="sum", command=f'{sys.executable} -c "{script}" {{peers}} {{numel}}')
    assert trio.run(partial(run_rival, rival, peers=4, numel=1000)) == 1004.0


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("/nonexistent/rival", "No such file"),
        (f"{sys.executable} -c 'print(1); raise SystemExit(3)'", "exited with 3"),
    ],
)
def test_a_rival_that_fails_is_a_network_error(command: str, says: str) -> None:
    with pytest.raises(NetworkError, match=says):
        trio.run(partial(run_rival, Rival(name="bad", command=command), peers=2, numel=10))


def test_the_yardstick_runs_and_tells_its_time() -> None:
    seconds = trio.run(partial(run_rival, gloo(2), peers=2, numel=20_000))
    assert 0 < seconds < 5


# --- rows ---


def sample(system: str, peers: int, repetition: int, median_s: float, whole_s: float | None = None) -> Sample:
    return Sample(system=system, peers=peers, repetition=repetition, median_s=median_s, whole_s=whole_s)


SAMPLES = (
    *(sample("gloo", 4, r, s) for r, s in enumerate((0.1, 0.2, 0.1))),
    *(sample("fp32", 4, r, s, 1.5 * s) for r, s in enumerate((0.3, 0.4, 0.18))),
    *(sample("int8", 4, r, 0.1, 0.2) for r in range(3)),
    sample("gloo", 2, 0, 0.1),
    sample("fp32", 2, 0, 0.15, 0.2),
    *(sample("hivemind", 4, r, s) for r, s in enumerate((3.0, 2.8))),
    sample("other", 4, 0, 0.9),
)
DETAIL = Allreduce(
    peers=4, numel=NUMEL, codec="fp32", median_s=0.3, times_s=(0.3,), decode_s=0.0, round_s=0.5,
    rounds_s=(0.5,), beyond_reduce_s=0.2, breakdown={"reduce_s": 0.3, "apply_s": 0.2}, wire_bytes_per_peer=150_000_000,
    peak_extra_bytes=80 * MIB, peak_growth_bytes=175 * MIB, max_abs_error=3e-8, identical=True, exact=True,
    encrypted=True, fault=FaultResult(kind="none"),
)  # fmt: skip
FAULTS = (
    FaultResult(kind="sigkill", delay_s=0.4, delays_s=(0.3, 0.4, 2.5)),
    FaultResult(kind="sigstop", delay_s=7.0, delays_s=(7.0,)),
)
LANE = LaneSpeed(
    encrypted=(1700.0, 1500.0, 1600.0), shared=(1800.0, 1900.0, 1500.0), plaintext=(2000.0, 2000.0, 2000.0)
)


def rows() -> dict[str, Row]:
    found = rows_of(SAMPLES, (DETAIL,), FAULTS, LANE, ["hivemind", "other"])
    return {row.name: row for row in found}


def median(name: str) -> float:
    measured = next(row for key, row in rows().items() if key.startswith(name)).measured
    assert measured is not None
    return measured.median


def test_rows_are_ratios_within_a_repetition() -> None:
    assert median("fp32, 4 peers, beside gloo") == pytest.approx(2.0)  # of 3, 2 and 1.8, not 0.3 over 0.1
    assert median("fp32, 2 peers") == pytest.approx(1.5)
    assert median("int8, 4 peers") == pytest.approx(1.0)
    assert median("the round beyond") == pytest.approx(0.5)
    assert median("one encrypted lane beside") == pytest.approx(0.9)
    assert median("one encrypted lane, sockets") == pytest.approx(0.8)
    assert median("hivemind") == pytest.approx((10 + 7) / 2)
    assert median("SIGKILL") == pytest.approx(0.4)
    assert median("peak memory") == pytest.approx(80)
    spread = rows()["fp32, 4 peers, beside gloo"].measured
    assert spread is not None
    assert (spread.least, spread.most) == (pytest.approx(1.8), pytest.approx(3.0))


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    found = rows_of((), (), (), None, ())
    assert [(row.measured, row.met) for row in found] == [(None, None)] * 10


# --- the command ---


def test_compare_shows_misses_as_misses_and_fails_for_a_wrong_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fake(wanted: Compare, tell: object) -> Comparison:
        assert (wanted.peers, wanted.repeat, [r.name for r in wanted.rivals]) == ((4,), 2, ["hivemind"])
        return Comparison(
            machine=this_machine(), repeat=2, peers=(4,), numel=NUMEL, iters=5, fault_iters=3,
            rivals={"hivemind": "", "other": ""}, samples=SAMPLES, details=(DETAIL,), faults=FAULTS, lane=LANE,
            rows=tuple(rows().values()), ok=False, notes=("WRONG VALUES: fp32",),
        )  # fmt: skip

    monkeypatch.setattr("shoal.lab.bench.compare.compare", fake)
    wanted = Compare(peers=Numbers((4,)), repeat=2, rival=["hivemind=h"])
    with pytest.raises(typer.Exit) as ended:
        CASE(wanted, LongCaseOptions(as_json=True, log_level="error"))
    assert ended.value.exit_code == 1
    assert json.loads(capsys.readouterr().out)["peers"] == [4]
    with pytest.raises(typer.Exit):
        CASE(wanted, LongCaseOptions(log_level="error"))
    shown = capsys.readouterr().out
    verdicts = {line.split(" | ")[0].strip("| "): line.split(" | ")[-1].strip("| ") for line in shown.splitlines()}
    assert verdicts["fp32, 4 peers, beside gloo"] == "met"
    assert verdicts["int8, 4 peers, beside gloo in fp32"] == "met, and the aim"
    assert verdicts["SIGSTOP of one of 4 in mid-reduce: added delay"] == "**missed**"
    assert verdicts["other, fp32, 4 peers, beside ours"] == "–"
    assert "WRONG VALUES: fp32" in shown


@pytest.mark.parametrize("wrong", [["--peers", "two"], ["--peers", ""], ["--peers", "1,4"], ["--repeat", "0"]])
def test_compare_refuses_what_it_cannot_do(wrong: list[str]) -> None:
    assert execute(["bench", "compare", *wrong]) == 2
