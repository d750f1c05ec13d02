"""Memory for payloads, used again once nobody refers to the payload that had it.

As for the vectors of states (see vectors.py): fresh pages cost more than the sum that is read from them, and a payload
is gone when its array has ceased to exist, whoever held the last slice of it.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np

from shoal.collectives.codecs import U8

GRAIN_BYTES = 4096
"""Sizes are rounded up to it, so that contributions and finals of a chunk can use each other's memory."""


class PayloadPool:
    """Gives out payloads; keeps up to `spare_bytes` of each size that are gone. Safe in any number of threads."""

    def __init__(self, spare_bytes: int) -> None:
        self._spare_bytes = spare_bytes
        # No lock: a payload may cease to exist at any point of any thread, also inside `take`.
        self._spare: dict[int, deque[memoryview]] = {}

    def take(self, size: int) -> U8:
        """(size,) uint8 of unspecified content, writeable."""
        room = -(-size // GRAIN_BYTES) * GRAIN_BYTES
        spare = self._spare.setdefault(room, deque(maxlen=self._spare_bytes // room))
        try:
            memory = spare.pop()
        except IndexError:
            memory = np.empty(room, np.uint8).data
        payload = np.frombuffer(memory, np.uint8)
        weakref.finalize(payload, spare.append, memory).atexit = False
        return payload[:size]
