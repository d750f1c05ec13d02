"""The page of events has every event with every field, and says of each what it is."""

from __future__ import annotations

import pytest

from shoal.lab.events_page import render
from shoal.node.reporting.events import EVENTS


def test_page_has_every_event_with_its_fields_and_what_it_says() -> None:
    rows = [line.split(" | ") for line in render().splitlines() if line.startswith("| `")]
    assert [row[0].strip("| `") for row in rows] == list(EVENTS)
    for (_, fields, text), kind in zip(rows, EVENTS.values(), strict=True):
        assert [field.split("`")[1] for field in fields.split("<br>")] == [
            field for field in kind.__struct_fields__ if field != "at"
        ]
        assert len(text) > 15
        assert text.startswith(str(kind.__doc__).split(".")[0].split("\n")[0])


@pytest.mark.parametrize(
    ("event", "field"),
    [
        ("started", "`pid`: whole number"),
        ("evaluated", "`loss`: number or null"),
        ("died", "`left`: true or false"),
        ("planned", "`evicted`: list of texts"),
        ("rollouts", "`rejected`: object of whole numbers"),
        ("amended", "`settings`: object"),
    ],
)
def test_field_says_what_stands_in_json(event: str, field: str) -> None:
    row = next(line for line in render().splitlines() if line.startswith(f"| `{event}` "))
    assert field in row.split(" | ")[1].split("<br>")
