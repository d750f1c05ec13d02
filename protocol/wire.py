"""Encoding of messages in bytes, and decoding of a stranger's bytes into a message or a RemoteError.

Sending.  `canonical` turns a struct into msgpack in exactly one way: map keys are strings in sorted order,
integers take their shortest form, floats are 64-bit and finite. Whatever is hashed or signed goes through it.

Receiving.  `decode` works in three steps, each of which may only trust the one before it:

1. the size is checked;
2. a scan reads nothing but the lengths that the bytes claim, without building an object or recursing. It
   refuses depth, lengths and item counts beyond the limits, claims beyond the end of the data, extension
   types, NaN and infinities, and bytes after the end;
3. msgspec converts into the struct that the caller named: right types, no unknown fields, values in range.

Whatever the bytes are, the only exception that leaves this module for them is RemoteError.

An `Envelope` is what travels between peers: a payload with who says it (`sender`), to whom (`swarm`), as what
(`kind`), and when in the sender's own order (`boot`, `seq`; no clock). Its signature covers all of that.

Source: https://github.com/msgpack/msgpack/blob/master/spec.md
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Annotated, Any, Final, NewType, TypeVar, cast

import msgspec

from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import PEER_ID_CHARS, SIGNATURE_BYTES, Identity, PeerId, parse_peer_id, verify
from shoal.protocol.replays import longest_silent

WIRE_VERSION = 2

MESSAGE_LIMIT_BYTES = 1 << 20  # one canonical message or envelope
ENVELOPE_OVERHEAD_LIMIT_BYTES = 512  # kept free of a payload for its envelope
DEPTH_LIMIT = 16  # containers inside each other
LENGTH_LIMIT_ITEMS = 16_384
"""Of one array or map."""
ITEM_LIMIT = 65_536
"""Of all values in one message together: bounds what step 3 can allocate, and how long step 2 can take."""
TEXT_LIMIT_BYTES = 65_536  # of one text
KIND_LIMIT_CHARS = 48  # of an envelope's kind
COUNTER_LIMIT = 2**63 - 1  # boot, seq, round and other counters
HASH_BYTES = 32

REPLAY_SENDER_LIMIT = 4096
REPLAY_KIND_LIMIT = 32
"""Kinds of one sender: far more than there are."""

SwarmId = NewType("SwarmId", bytes)
"""32 bytes: BLAKE3 over what the members of a swarm agree on (see `shoal.protocol.manifest`)."""

PeerIdField = Annotated[PeerId, msgspec.Meta(min_length=PEER_ID_CHARS, max_length=PEER_ID_CHARS)]
"""A field holding a PeerId; call `parse_peer_id` on it in `__post_init__` to have its key checked as well."""
HashField = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
SignatureField = Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
CounterField = Annotated[int, msgspec.Meta(ge=0, le=COUNTER_LIMIT)]

T = TypeVar("T")

_ENVELOPE_DOMAIN = b"shoal envelope"


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything that comes from a peer: immutable, named fields, no unknown ones."""


# --- sending ---


def canonical(obj: object) -> bytes:
    """The one msgpack encoding of `obj`: a struct, or plain None, bool, int, float, str, bytes, list, dict.

    Raises LocalError for what has no canonical form: NaN, infinities, keys that are not strings, foreign
    types, integers beyond 64 bits, and anything nested deeper than a receiver would accept.
    """
    try:
        plain = msgspec.to_builtins(obj, builtin_types=(bytes,), order="sorted")
        _check_plain(plain, 1)
        return msgspec.msgpack.encode(plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise LocalError(f"no canonical form: {error}") from error


_ALWAYS_PLAIN = frozenset({type(None), bool, int, str, bytes})


def _check_plain(value: object, depth: int) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    if isinstance(value, dict | list | tuple):
        if depth > DEPTH_LIMIT:
            raise ValueError(f"nested deeper than {DEPTH_LIMIT}")
        if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
            raise ValueError("a map key that is not a string")
        for item in value.values() if isinstance(value, dict) else value:
            if type(item) not in _ALWAYS_PLAIN:
                _check_plain(item, depth + 1)


# --- receiving ---

_FIXED, _FLOAT, _TEXT, _BINARY, _ARRAY, _MAP, _REFUSED = range(7)


def _first_byte_table() -> tuple[tuple[int, int, int], ...]:
    """Tabulate by first byte: what it starts, the width of the length or value that follows, the length inside it."""
    table = [(_FIXED, 0, 0)] * 256  # positive and negative fixint, nil, false, true
    for low in range(16):
        table[0x80 | low] = (_MAP, 0, low)
        table[0x90 | low] = (_ARRAY, 0, low)
    for low in range(32):
        table[0xA0 | low] = (_TEXT, 0, low)
    table[0xC1] = (_REFUSED, 0, 0)  # never used, says the specification
    for extension in (0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8):
        table[extension] = (_REFUSED, 0, 0)
    for first, kind, widths in (
        (0xC4, _BINARY, (1, 2, 4)),
        (0xCA, _FLOAT, (4, 8)),
        (0xCC, _FIXED, (1, 2, 4, 8)),
        (0xD0, _FIXED, (1, 2, 4, 8)),
        (0xD9, _TEXT, (1, 2, 4)),
        (0xDC, _ARRAY, (2, 4)),
        (0xDE, _MAP, (2, 4)),
    ):
        for offset, width in enumerate(widths):
            table[first + offset] = (kind, width, 0)
    return tuple(table)


_FIRST_BYTE: Final = _first_byte_table()


class _Refused(Exception):
    """Reason for which the scan stopped; `decode` turns it into a RemoteError."""


def _scan(data: bytes) -> None:
    """Step over one msgpack value that must fill `data`, keeping to the limits. Raises _Refused.

    `open_items` holds, per container being read, how many of its values are still to come.
    """
    end, at, items = len(data), 0, 0
    open_items = [1]
    while open_items:
        if open_items[-1] == 0:
            open_items.pop()
            continue
        open_items[-1] -= 1
        items += 1
        if items > ITEM_LIMIT:
            raise _Refused(f"more than {ITEM_LIMIT} values")
        if at >= end:
            raise _Refused("truncated")
        kind, width, length = _FIRST_BYTE[data[at]]
        at += 1 + width
        if at > end:
            raise _Refused("truncated")
        if kind == _FIXED:
            continue
        if kind == _FLOAT:
            # Not finite is: all bits of the exponent set, 8 of them or 11.
            if data[at - width] & 0x7F == 0x7F and data[at - width + 1] >= (0xF0 if width == 8 else 0x80):
                raise _Refused("a number that is not finite")
            continue
        if kind in (_ARRAY, _MAP):
            length = int.from_bytes(data[at - width : at], "big") if width else length
            if length > LENGTH_LIMIT_ITEMS:
                raise _Refused(f"a length of {length}; the limit is {LENGTH_LIMIT_ITEMS}")
            if len(open_items) > DEPTH_LIMIT:
                raise _Refused(f"nested deeper than {DEPTH_LIMIT}")
            open_items.append(2 * length if kind == _MAP else length)
        else:
            at = _step_over(data, kind, at, width, length)
    if at != end:
        raise _Refused(f"{end - at} bytes after the end")


def _step_over(data: bytes, kind: int, at: int, width: int, length: int) -> int:
    """Return the offset at which the text or binary ends whose contents begin at `at`."""
    if kind == _REFUSED:
        raise _Refused("an extension type")
    if width:
        length = int.from_bytes(data[at - width : at], "big")
    if kind == _TEXT and length > TEXT_LIMIT_BYTES:
        raise _Refused(f"a text of {length} bytes; the limit is {TEXT_LIMIT_BYTES}")
    if at + length > len(data):
        raise _Refused("truncated")
    return at + length


@lru_cache(maxsize=256)
def _decoder(of: Hashable) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(of)


def decode(data: bytes, of: type[T], *, peer: PeerId | None = None, limit_bytes: int = MESSAGE_LIMIT_BYTES) -> T:
    """Decode `data` into an `of` (normally a `Message`).

    `peer` is who gets the blame: whoever delivered the bytes, not whom they name.
    Raises RemoteError for anything that is not exactly such a message within the limits.
    """
    if len(data) > limit_bytes:
        raise RemoteError(f"a message of {len(data)} bytes; the limit is {limit_bytes}", peer=peer)
    try:
        _scan(data)
        message: T = _decoder(cast(Hashable, of)).decode(data)
    except (_Refused, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RemoteError(f"not a valid {_name_of(of)}: {error}", peer=peer) from None
    return message


def _name_of(of: object) -> str:
    return getattr(of, "__name__", str(of))


# --- envelopes ---


class Envelope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """A signed message. On the wire an array in this order, so that a version can be read before all else.

    `boot` counts the sender's starts and is kept on its disk; `seq` counts its messages since then.
    """

    version: int
    swarm: HashField
    kind: Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_.-]*\Z", max_length=KIND_LIMIT_CHARS)]
    sender: PeerIdField
    boot: CounterField
    seq: CounterField
    payload: bytes
    signature: SignatureField


class _VersionOnly(msgspec.Struct, frozen=True, array_like=True):
    version: int


def _signed_part(envelope: Envelope) -> bytes:
    fields = [getattr(envelope, name) for name in envelope.__struct_fields__ if name != "signature"]
    return canonical(fields)


class Sealer:
    """Puts one node's messages into envelopes, numbering them."""

    def __init__(self, identity: Identity, swarm_id: SwarmId, boot: int) -> None:
        if len(swarm_id) != HASH_BYTES or not 0 <= boot <= COUNTER_LIMIT:
            raise LocalError(f"a Sealer needs a SwarmId of {HASH_BYTES} bytes and a boot counter from 0")
        self._identity = identity
        self._swarm_id = swarm_id
        self._boot = boot
        self._seq = 0

    @property
    def boot(self) -> int:
        """The boot counter in every envelope of this life of the node."""
        return self._boot

    @property
    def order(self) -> tuple[int, int]:
        """Number of this node's newest envelope: its boot counter, and how many it has sealed since."""
        return self._boot, self._seq

    @property
    def peer_id(self) -> PeerId:
        """PeerId that signs."""
        return self._identity.peer_id

    def seal(self, kind: str, payload: bytes) -> bytes:
        """A signed envelope around `payload`, newer than all before it. Raises LocalError if too big."""
        limit = MESSAGE_LIMIT_BYTES - ENVELOPE_OVERHEAD_LIMIT_BYTES
        if len(payload) > limit:
            raise LocalError(f"a {kind} payload of {len(payload)} bytes; the limit is {limit}")
        self._seq += 1
        unsigned = Envelope(
            version=WIRE_VERSION,
            swarm=self._swarm_id,
            kind=kind,
            sender=self._identity.peer_id,
            boot=self._boot,
            seq=self._seq,
            payload=payload,
            signature=bytes(SIGNATURE_BYTES),
        )
        signature = self._identity.sign(_ENVELOPE_DOMAIN, _signed_part(unsigned))
        return canonical(msgspec.structs.replace(unsigned, signature=signature))


def open_envelope(data: bytes, swarm_id: SwarmId, *, peer: PeerId | None = None) -> Envelope:
    """The envelope in `data`, if its version and swarm are ours and its sender did sign it.

    `peer` is who delivered it, and takes the blame: a forged envelope says nothing about the one it names.
    Raises RemoteError.
    """
    envelope = unproven_envelope(data, swarm_id, peer=peer)
    prove(envelope, peer=peer)
    return envelope


def unproven_envelope(data: bytes, swarm_id: SwarmId, *, peer: PeerId | None = None) -> Envelope:
    """The envelope in `data`, of our version and swarm; whether its sender signed it is not known yet. As above."""
    version = decode(data, _VersionOnly, peer=peer).version
    if version != WIRE_VERSION:
        raise RemoteError(f"speaks wire version {version}, we speak {WIRE_VERSION}", peer=peer)
    envelope = decode(data, Envelope, peer=peer)
    if envelope.swarm != swarm_id:
        raise RemoteError(f"belongs to swarm {envelope.swarm.hex()[:16]}…, not to ours", peer=peer)
    return envelope


def prove(envelope: Envelope, *, peer: PeerId | None = None) -> None:
    """Raise RemoteError unless the sender of the envelope did sign it."""
    try:
        parse_peer_id(envelope.sender)
    except RemoteError as error:
        raise RemoteError(str(error), peer=peer) from None
    if not verify(envelope.sender, _ENVELOPE_DOMAIN, _signed_part(envelope), envelope.signature):
        raise RemoteError(f"a {envelope.kind} that {envelope.sender} did not sign", peer=peer)


class ReplayGuard:
    """Lets each sender's messages of each kind through in increasing order of (boot, seq) only.

    Bounded. Where there is no room, the sender that is silent for longest is forgotten, and can be replayed; but never
    one that is `kept`.
    """

    def __init__(self, kept: Callable[[PeerId], bool] = lambda _: False) -> None:
        self._kept = kept
        self._newest: dict[PeerId, dict[str, tuple[int, int]]] = {}

    def accept(self, envelope: Envelope) -> bool:
        """True if this (opened, hence authentic) envelope is new; if so, it and all before it are old now."""
        kinds = self._newest.get(envelope.sender, {})
        order = (envelope.boot, envelope.seq)
        if envelope.kind in kinds:
            if order <= kinds[envelope.kind]:
                return False
        elif len(kinds) >= REPLAY_KIND_LIMIT:
            return False
        if envelope.sender not in self._newest and not self._has_room():
            return False
        kinds[envelope.kind] = order
        self._newest.pop(envelope.sender, None)
        self._newest[envelope.sender] = kinds  # the last of all
        return True

    def _has_room(self) -> bool:
        """True if there is room for one sender more, perhaps since another was forgotten."""
        if len(self._newest) >= REPLAY_SENDER_LIMIT:
            forgotten = longest_silent(self._newest, self._kept)
            if forgotten is None:
                return False
            del self._newest[forgotten]
        return True

    def __len__(self) -> int:
        return len(self._newest)
