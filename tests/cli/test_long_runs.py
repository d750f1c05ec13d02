"""Commands that run swarms for long: where they put what they leave, what they print, and how they end."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import typer

from shoal.cli.long_runs import PROBLEMS_SHOWN, LongRunOptions, run_and_report, run_folder, tell
from shoal.cli.render import ShowNow


def end(options: LongRunOptions, *, good: bool) -> int:
    """The exit code with which a run that finds `good` ends; what it is given goes into its report."""

    def run(out: Path, _: ShowNow) -> dict[str, str]:
        return {"out": str(out)}

    with pytest.raises(typer.Exit) as ended:
        run_and_report(
            options,
            "chaos",
            run,
            to_json=json.dumps,
            summary=lambda report, out: ["all of it:", f"{report['out']} is {out}"],
            ok=lambda _: good,
        )
    return ended.value.exit_code


@pytest.mark.parametrize("good", [True, False])
def test_a_run_prints_its_report_as_asked_and_its_exit_code_says_whether_it_is_good(
    good: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end(LongRunOptions(out=tmp_path), good=good) == (0 if good else 1)
    assert capsys.readouterr().out == f"all of it:\n{tmp_path} is {tmp_path}\n"
    assert end(LongRunOptions(out=tmp_path, as_json=True), good=good) == (0 if good else 1)
    assert json.loads(capsys.readouterr().out) == {"out": str(tmp_path)}


def test_a_run_without_a_folder_gets_one_of_its_own() -> None:
    assert re.fullmatch(r"runs/chaos-\d{8}-\d{6}", str(run_folder(None, "chaos")))
    assert run_folder(Path("mine"), "chaos") == Path("mine")


def test_what_is_over_is_told_in_a_line_and_each_of_its_first_problems_in_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="shoal.progress"):
        tell("scenario 3: exact", failed=False)
        tell("scenario 4: FAILED", failed=True, problems=[f"wrong\n{number}" for number in range(PROBLEMS_SHOWN + 1)])
    assert [record.levelno for record in caplog.records] == [logging.INFO] + [logging.ERROR] * (1 + PROBLEMS_SHOWN)
    assert caplog.messages[:2] == ["scenario 3: exact", "scenario 4: FAILED"]
    assert not any("\n" in message for message in caplog.messages)
