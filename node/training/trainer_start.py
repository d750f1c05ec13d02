"""Entry point of a trainer process: it imports torch, which takes seconds, and keeps count of them.

Run as ``python -P -m shoal.node.training.trainer_start CONTROL MEMORY PROCESSES``; see trainer_process.py.
"""

from __future__ import annotations

import importlib
import sys
import time

from shoal.node.training.ranks import Ranks


def main(arguments: list[str]) -> int:
    """Serve one daemon; return the exit status. Other processes of the trainer import torch at the same time."""
    control, memory, processes = map(int, arguments)
    ranks = Ranks(processes) if processes > 1 else None
    began = time.perf_counter()
    importlib.import_module("torch")
    import_s = time.perf_counter() - began
    from shoal.node.training.trainer_process import serve

    return serve(control, memory, import_s=import_s, ranks=ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
