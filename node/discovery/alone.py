"""A line for the user of a node that is linked with nobody: whom it looks for, what it tried, and what helps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shoal.protocol.identity import PeerId

NAMED_LIMIT = 2
"""Peers, and addresses with what came of them, that are named one by one; of more the number is told."""
REASON_LIMIT_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A search for somebody that has found nobody yet.

    wanted: founders, members, and whom the user named. tried: by address that user or manifest name, why it led to
    nobody. in_book: peers of the address book. locally, publicly: whether the local network is searched, and the places
    where strangers meet.
    """

    seconds: float
    wanted: Collection[PeerId]
    tried: Mapping[str, str]
    in_book: int
    locally: bool
    publicly: bool

    @property
    def line(self) -> str:
        """One line for the user."""
        who = some(sorted(self.wanted))
        searched = [place for place, is_searched in self._places if is_searched]
        where = f" and {' and '.join(searched)} are searched" if len(searched) > 1 else ""
        where = where or (f" and {searched[0]} is searched" if searched else "")
        return (
            f"linked with nobody for {self.seconds:.0f} s; looked for: {who}. {self._tried}{where}. Start one of them, "
            "or see that its port is open (`shoal doctor` there), or give this node the address of one that runs, "
            "with --join or a fresh `shoal link`"
        )

    @property
    def _places(self) -> tuple[tuple[str, bool], ...]:
        return ("the local network", self.locally), ("the public meeting points", self.publicly)

    @property
    def _tried(self) -> str:
        if not self.tried:
            named = "No address is given"
        else:
            named = some([_clipped(why) for why in self.tried.values()])
            named = f"Tried: {named}"
        count = self.in_book
        book = f"; of the {count} in the address book none answers" if count > 1 else "; the one known before does not answer"
        return named + (book if count else "")


def some(names: Collection[str]) -> str:
    """The first names, and how many more there are."""
    shown, more = list(names)[:NAMED_LIMIT], len(names) - NAMED_LIMIT
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _clipped(reason: str) -> str:
    return reason if len(reason) <= REASON_LIMIT_CHARS else reason[: REASON_LIMIT_CHARS - 1] + "…"
