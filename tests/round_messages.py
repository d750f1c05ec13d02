"""Messages and values of a round, of which each test says what matters to it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shoal.collectives.grid import Grid
from shoal.collectives.partition import deal
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import NO_HASH, Certificate, Participant, Plan, Ready, Report, Term, Value
from shoal.protocol.planning import CONTRIBUTOR


def plan_with(
    participants: Iterable[Participant], grid: Grid | None = None, *, after: Value | None = None, **given: Any
) -> Plan:
    """A plan of round 1, or of the round after `after`, by its first participant; all own alike. given: what differs.

    grid: one chunk of one value, if left out.
    """
    there, grid = tuple(participants), grid or Grid(1, 1)
    fields: dict[str, Any] = {
        "term": Term() if after is None else after.next_term,
        "round": 1 if after is None else after.next_round,
        "base": NO_HASH if after is None else after.hash,
        "view": 0,
        "attempt": 0,
        "participants": there,
        "codec": "int8",
        "numel": grid.numel,
        "chunk_values": grid.chunk_values,
    }
    if there:
        fields |= {"planner": there[0].peer, "owners": deal([(0, 0)] * len(there), grid.chunks)}
    return Plan(**fields | given)


def ready_with(after: Value, root: bytes, **given: Any) -> Ready:
    """A contribution to the round after `after`, committed to by `root` and not signed. given: what differs."""
    fields: dict[str, Any] = {
        "term": after.next_term,
        "round": after.next_round,
        "base": after.hash,
        "role": CONTRIBUTOR,
        "state": after.digest,
        "root": root,
        "squares": (),
        "tokens": 1,
        "upload": 0,
        "download": 0,
        "reaches": (),
    }
    return Ready(**fields | given)


def value_with(
    previous: Value, report: Report, planner: PeerId, members: Iterable[PeerId] | None = None, **given: Any
) -> Value:
    """The value after `previous` that says what `report` does. members: those of `previous`, if left out."""
    fields: dict[str, Any] = {
        "swarm": previous.swarm,
        "term": previous.next_term,
        "round": previous.next_round,
        "base": previous.hash,
        "plan": report.plan,
        "planner": planner,
        "members": tuple(sorted(previous.members if members is None else members)),
        "bitmaps": report.bitmaps,
        "tokens": report.tokens,
        "digest": report.digest,
    }
    return Value(**fields | given)


def unsigned_certificate(peer: PeerId) -> Certificate:
    """A certificate of a round 1 in which `peer` was alone; it has nobody's signature."""
    hashes = dict.fromkeys(("swarm", "base", "plan", "bitmaps", "digest"), NO_HASH)
    value = Value(term=Term(), round=1, planner=peer, members=(peer,), tokens=1, **hashes)
    return Certificate(value=value, view=0, signers=(peer,), signatures=(bytes(64),))
