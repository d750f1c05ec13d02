"""Messages that one member of a row owes others: sent again until they have arrived, or are of no use any more."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.lab.rows.row_effects import Tell
from shoal.lab.rows.row_messages import FromHead, RowAsk, RowBegin, RowHead, RowHeard, RowLoss, RowPlan, RowReady, What
from shoal.protocol.identity import PeerId

REPEAT_S = 0.5
"""Until something is said again; doubled each time."""
REPEAT_LIMIT_S = 8.0
POST_LIMIT_S = 60.0
"""After so long without an answer it is for the failure detector to judge, and for the other's own deadlines."""

Post = RowBegin | RowPlan | RowLoss | RowHead | RowReady | RowAsk


@dataclass(slots=True)
class _Owed:
    message: Post
    signer: PeerId
    since: float
    wait_s: float
    due_at: float
    tries: int = 1


class Posts:
    """Messages owed, by peer and kind, of which there is one each; the newer takes the place of the older."""

    def __init__(self) -> None:
        self._owed: dict[tuple[PeerId, type], _Owed] = {}
        self.next_at = math.inf
        """Nothing is to be said again before."""

    def __len__(self) -> int:
        return len(self._owed)

    def post(self, peer: PeerId, message: Post, signer: PeerId, now: float) -> Tell:
        """Say it now, and again until it is heard."""
        self._owed[peer, type(message)] = _Owed(message, signer, now, REPEAT_S, now + REPEAT_S)
        self.next_at = min(self.next_at, now + REPEAT_S)
        return Tell(peer, message, signer)

    def owes(self, peer: PeerId, kind: type) -> bool:
        """True if `peer` has not acknowledged such a message yet."""
        return (peer, kind) in self._owed

    def heard(self, peer: PeerId, word: RowHeard) -> None:
        """`peer` has it, if it is this one."""
        kind = _KINDS[word.what]
        owed = self._owed.get((peer, kind))
        if owed is not None and owed.message.stamp == word.stamp and _attempt(owed.message) == word.attempt:
            del self._owed[peer, kind]

    def settle(self, peer: PeerId, kind: type) -> None:
        """`peer` need not be told such a thing any more."""
        self._owed.pop((peer, kind), None)

    def forget(self, peer: PeerId) -> None:
        """Drop all that is owed to a peer."""
        for key in [key for key in self._owed if key[0] == peer]:
            del self._owed[key]

    def clear(self) -> None:
        """Drop all that is owed to anybody."""
        self._owed.clear()
        self.next_at = math.inf

    def due(self, now: float) -> Iterator[tuple[Tell, int]]:
        """Yield the messages to send again, each with the number of repetitions before."""
        for key, one in list(self._owed.items()):
            if now < one.due_at:
                continue
            if now - one.since >= POST_LIMIT_S:
                del self._owed[key]
                continue
            one.wait_s = min(2 * one.wait_s, REPEAT_LIMIT_S)
            one.due_at = now + one.wait_s
            one.tries += 1
            yield Tell(key[0], one.message, one.signer), one.tries - 1
        self.next_at = min((one.due_at for one in self._owed.values()), default=math.inf)


def receipt(peer: PeerId, message: FromHead | RowReady, me: PeerId) -> Tell:
    """Tell `peer`, who delivered it, that it came."""
    term, round, base, turn = message.term, message.round, message.base, message.turn
    what, attempt = _WHAT[type(message)], _attempt(message)
    return Tell(peer, RowHeard(term=term, round=round, base=base, turn=turn, what=what, attempt=attempt), me)


def _attempt(message: Post) -> int:
    return message.attempt if isinstance(message, RowLoss) else 0


_WHAT: dict[type, What] = {
    RowBegin: "rowbegin",
    RowReady: "rowready",
    RowPlan: "rowplan",
    RowLoss: "rowloss",
    RowHead: "rowhead",
}
_KINDS = {what: kind for kind, what in _WHAT.items()}
