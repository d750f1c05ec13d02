"""Messages between a node and its hivemind process, over that process's pipes.

hivemind and libp2p define the same protobuf symbols and cannot share a process. So the process imports hivemind and not
libp2p, and both ends import this module, which knows neither.

    message = length (4 bytes, big-endian) ‖ canonical msgpack of one of these structs

Both ends check what they read as if a stranger had written it: the process passes on what a DHT of strangers holds.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.protocol.errors import RemoteError
from shoal.protocol.wire import CounterField, Message, canonical, decode

LENGTH_BYTES = 4
MESSAGE_LIMIT_BYTES = 1 << 20
ADDRESSES_LIMIT = 64
ADDRESS_LIMIT_CHARS = 512
KEYS_LIMIT = 64
KEY_LIMIT_CHARS = 128
VALUE_LIMIT_BYTES = 4096
VALUES_LIMIT = 200
"""Values in one answer: with VALUE_LIMIT_BYTES it fits in a message."""
VALID_LIMIT_S = 86_400
REASON_LIMIT_CHARS = 500

_Addresses = Annotated[
    tuple[Annotated[str, msgspec.Meta(max_length=ADDRESS_LIMIT_CHARS)], ...], msgspec.Meta(max_length=ADDRESSES_LIMIT)
]
_Key = Annotated[str, msgspec.Meta(min_length=1, max_length=KEY_LIMIT_CHARS)]
_Keys = Annotated[tuple[_Key, ...], msgspec.Meta(max_length=KEYS_LIMIT)]
_Bytes = Annotated[bytes, msgspec.Meta(max_length=VALUE_LIMIT_BYTES)]


class Start(Message, frozen=True, kw_only=True, tag="start"):
    """The first order: join the DHT of these peers, or begin one; `serves`: store for others, and relay for them.

    identity: path of a libp2p private key file, where the PeerId is to stay the same.
    """

    initial: _Addresses = ()
    serves: bool = False
    listen: _Addresses = ()
    announce: _Addresses = ()
    identity: str | None = None


class Put(Message, frozen=True, kw_only=True, tag="put"):
    """Store a value in the dictionaries under these keys, as the entry `name`."""

    id: CounterField
    keys: _Keys
    name: _Key
    value: _Bytes
    valid_s: Annotated[int, msgspec.Meta(ge=1, le=VALID_LIMIT_S)]


class Get(Message, frozen=True, kw_only=True, tag="get"):
    """Look up all entries of the dictionaries under these keys."""

    id: CounterField
    keys: _Keys


class Ready(Message, frozen=True, kw_only=True, tag="ready"):
    """The answer to `Start`: where the process's own libp2p node is."""

    addresses: _Addresses


class Stored(Message, frozen=True, kw_only=True, tag="stored"):
    """The answer to `Put`: under how many of the keys it lies."""

    id: CounterField
    keys: Annotated[int, msgspec.Meta(ge=0, le=KEYS_LIMIT)]


class Found(Message, frozen=True, kw_only=True, tag="found"):
    """The answer to `Get`: whatever byte strings lie there."""

    id: CounterField
    values: Annotated[tuple[_Bytes, ...], msgspec.Meta(max_length=VALUES_LIMIT)]


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """The order `id` came to nothing; 0 for `Start`, after which the process ends."""

    id: CounterField
    reason: Annotated[str, msgspec.Meta(max_length=REASON_LIMIT_CHARS)]


Order = Start | Put | Get
Report = Ready | Stored | Found | Failed


def frame(message: Order | Report) -> bytes:
    """The message as it goes into the pipe."""
    data = canonical(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def length_of(head: bytes) -> int:
    """Length in bytes of the message after these LENGTH_BYTES. Raises RemoteError beyond MESSAGE_LIMIT_BYTES."""
    length = int.from_bytes(head, "big")
    if length > MESSAGE_LIMIT_BYTES:
        raise RemoteError(f"a message of {length} bytes; the limit is {MESSAGE_LIMIT_BYTES}")
    return length


def read_order(data: bytes) -> Order:
    """Raises RemoteError."""
    return decode(data, Order, limit_bytes=MESSAGE_LIMIT_BYTES)  # type: ignore[arg-type]


def read_report(data: bytes) -> Report:
    """Raises RemoteError."""
    return decode(data, Report, limit_bytes=MESSAGE_LIMIT_BYTES)  # type: ignore[arg-type]
