"""Memory of payloads: used again when nobody can see the payload any more, and never before."""

from __future__ import annotations

import gc
import threading
from itertools import pairwise

import numpy as np
import pytest

import shoal.collectives.payloads as payloads_module
from shoal.collectives.codecs import U8
from shoal.collectives.payloads import GRAIN_BYTES, SHARING_BYTES, SLAB_BYTES, PayloadPool

WAIT_S = 30.0


def address(payload: U8) -> int:
    return int(payload.__array_interface__["data"][0])


def test_memory_is_used_again_once_the_payload_is_gone() -> None:
    pool = PayloadPool(1 << 20)
    payload = pool.take(GRAIN_BYTES - 7)
    payload[:] = 1
    where = address(payload)
    del payload
    gc.collect()
    again = pool.take(GRAIN_BYTES)  # of the same grain
    assert (again.size, address(again)) == (GRAIN_BYTES, where)


@pytest.mark.parametrize(
    "view",
    [lambda p: p[3:9], lambda p: p.data[3:9], lambda p: p.view(np.int8), lambda p: np.frombuffer(p.data, np.uint8)],
)
def test_memory_of_which_there_is_any_view_is_nobody_elses(view) -> None:  # type: ignore[no-untyped-def]
    pool = PayloadPool(1 << 20)
    payload = pool.take(GRAIN_BYTES)
    payload[:] = 7
    kept = view(payload)
    del payload
    gc.collect()
    other = pool.take(GRAIN_BYTES)
    other[:] = 0
    assert bytes(kept) == b"\x07" * len(bytes(kept))


def test_payloads_at_once_do_not_share_memory() -> None:
    pool = PayloadPool(1 << 20)
    payloads = [pool.take(GRAIN_BYTES) for _ in range(20)]
    for n, payload in enumerate(payloads):
        payload[:] = n
    assert all((payload == n).all() for n, payload in enumerate(payloads))


def test_no_more_than_the_limit_is_kept() -> None:
    pool = PayloadPool(3 * GRAIN_BYTES)
    payloads = [pool.take(GRAIN_BYTES) for _ in range(10)]
    del payloads
    gc.collect()
    assert pool.spare_bytes() == 3 * GRAIN_BYTES
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
    monkeypatch.setattr(payloads_module, "own_array", lambda *_: pytest.fail("memory is fresh"))
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
    doomed = [pool.take(GRAIN_BYTES)]

    class Collecting(payloads_module._Slab):
        """In the midst of `take`, with its lock held, a payload goes, as when the collector comes by."""

        def __init__(self, room: int, *, shared: bool) -> None:
            doomed.clear()
            super().__init__(room, shared=shared)

    monkeypatch.setattr(payloads_module, "_Slab", Collecting)
    held: list[U8] = []
    thread = threading.Thread(target=lambda: held.append(pool.take(GRAIN_BYTES)), daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert [payload.size for payload in held] == [GRAIN_BYTES], "it waits for itself"
    assert pool.spare_bytes() == GRAIN_BYTES


def test_threads_never_share_what_they_took() -> None:
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
