"""NodeRecords: what each node tells the swarm about itself, and the book in which the others keep it.

A record travels sealed (`shoal.protocol.wire.Envelope`, kind "node-record"), is passed on unopened by gossip, and is
therefore believed only for what it is: a statement of its signer about itself. The newest by (boot, seq) counts, so a
replay is worth nothing and clocks do not matter; `now` serves only to let records that nobody renews expire.

Numbers in a record are claims. They help to plan well; no plan is wrong because one of them is a lie.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.protocol.invites import Credential
from shoal.protocol.wire import (
    CounterField,
    Envelope,
    Message,
    PeerIdField,
    Sealer,
    SwarmId,
    canonical,
    decode,
    prove,
    unproven_envelope,
)

NODE_RECORD_KIND = "node-record"

ADDRESS_LIMIT = 16
"""Addresses of one sort in a record."""
ADDRESS_LIMIT_CHARS = 256
SOFTWARE_LIMIT_CHARS = 64
RECORD_LIMIT = 4096
"""Records in a book."""
RECORD_LIMIT_BYTES = 16_384
RECORD_TTL_S = 600.0
"""Time for which a record is kept without a newer one; nodes renew theirs at least every third of it."""
RENEWAL_S = 120.0
"""Between two publications of a record that says nothing new, where there are up to so many as seconds; beyond, so
that gossip passes on no more than one record a second, up to a third of RECORD_TTL_S."""
RATE_LIMIT = 1e15
STEP_TOKENS_LIMIT = 10**12
_STEP_TOKENS = re.compile(r"step\.([1-9][0-9]{0,11})")
"""The capability by which a record says how many tokens a step has."""

Phase = Literal["starting", "joining", "training", "paused", "leaving"]
Address = Annotated[str, Meta(min_length=1, max_length=ADDRESS_LIMIT_CHARS, pattern=r"^[!-~]*\Z")]
Addresses = Annotated[tuple[Address, ...], Meta(max_length=ADDRESS_LIMIT)]
Rate = Annotated[float, Meta(ge=0, le=RATE_LIMIT)]


def renewal_s(records: int) -> float:
    """Seconds until a record that says nothing new is published again, where so many are known."""
    return min(max(RENEWAL_S, records), RECORD_TTL_S / 3)


class NodeRecord(Message, frozen=True, kw_only=True):
    """One node about itself. Rates are measured: tokens/s of its trainer, bytes/s of its links."""

    peer: PeerIdField
    boot: CounterField
    incarnation: CounterField = 0
    control_addresses: Addresses = ()
    lane_addresses: Addresses = ()
    software: Annotated[str, Meta(max_length=SOFTWARE_LIMIT_CHARS, pattern=r"^[ -~]*\Z")] = ""
    capabilities: Annotated[
        tuple[Annotated[str, Meta(max_length=32, pattern=r"^[a-z0-9_.-]+\Z")], ...], Meta(max_length=16)
    ] = ()
    tokens_per_s: Rate = 0.0
    upload_bytes_per_s: Rate = 0.0
    download_bytes_per_s: Rate = 0.0
    phase: Phase = "starting"
    term: tuple[CounterField, CounterField] = (0, 0)
    round: CounterField = 0
    invite: Credential | msgspec.UnsetType = msgspec.UNSET

    @property
    def credential(self) -> Credential | None:
        """Credential that admits it where admission is by invite; else None."""
        return None if self.invite is msgspec.UNSET else self.invite

    @property
    def steps_per_s(self) -> float:
        """Speed of its trainer in steps; 0 where it does not say how many tokens one has."""
        said = next(filter(None, map(_STEP_TOKENS.fullmatch, self.capabilities)), None)
        return 0.0 if said is None else self.tokens_per_s / int(said[1])

    @property
    def certified(self) -> tuple[tuple[int, int], int]:
        """Progress along its chain: (term, round), to be compared as it stands."""
        return (self.term, self.round)

    def says_the_same(self, other: NodeRecord) -> bool:
        """True if `other` differs in nothing but what changes all the time: rates, unless one is none, and progress."""
        if bool(self.tokens_per_s) != bool(other.tokens_per_s):
            return False
        return self == msgspec.structs.replace(
            other,
            tokens_per_s=self.tokens_per_s,
            upload_bytes_per_s=self.upload_bytes_per_s,
            download_bytes_per_s=self.download_bytes_per_s,
            term=self.term,
            round=self.round,
        )


def step_capability(tokens: float) -> tuple[str, ...]:
    """The capability by which a record says how many tokens a step has, on average; none where that is not known."""
    return (f"step.{min(max(round(tokens), 1), STEP_TOKENS_LIMIT - 1)}",) if tokens > 0 else ()


def seal_record(sealer: Sealer, record: NodeRecord) -> bytes:
    """`record`, about the sealer's own node, ready to be gossiped. Raises LocalError if it is out of range."""
    try:
        msgspec.convert(msgspec.to_builtins(record), NodeRecord)
    except msgspec.ValidationError as error:
        raise LocalError(f"our own record is out of range: {error}") from error
    if record.boot != sealer.boot or record.peer != sealer.peer_id:
        raise LocalError("a node seals records about itself and its present life only")
    return sealer.seal(NODE_RECORD_KIND, canonical(record))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A record with its place in its sender's order, when it came, and the envelope to pass on."""

    record: NodeRecord
    boot: int
    seq: int
    expires_at: float
    sealed: bytes


def open_record(data: bytes, swarm_id: SwarmId, now: float, *, peer: PeerId | None = None) -> Entry:
    """The record in `data`, delivered by `peer`, if its signer says it about itself. Raises RemoteError."""
    envelope = _envelope_of(data, swarm_id, peer)
    return _proven(envelope, data, now, peer)


def _envelope_of(data: bytes, swarm_id: SwarmId, peer: PeerId | None) -> Envelope:
    if len(data) > RECORD_LIMIT_BYTES:
        raise RemoteError(f"a record of {len(data)} bytes; the limit is {RECORD_LIMIT_BYTES}", peer=peer)
    return unproven_envelope(data, swarm_id, peer=peer)


def _proven(envelope: Envelope, data: bytes, now: float, peer: PeerId | None) -> Entry:
    prove(envelope, peer=peer)
    if envelope.kind != NODE_RECORD_KIND:
        raise RemoteError(f"a {envelope.kind} where a {NODE_RECORD_KIND} belongs", peer=peer)
    record = decode(envelope.payload, NodeRecord, peer=peer, limit_bytes=RECORD_LIMIT_BYTES)
    if record.peer != envelope.sender or record.boot != envelope.boot:
        raise RemoteError(f"a record about {record.peer} signed by {envelope.sender}", peer=peer)
    return Entry(record=record, boot=envelope.boot, seq=envelope.seq, expires_at=now + RECORD_TTL_S, sealed=data)


class RecordBook:
    """The newest record of each peer. At most `RECORD_LIMIT`; those nearest to expiry make room, but for whom `keep`
    names, who come first.

    What has expired is forgotten, order and all, so an old record that somebody kept can come back then. It says
    what its signer once said, expires again, and yields to the signer's next word; who is alive is for the
    failure detector to say.
    """

    def __init__(self, swarm_id: SwarmId, *, keep: Callable[[], Collection[PeerId]] = tuple) -> None:
        self._swarm_id = swarm_id
        self._keep = keep
        self._entries: dict[PeerId, Entry] = {}

    def receive(self, data: bytes, now: float, *, peer: PeerId | None = None) -> NodeRecord | None:
        """Note the sealed record in `data`; return the record if it is news worth passing on, None if it is old.

        Raises RemoteError, blaming `peer` who delivered it, for what is malformed or forged; what is old all the same,
        as most of what newcomers are told by everybody, is not looked at for that.
        """
        envelope = _envelope_of(data, self._swarm_id, peer)
        known = self._entries.get(envelope.sender)
        if known is not None and (envelope.boot, envelope.seq) <= (known.boot, known.seq):
            return None
        entry = _proven(envelope, data, now, peer)
        if known is None and len(self._entries) >= RECORD_LIMIT:
            self._make_room()
        self._entries[entry.record.peer] = entry
        return entry.record

    def _make_room(self) -> None:
        kept = self._keep()
        oldest = min(self._entries, key=lambda peer: (peer in kept, self._entries[peer].expires_at, peer))
        del self._entries[oldest]

    def expire(self, now: float) -> tuple[PeerId, ...]:
        """Drop the records that nobody renewed; returns the PeerIds that they were of."""
        gone = tuple(sorted(peer for peer, entry in self._entries.items() if now >= entry.expires_at))
        for peer in gone:
            del self._entries[peer]
        return gone

    def get(self, peer: PeerId) -> NodeRecord | None:
        """The newest record of `peer`."""
        entry = self._entries.get(peer)
        return entry.record if entry else None

    def sealed(self, peer: PeerId) -> bytes | None:
        """The envelope of `peer`'s newest record, to be passed on."""
        entry = self._entries.get(peer)
        return entry.sealed if entry else None

    def order(self, peer: PeerId) -> tuple[int, int]:
        """Order of the newest record of `peer`: (boot, number of its envelope), (0, 0) without one."""
        entry = self._entries.get(peer)
        return (entry.boot, entry.seq) if entry else (0, 0)

    def forget(self, peer: PeerId) -> None:
        """Drop the record of a peer that may not be here."""
        self._entries.pop(peer, None)

    def records(self) -> tuple[NodeRecord, ...]:
        """All records, by PeerId."""
        return tuple(self._entries[peer].record for peer in sorted(self._entries))

    def __len__(self) -> int:
        return len(self._entries)
