"""Meeting points: where a member of a swarm can be met, signed by it, as strangers keep and pass them on.

A point is found by the SwarmId alone: it lies under keys that follow from it,

    key(swarm, slot) = "/shoal/" ‖ hex(BLAKE3(swarm ‖ slot))        slot in 0..SLOTS - 1

and each peer has two slots, which follow from its PeerId. So one key pair takes up one place in each of two
slots, whatever it signs, and the points of others stay. Who makes many key pairs can fill slots all the same, but for
the points of those who come first (`shoal.protocol.places`) at nodes that know these: a point is a hint, and whoever is
met proves its PeerId and passes the swarm's admission.

No clock is shared. A point is valid for `valid_s` from when it was first seen here, and the same (peer, sequence)
again does not prolong that; its signer renews it with a greater sequence.

    value = msgpack [point, …]              what lies under a key: at most POINTS_IN_SLOT points
    point = msgpack {said, signature}       said = canonical msgpack of a `MeetingPoint`
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from shoal.protocol.address import parse_any
from shoal.protocol.errors import ConfigError, RemoteError
from shoal.protocol.identity import Identity, MalformedPeerId, PeerId, parse_peer_id, verify
from shoal.protocol.messages import domain_hash
from shoal.protocol.records import Address
from shoal.protocol.wire import (
    CounterField,
    HashField,
    Message,
    PeerIdField,
    SignatureField,
    SwarmId,
    canonical,
    decode,
)

SLOTS = 8
POINTS_IN_SLOT = 8
SLOT_LIMIT = 512
"""Slots of all swarms that one node keeps: with POINT_LIMIT_BYTES at most 8 MiB."""
SEEN_LIMIT = 8192
"""Points whose first sight is remembered."""
ADDRESSES_LIMIT = 4
VALID_LIMIT_S = 7200
POINT_LIMIT_BYTES = 2048
VALUE_LIMIT_BYTES = POINTS_IN_SLOT * (POINT_LIMIT_BYTES + 8)

_DOMAIN = b"shoal meeting point"
_KEY_PREFIX = b"/shoal/"


class MeetingPoint(Message, frozen=True, kw_only=True):
    """Addresses of `peer`; `sequence` grows with each that it signs, `valid_s` counts from first sight."""

    swarm: HashField
    peer: PeerIdField
    addresses: Annotated[tuple[Address, ...], msgspec.Meta(min_length=1, max_length=ADDRESSES_LIMIT)]
    sequence: CounterField
    valid_s: Annotated[int, msgspec.Meta(ge=1, le=VALID_LIMIT_S)]


class _Signed(Message, frozen=True, kw_only=True):
    said: Annotated[bytes, msgspec.Meta(max_length=POINT_LIMIT_BYTES)]
    signature: SignatureField


_Value = Annotated[
    tuple[Annotated[bytes, msgspec.Meta(max_length=POINT_LIMIT_BYTES)], ...],
    msgspec.Meta(max_length=POINTS_IN_SLOT),
]


def sign_point(
    identity: Identity, swarm: SwarmId, *, addresses: Sequence[str], sequence: int, valid_s: int = VALID_LIMIT_S
) -> bytes:
    """The signed point of this node; of its addresses the first ADDRESSES_LIMIT are taken, and there must be one."""
    point = MeetingPoint(
        swarm=swarm,
        peer=identity.peer_id,
        addresses=tuple(addresses)[:ADDRESSES_LIMIT],
        sequence=sequence,
        valid_s=valid_s,
    )
    said = canonical(point)
    return canonical(_Signed(said=said, signature=identity.sign(_DOMAIN, said)))


def open_point(data: bytes, *, swarm: SwarmId | None = None, blame: PeerId | None = None) -> MeetingPoint:
    """The point in `data`, if its peer signed it and all its addresses are that peer's.

    Raises RemoteError, blaming who delivered it, for what does not hold, or is not of `swarm` where one is named.
    """
    signed = decode(data, _Signed, peer=blame, limit_bytes=POINT_LIMIT_BYTES)
    point = decode(signed.said, MeetingPoint, peer=blame, limit_bytes=POINT_LIMIT_BYTES)
    if swarm is not None and point.swarm != swarm:
        raise RemoteError(f"a meeting point of swarm {point.swarm.hex()[:16]}…, not of ours", peer=blame)
    try:
        parse_peer_id(point.peer)
        named = {parse_any(text).peer for text in point.addresses}
    except (MalformedPeerId, ConfigError) as error:
        raise RemoteError(f"a meeting point that names no place: {error}", peer=blame) from None
    if named != {point.peer}:
        raise RemoteError(f"a meeting point of {point.peer} with another peer's address", peer=blame)
    if not verify(point.peer, _DOMAIN, signed.said, signed.signature):
        raise RemoteError(f"a meeting point that {point.peer} did not sign", peer=blame)
    return point


def pack_points(points: Iterable[bytes]) -> bytes:
    """The value that holds these signed points, the first POINTS_IN_SLOT of them."""
    return canonical(list(points)[:POINTS_IN_SLOT])


def unpack_points(value: bytes, *, blame: PeerId | None = None) -> tuple[bytes, ...]:
    """The signed points in a value, not yet opened. Raises RemoteError."""
    found: tuple[bytes, ...] = decode(value, _Value, peer=blame, limit_bytes=VALUE_LIMIT_BYTES)
    return found


def slot_key(swarm: bytes, slot: int) -> bytes:
    """The key under which the points of one slot of a swarm lie, in ASCII."""
    return _KEY_PREFIX + domain_hash("meeting-slot", swarm, bytes([slot])).hex().encode()


def slots_of(swarm: bytes, peer: str) -> tuple[int, ...]:
    """The slots in which a peer's point belongs, all different."""
    digest = domain_hash("meeting-slots", swarm, peer.encode())
    first = digest[0] % SLOTS
    return first, (first + 1 + digest[1] % (SLOTS - 1)) % SLOTS


def keys_of(point: MeetingPoint) -> tuple[bytes, ...]:
    """The keys under which a point belongs."""
    return tuple(slot_key(point.swarm, slot) for slot in slots_of(point.swarm, point.peer))


def _rank(point: MeetingPoint) -> bytes:
    """In a full slot the points of least rank stay, after those who come first: nobody's later words change that."""
    return domain_hash("meeting-rank", point.swarm, point.peer.encode())


class FirstSight:
    """Times at which points were first seen here, and until which they are valid. Bounded: the oldest is forgotten."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[bytes, str], tuple[int, float]] = OrderedDict()

    def ends_at(self, point: MeetingPoint, now: float) -> float | None:
        """Time until which an opened point is valid; None if it is not, or its signer said a later one."""
        who = (point.swarm, point.peer)
        sequence, ends_at = self._seen.get(who, (-1, 0.0))
        if point.sequence < sequence:
            return None
        if point.sequence > sequence:
            ends_at = now + point.valid_s
            self._seen[who] = (point.sequence, ends_at)
            self._seen.move_to_end(who)
            if len(self._seen) > SEEN_LIMIT:
                self._seen.popitem(last=False)
        return ends_at if now < ends_at else None


@dataclass(frozen=True, slots=True)
class _Kept:
    point: MeetingPoint
    data: bytes
    ends_at: float


class PointStore:
    """The points that a node keeps for others, of any swarm; those of its own are not given up for those.

    comes_first: whether a peer has its place before others, as far as this node knows.
    """

    def __init__(self, own: SwarmId, comes_first: Callable[[PeerId], bool] = lambda peer: False) -> None:
        self._comes_first = comes_first
        self._own_keys = frozenset(slot_key(own, slot) for slot in range(SLOTS))
        self._slots: OrderedDict[bytes, dict[str, _Kept]] = OrderedDict()
        self._sight = FirstSight()

    def put(self, key: bytes, data: bytes, now: float, *, blame: PeerId | None = None) -> MeetingPoint:
        """Keep a signed point under `key`, if it is valid and there is room for it. Returns it, opened.

        Raises RemoteError for one that does not hold, or does not belong there.
        """
        point = open_point(data, blame=blame)
        if key not in keys_of(point):
            raise RemoteError(f"a meeting point of {point.peer} under a key that is not its own", peer=blame)
        ends_at = self._sight.ends_at(point, now)
        if ends_at is not None:
            slot = self._slots.setdefault(key, {})
            slot[point.peer] = _Kept(point, data, ends_at)
            self._expire(key, now)
            while len(slot) > POINTS_IN_SLOT:
                del slot[max(slot, key=lambda peer: (not self._comes_first(PeerId(peer)), _rank(slot[peer].point)))]
            self._make_room()
        return point

    def get(self, key: bytes, now: float) -> tuple[bytes, ...]:
        """The valid points under `key`."""
        self._expire(key, now)
        return tuple(kept.data for kept in self._slots.get(key, {}).values())

    def _expire(self, key: bytes, now: float) -> None:
        slot = self._slots.get(key, {})
        for peer in [peer for peer, kept in slot.items() if now >= kept.ends_at]:
            del slot[peer]
        if not slot:
            self._slots.pop(key, None)

    def _make_room(self) -> None:
        """Give up the slot that was begun first, of another swarm."""
        if len(self._slots) > SLOT_LIMIT:
            del self._slots[next(key for key in self._slots if key not in self._own_keys)]

    def __len__(self) -> int:
        return len(self._slots)
