"""Bursts as TAP devices hand them over: what they stand for, and that each part cut out of one is a burst as sound."""

from __future__ import annotations

import struct

import pytest

from shoal.testnet.links.wan_frames import ALONE, HEADER_BYTES, burst, cut

EACH = 1000
TCP4 = 1
FIN, PUSH, ACK, REDUCED = 0x01, 0x08, 0x10, 0x80
OPTIONS = bytes(12)
HEADERS = 14 + 20 + 20 + len(OPTIONS)
SEQUENCE = 0xFFFF_FF00  # it goes round within the burst
SOURCE, TARGET = bytes([198, 18, 0, 1]), bytes([198, 18, 0, 2])


def folded(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def pseudo_sum(tcp_bytes: int) -> int:
    """RFC 9293, 3.1: of the addresses, the protocol and the length."""
    return folded(SOURCE + TARGET + struct.pack("!HH", 6, tcp_bytes))


def frame(payload: bytes, *, flags: int = FIN | PUSH | ACK | REDUCED) -> bytes:
    """A burst as the kernel writes it: the checksum's field holds the sum over the pseudo-header."""
    tcp_bytes = 20 + len(OPTIONS) + len(payload)
    virtio = struct.pack("=BBHHHH", 1, TCP4, HEADERS, EACH, 34, 16)
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + tcp_bytes, 0xFFFE, 0x4000, 64, 6, 0, SOURCE, TARGET)
    ip = ip[:10] + struct.pack("!H", 0xFFFF - folded(ip)) + ip[12:]
    data_offset = (20 + len(OPTIONS)) // 4 << 4
    tcp = struct.pack("!HHIIBBHHH", 4002, 4002, SEQUENCE, 7, data_offset, flags, 500, pseudo_sum(tcp_bytes), 0)
    return virtio + bytes(12) + b"\x08\x00" + ip + tcp + OPTIONS + payload


def payload_of(size: int) -> bytes:
    return bytes(i * 7 % 251 for i in range(size))


@pytest.mark.parametrize(
    ("size", "packets"), [(1, 1), (EACH, 1), (EACH + 1, 2), (10 * EACH, 10), (10 * EACH + 999, 11)]
)
def test_burst_is_counted_as_the_packets_that_a_wire_would_see(size: int, packets: int) -> None:
    assert burst(frame(payload_of(size))) == (packets, packets * HEADERS + size)


@pytest.mark.parametrize(("first", "end"), [(0, 1), (0, 3), (2, 5), (4, 6), (5, 6), (0, 6)])
def test_part_of_a_burst_is_sound(first: int, end: int) -> None:
    payload = payload_of(5 * EACH + 123)
    part = cut(frame(payload), first, end)
    kind, each = part[1], struct.unpack_from("=H", part, 4)[0]
    ip, tcp, rest = part[24:44], part[44:76], part[76:]
    assert rest == payload[first * EACH : end * EACH]
    assert (kind, each) == ((ALONE, 0) if end - first == 1 else (TCP4, EACH))
    assert len(part) == HEADER_BYTES + 14 + struct.unpack_from("!H", ip, 2)[0]
    assert folded(ip) == 0xFFFF  # RFC 1071: a header with its checksum adds up to this
    assert struct.unpack_from("!H", ip, 4)[0] == (0xFFFE + first) % 2**16
    assert struct.unpack_from("!I", tcp, 4)[0] == (SEQUENCE + first * EACH) % 2**32
    assert struct.unpack_from("!H", tcp, 16)[0] % 0xFFFF == pseudo_sum(len(tcp) + len(rest)) % 0xFFFF
    assert tcp[13] == ACK | (REDUCED if first == 0 else 0) | (FIN | PUSH if end == 6 else 0)


def test_the_whole_of_a_burst_is_the_burst() -> None:
    whole = frame(payload_of(3 * EACH))
    assert cut(whole, 0, 3) == whole
