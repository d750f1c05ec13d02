"""Lines about peers that come and go, for the terminal of a running node: each thing once, and of many alike a few.

A kill shows as a link that is lost, as silence and as a death, and a stop of two seconds as silence and a return. One
line says it: what a peer is to the reader (absent, here, silent), and which change makes it what, is a table.
"""

from __future__ import annotations

from typing import Final, Literal

from shoal.node.happenings import DEPARTED, words_of
from shoal.node.outcome import PeerChanged

ALIKE_LIMIT: Final = 6
ALIKE_S: Final = 1.0
"""Of more than so many lines of one kind within that time, the others are counted, as on the node's page."""
PEER_LIMIT: Final = 4096

Seen = Literal["unknown", "here", "silent", "gone"]

_CHANGES: Final[dict[tuple[Seen, str], tuple[Seen, str]]] = {
    ("unknown", "linked"): ("here", "{} is here"),
    ("gone", "linked"): ("here", words_of("revived", "{}")),
    ("gone", "revived"): ("here", words_of("revived", "{}")),
    ("silent", "revived"): ("here", words_of("revived", "{}")),
    ("here", "suspected"): ("silent", words_of("suspected", "{}")),
    **{
        (seen, kind): ("gone", words_of(DEPARTED if kind == "left" else kind, "{}"))
        for seen in ("here", "silent")
        for kind in ("died", "left", "revoked")
    },
}
"""Phase and words, by the phase before and the event; a pair that is not here says nothing."""


class PeerLines:
    """Says what became of peers. Times are in seconds, of one clock."""

    def __init__(self) -> None:
        self._seen: dict[str, Seen] = {}
        self._alike: dict[str, tuple[float, int]] = {}
        """Of each kind of line, since when there were how many within `ALIKE_S`."""

    def take(self, event: PeerChanged, now: float) -> list[str]:
        """The lines that this change makes; peers by their PeerId."""
        change = _CHANGES.get((self._seen.get(event.peer, "unknown"), event.kind))
        lines = self.late(now)
        if change is None:
            return lines
        seen, said = change
        self._seen.pop(event.peer, None)
        if len(self._seen) >= PEER_LIMIT:
            del self._seen[next(iter(self._seen))]
        self._seen[event.peer] = seen
        began, alike = self._alike.get(said, (now, 0))
        self._alike[said] = began, alike + 1
        return [*lines, said.format(event.peer)] if alike < ALIKE_LIMIT else lines

    def late(self, now: float) -> list[str]:
        """The lines that stand for the peers that were counted, once their time is over."""
        over = [(said, alike) for said, (began, alike) in self._alike.items() if now - began >= ALIKE_S]
        for said, _ in over:
            del self._alike[said]
        return [f"{alike - ALIKE_LIMIT:,} more: {said.format('each')}" for said, alike in over if alike > ALIKE_LIMIT]
