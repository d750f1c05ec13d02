"""Commands and options are those of the list: nothing goes or changes unseen."""

from __future__ import annotations

from tests.cli.command_list import LIST, collect


def test_commands_and_options_are_those_of_the_list() -> None:
    listed, found = LIST.read_text(encoding="utf-8").splitlines(), collect()
    assert [line for line in listed if line not in found] == [], "scripts may say this"
    assert found == listed, "what is new is added by python -m tests.cli.command_list"
    assert len(found) > 300
