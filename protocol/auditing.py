"""Lottery of the chunks that a node recomputes in a round: no owner can win it by choosing what it signs.

    beacon = H("audit-beacon", hash of the certified value, root over (result, bitmap) of every chunk)
    ticket = the auditor's signature of the beacon
    count  = ⌊wanted⌋, and one more if a number of 8 bytes from BLAKE3(ticket ‖ "count") ÷ 2^64 is below the rest
    chunks = distinct numbers from BLAKE3(ticket), extended output, 8 bytes each modulo the number of chunks
    work   = two numbers of 8 bytes from BLAKE3(ticket ‖ "work"): weighed if the first ÷ 2^64 is below the share, the
             contribution in plan order whose number is the second modulo how many there are

The beacon depends on every owner's signed results, so nothing is drawn before all are signed. Who signs last could try
many results and keep one whose beacon suits it; but what follows from a beacon it cannot know, for it cannot sign for
another. An Ed25519 signature is the same every time, so an auditor does not choose either, and can show its ticket.
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from shoal.protocol.identity import Identity
from shoal.protocol.messages import domain_hash

TICKET_DOMAIN = b"shoal/audit-ticket"
_NUMBER_BYTES = 8


def beacon(value_hash: bytes, stated: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the hash that all auditors of a round sign; stated: per chunk what its owner signed, (result, bitmap)."""
    results = domain_hash("audit-results", *(part for pair in stated for part in pair))
    return domain_hash("audit-beacon", value_hash, results)


def ticket(auditor: Identity, beacon: bytes) -> bytes:
    """The auditor's signature of a beacon."""
    return auditor.sign(TICKET_DOMAIN, beacon)


def affordable(chunks: int, contributors: int, *, limit: int, share: float) -> float:
    """Number of a round's chunks that a node audits on average: at most `limit`, and `share` of the round's bytes.

    To audit a chunk is to fetch what all others of n contributors made of it, n - 1 payloads. For a round of c chunks a
    node sends, and gets, 2 · c · (n - 1) / n. So 2 · share · c / n chunks take `share` of that, of whatever n and c.
    """
    return min(float(limit), 2 * share * chunks / max(1, contributors))


def drawn(ticket: bytes, chunks: int, wanted: float) -> list[int]:
    """The chunks that a ticket draws of `chunks`, `wanted` on average, in the order in which it does; or all."""
    whole = int(wanted)
    more = int.from_bytes(blake3(ticket + b"count").digest(length=_NUMBER_BYTES), "little")
    count = min(chunks, whole + (more < (wanted - whole) * 2 ** (8 * _NUMBER_BYTES)))
    found, at = dict[int, None](), 0
    stream = blake3(ticket)
    while len(found) < count:
        found[int.from_bytes(stream.digest(length=_NUMBER_BYTES, seek=at), "little") % chunks] = None
        at += _NUMBER_BYTES
    return list(found)


def drawn_work(ticket: bytes, contributors: int, share: float) -> int | None:
    """Draw the contributor whose work is weighed in a round; None in a round that weighs nobody's.

    Returns its number, below `contributors`. share: the probability that a round weighs anybody's.
    """
    stream = blake3(ticket + b"work").digest(length=2 * _NUMBER_BYTES)
    chance, whose = (int.from_bytes(part, "little") for part in (stream[:_NUMBER_BYTES], stream[_NUMBER_BYTES:]))
    return whose % contributors if contributors and chance < share * 2 ** (8 * _NUMBER_BYTES) else None
