from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from shoal.protocol.errors import LocalError, NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.frame import HEADER_BYTES, FrameHeader, FrameKind
from shoal.swarm.lanes.seal import (
    ADDRESS_LIMIT,
    LANE_LIMIT_BYTES,
    SEAL_OVERHEAD_BYTES,
    TAG_BYTES,
    LaneKeys,
    LaneOffer,
    LaneProposal,
    LaneSummons,
    Opener,
    Sealer,
    accept_offer,
    decode_answer,
    decode_request,
    encode_handshake,
    format_address,
    parse_address,
)

DIALLER, LISTENER = PeerId("12D3KooWdialler"), PeerId("12D3KooWlistener")
SWARM = b"swarm one"
HEADER = FrameHeader(
    kind=FrameKind.FINAL,
    flags=1,
    attempt=2,
    round=3,
    view=4,
    chunk=5,
    offset=6,
    total=700,
    scope=b"01234567",
    length=12,
)
PAYLOAD = b"twelve bytes"


def agree() -> tuple[LaneKeys, LaneKeys]:
    """The dialler's and the listener's keys of a new lane."""
    proposal = LaneProposal(me=DIALLER, peer=LISTENER, swarm_id=SWARM)
    answer, theirs = accept_offer(proposal.offer, me=LISTENER, peer=DIALLER, swarm_id=SWARM, addresses=("127.0.0.1:1",))
    return proposal.keys(answer), theirs


def seal(sealer: Sealer, header: FrameHeader = HEADER, payload: bytes = PAYLOAD) -> bytes:
    out = bytearray(header.length + SEAL_OVERHEAD_BYTES + 7)
    size = sealer.seal_into(header, payload, memoryview(out))
    assert size == header.length + SEAL_OVERHEAD_BYTES
    return bytes(out[:size])


def open_frame(opener: Opener, wire: bytes) -> bytes:
    sealed = memoryview(wire)[HEADER_BYTES:]
    out = bytearray(len(sealed) - TAG_BYTES)
    opener.open_into(wire[:HEADER_BYTES], sealed, memoryview(out))
    return bytes(out)


def pair() -> tuple[Sealer, Opener]:
    dialler, listener = agree()
    return Sealer(dialler.send_key), Opener(listener.receive_key, peer=DIALLER)


def test_agreement_gives_each_direction_its_own_key() -> None:
    dialler, listener = agree()
    assert dialler.send_key == listener.receive_key
    assert dialler.receive_key == listener.send_key
    assert dialler.send_key != dialler.receive_key
    assert dialler.lane_id == listener.lane_id
    assert (dialler.peer, listener.peer) == (LISTENER, DIALLER)
    assert agree()[0].send_key != dialler.send_key


@pytest.mark.parametrize("part", ["swarm", "dialler", "listener", "lane_id", "nonce", "offer_nonce", "ephemeral"])
def test_agreement_binds_the_whole_transcript(part: str) -> None:
    """Whoever sees another transcript than the other side gets other keys."""
    proposal = LaneProposal(
        me=PeerId("12D3KooWother") if part == "dialler" else DIALLER,
        peer=PeerId("12D3KooWother") if part == "listener" else LISTENER,
        swarm_id=b"another" if part == "swarm" else SWARM,
    )
    offer = proposal.offer
    if part == "offer_nonce":
        offer = msgspec.structs.replace(offer, nonce=bytes(32))
    answer, theirs = accept_offer(offer, me=LISTENER, peer=DIALLER, swarm_id=SWARM, addresses=("127.0.0.1:1",))
    if part == "lane_id":
        answer = msgspec.structs.replace(answer, lane_id=bytes(16))
    if part == "nonce":
        answer = msgspec.structs.replace(answer, nonce=bytes(32))
    if part == "ephemeral":
        answer = msgspec.structs.replace(
            answer, ephemeral=LaneProposal(me=DIALLER, peer=LISTENER, swarm_id=SWARM).offer.ephemeral
        )
    ours = proposal.keys(answer)
    assert ours.send_key != theirs.receive_key
    assert ours.receive_key != theirs.send_key


def test_agreement_refuses_a_key_of_low_order() -> None:
    zero = LaneOffer(ephemeral=bytes(32), nonce=bytes(32))
    with pytest.raises(RemoteError, match="low order"):
        accept_offer(zero, me=LISTENER, peer=DIALLER, swarm_id=SWARM, addresses=("127.0.0.1:1",))
    proposal = LaneProposal(me=DIALLER, peer=LISTENER, swarm_id=SWARM)
    answer, _ = accept_offer(proposal.offer, me=LISTENER, peer=DIALLER, swarm_id=SWARM, addresses=("127.0.0.1:1",))
    with pytest.raises(RemoteError, match="low order"):
        proposal.keys(msgspec.structs.replace(answer, ephemeral=bytes(32)))


def test_keys_are_not_printed() -> None:
    keys, _ = agree()
    assert repr(keys.send_key) not in repr(keys)


def test_handshake_survives_the_wire() -> None:
    proposal = LaneProposal(me=DIALLER, peer=LISTENER, swarm_id=SWARM, lanes=3)
    answer, _ = accept_offer(
        proposal.offer, me=LISTENER, peer=DIALLER, swarm_id=SWARM, addresses=("127.0.0.1:1", "[::1]:2")
    )
    assert decode_request(encode_handshake(proposal.offer), peer=DIALLER) == proposal.offer
    assert decode_request(encode_handshake(LaneSummons()), peer=DIALLER) == LaneSummons()
    assert decode_answer(encode_handshake(answer), peer=LISTENER) == answer


GOOD_ANSWER = {
    "type": "answer",
    "ephemeral": bytes(32),
    "nonce": bytes(32),
    "lane_id": bytes(16),
    "addresses": ["127.0.0.1:1"],
}


@pytest.mark.parametrize(
    "change",
    [
        {"ephemeral": bytes(31)},
        {"nonce": bytes(33)},
        {"lane_id": b""},
        {"lane_id": "text"},
        {"addresses": []},
        {"addresses": ["127.0.0.1:1"] * (ADDRESS_LIMIT + 1)},
        {"addresses": ["h" * 200 + ":1"]},
        {"addresses": ["224.0.0.1:99"]},
        {"addresses": [7]},
        {"unknown": 1},
        {"type": "offer"},
    ],
)
def test_answer_refuses_what_does_not_fit(change: dict[str, object]) -> None:
    assert decode_answer(msgspec.msgpack.encode(GOOD_ANSWER), peer=LISTENER).addresses == ("127.0.0.1:1",)
    with pytest.raises(RemoteError) as caught:
        decode_answer(msgspec.msgpack.encode(GOOD_ANSWER | change), peer=LISTENER)
    assert caught.value.peer == LISTENER


@pytest.mark.parametrize("lanes", [0, 17, -1, "2"])
def test_offer_refuses_a_silly_number_of_lanes(lanes: object) -> None:
    wire = msgspec.msgpack.encode({"type": "offer", "ephemeral": bytes(32), "nonce": bytes(32), "lanes": lanes})
    with pytest.raises(RemoteError):
        decode_request(wire, peer=DIALLER)


@example(b"\x81\xa4\x00\x00\x00\x80")  # a key that is no UTF-8
@example(b"\x81\xa1x" + b"\x91" * 2000)  # nested deep
@example(b"\x81\xa4type" + b"\x81\xa1x" * 600)
@given(st.binary(max_size=4096))
def test_handshake_garbage_raises_nothing_else(data: bytes) -> None:
    with pytest.raises(RemoteError):
        decode_request(data, peer=DIALLER)
    with pytest.raises(RemoteError):
        decode_answer(data, peer=LISTENER)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("[2001:db8::1]:65535", ("2001:db8::1", 65535)),
        ("home.example.org:4001", ("home.example.org", 4001)),
    ],
)
def test_address_parses(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected
    assert format_address(*expected) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        ":1",
        "host:0",
        "host:65536",
        "host:-1",
        "host:1e3",
        "host:١",
        "a b:1",
        "-x:1",
        "::1:80",
        "[::1:80",
        "[]:1",
        "0.0.0.0:1",
        "[::]:1",
        "239.1.1.1:1",
        "[ff02::1]:1",
    ],
)
def test_address_refuses(text: str) -> None:
    with pytest.raises(RemoteError):
        parse_address(text)


def test_frames_open_in_order() -> None:
    sealer, opener = pair()
    for number in range(3):
        header = replace(HEADER, chunk=number)
        wire = seal(sealer, header)
        assert FrameHeader.decode(wire[:HEADER_BYTES]) == header
        assert PAYLOAD not in wire
        assert open_frame(opener, wire) == PAYLOAD
    assert sealer.bytes_used == opener.bytes_used == 3 * (len(PAYLOAD) + SEAL_OVERHEAD_BYTES)


def test_no_two_frames_are_sealed_with_one_nonce() -> None:
    sealer, _ = pair()
    frames = 300  # more than a byte counts
    assert len({bytes(seal(sealer, HEADER)) for _ in range(frames)}) == frames


def test_frame_may_be_empty() -> None:
    sealer, opener = pair()
    assert open_frame(opener, seal(sealer, FrameHeader(kind=FrameKind.CLOSE, length=0), b"")) == b""


@pytest.mark.parametrize(
    "change",
    [
        {"kind": FrameKind.CONTRIBUTION},
        {"flags": 2},
        {"attempt": 3},
        {"round": 4},
        {"view": 5},
        {"chunk": 6},
        {"offset": 7},
        {"total": 701},
        {"scope": b"01234568"},
        {"length": 11},
    ],
)
def test_frame_with_a_changed_header_is_refused(change: dict[str, object]) -> None:
    sealer, opener = pair()
    wire = seal(sealer)
    forged = replace(HEADER, **change).encode() + wire[HEADER_BYTES:]  # type: ignore[arg-type]
    with pytest.raises(RemoteError, match="authentication"):
        open_frame(opener, forged)


def test_frame_with_any_bit_changed_is_refused() -> None:
    for position in range(len(PAYLOAD) + SEAL_OVERHEAD_BYTES):
        sealer, opener = pair()
        wire = bytearray(seal(sealer))
        wire[position] ^= 0x80
        with pytest.raises(RemoteError, match="authentication"):
            open_frame(opener, bytes(wire))


@pytest.mark.parametrize("kept", [HEADER_BYTES + TAG_BYTES, HEADER_BYTES + len(PAYLOAD) + TAG_BYTES - 1])
def test_frame_truncated_is_refused(kept: int) -> None:
    sealer, opener = pair()
    with pytest.raises(RemoteError, match="authentication"):
        open_frame(opener, seal(sealer)[:kept])


def test_frames_reordered_are_refused() -> None:
    sealer, opener = pair()
    _, second = seal(sealer), seal(sealer)
    with pytest.raises(RemoteError, match="authentication"):
        open_frame(opener, second)


def test_frame_replayed_is_refused() -> None:
    sealer, opener = pair()
    wire = seal(sealer)
    open_frame(opener, wire)
    with pytest.raises(RemoteError, match="authentication"):
        open_frame(opener, wire)


def test_frame_of_another_lane_is_refused() -> None:
    (other, _), (_, opener) = pair(), pair()
    with pytest.raises(RemoteError, match="authentication"):
        open_frame(opener, seal(other))


def test_frame_of_the_other_direction_is_refused() -> None:
    dialler, _ = agree()
    own = seal(Sealer(dialler.send_key))
    with pytest.raises(RemoteError, match="authentication"):
        open_frame(Opener(dialler.receive_key, peer=LISTENER), own)


def test_opener_opens_nothing_after_a_fault() -> None:
    sealer, opener = pair()
    first, second = seal(sealer), seal(sealer)
    with pytest.raises(RemoteError) as caught:
        open_frame(opener, first[:-1] + bytes([first[-1] ^ 1]))
    assert caught.value.peer == DIALLER
    for wire in (first, second):
        with pytest.raises(LocalError):
            open_frame(opener, wire)


def test_keys_end_before_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LANE_LIMIT_BYTES == 2**40
    frame = len(PAYLOAD) + SEAL_OVERHEAD_BYTES
    monkeypatch.setattr("shoal.swarm.lanes.seal.LANE_LIMIT_BYTES", 3 * frame - 1)
    sealer, opener = pair()
    open_frame(opener, seal(sealer))
    open_frame(opener, seal(sealer))
    with pytest.raises(NetworkError, match="replaced"):
        seal(sealer)
    with pytest.raises(NetworkError, match="replaced"):
        open_frame(opener, bytes(frame))


def test_sizes_that_disagree_are_our_fault() -> None:
    sealer, opener = pair()
    with pytest.raises(LocalError):
        sealer.seal_into(HEADER, b"too short", memoryview(bytearray(200)))
    with pytest.raises(LocalError):
        sealer.seal_into(HEADER, PAYLOAD, memoryview(bytearray(len(PAYLOAD) + SEAL_OVERHEAD_BYTES - 1)))
    with pytest.raises(LocalError):
        opener.open_into(bytes(HEADER_BYTES), memoryview(bytes(40)), memoryview(bytearray(40)))
    assert sealer.bytes_used == opener.bytes_used == 0
