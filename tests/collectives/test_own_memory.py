"""Threads' working memory: that it is what is asked for, and that the system has it back when the threads are gone."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from shoal.collectives.own_memory import HUGE_BYTES, own_array

SMAPS = Path("/proc/self/smaps_rollup")
GROWTH_LIMIT_MIB = 6.0
"""Stacks and small things of threads that came and went; the arrays of one thread take more than 3 MiB."""

COME_AND_GO = """
import threading
from pathlib import Path
import numpy as np
from shoal.collectives.codecs import SPAN_VALUES, codec
from shoal.collectives.robust import Aggregate, combine
from shoal.collectives.summing import Term

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
