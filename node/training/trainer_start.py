"""Entry point of a trainer process: it imports torch, which takes seconds, and keeps count of them.

It gives way to daemons: what a trainer computes takes seconds and more, and loses little by a moment in which a daemon
answers its peers; a daemon that a trainer keeps from answering is held for slow, or dead, by all of them.

Run as ``python -P -m shoal.node.training.trainer_start CONTROL MEMORY PROCESSES``; see trainer_process.py.
"""

from __future__ import annotations

import importlib
import os
import sys
import time

from shoal.node.training.ranks import Ranks

GIVES_WAY = 5
"""Steps of priority below the daemon's (nice): where both want the processor the daemon has three parts of four."""


def main(arguments: list[str]) -> int:
    """Serve one daemon; return the exit status. Other processes of the trainer import torch at the same time."""
    control, memory, processes = map(int, arguments)
    os.nice(GIVES_WAY)
    ranks = Ranks(processes) if processes > 1 else None
    began = time.perf_counter()
    importlib.import_module("torch")
    import_s = time.perf_counter() - began
    from shoal.node.training.trainer_process import serve

    return serve(control, memory, import_s=import_s, ranks=ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
