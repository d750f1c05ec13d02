from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shoal.collectives.codecs import F32
from shoal.collectives.state import frozen
from shoal.collectives.vectors import VectorPool


def address(vector: F32) -> int:
    return int(vector.__array_interface__["data"][0])


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


def test_threads_never_get_the_same_memory() -> None:
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
