"""The state of simulated peers: a short vector, the chunks it travels in, and the header that a certificate names.

As of a real state (`shoal.collectives.state`), the certified digest is that of a header, which has the hash of every
chunk. So whoever trusts a certificate checks a header against it, and each chunk against the header, whoever sent it.
What stands in is small: the vector has a few values, and a chunk's payload takes the time of its share of
`Workload.state_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from blake3 import blake3

from shoal.collectives.codecs import F32
from shoal.collectives.fragments import Fragment
from shoal.node.state.states import PIN_S, PINS_LIMIT_STATES, STATES_KEPT
from shoal.protocol.errors import RemoteError
from shoal.protocol.messages import Term, Value, domain_hash
from shoal.swarm.lanes.frame import SCOPE_BYTES

STATE_CHUNKS = 24
"""A state has about so many chunks."""


def chunks_of(state: F32) -> list[bytes]:
    """The chunks of a state (numel,) float32, in order."""
    each = -(-state.size // STATE_CHUNKS)
    return [state[first : first + each].tobytes() for first in range(0, state.size, each)]


@dataclass(frozen=True)
class Header:
    """Everything of a state but its values. base: the hash of the value before the one that certifies it."""

    term: Term
    round: int
    base: bytes
    hashes: tuple[bytes, ...]

    @classmethod
    def of(cls, value: Value, state: F32) -> Header:
        """The header of the state that a value certifies."""
        return cls(value.term, value.round, value.base, _hashes(state))

    @cached_property
    def digest(self) -> bytes:
        """The digest that members vote on."""
        return _digest(self.base, self.hashes)

    def check(self, chunk: int, data: bytes) -> None:
        """Raises RemoteError for other bytes than the certified ones."""
        if blake3(data).digest() != self.hashes[chunk]:
            raise RemoteError(f"chunk {chunk} of the state is not the certified one")

    def assembled(self, chunks: Iterable[bytes]) -> F32:
        """The state of these chunks, all of them and in order."""
        return np.frombuffer(b"".join(chunks), np.float32)


def state_digest(base: bytes, state: F32) -> bytes:
    """The digest of a state in its certificate: it depends on the state's bits and on the certificate before it."""
    return _digest(base, _hashes(state))


def _digest(base: bytes, hashes: Iterable[bytes]) -> bytes:
    return domain_hash("simulated state", base, *hashes)


def _hashes(state: F32) -> tuple[bytes, ...]:
    return tuple(blake3(chunk).digest() for chunk in chunks_of(state))


def next_state(state: F32, update: F32, fragment: Fragment) -> F32:
    """The state after a round of `fragment`: one elementwise subtraction there, rounded to float32."""
    after = state.copy()
    for there, here in fragment.spans():
        np.subtract(state[there], update[here], out=after[there])
    return after


@dataclass(slots=True)
class _Held:
    header: Header
    chunks: list[bytes]
    asked_at: float = float("-inf")


class Cache:
    """The states that a peer can serve: the newest, and older ones for as long as they are asked for."""

    def __init__(self) -> None:
        self._states: dict[int, _Held] = {}

    def put(self, value: Value, state: F32, now: float) -> None:
        """Hold the state that `value` certifies."""
        self._states.pop(value.round, None)
        self._states[value.round] = _Held(Header.of(value, state), chunks_of(state))
        older = list(self._states)[:-STATES_KEPT]
        latest_first = sorted(older, key=lambda round: self._states[round].asked_at, reverse=True)
        for place, round in enumerate(latest_first):
            if place >= PINS_LIMIT_STATES or now - self._states[round].asked_at > PIN_S:
                del self._states[round]

    def begin_serving(self, round: int, now: float) -> Header | None:
        """The header of a state that is held; the state is held for a while more."""
        held = self._states.get(round)
        if held is None:
            return None
        held.asked_at = now
        return held.header

    def lookup(self, scope: bytes, chunk: int, now: float) -> bytes | None:
        """A chunk of the state whose digest begins with `scope`."""
        held = next((one for one in self._states.values() if one.header.digest[:SCOPE_BYTES] == scope), None)
        if held is None or chunk >= len(held.chunks):
            return None
        held.asked_at = now
        return held.chunks[chunk]
