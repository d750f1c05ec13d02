"""A reduction of a gigabyte between two processes, and what memory it takes beyond its input and its output."""

from __future__ import annotations

import json
import subprocess
import sys

import psutil  # type: ignore[import-untyped]
import pytest

NUMEL = 250_000_000
NEEDED_BYTES = 6 << 30
EXTRA_LIMIT_BYTES = 64 << 20
DEADLINE_S = 150.0


@pytest.mark.long
@pytest.mark.skipif(psutil.virtual_memory().available < NEEDED_BYTES, reason="needs 6 GiB of free memory")
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_gigabyte_is_exact_and_takes_little_memory_beside_input_and_output() -> None:
    command = [sys.executable, "-m", "tests.collectives.gigabyte_peer"]
    listener = subprocess.Popen([*command, "0", "0", str(NUMEL)], stdout=subprocess.PIPE, text=True)
    try:
        assert listener.stdout is not None
        port = listener.stdout.readline().strip()
        dialler = subprocess.run(
            [*command, "1", port, str(NUMEL)], capture_output=True, text=True, timeout=DEADLINE_S, check=True
        )
        told = [json.loads(dialler.stdout), json.loads(listener.communicate(timeout=DEADLINE_S)[0])]
    finally:
        listener.kill()
        listener.wait()
    for peer in told:
        assert (peer["wrong_values"], peer["unsound"], peer["coverage"]) == (0, 0, 1.0)
        assert peer["extra_bytes"] <= EXTRA_LIMIT_BYTES, told
