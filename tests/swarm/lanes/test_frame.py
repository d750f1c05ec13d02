from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.errors import LocalError, RemoteError
from shoal.swarm.lanes.frame import (
    BULK_KINDS,
    CHUNK_LIMIT_BYTES,
    FRAME_LIMIT_BYTES,
    HEADER_BYTES,
    FrameHeader,
    FrameKind,
    split_chunk,
)

EXAMPLE = FrameHeader(
    kind=FrameKind.FINAL,
    flags=7,
    attempt=2,
    round=2**40,
    view=3,
    chunk=11,
    offset=1024,
    total=4096,
    scope=b"planhash",
    length=512,
)


def headers() -> st.SearchStrategy[FrameHeader]:
    u32 = st.integers(0, 2**32 - 1)

    def build(kind: FrameKind, length: int, room: tuple[int, int], small: tuple[int, int, int]) -> FrameHeader:
        offset, rest = room
        return FrameHeader(
            kind=kind,
            length=length,
            offset=offset,
            total=offset + length + rest,
            attempt=small[0],
            view=small[1],
            chunk=small[2],
            round=small[0] * small[1],
            flags=small[0] % 256,
            scope=small[2].to_bytes(8, "big"),
        )

    room = st.tuples(st.integers(0, 2**29), st.integers(0, 2**28))
    lengths = st.integers(0, FRAME_LIMIT_BYTES)
    return st.builds(build, st.sampled_from(FrameKind), lengths, room, st.tuples(u32, u32, u32))


@given(headers())
def test_header_survives_the_wire(header: FrameHeader) -> None:
    assert FrameHeader.decode(header.encode()) == header


def test_header_layout_is_fixed() -> None:
    wire = EXAMPLE.encode()
    assert len(wire) == HEADER_BYTES == 52
    assert wire == struct.pack("<HBBIIIIQQQ8s", 1, 2, 7, 512, 2, 3, 11, 2**40, 1024, 4096, b"planhash")


def test_header_every_byte_matters() -> None:
    """No two wire forms read as the same header, so the associated data covers all that is believed."""
    wire = EXAMPLE.encode()
    for position in range(HEADER_BYTES):
        changed = bytearray(wire)
        changed[position] ^= 1
        with contextlib.suppress(RemoteError):
            assert FrameHeader.decode(changed) != EXAMPLE, position


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, b"\x02\x00"),  # version
        (2, b"\x63"),  # kind
        (4, (FRAME_LIMIT_BYTES + 1).to_bytes(4, "little")),  # length
        (4, (4096 - 1024 + 1).to_bytes(4, "little")),  # runs past the chunk's end
        (28, (2**64 - 1).to_bytes(8, "little")),  # offset
        (36, (CHUNK_LIMIT_BYTES + 1).to_bytes(8, "little")),  # total
        (36, (1024).to_bytes(8, "little")),  # total before the end
    ],
)
def test_header_decode_blames_the_peer(position: int, value: bytes) -> None:
    wire = bytearray(EXAMPLE.encode())
    wire[position : position + len(value)] = value
    with pytest.raises(RemoteError) as caught:
        FrameHeader.decode(wire, peer="12D3KooWliar")
    assert caught.value.peer == "12D3KooWliar"


@pytest.mark.parametrize("size", [0, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_header_decode_refuses_other_sizes(size: int) -> None:
    with pytest.raises(RemoteError):
        FrameHeader.decode(bytes(size))


@pytest.mark.parametrize(
    "fields",
    [
        {"length": -1},
        {"length": FRAME_LIMIT_BYTES + 1},
        {"flags": 256},
        {"attempt": 2**32},
        {"view": -1},
        {"chunk": 2**32},
        {"round": 2**64},
        {"offset": 1, "total": 1, "length": 1},
        {"total": CHUNK_LIMIT_BYTES + 1},
        {"scope": b"short"},
    ],
)
def test_header_made_here_wrongly_is_our_fault(fields: dict[str, int]) -> None:
    with pytest.raises(LocalError):
        FrameHeader(**{"kind": FrameKind.STATE, "length": 0} | fields)  # type: ignore[arg-type]


def test_header_of_a_request_may_name_a_chunk_it_does_not_carry() -> None:
    header = FrameHeader(kind=FrameKind.REQUEST, length=3, offset=100, total=50)
    assert FrameHeader.decode(header.encode()) == header


@pytest.mark.parametrize("size", [0, 1, FRAME_LIMIT_BYTES, FRAME_LIMIT_BYTES + 1, 3 * FRAME_LIMIT_BYTES - 5])
def test_split_chunk_covers_every_byte_once(size: int) -> None:
    payload = memoryview(bytes(i % 251 for i in range(size)))
    like = FrameHeader(kind=FrameKind.STATE, length=0, chunk=4, scope=b"digest!!")
    rebuilt = bytearray(size)
    cursor = 0
    for header, part in split_chunk(like, payload):
        assert (header.offset, header.length, header.total) == (cursor, len(part), size)
        assert (header.chunk, header.scope) == (4, b"digest!!")
        assert part.obj is payload.obj  # a view, no copy
        rebuilt[cursor : cursor + len(part)] = part
        cursor += len(part)
    assert cursor == size
    assert rebuilt == payload


def test_bulk_kinds_are_those_with_a_region() -> None:
    assert {FrameKind.CONTRIBUTION, FrameKind.FINAL, FrameKind.STATE} == BULK_KINDS
