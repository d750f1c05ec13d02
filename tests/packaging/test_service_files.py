"""The unit and the container file in the documents: understood by what reads them, and true to the command line."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from shoal.cli.commands import app

PAGE = (Path(__file__).parents[2] / "docs" / "public-swarm.md").read_text(encoding="utf-8")
INSTRUCTIONS = {"FROM", "RUN", "COPY", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT"}


def block(language: str) -> str:
    """The one block of that language on the page, continued lines joined."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(found).replace("\\\n", " ")


def run_options() -> set[str]:
    command = get_command(app).get_command(None, "run")  # type: ignore[attr-defined]
    return {name for parameter in command.params for name in parameter.opts}


def options_in(words: list[str]) -> set[str]:
    return {word for word in words if word.startswith("--")}


def entry_point() -> list[str]:
    (line,) = (one for one in block("dockerfile").splitlines() if one.startswith("ENTRYPOINT "))
    words: list[str] = json.loads(line.removeprefix("ENTRYPOINT "))
    return words


def test_unit_and_container_start_a_node_with_options_that_there_are() -> None:
    (start,) = (one for one in block("ini").splitlines() if one.startswith("ExecStart="))
    for words in (shlex.split(start.removeprefix("ExecStart=")), entry_point()):
        assert [Path(words[0]).name, words[1]] == ["shoal", "run"]
        assert options_in(words)
        assert options_in(words) <= run_options()


def test_unit_is_understood_by_systemd(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "shoal.service"
    here = block("ini").replace("/opt/shoal/.venv/bin/shoal", sys.executable).replace("User=shoal", "User=root")
    unit.write_text(here)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_container_file_has_instructions_only_and_its_data_where_it_says() -> None:
    lines = [line for line in block("dockerfile").splitlines() if line]
    assert {line.split()[0] for line in lines} <= INSTRUCTIONS
    assert lines[0].startswith("FROM python:3.11")
    assert "VOLUME /swarm" in lines
    assert all(word.startswith("/swarm/") for word in entry_point() if word.startswith("/swarm"))
    assert "STOPSIGNAL SIGINT" in lines
