"""`shoal bench crowd`: what is refused, what its numbers come to, and a small crowd of real daemons."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from shoal.lab.bench.crowd import at_share, heard_by_all, links_over_time, pulled_share
from shoal.lab.bench.crowd_node import Note, Notes, read_notes
from shoal.node.reporting.events import Linked, Lost


def test_a_group_counts_by_who_heard_it_within_a_minute_of_its_making() -> None:
    notes = [
        [Note(at=9, made="early"), Note(at=10, made="a"), Note(at=71, made="late")],
        [Note(at=20, made="b"), Note(at=12, heard="a")],
        [Note(at=71, heard="a"), Note(at=80, heard="b")],
    ]
    found = heard_by_all(notes, 10, 70)
    # a: heard after 2 s and, too late, after 61; b: by one of two, after 60.
    assert (found.groups, found.heard, found.least_heard, found.delays_s) == (2, 0.5, 0.5, (2, 60, 61))
    nothing = heard_by_all([[], []], 10, 70)
    assert (nothing.groups, nothing.heard, nothing.least_heard) == (0, 0.0, 0.0)


def test_pulls_are_those_of_the_time() -> None:
    notes = [[Note(at=5, wanted=2, got=0), Note(at=11, wanted=2, got=1)], [Note(at=12, wanted=2, got=2)]]
    assert pulled_share(notes, 10, 20) == 0.75


def test_links_are_counted_as_they_come_and_go() -> None:
    changes = [Linked(peer="a"), Linked(peer="b"), Lost(peer="a"), Linked(peer="b"), Lost(peer="c")]
    assert links_over_time(changes) == (1, 2)


def test_share_of_ordered_numbers() -> None:
    assert at_share([float(n) for n in range(1, 101)], 0.5) == 51
    assert at_share([float(n) for n in range(1, 101)], 0.99) == 100
    assert at_share([], 0.5) == float("inf")


def test_notes_are_read_as_they_were_written_without_the_last_that_is_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    assert read_notes(path) == []
    with closing(Notes(path)) as notes:
        notes.write(made="aa")
        notes.write(wanted=2, got=1)
    with path.open("ab") as file:
        file.write(b'{"at":1')
    assert [(note.made, note.wanted, note.got) for note in read_notes(path)] == [("aa", 0, 0), ("", 2, 1)]
