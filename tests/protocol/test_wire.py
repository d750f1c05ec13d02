"""Wire: one encoding per value, and no bytes that can do more harm than a RemoteError."""

from __future__ import annotations

import math
import struct
import tracemalloc

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.protocol import wire
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.wire import (
    WIRE_VERSION,
    Envelope,
    Message,
    ReplayGuard,
    Sealer,
    SwarmId,
    canonical,
    decode,
    open_envelope,
)

FUZZ = settings(derandomize=True)
"""The same examples every time, however busy the machine."""

ALICE = Identity.from_seed(bytes(range(32)))
BOB = Identity.from_seed(bytes(32))
SWARM = SwarmId(bytes(range(32)))
OTHER_SWARM = SwarmId(bytes(32))


class Inner(Message):
    values: list[float]


class Sample(Message):
    name: str
    count: int
    blob: bytes
    inner: Inner | None = None
    table: dict[str, int] = msgspec.field(default_factory=dict)


SAMPLE = Sample(name="a", count=7, blob=b"xyz", inner=Inner(values=[0.5, -1.0]), table={"b": 1, "a": 2})

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


def nested(depth: int) -> bytes:
    """`depth` arrays, one inside another."""
    return b"\x91" * depth + b"\xc0"


# --- canonical ---


def test_canonical_golden_bytes() -> None:
    assert canonical({"b": 1, "a": [300, -1, 0.5, b"\x00", "é", None, True]}) == bytes.fromhex(
        "82a161 97cd012c ff cb3fe0000000000000 c40100 a2c3a9 c0 c3 a162 01"
    )


def test_canonical_sorts_struct_fields_and_map_keys() -> None:
    assert list(msgpack.unpackb(canonical(SAMPLE))) == ["blob", "count", "inner", "name", "table"]
    assert canonical({"z": 1, "a": {"y": 1, "b": 2}}) == canonical({"a": {"b": 2, "y": 1}, "z": 1})


@given(plain)
@FUZZ
def test_canonical_agrees_with_an_independent_msgpack(value: object) -> None:
    data = canonical(value)
    assert msgpack.unpackb(data, strict_map_key=True) == decode(data, object) == value
    assert canonical(msgpack.unpackb(data)) == data


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), [float("-inf")], {1: 2}, {b"a": 1}, 2**64, -(2**63) - 1, object(), "\ud800"],
)
def test_canonical_refuses_what_has_no_canonical_form(value: object) -> None:
    with pytest.raises(LocalError):
        canonical(value)


def test_canonical_refuses_what_no_receiver_would_take() -> None:
    value: list[object] = []
    for _ in range(15):
        value = [value]
    assert decode(canonical(value), list) == value
    with pytest.raises(LocalError, match="nested deeper than 16"):
        canonical([value])


# --- decode ---


def test_decode_returns_what_was_encoded() -> None:
    assert decode(canonical(SAMPLE), Sample) == SAMPLE


@given(st.floats())
@FUZZ
def test_decode_lets_finite_floats_through_only(value: float) -> None:
    for data in (msgpack.packb(value), struct.pack(">Bf", 0xCA, value) if abs(value) < 3e38 else b"\xc0"):
        if math.isfinite(value):
            decode(data, object)
        elif len(data) > 1:
            with pytest.raises(RemoteError, match="not finite"):
                decode(data, object)


@given(plain, st.data())
@FUZZ
def test_decode_notices_any_truncation_and_any_trailing_byte(value: object, data: st.DataObject) -> None:
    encoded = canonical(value)
    with pytest.raises(RemoteError):
        decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))], object)
    with pytest.raises(RemoteError, match="after the end"):
        decode(encoded + b"\x00", object)


@pytest.mark.parametrize("value", [0, -1, 127, 255, 2**16, 2**32, 2**63, -(2**7), -(2**15), -(2**31), 1.5, -3.4e38])
def test_decode_steps_over_every_number_width(value: float) -> None:
    for data in (msgpack.packb(value), msgpack.packb(value, use_single_float=True)):
        assert decode(data, object) == pytest.approx(value)
        assert decode(b"\x92" + data + data, list) == pytest.approx([value, value])


@pytest.mark.parametrize("size", [0, 31, 32, 255, 256, 65_535, 65_536])
def test_decode_steps_over_every_length_width(size: int) -> None:
    items = min(size, wire.LENGTH_LIMIT_ITEMS)
    for value in ("x" * size, b"x" * size, [None] * items, {str(n): None for n in range(items)}):
        assert decode(msgpack.packb(value), object) == value


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (nested(17), "nested deeper than 16"),
        (nested(1_000_000), "nested deeper than 16"),
        (b"\x81\xa1a" * 100_000, "nested deeper than 16"),
        (b"\xdd\xff\xff\xff\xff", "a length of 4294967295"),
        (b"\xdf\xff\xff\xff\xff", "a length of 4294967295"),
        (b"\xdd\x00\x00\x40\x01" + bytes(16_385), "a length of 16385"),
        (b"\x9f" * 16, "truncated"),
        (b"\xdb\xff\xff\xff\xff", "a text of 4294967295 bytes"),
        (b"\xc6\xff\xff\xff\xff", "truncated"),
        (b"\xc6\x00", "truncated"),
        (b"", "truncated"),
        (b"\xcb\x00", "truncated"),
        (b"\x95" + (b"\xdc\x3f\xff" + bytes(16_383)) * 5, "more than 65536 values"),
        (b"\xc0\xc0", "1 bytes after the end"),
        (b"\xc1", "extension"),
        (b"\xd4\x01\x00", "extension"),
        (b"\xc7\x00\x01", "extension"),
        (b"\xca\x7f\xc0\x00\x00", "not finite"),
        (b"\xca\xff\x80\x00\x00", "not finite"),
        (b"\xcb\x7f\xf0" + bytes(6), "not finite"),
        (b"\xcb\xff\xf8" + bytes(6), "not finite"),
        (b"\xa1\xff", "not a valid"),
        (bytes(wire.MESSAGE_LIMIT_BYTES + 1), "a message of 1048577 bytes; the limit is 1048576"),
    ],
)
def test_decode_refuses_hostile_bytes_cheaply(data: bytes, why: str) -> None:
    tracemalloc.start()
    try:
        for of in (object, list, dict, Sample, Envelope):
            with pytest.raises(RemoteError, match=why):
                decode(data, of, peer=BOB.peer_id)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 300_000


@pytest.mark.parametrize(
    "value",
    [
        {"name": "a", "count": 1, "blob": b"", "extra": 1},
        {"name": "a", "count": 1},
        {"name": "a", "count": "1", "blob": b""},
        {"name": "a", "count": 1.5, "blob": b""},
        {"name": "a", "count": True, "blob": b""},
        {"name": b"a", "count": 1, "blob": b""},
        {"name": "a", "count": 1, "blob": b"", "inner": {"values": ["x"]}},
        {"name": "a", "count": 1, "blob": b"", "inner": {"values": [], "more": 0}},
        [1, 2],
        None,
    ],
)
def test_decode_converts_strictly(value: object) -> None:
    with pytest.raises(RemoteError, match="not a valid Sample") as caught:
        decode(canonical(value), Sample, peer=BOB.peer_id)
    assert caught.value.peer == BOB.peer_id


# --- envelopes ---


def test_envelope_round_trip() -> None:
    sealer = Sealer(ALICE, SWARM, boot=3)
    for seq in (1, 2, 3):
        envelope = open_envelope(sealer.seal("ready", b"payload"), SWARM)
        assert (envelope.kind, envelope.payload, envelope.sender) == ("ready", b"payload", ALICE.peer_id)
        assert (envelope.boot, envelope.seq, envelope.swarm) == (3, seq, SWARM)


def _resealed(**changes: object) -> bytes:
    envelope = open_envelope(Sealer(ALICE, SWARM, boot=3).seal("ready", b"payload"), SWARM)
    return canonical(msgspec.structs.replace(envelope, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "vote"},
        {"sender": BOB.peer_id},
        {"boot": 4},
        {"seq": 2},
        {"payload": b"pay1oad"},
        {"signature": bytes(64)},
    ],
)
def test_envelope_signature_covers_every_field(changes: dict[str, object]) -> None:
    assert open_envelope(_resealed(), SWARM)
    with pytest.raises(RemoteError, match="did not sign") as caught:
        open_envelope(_resealed(**changes), SWARM, peer=BOB.peer_id)
    assert caught.value.peer == BOB.peer_id  # who delivered it, not whom it names


def test_envelope_signed_for_another_swarm_cannot_be_relabelled() -> None:
    data = Sealer(ALICE, OTHER_SWARM, boot=3).seal("ready", b"payload")
    with pytest.raises(RemoteError, match="belongs to swarm 0000000000000000"):
        open_envelope(data, SWARM)
    relabelled = msgspec.structs.replace(open_envelope(data, OTHER_SWARM), swarm=SWARM)
    with pytest.raises(RemoteError, match="did not sign"):
        open_envelope(canonical(relabelled), SWARM)


def test_envelope_of_another_version_is_named_even_if_its_shape_changed() -> None:
    other = WIRE_VERSION + 1
    for future in ([other], [other, "new", {"shape": 1}], [other] + [None] * 20):
        with pytest.raises(RemoteError, match=f"speaks wire version {other}, we speak {WIRE_VERSION}"):
            open_envelope(canonical(future), SWARM)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": ""},
        {"kind": "Vote"},
        {"kind": "vote\n"},
        {"kind": "x" * 49},
        {"sender": PeerId("z" * 52)},
        {"sender": PeerId("short")},
        {"boot": -1},
        {"seq": 2**63},
        {"swarm": b""},
        {"signature": b"short"},
    ],
)
def test_envelope_fields_have_their_ranges(changes: dict[str, object]) -> None:
    with pytest.raises(RemoteError):
        open_envelope(_resealed(**changes), SWARM)


def test_largest_payload_fits_a_message_and_one_more_byte_does_not() -> None:
    limit = wire.MESSAGE_LIMIT_BYTES - wire.ENVELOPE_OVERHEAD_LIMIT_BYTES
    sealer = Sealer(ALICE, SWARM, boot=wire.COUNTER_LIMIT)
    data = sealer.seal("k" * wire.KIND_LIMIT_CHARS, bytes(limit))
    assert len(data) <= wire.MESSAGE_LIMIT_BYTES
    assert len(open_envelope(data, SWARM).payload) == limit
    with pytest.raises(LocalError):
        sealer.seal("k", bytes(limit + 1))


# --- replay ---


def _envelope(sender: str, kind: str, boot: int, seq: int) -> Envelope:
    return Envelope(
        version=1,
        swarm=SWARM,
        kind=kind,
        sender=PeerId(sender),
        boot=boot,
        seq=seq,
        payload=b"",
        signature=bytes(64),
    )


def test_replay_guard_lets_only_newer_messages_through() -> None:
    guard = ReplayGuard()
    assert guard.accept(_envelope("a", "ready", 1, 5))
    assert not guard.accept(_envelope("a", "ready", 1, 5))
    assert not guard.accept(_envelope("a", "ready", 1, 4))
    assert guard.accept(_envelope("a", "vote", 1, 4))
    assert guard.accept(_envelope("b", "ready", 1, 1))
    assert guard.accept(_envelope("a", "ready", 2, 1))
    assert not guard.accept(_envelope("a", "ready", 1, 6))
    assert guard.accept(_envelope("a", "ready", 2, 2))


def test_a_full_replay_guard_forgets_who_was_silent_for_longest_and_never_who_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "REPLAY_SENDER_LIMIT", 3)
    kept = {"a"}
    guard = ReplayGuard(lambda peer: peer in kept)
    assert all(guard.accept(_envelope(name, "k", 1, 1)) for name in "abc")
    assert guard.accept(_envelope("b", "k", 1, 2))
    assert guard.accept(_envelope("d", "k", 1, 1))  # in the place of c
    assert [guard.accept(_envelope(name, "k", 1, 1)) for name in "abd"] == [False] * 3
    kept |= {"b", "d"}
    assert not guard.accept(_envelope("c", "k", 1, 2))
    assert len(guard) == 3


def test_replay_guard_takes_so_many_kinds_of_a_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "REPLAY_KIND_LIMIT", 2)
    guard = ReplayGuard()
    assert [guard.accept(_envelope("a", kind, 1, 1)) for kind in "klm"] == [True, True, False]
