"""One honest voter of the model: what it remembers, has on disk and has said, and what follows from a signature.

A `Voter` is a tuple of small integers and never changes. What it says is held against what it said before, in this
life or an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from shoal.lab.explore.rules_bugs import Bug

RowT = TypeVar("RowT")

NONE = -1
"""No value; of a ViewChange, no prepare certificate."""


class Memory(NamedTuple):
    """Memory of a voter: its view, whether it left, and for each view the value that it prepared and voted for."""

    view: int
    left: bool
    prepared: tuple[int, ...]
    voted: tuple[int, ...]

    @property
    def signed(self) -> bool:
        """True if it signed anything in this round."""
        return self.view > 0 or any(value != NONE for value in self.prepared)


class Voter(NamedTuple):
    """One state of an honest voter.

    memory, disk: what it goes by, and will after a restart. left: whether it said so. prepares, votes: for each view
    the values that it signed one for, as a bit mask. moves: for each view the certificates with which it moved there,
    each view · (number of values) + value, or NONE.
    """

    memory: Memory
    disk: Memory
    left: bool
    prepares: tuple[int, ...]
    votes: tuple[int, ...]
    moves: tuple[tuple[int, ...], ...]

    @property
    def moved(self) -> int:
        """The highest view that it said it moved to."""
        return max((view for view, codes in enumerate(self.moves) if codes), default=0)

    @property
    def signed(self) -> bool:
        """True if it ever signed anything but that it left."""
        return self.moved > 0 or any(self.prepares) or any(self.votes)


def new_voter(views: int) -> Voter:
    """A voter at the start of the round."""
    memory = Memory(0, False, (NONE,) * views, (NONE,) * views)
    return Voter(memory, memory, False, (0,) * views, (0,) * views, ((),) * views)


class Signing(NamedTuple):
    """A voter after a signature, what is wrong with it if anything is, and how often the voter was killed in it."""

    voter: Voter
    wrong: str | None
    killed: int = 0


class Signatures:
    """Consequences of a voter's signatures, with a bug or none, for `values` values."""

    def __init__(self, values: int, bug: Bug | None) -> None:
        self._values = values
        self._bug = bug

    def prepare(self, voter: Voter, view: int, value: int) -> Iterator[Signing]:
        """Prepare a value; further Signings are those in which it is killed."""
        memory = voter.memory
        wrong = "two Prepares in one view" if voter.prepares[view] & ~(1 << value) else _misplaced(voter, view)
        remembered = memory._replace(view=max(memory.view, view), prepared=_with(memory.prepared, view, value))
        said = voter._replace(prepares=_with(voter.prepares, view, voter.prepares[view] | 1 << value))
        yield from self._written(said, remembered, wrong)

    def vote(self, voter: Voter, view: int, value: int) -> Iterator[Signing]:
        """Vote for a value."""
        memory = voter.memory
        wrong = "two votes in one view" if voter.votes[view] & ~(1 << value) else _misplaced(voter, view)
        remembered = memory._replace(voted=_with(memory.voted, view, value))
        said = voter._replace(votes=_with(voter.votes, view, voter.votes[view] | 1 << value))
        yield from self._written(said, remembered, wrong)

    def move(self, voter: Voter, view: int) -> Iterator[Signing]:
        """Move to a view."""
        memory = voter.memory
        code = self.shown(memory, view)
        wrong = "signed after leaving" if voter.left else None
        if voter.moved > view:
            wrong = "a view went back"
        cast = max((v for v, votes in enumerate(voter.votes[:view]) if votes), default=NONE)
        if cast > code // self._values:
            wrong = "a ViewChange below its own vote"
        remembered = memory._replace(view=view)
        said = voter._replace(moves=_with(voter.moves, view, tuple(sorted({*voter.moves[view], code}))))
        yield from self._written(said, remembered, wrong)

    def leave(self, voter: Voter) -> Iterator[Signing]:
        """Leave."""
        wrong = "a leave after signing" if voter.signed else None
        yield from self._written(voter._replace(left=True), voter.memory._replace(left=True), wrong)

    def shown(self, memory: Memory, view: int) -> int:
        """The prepare certificate with which a voter moves to a view: that of its highest vote below it."""
        held = [v for v, value in enumerate(memory.voted[:view]) if value != NONE]
        if not held or self._bug is Bug.HIDES_CERTIFICATE:
            return NONE
        highest = min(held) if self._bug is Bug.SHOWS_LOWEST else max(held)
        return highest * self._values + memory.voted[highest]

    def _written(self, said: Voter, remembered: Memory, wrong: str | None) -> Iterator[Signing]:
        """A restart before the writing is no step, and one after it brings the signature back, so neither is told."""
        yield Signing(said._replace(memory=remembered, disk=self._disk(remembered)), wrong)
        if self._bug is Bug.SENDS_FIRST:
            yield Signing(said._replace(memory=said.disk), wrong, killed=1)

    def _disk(self, memory: Memory) -> Memory:
        nothing = (NONE,) * len(memory.prepared)
        if self._bug is Bug.FORGETS_PREPARE:
            return memory._replace(prepared=memory.voted)
        if self._bug is Bug.FORGETS_VOTE:
            return memory._replace(voted=nothing)
        if self._bug is Bug.FORGETS_PROMISE:
            return memory._replace(view=max((v for v, value in enumerate(memory.prepared) if value != NONE), default=0))
        if self._bug is Bug.FORGETS_LEAVE:
            return memory._replace(left=False)
        return memory


def _misplaced(voter: Voter, view: int) -> str | None:
    if voter.left:
        return "signed after leaving"
    return "a signature below a promise" if voter.moved > view else None


def _with(row: tuple[RowT, ...], at: int, entry: RowT) -> tuple[RowT, ...]:
    return (*row[:at], entry, *row[at + 1 :])
