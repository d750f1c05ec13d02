"""Frames as a TAP device hands them over when it lets the kernel leave the cutting to others (virtio, section 5.1.6).

    header (10 bytes): flags, kind, length of headers, bytes per packet, where the checksum starts, where it goes
    Ethernet │ IPv4 │ TCP │ payload of many packets

A burst of one TCP connection comes as one such frame of up to 64 KiB, which costs what one packet costs. What it stands
for on a wire is counted here, and packets are taken out of its midst.

Source: Virtual I/O Device (VIRTIO) 1.2, 5.1.6; RFC 1624 for checksums that change by a difference.
"""

from __future__ import annotations

import struct
from typing import Final

HEADER_BYTES: Final = 10
FRAME_LIMIT_BYTES: Final = HEADER_BYTES + 14 + 65_536
ALONE: Final = 0
"""The kind of a frame that is one packet."""

_ETHERNET_BYTES: Final = 14
_KIND, _PACKET_BYTES, _CHECKED_FROM = 1, struct.Struct("=4xH"), struct.Struct("=6xH")
_IP: Final = HEADER_BYTES + _ETHERNET_BYTES
_U16, _U32 = struct.Struct("!H"), struct.Struct("!I")
_FIN_AND_PUSH, _WINDOW_REDUCED = 0x09, 0x80


def burst(frame: bytes) -> tuple[int, int]:
    """Count the packets that a frame of a kind other than ALONE stands for, and their bytes, headers and all."""
    headers, each = _headers_bytes(frame), _PACKET_BYTES.unpack_from(frame)[0]
    payload = len(frame) - HEADER_BYTES - headers
    packets = max(1, -(-payload // each))
    return packets, packets * headers + payload


def cut(frame: bytes, first: int, end: int) -> bytes:
    """The frame of the packets from `first` to before `end` of a burst, which must be some of them."""
    headers, each = _headers_bytes(frame), int(_PACKET_BYTES.unpack_from(frame)[0])
    start, tcp = HEADER_BYTES + headers, HEADER_BYTES + int(_CHECKED_FROM.unpack_from(frame)[0])
    payload = frame[start + first * each : start + end * each]
    head = bytearray(frame[:start])
    if len(payload) <= each:
        head[_KIND] = ALONE
        head[4:6] = b"\0\0"
    before, after = _U16.unpack_from(head, _IP + 2)[0], headers - _ETHERNET_BYTES + len(payload)
    _U16.pack_into(head, _IP + 2, after)
    _U16.pack_into(head, _IP + 4, (_U16.unpack_from(head, _IP + 4)[0] + first) & 0xFFFF)
    _U16.pack_into(head, _IP + 10, 0)
    _U16.pack_into(head, _IP + 10, 0xFFFF - _sum16(head[_IP:tcp]))
    _U32.pack_into(head, tcp + 4, (_U32.unpack_from(head, tcp + 4)[0] + first * each) & 0xFFFF_FFFF)
    if first:
        head[tcp + 13] &= ~_WINDOW_REDUCED
    if start + end * each < len(frame):
        head[tcp + 13] &= ~_FIN_AND_PUSH
    # The field holds the sum over the pseudo-header alone, in which the length occurs; who sends it adds the rest.
    pseudo = (_U16.unpack_from(head, tcp + 16)[0] + after - before) % 0xFFFF
    _U16.pack_into(head, tcp + 16, pseudo)
    return bytes(head) + payload


def _headers_bytes(frame: bytes) -> int:
    """Size of the headers from Ethernet to TCP."""
    tcp = int(_CHECKED_FROM.unpack_from(frame)[0])
    return tcp + (frame[HEADER_BYTES + tcp + 12] >> 4) * 4


def _sum16(words: bytes | bytearray) -> int:
    total: int = sum(struct.unpack(f"!{len(words) // 2}H", words))
    total = (total & 0xFFFF) + (total >> 16)
    return (total & 0xFFFF) + (total >> 16)
