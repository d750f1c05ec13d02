"""The pages that are made when the site is built have all that the source has, with the values that it has."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.lab import bounds_page, messages_page, modules_page
from shoal.lab.source import trees

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _no_trees_afterwards() -> Iterator[None]:
    """They are a million objects, at which every search for garbage would look."""
    yield
    trees.cache_clear()


def test_bounds_have_the_values_of_the_source() -> None:
    bounds = bounds_page.collect()
    assert len(bounds) > 500
    wrong = []
    for bound in bounds:
        if bound.module.startswith(("shoal.protocol.", "shoal.collectives.", "shoal.swarm.")):
            real = getattr(importlib.import_module(bound.module), bound.name)
            if real != pytest.approx(bound.value, rel=1e-12):
                wrong.append((bound, real))
    assert not wrong


@pytest.mark.parametrize(
    ("module", "name", "told"),
    [
        ("protocol.messages", "MEMBER_LIMIT", "64"),
        ("protocol.leading", "RELAY_SETTLE_S", "3 s"),
        ("protocol.accusations", "PLANS_LIMIT", "64"),  # another module's
        ("protocol.wire", "COUNTER_LIMIT", "2^63 − 1"),
        ("protocol.wire", "MESSAGE_LIMIT_BYTES", "1 MiB"),
        ("swarm.limits", "HANDSHAKES_PER_S", "0.3 /s"),  # one of two in a line
    ],
)
def test_bounds_are_told_with_their_units(module: str, name: str, told: str) -> None:
    page = bounds_page.render(bounds_page.collect())
    section = page[page.index(f"## {module}\n") :]
    row = next(line for line in section.splitlines() if line.startswith(f"| `{name}` "))
    assert row.split(" | ")[1] == told


def test_text_beneath_a_bound_is_told_beside_it() -> None:
    (bound,) = (one for one in bounds_page.collect() if one.name == "VIEWS_AHEAD_LIMIT")
    assert bound.text.startswith("Views further ahead than this are ignored")


def test_messages_are_all_those_of_the_wire_with_what_they_are_for() -> None:
    entries = messages_page.entries(ROOT / messages_page.LIST)
    page = messages_page.render(entries)
    for name in entries:
        assert name.removeprefix("one of ").split(" ")[-1] in page
    plan = page[page.index("### Plan\n") : page.index("### Prepare\n")]
    assert "Who takes part with which weight" in plan
    assert "* `participants: [Participant] of 1 to 64`" in plan
    assert "This node's contribution is fixed" in page[page.index("### Ready\n") : page.index("### Rebase\n")]
    assert "| `shoal/vote/2` | `protocol/messages.py` |" in page
    assert "| `/shoal/hello/1` | `swarm/links.py` |" in page


def test_page_of_the_code_names_every_module() -> None:
    page = modules_page.render(modules_page.collect())
    for module in trees():
        folder, _, name = module.removeprefix("shoal.").rpartition(".")
        parts = page.split(f"\n## {folder.replace('.', '/')}\n")
        if folder and not any(other.startswith(f"{module}.") for other in trees()):
            assert f"* `{name}`: " in parts[1].split("\n## ")[0], module
