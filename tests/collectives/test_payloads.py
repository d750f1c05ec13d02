"""Memory of payloads: used again when nobody can see the payload any more, and never before."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from shoal.collectives.codecs import U8
from shoal.collectives.payloads import GRAIN_BYTES, PayloadPool


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
    assert sum(memory.nbytes for memory in pool._spare[GRAIN_BYTES]) == 3 * GRAIN_BYTES
    assert PayloadPool(0).take(1).size == 1
