"""One proof of each thing: which quorum a certificate or a view was entered by makes no difference to what follows.

So whoever compares states replaces every proof that holds by the first one that was met of the same thing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shoal.protocol.durable import DurableRecord
from shoal.protocol.messages import Evict, Message, Moves, Plan, Prepared, PreparedValue, Propose, Value, ViewChange
from shoal.protocol.view_change import are_sound, compelled, is_prepared
from shoal.protocol.voting import CONTRIBUTORS, Voting


class Proofs:
    """The proofs met in rounds after `previous`."""

    def __init__(self, previous: Value, voting: Voting = CONTRIBUTORS) -> None:
        self._previous = previous
        self._voting = voting
        self._certificates: dict[tuple[int, bytes], Prepared] = {}
        self._moves: dict[tuple[int, tuple[int, bytes] | None], Moves] = {}

    def message(self, message: Message) -> Message:
        """`message` with the first proofs that were met of what it shows; who moved tells nothing of its finals."""
        if isinstance(message, Propose):
            return msgspec.structs.replace(message, **self._of(message.view, message.value, message))
        if isinstance(message, ViewChange):
            one = message.prepared
            same = None if one is None else PreparedValue(one.value, self._certificate(one.value, one.prepared))
            return msgspec.structs.replace(message, report=None, prepared=same)
        if isinstance(message, Plan | Evict) and isinstance(message.moves, Moves):
            return msgspec.structs.replace(message, moves=self._moved(message.view, message.moves))
        return message

    def record(self, record: DurableRecord) -> DurableRecord:
        """The same for what is on disk."""
        if record.value is None:
            return record
        return msgspec.structs.replace(record, **self._of(record.view, record.value, record))

    def _of(self, view: int, value: Value, shown: Propose | DurableRecord) -> dict[str, Any]:
        moves, prepared = shown.moves, shown.prepared
        return {
            "moves": self._moved(view, moves) if isinstance(moves, Moves) else moves,
            "prepared": self._certificate(value, prepared) if isinstance(prepared, Prepared) else prepared,
        }

    def _certificate(self, value: Value, prepared: Prepared) -> Prepared:
        if not is_prepared(prepared, value, self._previous, voting=self._voting):
            return prepared
        return self._certificates.setdefault((prepared.view, value.hash), prepared)

    def _moved(self, view: int, moves: Moves) -> Moves:
        if not are_sound(moves, view, self._previous, voting=self._voting):
            return moves
        return self._moves.setdefault((view, compelled(moves)), moves)
