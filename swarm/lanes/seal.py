"""Keys of a lane: how two nodes agree on them, and how frames are sealed with them. No sockets here.

    dialler                                      listener
      │  LaneOffer(ephemeral, nonce)                │      both over the authenticated libp2p channel,
      │ ──────────────────────────────────────────► │      which proves the two PeerIds
      │  LaneAnswer(ephemeral, nonce, id, addresses)│
      │ ◄────────────────────────────────────────── │
      │        key per sender = HKDF-SHA256(X25519, salt = transcript)
      │  lane id ‖ sealed HELLO                     │      over a new TCP connection
      │ ──────────────────────────────────────────► │
      │                             sealed HELLO    │
      │ ◄────────────────────────────────────────── │

The transcript holds both ephemerals, both nonces, both PeerIds, the swarm and the lane id, so keys of one
lane are good for nothing else. They belong to one TCP connection and die with it: nonces are counters, and a
counter that started again under an old key would break GCM. Counters are implicit: a frame lost, repeated,
moved or taken from the other direction fails to open.

Source: RFC 7748 (X25519), RFC 5869 (HKDF), NIST SP 800-38D (GCM, section 8.2.1 for counters as nonces).
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import Meta

from shoal.protocol.errors import LocalError, NetworkError, RemoteError
from shoal.protocol.identity import PeerId
from shoal.swarm.lanes.frame import HEADER_BYTES, LARGE_FRAME_BYTES, FrameHeader

KEY_BYTES = 32
NONCE_BYTES = 32  # of the handshake; a frame's nonce is its counter
LANE_ID_BYTES = 16
TAG_BYTES = 16
SEAL_OVERHEAD_BYTES = HEADER_BYTES + TAG_BYTES
LANE_LIMIT_BYTES = 1 << 40  # under one key
ADDRESS_LIMIT = 8
ADDRESS_LIMIT_CHARS = 128
HANDSHAKE_LIMIT_BYTES = 2048  # a handshake message
LANES_PER_PEER_LIMIT = 16  # lanes that may be asked for

_Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_LaneId = Annotated[bytes, Meta(min_length=LANE_ID_BYTES, max_length=LANE_ID_BYTES)]
_Address = Annotated[str, Meta(min_length=1, max_length=ADDRESS_LIMIT_CHARS)]
_Addresses = Annotated[tuple[_Address, ...], Meta(min_length=1, max_length=ADDRESS_LIMIT)]


class LaneVia(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Meeting place of two of whom neither can dial the other: at this third's lanes, with this ticket."""

    relay: Annotated[str, Meta(min_length=1, max_length=ADDRESS_LIMIT_CHARS)]
    ticket: _LaneId


class LanePunch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Both dial at once (`shoal.swarm.reaching.punching`): who saw the sender's port, and where.

    Where the relay is the receiver itself, nobody saw it: of the address only the port counts, which is the sender's
    own, and so it is with the answer's.
    """

    relay: Annotated[str, Meta(min_length=1, max_length=ADDRESS_LIMIT_CHARS)]
    address: _Address


class LaneOffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="offer"):
    """A would-be dialler's half of the key agreement, and how many lanes it wants between the two."""

    ephemeral: _Key
    nonce: _Nonce
    lanes: Annotated[int, Meta(ge=1, le=LANES_PER_PEER_LIMIT)] = 1
    via: LaneVia | None = None
    punch: LanePunch | None = None


class LaneSummons(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="summons"):
    """Asks the other side to dial until there are so many lanes, because the sender cannot reach it."""

    lanes: Annotated[int, Meta(ge=1, le=LANES_PER_PEER_LIMIT)] = 1


class LaneAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="answer"):
    """The listener's half: its key, the id to open the connection with, and where to dial ('host:port')."""

    ephemeral: _Key
    nonce: _Nonce
    lane_id: _LaneId
    addresses: _Addresses


_Message = TypeVar("_Message", LaneAnswer, LaneOffer | LaneSummons)


def encode_handshake(message: LaneOffer | LaneSummons | LaneAnswer) -> bytes:
    """The message in msgpack, at most HANDSHAKE_LIMIT_BYTES."""
    return msgspec.msgpack.encode(message)


def decode_request(data: bytes, *, peer: PeerId) -> LaneOffer | LaneSummons:
    """Decode what `peer` asks of us. Raises RemoteError if it is nothing known."""
    return _decode(data, _REQUESTS, peer)


def decode_answer(data: bytes, *, peer: PeerId) -> LaneAnswer:
    """Decode the answer of `peer` to our offer. Raises RemoteError if it cannot be used."""
    answer = _decode(data, _ANSWERS, peer)
    for address in answer.addresses:
        parse_address(address, peer=peer)
    return answer


_REQUESTS: msgspec.msgpack.Decoder[LaneOffer | LaneSummons] = msgspec.msgpack.Decoder(LaneOffer | LaneSummons)
_ANSWERS: msgspec.msgpack.Decoder[LaneAnswer] = msgspec.msgpack.Decoder(LaneAnswer)


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[_Message], peer: PeerId) -> _Message:
    if len(data) > HANDSHAKE_LIMIT_BYTES:
        raise RemoteError(f"a lane handshake of {len(data)} bytes", peer=peer)
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # msgspec lets the last two through as they are: bad UTF-8 in a key, values nested too deep.
        raise RemoteError(f"a malformed lane handshake: {error}", peer=peer) from None


_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")


def parse_address(text: str, *, peer: str | None = None) -> tuple[str, int]:
    """The host and port of 'host:port' or '[v6]:port'.

    Raises RemoteError if it is no address of one machine (a multicast address, say).
    """
    host, _, port = text.rpartition(":")
    fault = RemoteError(f"{text!r} is not host:port", peer=peer)
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 2**16):
        raise fault
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise fault
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        if _HOST_NAME.fullmatch(host) is None:
            raise fault from None
        return host, int(port)
    if address.is_multicast or address.is_unspecified:
        raise RemoteError(f"{text!r} is not the address of one machine", peer=peer)
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """'host:port', the host in brackets if it is an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneKeys:
    """Keys with which one end of one lane seals and opens. For one TCP connection only.

    relayed: it goes through a third.
    """

    peer: PeerId
    lane_id: bytes
    relayed: bool = False
    send_key: bytes = field(repr=False)
    receive_key: bytes = field(repr=False)


class LaneProposal:
    """The dialler's side of one key agreement: an offer, and the private key to take the answer with."""

    def __init__(
        self,
        *,
        me: PeerId,
        peer: PeerId,
        swarm_id: bytes,
        lanes: int = 1,
        via: LaneVia | None = None,
        punch: LanePunch | None = None,
    ) -> None:
        self._me = me
        self._peer = peer
        self._swarm_id = swarm_id
        self._private = X25519PrivateKey.generate()
        self.offer = LaneOffer(
            ephemeral=self._private.public_key().public_bytes_raw(),
            nonce=secrets.token_bytes(NONCE_BYTES),
            lanes=lanes,
            via=via,
            punch=punch,
        )

    def keys(self, answer: LaneAnswer) -> LaneKeys:
        """The dialler's keys. Raises RemoteError if the answer's key is of low order."""
        transcript = _transcript(self._swarm_id, self._me, self._peer, self.offer, answer)
        secret = _shared_secret(self._private, answer.ephemeral, self._peer)
        first, second = _derive(secret, transcript)
        relayed = self.offer.via is not None
        return LaneKeys(peer=self._peer, lane_id=answer.lane_id, relayed=relayed, send_key=first, receive_key=second)


def accept_offer(
    offer: LaneOffer, *, me: PeerId, peer: PeerId, swarm_id: bytes, addresses: tuple[str, ...]
) -> tuple[LaneAnswer, LaneKeys]:
    """The listener's answer to an offer, and its keys. Raises RemoteError on a key of low order."""
    private = X25519PrivateKey.generate()
    answer = LaneAnswer(
        ephemeral=private.public_key().public_bytes_raw(),
        nonce=secrets.token_bytes(NONCE_BYTES),
        lane_id=secrets.token_bytes(LANE_ID_BYTES),
        addresses=addresses,
    )
    transcript = _transcript(swarm_id, peer, me, offer, answer)
    first, second = _derive(_shared_secret(private, offer.ephemeral, peer), transcript)
    relayed = offer.via is not None
    return answer, LaneKeys(peer=peer, lane_id=answer.lane_id, relayed=relayed, send_key=second, receive_key=first)


def _shared_secret(private: X25519PrivateKey, public: bytes, peer: PeerId) -> bytes:
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise RemoteError("a lane key of low order", peer=peer) from None


def _transcript(swarm_id: bytes, dialler: PeerId, listener: PeerId, offer: LaneOffer, answer: LaneAnswer) -> bytes:
    parts = (
        swarm_id,
        answer.lane_id,
        dialler.encode(),
        listener.encode(),
        offer.ephemeral,
        answer.ephemeral,
        offer.nonce,
        answer.nonce,
    )
    # Every part with its length: no two transcripts read the same.
    return b"".join(len(part).to_bytes(2, "big") + part for part in parts)


def _derive(secret: bytes, transcript: bytes) -> tuple[bytes, bytes]:
    """The dialler's and the listener's sending key."""
    both = HKDF(algorithm=SHA256(), length=2 * KEY_BYTES, salt=transcript, info=b"shoal-lane-v1").derive(secret)
    return both[:KEY_BYTES], both[KEY_BYTES:]


class _Counter:
    """The frame counter of one direction, and the bytes that went under its key."""

    __slots__ = ("bytes_used", "frames")

    def __init__(self) -> None:
        self.frames = 0
        self.bytes_used = 0

    def next_nonce(self, size: int) -> bytes:
        """The 96-bit nonce of the next frame, of `size` bytes on the wire."""
        if self.bytes_used + size > LANE_LIMIT_BYTES:
            raise NetworkError(f"the lane's keys have sealed {LANE_LIMIT_BYTES} bytes; it must be replaced")
        nonce = self.frames.to_bytes(12, "big")
        self.frames += 1
        self.bytes_used += size
        return nonce


class Sealer:
    """Seals one direction of one lane. Not thread-safe: it belongs to the lane's send thread."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._counter = _Counter()

    @property
    def bytes_used(self) -> int:
        """Bytes that left under this key, headers and tags included."""
        return self._counter.bytes_used

    def seal_into(self, header: FrameHeader, payload: memoryview | bytes, out: memoryview) -> int:
        """Write header, ciphertext and tag to `out`; returns how many bytes that is.

        payload: (header.length,) uint8. out: at least header.length + SEAL_OVERHEAD_BYTES long.

        Raises LocalError if sizes disagree, NetworkError when the keys are used up.
        """
        size = header.length + SEAL_OVERHEAD_BYTES
        if len(payload) != header.length or len(out) < size:
            raise LocalError(f"sealing {len(payload)} bytes as {header.length}, with room for {len(out)}")
        head = header.encode()
        nonce = self._counter.next_nonce(size)
        out[:HEADER_BYTES] = head
        self._cipher.encrypt_into(nonce, payload, head, out[HEADER_BYTES:size])
        return size


class Opener:
    """Opens one direction of one lane, in order, until the first fault. Belongs to the receive thread."""

    def __init__(self, key: bytes, *, peer: PeerId) -> None:
        self._cipher = AESGCM(key)
        self._counter = _Counter()
        self._peer = peer
        self._broken = False

    @property
    def bytes_used(self) -> int:
        """Bytes that arrived under this key, headers and tags included."""
        return self._counter.bytes_used

    def open_into(self, head: bytes | bytearray, sealed: memoryview, out: memoryview) -> None:
        """Authenticate `head` and `sealed` as the next frame and write its plaintext to `out`.

        head: the header's bytes as received. sealed: ciphertext and tag. out: TAG_BYTES shorter, writable.

        `out` is written *before* the tag is known to be good: on RemoteError it holds bytes that nobody
        vouches for. Open only into scratch or into a region that is not marked valid.

        Raises RemoteError if the frame is not the next one of this lane; nothing can be opened after that.
        """
        if self._broken:
            raise LocalError("a lane was read on after a frame failed to open")
        if len(head) != HEADER_BYTES or len(out) != len(sealed) - TAG_BYTES or len(out) > LARGE_FRAME_BYTES:
            raise LocalError(f"opening {len(sealed)} sealed bytes into {len(out)}, header of {len(head)}")
        nonce = self._counter.next_nonce(HEADER_BYTES + len(sealed))
        try:
            self._cipher.decrypt_into(nonce, sealed, head, out)
        except InvalidTag:
            self._broken = True
            raise RemoteError("a frame failed authentication", peer=self._peer) from None
