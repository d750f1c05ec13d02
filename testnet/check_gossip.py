"""The independent check of a testnet of the strategy `gossip`: every step recomputed from the two vectors in it.

In test mode a node keeps, per round, in `rounds/0.0-<round>/`

    vector-…   msgpack {codec, numel, chunk_values, root, chunks}: what it offered; named by the first half of the root
    delta      what its inner steps made of its weights, little-endian float32
    exchange   msgpack {base_round, base, root, partner, partner_round, partner_root}: the state that the step was made
               from, by its round and the hash of its file, and the vectors in it; partner may be nil
    stepped    its weights and its momentum after the step, little-endian float32, the one after the other
    began      the same of the state on which a process began: S(0), a snapshot, or what was on its disk

Of the last two each also lies there by its hash, as `stepped-…` and `began-…`: a node whose folder was put back makes
rounds once more, from other states, and other files of that name take the place of those from which it went on before.

There is no common state, so nothing is compared between nodes. What can be checked is: that the vector taken is the one
that the partner offered; that it was β·Δ + γ·φ, to within the codec; and, to the bit, that the step from the node's
state before to its state after is that of the formula in `shoal.collectives.gossip`, written out again here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from shoal.collectives.codecs import F32, chunk_codec
from shoal.collectives.commitment import chunk_hash
from shoal.collectives.fragments import Fragments
from shoal.collectives.gossip import GossipSettings
from shoal.collectives.grid import Grid
from shoal.collectives.reference import wrong_values
from shoal.protocol.errors import RemoteError
from shoal.protocol.gossip_messages import Offer
from shoal.protocol.planning import split_codec
from shoal.protocol.wire import decode
from shoal.testnet.check import FILE_LIMIT_BYTES, Check, RoundCheck, Witness

CODEC_ERROR = {"fp32": 2.0**-23, "bf16": 2.0**-7}
"""By how much of a value its encoding may differ from it: rounding by chance takes either neighbour."""


class StoredVector(msgspec.Struct, frozen=True, kw_only=True):
    """The file `vector`."""

    codec: str
    numel: int
    chunk_values: int
    root: bytes
    chunks: list[bytes]


class StoredExchange(msgspec.Struct, frozen=True, kw_only=True):
    """The file `exchange`."""

    base_round: int
    base: bytes
    root: bytes
    partner: str | None
    partner_round: int
    partner_root: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """One node's record of one round; all vectors are (numel,) float32, `sent` is decoded.

    buffers_begin: the place of the first buffer, or `numel`.
    """

    buffers_begin: int
    exchange: StoredExchange
    sent: F32
    delta: F32
    anchor: F32
    momentum: F32


def check_gossip(witnesses: Sequence[Witness], rounds: Collection[tuple[str, int]], settings: GossipSettings) -> Check:
    """Recompute these rounds of all nodes from their files. Takes seconds; blocks."""
    return Check(rounds=tuple(_check_round(witnesses, term, number, settings) for term, number in sorted(rounds)))


def _check_round(witnesses: Sequence[Witness], term: str, number: int, settings: GossipSettings) -> RoundCheck:
    errors: list[str] = []
    wrong = compared = numel = steps = paired = 0
    for witness in witnesses:
        where = f"round {number}: node {witness.index}"
        try:
            step = _read(witness.folder, number)
            before = None if step is None else _state_before(witness.folder, step.exchange)
            other = None if step is None else _taken(step.exchange, witnesses)
        except (OSError, ValueError, RemoteError) as error:
            errors.append(f"{where}: {error}")
            continue
        if step is None:
            if (term, number) in witness.settled:
                errors.append(f"{where} made its step but kept nothing of it")
            continue
        steps, paired, numel = steps + 1, paired + (other is not None), step.delta.size
        if before is None or before.size != 2 * step.delta.size:
            errors.append(f"{where} kept nothing of the state before its step")
            continue
        compared += 1
        wrong += _wrong(step, before, other, settings)
    if not steps:
        errors.append(f"round {number}: no node kept its step")
    return RoundCheck(
        term=term,
        round=number,
        numel=numel,
        contributors=steps,
        coverage=paired / steps if steps else 0.0,
        updates_compared=compared,
        wrong_values=wrong,
        errors=tuple(errors),
    )


def _wrong(step: _Step, before: F32, other: F32 | None, settings: GossipSettings) -> int:
    """Count the wrong values of the step, and of the vector that was sent for it."""
    buffers = slice(step.buffers_begin, None)
    alpha, lr, gamma = np.float32(settings.momentum), np.float32(settings.lr), np.float32(settings.gamma)
    phi, momentum = np.split(before, 2)
    momentum = momentum * alpha + step.delta * lr
    if other is not None:
        momentum = momentum + (other - step.sent) * np.float32(0.5)
    anchor, meant = phi + momentum, step.delta * lr + phi * gamma
    tolerance = np.abs(meant) * max(CODEC_ERROR.values()) + np.float32(2.0**-126)
    momentum[buffers] = tolerance[buffers] = 0
    meant[buffers] = step.delta[buffers]
    anchor[buffers] = step.delta[buffers] if other is None else (step.sent + other)[buffers] * np.float32(0.5)
    wrong = wrong_values(step.momentum, momentum) + wrong_values(step.anchor, anchor)
    return wrong + int((np.abs(step.sent - meant) > tolerance).sum())


def _read(folder: Path, number: int) -> _Step | None:
    """Read a node's record of a round; None if it was not in it. Raises OSError, ValueError, RemoteError."""
    place = _place(folder, number)
    if not (place / "stepped").exists():
        return None
    exchange = decode((place / "exchange").read_bytes(), StoredExchange)
    sent, buffers_begin = _vector(place, exchange.root)
    delta, after = (np.frombuffer((place / name).read_bytes(), "<f4") for name in ("delta", "stepped"))
    if delta.size != sent.size or after.size != 2 * sent.size:
        raise ValueError(f"{place} holds vectors of different lengths")
    return _Step(
        buffers_begin=buffers_begin,
        exchange=exchange,
        sent=sent,
        delta=delta,
        anchor=after[: sent.size],
        momentum=after[sent.size :],
    )


def _state_before(folder: Path, exchange: StoredExchange) -> F32 | None:
    """φ and δ, the one after the other, from which a step was made; None if nothing is kept that has its hash."""
    for path in _place(folder, exchange.base_round).glob(f"*-{exchange.base.hex()[:16]}"):
        data = path.read_bytes()
        if chunk_hash(data) == exchange.base:
            return np.frombuffer(data, "<f4")
    return None


def _taken(exchange: StoredExchange, witnesses: Sequence[Witness]) -> F32 | None:
    """The partner's vector, as the partner kept it; None for none. Raises RemoteError if it is not the one taken."""
    if exchange.partner is None:
        return None
    partner = next((witness for witness in witnesses if witness.peer_id == exchange.partner), None)
    if partner is None:
        raise RemoteError(f"its partner {exchange.partner} is unknown")
    values, _ = _vector(_place(partner.folder, exchange.partner_round), exchange.partner_root)
    return values


def _vector(place: Path, root: bytes) -> tuple[F32, int]:
    """A vector that was offered, decoded, and the place of its first buffer."""
    path = place / f"vector-{root.hex()[:16]}"
    stored = decode(path.read_bytes(), StoredVector, limit_bytes=FILE_LIMIT_BYTES)
    grid = Grid(stored.numel, stored.chunk_values)
    offer = Offer(
        round=int(place.name.partition("-")[2]),
        codec=stored.codec,
        numel=stored.numel,
        chunk_values=stored.chunk_values,
        hashes=b"".join(chunk_hash(chunk) for chunk in stored.chunks),
    )
    if offer.root != root:
        raise RemoteError(f"{path} is not the vector that was offered")
    out = np.empty(grid.numel, np.float32)
    for chunk, encoded in enumerate(stored.chunks):
        chunk_codec(stored.codec, grid, chunk).decode_into(encoded, out[slice(*grid.span(chunk))])
    return out, Fragments(grid, buffers=split_codec(stored.codec)[1]).buffers_begin


def _place(folder: Path, number: int) -> Path:
    return folder / "rounds" / f"0.0-{number}"
