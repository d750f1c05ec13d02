"""Memory: what is asked for is what one gets, and it is used again when nobody can see what lay in it, never before."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.collectives import memory
from shoal.collectives.codecs import F32, U8
from shoal.collectives.memory import (
    HUGE_BYTES,
    PAGE_BYTES,
    SHARING_BYTES,
    SLAB_BYTES,
    PayloadPool,
    VectorPool,
    own_array,
)
from shoal.collectives.state import frozen

WAIT_S = 30.0
SMAPS = Path("/proc/self/smaps_rollup")
GROWTH_LIMIT_MIB = 6.0
"""Stacks and small things of threads that came and went; the arrays of one thread take more than 3 MiB."""

COME_AND_GO = """
import threading
from pathlib import Path
import numpy as np
from shoal.collectives.codecs import SPAN_VALUES, codec
from shoal.collectives.aggregate import Aggregate, combine
from shoal.collectives.aggregate import Term

encoded = codec("int8").encode(np.linspace(-1, 1, SPAN_VALUES, dtype=np.float32))
terms = [Term(place, 1, encoded) for place in range(3)]
outs = np.ones((8, SPAN_VALUES), np.float32)

def anonymous_mib():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024

def together(threads):
    barrier = threading.Barrier(threads)

    def combine_one(out):
        barrier.wait()
        combine(codec("int8"), terms, Aggregate(bounded=True), out)
        barrier.wait()  # nobody ends, and leaves memory to others, before all have theirs

    working = [threading.Thread(target=combine_one, args=(outs[n],)) for n in range(threads)]
    for thread in working:
        thread.start()
    for thread in working:
        thread.join()

together(1)
before = anonymous_mib()
for _ in range(3):
    together(8)
print(anonymous_mib() - before)
assert (outs == outs[0]).all() and not (outs == 1).all()
"""


def test_an_array_has_the_shape_and_type_asked_for_is_zero_and_can_be_written() -> None:
    for numel, dtype in ((0, np.float32), (1, np.int8), (1000, np.float64), (5000, "<u2")):
        array = own_array(numel, dtype)
        assert (array.shape, array.dtype) == ((numel,), np.dtype(dtype))
        assert not array.any()
        array[:] = 1
        assert array.sum() == numel


@pytest.mark.parametrize("size", [1, 4096, HUGE_BYTES - 1, HUGE_BYTES, HUGE_BYTES + 12_345])
def test_an_array_of_any_size_begins_with_a_page(size: int) -> None:
    array = own_array(size, np.uint8)
    assert array.shape == (size,)
    assert array.ctypes.data % 4096 == 0
    array[[0, -1]] = 1, 2
    assert array[-1] == 2


def test_memory_lasts_as_long_as_anything_refers_to_it_and_no_longer() -> None:
    array = own_array(1 << 20, np.float32)
    gone = weakref.ref(array)
    part = array[5:]
    array[:] = 7
    del array
    assert gone() is not None
    assert (part == 7).all()
    del part
    gc.collect()
    assert gone() is None


@pytest.mark.skipif(not SMAPS.exists(), reason="only Linux says what memory a process has")
def test_threads_that_are_gone_leave_no_working_memory_behind() -> None:
    ended = subprocess.run([sys.executable, "-c", COME_AND_GO], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) < GROWTH_LIMIT_MIB


# --- vectors ---


def address(array: F32 | U8) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_of_a_vector_that_is_gone_is_used_again() -> None:
    pool = VectorPool(2)
    vector = pool.take(1000)
    assert (vector.shape, vector.dtype, vector.flags.writeable) == ((1000,), np.float32, True)
    first = address(vector)
    del vector
    assert address(pool.take(1000)) == first


def test_vectors_that_are_there_share_no_memory() -> None:
    pool = VectorPool(2)
    vectors = [pool.take(100) for _ in range(5)]
    for n, vector in enumerate(vectors):
        vector[:] = n
    assert [float(vector.sum()) for vector in vectors] == [0, 100, 200, 300, 400]


HOLDERS: dict[str, Callable[[F32], Any]] = {
    "slice": lambda vector: vector[10:20],
    "slice of a slice": lambda vector: vector[10:20][2:4],
    "one element's view": lambda vector: vector[3:4].view(np.uint32),
    "memoryview": lambda vector: vector.data,
    "memoryview of a slice, as lanes queue it": lambda vector: vector[10:20].data.cast("B")[4:8],
    "array over a memoryview": lambda vector: np.frombuffer(vector[10:20].data, np.uint8),
    "reshaped": lambda vector: vector.reshape(10, -1)[2],
    "tensor": torch.from_numpy,
    "frozen slice": lambda vector: frozen(vector)[1:2],
}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_is_not_used_again_while_any_part_of_it_is_referred_to(holder: str) -> None:
    pool = VectorPool(2)
    vector = pool.take(100)
    first = address(vector)
    held = HOLDERS[holder](vector)
    del vector
    assert address(pool.take(100)) != first
    del held
    assert first in {address(one) for one in [pool.take(100), pool.take(100)]}


def test_spare_memory_is_bounded_and_of_one_size() -> None:
    pool = VectorPool(2)
    vectors = [pool.take(100) for _ in range(5)]
    del vectors
    assert len(pool._spare) == 2
    small = pool.take(50)
    assert small.shape == (50,)
    assert not pool._spare


def test_threads_never_get_the_same_vector() -> None:
    pool, failures = VectorPool(3), []

    def work(number: int) -> None:
        for _ in range(300):
            vector = pool.take(64)
            vector[:] = number
            part = vector[1:3]
            del vector
            if part.tolist() != [number, number]:
                failures.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# --- payloads ---


def test_memory_of_a_payload_that_is_gone_is_used_again() -> None:
    pool = PayloadPool(1 << 20)
    payload = pool.take(PAGE_BYTES - 7)
    payload[:] = 1
    where = address(payload)
    del payload
    gc.collect()
    again = pool.take(PAGE_BYTES)  # of the same grain
    assert (again.size, address(again)) == (PAGE_BYTES, where)


@pytest.mark.parametrize(
    "view",
    [lambda p: p[3:9], lambda p: p.data[3:9], lambda p: p.view(np.int8), lambda p: np.frombuffer(p.data, np.uint8)],
)
def test_memory_of_which_there_is_any_view_is_nobody_elses(view) -> None:  # type: ignore[no-untyped-def]
    pool = PayloadPool(1 << 20)
    payload = pool.take(PAGE_BYTES)
    payload[:] = 7
    kept = view(payload)
    del payload
    gc.collect()
    other = pool.take(PAGE_BYTES)
    other[:] = 0
    assert bytes(kept) == b"\x07" * len(bytes(kept))


def test_payloads_at_once_do_not_share_memory() -> None:
    pool = PayloadPool(1 << 20)
    payloads = [pool.take(PAGE_BYTES) for _ in range(20)]
    for n, payload in enumerate(payloads):
        payload[:] = n
    assert all((payload == n).all() for n, payload in enumerate(payloads))


def test_no_more_than_the_limit_is_kept() -> None:
    pool = PayloadPool(3 * PAGE_BYTES)
    payloads = [pool.take(PAGE_BYTES) for _ in range(10)]
    del payloads
    gc.collect()
    assert pool.spare_bytes() == 3 * PAGE_BYTES
    assert PayloadPool(0).take(1).size == 1


def test_large_payloads_share_slabs_and_no_byte_of_them() -> None:
    room = 5 << 20
    pool = PayloadPool(4 * SLAB_BYTES)
    payloads = [pool.take(room) for _ in range(9)]  # three slabs
    begins = sorted(address(payload) for payload in payloads)
    assert all(after - before >= room for before, after in pairwise(begins))
    assert pool.spare_bytes() == 3 * room


def test_memory_of_a_slab_is_used_again_before_another_is_begun() -> None:
    room = SLAB_BYTES // 4
    pool = PayloadPool(4 * SLAB_BYTES)
    payloads = [pool.take(room) for _ in range(8)]
    gone = {address(payloads[2]), address(payloads[5])}
    del payloads[5], payloads[2]
    again = [pool.take(room) for _ in range(2)]
    assert {address(payload) for payload in again} == gone


def test_an_empty_slab_is_let_go_beyond_the_limit_and_one_in_use_is_not() -> None:
    room = SLAB_BYTES // 4
    pool = PayloadPool(SLAB_BYTES)
    payloads = [pool.take(room) for _ in range(12)]  # three slabs
    kept = payloads[5]
    kept[:] = 7
    del payloads
    assert pool.spare_bytes() == 3 * room + SLAB_BYTES
    assert (kept == 7).all()


def test_as_much_is_prepared_as_was_taken_although_all_of_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    room = SLAB_BYTES // 4
    pool = PayloadPool(4 * SLAB_BYTES)
    held = [pool.take(room) for _ in range(10)]
    pool.prepare()
    assert pool.spare_bytes() >= 10 * room
    monkeypatch.setattr(memory, "own_array", lambda *_: pytest.fail("memory is fresh"))
    held += [pool.take(room) for _ in range(10)]
    assert len({address(payload) for payload in held}) == 20


def test_nothing_is_prepared_where_there_is_room_or_nothing_was_taken() -> None:
    room = SLAB_BYTES // 4
    pool = PayloadPool(4 * SLAB_BYTES)
    held = [pool.take(room) for _ in range(4)]
    del held
    pool.prepare()
    assert pool.spare_bytes() == SLAB_BYTES
    assert all(pool.take(room).size == room for _ in range(4))
    pool.prepare()
    pool.prepare()  # nothing was taken since
    assert pool.spare_bytes() == SLAB_BYTES


def test_no_more_is_prepared_than_is_kept() -> None:
    room = SLAB_BYTES // 4
    pool = PayloadPool(SLAB_BYTES)
    held = [pool.take(room) for _ in range(12)]
    pool.prepare()
    assert len(held) == 12
    assert pool.spare_bytes() == SLAB_BYTES


def test_what_ceases_to_exist_while_the_pool_is_at_work_is_sorted_in_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PayloadPool(1 << 20)
    doomed = [pool.take(PAGE_BYTES)]

    class Collecting(memory._Slab):
        """In the midst of `take`, with its lock held, a payload goes, as when the collector comes by."""

        def __init__(self, room: int, *, shared: bool) -> None:
            doomed.clear()
            super().__init__(room, shared=shared)

    monkeypatch.setattr(memory, "_Slab", Collecting)
    held: list[U8] = []
    thread = threading.Thread(target=lambda: held.append(pool.take(PAGE_BYTES)), daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert [payload.size for payload in held] == [PAGE_BYTES], "it waits for itself"
    assert pool.spare_bytes() == PAGE_BYTES


def test_threads_never_share_a_payload() -> None:
    pool = PayloadPool(2 * SLAB_BYTES)
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(200):
            some = [pool.take(SHARING_BYTES) for _ in range(1 + turn % 3)]
            for payload in some:
                payload[:8] = number
            wrong.extend(1 for payload in some if (payload[:8] != number).any())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.spare_bytes() == SLAB_BYTES
