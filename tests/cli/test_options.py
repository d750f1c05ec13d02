"""Options as the command line has them, and their environment variables."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from shoal.cli.commands import app_of
from shoal.cli.main import PANELS_COLUMNS, execute
from shoal.cli.options import help_of, no_markup
from shoal.protocol.identity import Identity


def test_every_option_has_its_environment_variable() -> None:
    commands = typer.main.get_command(app_of()).commands  # type: ignore[attr-defined]
    seen = set()
    for command in commands.values():
        for parameter in command.params:
            if parameter.param_type_name == "option":
                name = next(name for name in parameter.opts if name.startswith("--"))
                assert parameter.envvar == "SHOAL_" + name[2:].replace("-", "_").upper()
                seen.add(parameter.envvar)
    assert {"SHOAL_DATA_DIR", "SHOAL_MAX_UPLOAD", "SHOAL_MDNS", "SHOAL_JSON", "SHOAL_NODES"} <= seen


def test_environment_variable_stands_for_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_DATA_DIR", str(tmp_path / "here"))
    assert execute(["id"]) == 0
    assert capsys.readouterr().out.strip() == Identity.load(tmp_path / "here" / "node.key").peer_id


def test_all_commands_share_one_default_data_dir() -> None:
    commands = typer.main.get_command(app_of()).commands  # type: ignore[attr-defined]
    defaults = {p.default for command in commands.values() for p in command.params if p.name == "data_dir"}
    assert len(defaults) == 1


def _commands() -> list[tuple[str, Any]]:
    """Every command with its name, those of groups included."""
    root = typer.main.get_command(app_of())
    found: list[tuple[str, Any]] = []
    waiting = [(f"shoal {name}", command) for name, command in root.commands.items()]  # type: ignore[attr-defined]
    while waiting:
        name, command = waiting.pop()
        found.append((name, command))
        waiting += [(f"{name} {inner}", of) for inner, of in getattr(command, "commands", {}).items()]
    return found


def test_every_command_and_option_says_what_it_is_for() -> None:
    assert len(_commands()) > 30
    for name, command in _commands():
        first, _, _ = (command.help or "").partition("\n\n")
        assert len(first.split()) >= 4, name
        assert first.endswith("."), name
        for parameter in command.params:
            if not getattr(parameter, "hidden", False):
                assert len((parameter.help or "").split()) >= 2, (name, parameter.name)


def test_help_shows_commands_and_options_in_panels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(PANELS_COLUMNS))
    assert execute(["--help"]) == 0
    shown = capsys.readouterr().out
    for panel in ("A swarm", "A node", "Deciding together", "Checking and taking away", "Trying and measuring"):
        assert panel in shown
    assert execute(["run", "-h"]) == 0
    shown = capsys.readouterr().out
    for panel in ("Network", "Training", "Watching", "Sharing rollouts", "Checkpoints"):
        assert f"─ {panel}" in shown


def test_brackets_in_help_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    def execute_it(options: object) -> None:
        """Needs shoal[hf] and
        more.

        A second
        paragraph.
        """

    assert help_of(execute_it) == "Needs shoal\\[hf] and more.\n\nA second paragraph."
    assert no_markup(no_markup("a [b]")) == "a \\[b]"


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["--version"]) == 0
    assert re.fullmatch(r"shoal \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_shell_completion_knows_the_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_SHOAL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "shoal st")
    monkeypatch.setenv("COMP_CWORD", "1")
    with pytest.raises(SystemExit):
        execute([])
    assert capsys.readouterr().out.split() == ["status"]
