"""How many arenas a process of many threads has in the end, as the C library itself counts them."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from shoal.cli import run
from shoal.cli.arenas import ARENAS, VARIABLE

COUNT = """
import ctypes, sys, threading
from shoal.cli.arenas import share_arenas

share_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
barrier = threading.Barrier(6)

def allocate():
    barrier.wait()
    libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(50_000))))
    barrier.wait()

threads = [threading.Thread(target=allocate) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""

needs_glibc = pytest.mark.skipif(
    not all(hasattr(ctypes.CDLL(None), name) for name in ("mallopt", "malloc_info")), reason="the C library is another"
)


def arenas(out: Path, **environment: str) -> int:
    """How many arenas a process has after six threads allocated at once."""
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
    subprocess.run([sys.executable, "-c", COUNT, str(out)], env=inherited | environment, check=True, timeout=60)
    return out.read_text().count("<heap nr=")


@needs_glibc
def test_threads_share_few_arenas_unless_the_user_says_how_many(tmp_path: Path) -> None:
    assert arenas(tmp_path / "default") == ARENAS
    assert arenas(tmp_path / "chosen", **{VARIABLE: "4"}) == 4


def test_a_node_has_them_shared_before_anything_of_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def note_run(_: Any) -> None:
        done.append("ran")

    monkeypatch.setattr(run, "share_arenas", lambda: done.append("shared"))
    monkeypatch.setattr(trio, "run", note_run)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    run.run_to_end(None, None)  # type: ignore[arg-type]
    assert done == ["shared", "ran"]
