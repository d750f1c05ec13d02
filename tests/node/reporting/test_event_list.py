"""Events and their fields are those of the list: nothing goes unseen."""

from __future__ import annotations

from tests.node.reporting.event_list import LIST, collect


def test_events_and_their_fields_are_those_of_the_list() -> None:
    listed, found = LIST.read_text(encoding="utf-8").splitlines(), collect()
    assert [line for line in listed if line not in found] == [], "others read this"
    assert found == listed, "what is new is added by python -m tests.node.reporting.event_list"
    assert len(found) > 100
