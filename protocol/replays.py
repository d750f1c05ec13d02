"""Replays: which numbers of one origin came already, and which origin to forget where there is no room.

Source: RFC 4303, section 3.4.3, the window against replays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shoal.protocol.identity import PeerId


class Window:
    """Numbers that come in about rising order: each is new once, and none is `size` or more before the highest."""

    __slots__ = ("_came", "_size", "highest")

    def __init__(self, size: int, highest: int = 0) -> None:
        self._size = size
        self.highest = highest
        self._came = 0  # bit i: the number `highest` - i

    def came(self, number: int) -> bool:
        """True if this number came, of those that are kept."""
        return bool(self._came >> self.highest - number & 1)

    def is_new(self, number: int) -> bool:
        """True if this number may still come."""
        age = self.highest - number
        return age < 0 or (age < self._size and not self.came(number))

    def note(self, number: int) -> None:
        """Note that this number, which is new, came."""
        ahead = max(number - self.highest, 0)
        self._came = 0 if ahead >= self._size else self._came << ahead & (1 << self._size) - 1
        self.highest += ahead
        self._came |= 1 << self.highest - number


def longest_silent(origins: Iterable[PeerId], kept: Callable[[PeerId], bool]) -> PeerId | None:
    """The first of `origins` that may be forgotten; none where all are `kept`.

    Whoever puts who said something last at the end forgets who is silent for longest. But nobody pushes out a member or
    a neighbour with keys that it makes up.
    """
    return next((origin for origin in origins if not kept(origin)), None)
