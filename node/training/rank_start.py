"""Entry point of every process of a trainer's group but the first.

Run by `shoal.node.training.ranks` as ``python -P -m shoal.node.training.rank_start CONTROL STORE PARENT``: two
inherited descriptors, and the process id of rank 0, with which this one ends.
"""

from __future__ import annotations

import sys

from shoal.node.training.ranks import die_with


def main(arguments: list[str]) -> int:
    """Follow rank 0; return the exit status."""
    control, store, parent = map(int, arguments)
    die_with(parent)
    from shoal.node.training.rank_process import serve

    return serve(control, store)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
