"""Records of a member's agreement log: the votes and promises that bind it across restarts."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from shoal.protocol.messages import Moves, Prepared, Term, Value

ABSTAIN, PASSED = "abstain", "passed"
BINDING = frozenset({"propose", "prepare", "vote", ABSTAIN})
"""Kinds of records by which a value may be decided; or it is not known any more whether there was one."""


class DurableRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the agreement log: what this member has bound itself to in a round.

    `kind` is "promise" (nothing below `view`), "propose" (with `value`, and the `moves` and the `prepared` certificate
    that it goes with), "prepare" (with `value`), "vote" (with `value` and its `prepared` certificate), "leave" (the
    round), "ready" (a contribution was announced: after a restart the same one is announced again, or none in this
    round), "abstain" (what was signed up to this round may be lost: nothing is signed in it), or "passed" (all before
    is over).

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
