"""What a node reads of itself for its status: processor and memory, with those that it started."""

from __future__ import annotations

import subprocess
import sys

from shoal.node.status import USAGE_PERIOD_S, Usage

BURN = """
import sys, time
block = bytearray(64 << 20)
for place in range(0, len(block), 4096): block[place] = 1
while time.process_time() < 0.5: pass
print(flush=True)
sys.stdin.read()
"""


def test_usage_counts_what_a_trainer_takes() -> None:
    now = [100.0]
    usage = Usage(clock=lambda: now[0])
    cores, alone = usage.now()
    assert cores == 0
    assert alone > 1 << 20
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdin is not None
        trainer.stdout.readline()
        assert usage.now() == (cores, alone), "it is read once in a while"
        now[0] += 2 * USAGE_PERIOD_S
        cores, together = usage.now()
        assert cores >= 0.4 / (2 * USAGE_PERIOD_S)
        assert together - alone > 48 << 20
        trainer.stdin.close()
    now[0] += USAGE_PERIOD_S
    assert usage.now()[1] - alone < 32 << 20
    assert usage.now()[0] >= 0
    assert usage.uptime_s == 3 * USAGE_PERIOD_S
