"""Events and their fields are those of the list: nothing goes unseen, and what is declared is written."""

from __future__ import annotations

import re

from shoal.node.reporting.event_log import line_of
from shoal.node.reporting.events import EVENTS, peer_event
from shoal.node.reporting.round_log import _SIGNED, _Decided
from tests.node.reporting.event_list import LIST, ROOT, collect, written

GIVEN = {"**_decision(value)": set(_Decided.__annotations__)}
GIVEN["**traffic"] = {"lanes_sent", "lanes_received", "control_sent", "control_received"}
"""What is given by name where an event is made."""
ELSEWHERE = {"linked", "lost", "detoured", "suspected", "died", "revived", "revoked"}
"""Made by `peer_event`, of what becomes of peers."""


def test_events_and_their_fields_are_those_of_the_list() -> None:
    listed, found = LIST.read_text(encoding="utf-8").splitlines(), collect()
    assert [line for line in listed if line not in found] == [], "others read this"
    assert found == listed, "what is new is added by python -m tests.node.reporting.event_list"
    assert len(found) > 100


def test_every_event_is_written_somewhere_with_all_its_fields() -> None:
    places = written()
    for name, kind in EVENTS.items():
        if name in ELSEWHERE or kind in _SIGNED.values():
            continue
        assert places[kind.__name__], f"{name} is declared, and nobody writes it"
        for given in places[kind.__name__]:
            fields = set[str]().union(*(GIVEN.get(field, {field}) for field in given))
            assert fields == set(kind.__struct_fields__) - {"at"}, name


def test_every_change_of_a_peer_has_its_event() -> None:
    changes = set(re.findall(r'Change\("(\w+)"', (ROOT / "swarm" / "members.py").read_text(encoding="utf-8")))
    assert changes == ELSEWHERE
    for change in changes:
        assert peer_event(change, "a", left=False) == EVENTS[change](peer="a")  # type: ignore[call-arg]
    assert line_of(peer_event("died", "a", left=False)) == b'{"at":0.0,"event":"died","peer":"a"}\n'
    assert line_of(peer_event("died", "a", left=True)) == b'{"at":0.0,"event":"died","peer":"a","left":true}\n'
    assert line_of(peer_event("lost", "a")) == b'{"at":0.0,"event":"lost","peer":"a"}\n'
    assert line_of(peer_event("lost", "a", why="it is dead of silence")) == (
        b'{"at":0.0,"event":"lost","peer":"a","why":"it is dead of silence"}\n'
    )
