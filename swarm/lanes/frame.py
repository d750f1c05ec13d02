"""Frames that travel on a lane, each a fixed header in clear and a sealed payload.

    header (52 bytes, little-endian) ‖ ciphertext (`length` bytes) ‖ tag (16 bytes)

    version u16 │ kind u8 │ flags u8 │ length u32 │ attempt u32 │ view u32 │ chunk u32
    round u64 │ offset u64 │ total u64 │ scope 8 bytes

The header is the associated data of the seal: it can be read before the payload is opened (so that the
payload is decrypted where it belongs) and cannot be changed. A frame says by itself where its bytes go, so
frames may arrive over several lanes in any order. Over a connection a frame has at most FRAME_LIMIT_BYTES of payload;
what is handed over in memory may have LARGE_FRAME_BYTES, since Python around a frame costs half as much as its cipher.

A bulk frame (CONTRIBUTION, FINAL, STATE) carries the bytes `offset … offset + length` of a chunk of `total`
bytes. In all other kinds the meaning of offset and total is the sink's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Self

import msgspec
from msgspec.structs import replace

from shoal.protocol.errors import LocalError, RemoteError

FRAME_VERSION = 1
FRAME_LIMIT_BYTES = 516 * 1024
"""Of payload: half a chunk of the usual size, and half of what goes with it (a Merkle path, a signature)."""
LARGE_FRAME_BYTES = 2 * FRAME_LIMIT_BYTES
"""Of payload, where a frame is handed over in memory (`shared`): a chunk of the usual size with what goes with it."""
CHUNK_LIMIT_BYTES = 1 << 30
SCOPE_BYTES = 8

_LAYOUT = struct.Struct("<HBBIIIIQQQ8s")
HEADER_BYTES = _LAYOUT.size

_U32 = 2**32
_U64 = 2**64


class FrameKind(IntEnum):
    """Purpose of a frame."""

    HELLO = 0  # the first frame of either side: proves the keys, never seen again
    CONTRIBUTION = 1  # part of a node's encoded contribution, to the chunk's owner
    FINAL = 2  # part of a reduced chunk, from its owner
    LACKING = 3  # after a lane failed: what of the other's payloads is not there
    STATE = 4  # part of a chunk of certified state
    REQUEST = 5  # asks for bytes
    REFUSED = 6  # the answer to a request that will not be served
    SHARE = 7  # the large frames after it lie in memory that both ends see; to who has taken that (`shared`) alone
    CLOSE = 255  # the last frame of either side


BULK_KINDS = frozenset({FrameKind.CONTRIBUTION, FrameKind.FINAL, FrameKind.STATE})


class FrameHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Header of a frame: where its payload belongs.

    `length`: bytes of this frame's payload. `offset`: where they lie in the chunk, in bytes. `total`: bytes
    of the whole chunk, so that a receiver can allocate. `scope`: the first 8 bytes of the plan hash or state
    digest, so that frames of an obsolete plan are told from current ones.

    Raises LocalError if the fields do not fit together; `decode` blames the sender instead.
    """

    kind: FrameKind
    length: int
    flags: int = 0
    attempt: int = 0
    round: int = 0
    view: int = 0
    chunk: int = 0
    offset: int = 0
    total: int = 0
    scope: bytes = bytes(SCOPE_BYTES)

    def __post_init__(self) -> None:
        fault = _fault_of(self)
        if fault is not None:
            raise LocalError(f"bad frame header: {fault}")

    def encode(self) -> bytes:
        """The header's HEADER_BYTES bytes on the wire."""
        return _LAYOUT.pack(
            FRAME_VERSION,
            self.kind,
            self.flags,
            self.length,
            self.attempt,
            self.view,
            self.chunk,
            self.round,
            self.offset,
            self.total,
            self.scope,
        )

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview, *, peer: str | None = None) -> Self:
        """The header in `data`. Raises RemoteError, naming `peer`, if it is no valid one."""
        if len(data) != HEADER_BYTES:
            raise RemoteError(f"a frame header has {HEADER_BYTES} bytes, not {len(data)}", peer=peer)
        version, kind, flags, length, attempt, view, chunk, round_, offset, total, scope = _LAYOUT.unpack(data)
        if version != FRAME_VERSION:
            raise RemoteError(f"frame version {version}, ours is {FRAME_VERSION}", peer=peer)
        try:
            return cls(
                kind=FrameKind(kind),
                flags=flags,
                length=length,
                attempt=attempt,
                view=view,
                chunk=chunk,
                round=round_,
                offset=offset,
                total=total,
                scope=scope,
            )
        except (LocalError, ValueError) as error:
            raise RemoteError(str(error), peer=peer) from None


def _fault_of(header: FrameHeader) -> str | None:
    """Return what is wrong with the header's fields; None if nothing is."""
    limit = LARGE_FRAME_BYTES if header.kind in BULK_KINDS else FRAME_LIMIT_BYTES
    if not 0 <= header.length <= limit:
        return f"length {header.length} is not in 0 … {limit}"
    if not 0 <= header.flags < 256:
        return f"flags {header.flags} do not fit in 8 bits"
    if not (0 <= header.attempt < _U32 and 0 <= header.view < _U32 and 0 <= header.chunk < _U32):
        return "attempt, view and chunk must fit in 32 bits"
    if not 0 <= header.round < _U64:
        return "round must fit in 64 bits"
    if len(header.scope) != SCOPE_BYTES:
        return f"scope has {len(header.scope)} bytes, not {SCOPE_BYTES}"
    if not (0 <= header.total <= CHUNK_LIMIT_BYTES and 0 <= header.offset <= CHUNK_LIMIT_BYTES):
        return f"offset {header.offset} or total {header.total} is not in 0 … {CHUNK_LIMIT_BYTES}"
    if header.kind in BULK_KINDS and header.offset + header.length > header.total:
        return f"bytes up to {header.offset + header.length} of a chunk of {header.total}"
    return None


def split_chunk(
    header: FrameHeader, payload: memoryview, limit_bytes: int = FRAME_LIMIT_BYTES
) -> Iterator[tuple[FrameHeader, memoryview]]:
    """The frames that carry a whole chunk, in order; payloads are views of `payload`, not copies.

    header: a model for all of them; only length, offset and total are set here.
    payload: contiguous bytes, (total,) uint8. An empty chunk is one empty frame.
    """
    whole = payload.cast("B")
    for offset in range(0, max(1, len(whole)), limit_bytes):
        part = whole[offset : offset + limit_bytes]
        yield replace(header, length=len(part), offset=offset, total=len(whole)), part
