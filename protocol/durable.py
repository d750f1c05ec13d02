"""What a member binds itself to, as it stands in the agreement log on its disk."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from shoal.protocol.messages import Moves, Prepared, Term, Value


class DurableRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the agreement log: what this member has bound itself to in a round.

    `kind` is "promise" (nothing below `view`), "propose" (with `value`, and the `moves` and the `prepared` certificate
    that it goes with), "prepare" (with `value`), "vote" (with `value` and its `prepared` certificate), "leave" (the
    round), or "ready" (a contribution was announced: after a restart the same one is announced again, or none in this
    round).

    What 0.1.0 wrote as "vote" has no certificate; it was of another wire, and binds to nothing in this one.
    """

    kind: str
    term: Term
    round: int
    view: int = 0
    value: Value | None = None
    moves: Moves | msgspec.UnsetType = msgspec.UNSET
    prepared: Prepared | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class Persist:
    """Write and fsync this before carrying out any later effect."""

    record: DurableRecord
