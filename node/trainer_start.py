"""Where a trainer process begins: it imports torch, which takes seconds, and keeps count of them.

Run as ``python -P -m shoal.node.trainer_start CONTROL MEMORY``; see trainer_process.py.
"""

from __future__ import annotations

import importlib
import sys
import time


def main(arguments: list[str]) -> int:
    """Serve one daemon; return the exit status."""
    began = time.perf_counter()
    importlib.import_module("torch")
    import_s = time.perf_counter() - began
    from shoal.node.trainer_process import serve

    return serve(arguments, import_s=import_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
