"""Probes: how one node shows another that it was reached at a port, without a word of what the other shall say.

    expects:  secret ──(over the authenticated connection)──► dials
              listener ◄── 16 bytes, derived from the secret and the port ──  a fresh TCP connection
              listener ──── 32 bytes, derived likewise ────────────────────►  so it was reached, and nobody else

Every listener of a node takes the knocks that it expects; they begin with a zero, as libp2p's greeting does not. Who is
sent to a stranger's port sends that stranger 16 bytes of a hash, and hears no proof.
"""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass, field

import blake3
import trio

from shoal.protocol.errors import NetworkError

SECRET_BYTES = 32
PROBE_BYTES = 16
PROOF_BYTES = 32
PROBE_FIRST_BYTE = 0
EXPECTED_LIMIT = 256
ANSWER_DEADLINE_S = 5.0
PEEK_DEADLINE_S = 5.0


def probe_of(secret: bytes, port: int) -> bytes:
    """Bytes of a dial-back probe, PROBE_BYTES of them."""
    return bytes([PROBE_FIRST_BYTE]) + _derive(secret, b"knock", port)[: PROBE_BYTES - 1]


def proof_of(secret: bytes, port: int) -> bytes:
    """Bytes that answer the probe, PROOF_BYTES of them."""
    return _derive(secret, b"proof", port)


def _derive(secret: bytes, what: bytes, port: int) -> bytes:
    return blake3.blake3(what + port.to_bytes(2, "big"), key=secret).digest()


@dataclass(slots=True, kw_only=True)
class Expected:
    """Probes at these ports, as the world numbers them, under one secret; `came`: port to the knocker's IP address."""

    ports: tuple[int, ...]
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)
    came: dict[int, str] = field(default_factory=dict)


class DialBackProbes:
    """The knocks that one node expects, at all its listeners."""

    def __init__(self) -> None:
        self._expected: dict[bytes, tuple[Expected, int]] = {}

    def expect(self, expected: Expected) -> None:
        """Answer these knocks from now on. Raises NetworkError where too many are expected already."""
        if len(self._expected) + len(expected.ports) > EXPECTED_LIMIT:
            raise NetworkError(f"{EXPECTED_LIMIT} knocks are expected already")
        self._expected.update({probe_of(expected.secret, port): (expected, port) for port in expected.ports})

    def forget(self, expected: Expected) -> None:
        """Answer these no more."""
        for port in expected.ports:
            self._expected.pop(probe_of(expected.secret, port), None)

    def expects(self, probe: bytes) -> bool:
        """True if `answer` would take a connection that began with these bytes for an expected probe."""
        return probe in self._expected

    async def answer(self, stream: trio.SocketStream, probe: bytes) -> bool:
        """Answer a connection that began with these bytes, if they are an expected knock; whether they are.

        Raises trio.BrokenResourceError where it broke.
        """
        found = self._expected.get(probe)
        if found is None:
            return False
        expected, port = found
        expected.came[port] = str(stream.socket.getpeername()[0]).removeprefix("::ffff:")
        await stream.send_all(proof_of(expected.secret, port))
        return True

    async def took(self, stream: trio.SocketStream) -> bool:
        """Take a connection that begins as a probe and return True; else return False, and read nothing of it."""
        if not self._expected:
            return False
        try:
            with trio.fail_after(PEEK_DEADLINE_S):
                probe = await stream.socket.recv(PROBE_BYTES, socket.MSG_PEEK)
                if probe not in self._expected:
                    return False
                await stream.receive_some(PROBE_BYTES)
                return await self.answer(stream, probe)
        except (OSError, trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError):
            return False  # whoever reads next sees the same


async def probe(host: str, port: int, secret: bytes, *, deadline_s: float = ANSWER_DEADLINE_S) -> bool:
    """Return True if who listens at this IP address and port answers a probe under `secret` in time."""
    with trio.move_on_after(deadline_s):
        try:
            async with await trio.open_tcp_stream(host, port) as stream:
                await stream.send_all(probe_of(secret, port))
                proof = bytearray()
                while len(proof) < PROOF_BYTES and (more := await stream.receive_some(PROOF_BYTES - len(proof))):
                    proof += more
                return secrets.compare_digest(bytes(proof), proof_of(secret, port))
        except (OSError, trio.BrokenResourceError):
            return False
    return False
