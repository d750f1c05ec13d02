"""The page of commands tells all that users type, and nothing that is hidden from them."""

from __future__ import annotations

import re

from shoal.lab.commands_page import render
from tests.cli.command_list import LIST

HIDDEN = {"--hold", "--test-mode"}


def test_page_has_every_command_and_each_option_beneath_its_own() -> None:
    sections = dict(re.findall(r"^### (shoal .*?)\n(.*?)(?=^#|\Z)", render(), re.M | re.S))
    listed = [re.split(r" (?=[-<])", line) for line in LIST.read_text(encoding="utf-8").splitlines()]
    paths = {words[0] for words in listed}
    assert len(paths & sections.keys()) == len(sections) > 35
    told = 0
    for words in listed:
        command, names = words[0], {word for word in words if word.startswith("-")}
        if command in sections and not names & HIDDEN:
            told += 1
            assert all(f"`{name}`" in sections[command] or f"`{name} " in sections[command] for name in names), words
    assert told > 250


def test_page_shows_defaults_and_choices_and_no_hidden_option() -> None:
    page = render()
    assert "| `--checkpoint-every ROUNDS` | `10` | Rounds from one checkpoint to the next; 0: none. |" in page
    assert "| `--threads NUMBER` | `0` |" in page
    assert "| `--mdns`, `--no-mdns` | `--mdns` |" in page
    assert "| `--log-format text\\|json` | `text` |" in page
    assert "| `-o FILE`, `--output FILE` | `swarm.toml` |" in page
    assert "| `MANIFEST` | is needed | A manifest, which" in page
    assert not [name for name in HIDDEN if name in page]


def test_every_row_has_as_many_cells_as_its_table() -> None:
    for row in re.findall(r"^\|.*\|$", render(), re.M):
        assert len(re.findall(r"(?<!\\)\|", row)) == 4, row
