"""Memory for vectors as large as the model, used again once nobody refers to the vector that had it.

A round makes two such vectors. Fresh pages for them cost more time than the arithmetic that fills them, so the vectors
of states that are gone give theirs back. Gone is meant literally: a vector's memory is free when the vector has ceased
to exist, and numpy keeps a vector in existence as long as there is a slice, a view or a memoryview of it anywhere, in a
lane's queue or in another thread. No one has to say that he is done with it, and no one can say so too early.

They begin with a page, as files of states want it that go past the page cache.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np

from shoal.collectives.codecs import F32
from shoal.collectives.own_memory import own_array

PAGE_BYTES = 4096
"""Or more: pages are touched one by one."""


class VectorPool:
    """Gives out vectors; keeps the memory of at most `spare_limit` that are gone. Safe in any number of threads."""

    def __init__(self, spare_limit: int) -> None:
        # A vector may cease to exist at any point of any thread, also while this thread takes one: no lock, then, but
        # a deque, whose `append` and `pop` are atomic.
        self._spare: deque[memoryview] = deque(maxlen=spare_limit)

    def take(self, numel: int) -> F32:
        """(numel,) float32 of unspecified content, writeable."""
        memory = self._spare_of(4 * numel)
        if memory is None:
            memory = own_array(4 * numel, np.uint8).data
        # Over a memoryview, and not over an array, so that slices name this vector as their base and keep it.
        vector = np.frombuffer(memory, np.float32)
        weakref.finalize(vector, self._spare.append, memory).atexit = False
        return vector

    def prepare(self, numel: int) -> None:
        """Have memory for as many vectors as are kept, with pages of its own, which `take` is spared to wait for."""
        while len(self._spare) < (self._spare.maxlen or 0):
            memory = own_array(4 * numel, np.uint8)
            memory[::PAGE_BYTES] = 0
            self._spare.append(memory.data)

    def _spare_of(self, size: int) -> memoryview | None:
        """Spare memory of that many bytes; what is of another size is let go."""
        while True:
            try:
                memory = self._spare.pop()
            except IndexError:
                return None
            if memory.nbytes == size:
                return memory
