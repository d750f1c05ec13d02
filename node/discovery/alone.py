"""A line for the user of a node that is linked with nobody: whom it looks for, what it tried, and what helps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shoal.protocol.identity import PeerId

NAMED_LIMIT = 2
"""Peers that are named one by one; of more the number is told."""
REASON_LIMIT_CHARS = 48
"""Of what came of the first address; of more the number is told."""


NO_NETWORK = "this machine has no network; once it has one, this node links again by itself"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A search for somebody that has found nobody yet.

    wanted: founders, members, and whom the user named. tried: by address that user or manifest name, why it led to
    nobody. given: how many such addresses there are; one that worked is in the book since. in_book: peers of the
    address book. locally, publicly: whether the local network is searched, and the places where strangers meet.
    cut_off: whether this machine has no network.
    """

    seconds: float
    wanted: Collection[PeerId]
    tried: Mapping[str, str]
    given: int
    in_book: int
    locally: bool
    publicly: bool
    cut_off: bool

    @property
    def line(self) -> str:
        """One line for the user."""
        if self.cut_off:
            return f"linked with nobody for {self.seconds:.0f} s: {NO_NETWORK}"
        searched = ", ".join(place for place, is_searched in self._places if is_searched)
        where = f"; searched: {searched}" if searched else ""
        return (
            f"linked with nobody for {self.seconds:.0f} s; looked for: {some(sorted(self.wanted), NAMED_LIMIT)}. "
            f"{self._tried}{where}. Start one, open its port (`shoal doctor` tells), or give an address that "
            "works: --join, or a fresh `shoal link`"
        )

    @property
    def _places(self) -> tuple[tuple[str, bool], ...]:
        return ("local network", self.locally), ("public meeting points", self.publicly)

    @property
    def _tried(self) -> str:
        reasons = [_clipped(why) for why in self.tried.values()]
        given = "the address given" if self.given == 1 else f"the {self.given} addresses given"
        named = f"Tried: {some(reasons, 1) if reasons else given}" if reasons or self.given else "No address is given"
        count = self.in_book
        book = f"; none of the {count} known before answers" if count > 1 else "; the one known before does not answer"
        return named + (book if count else "")


def some(names: Collection[str], most: int) -> str:
    """The first names, and how many more there are."""
    shown, more = list(names)[:most], len(names) - most
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _clipped(reason: str) -> str:
    return reason if len(reason) <= REASON_LIMIT_CHARS else reason[: REASON_LIMIT_CHARS - 1] + "…"
