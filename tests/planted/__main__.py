"""`python -m tests.planted`: plant one bug after the other, and run the test that has to see it.

Words after it choose areas, or bugs by a part of their name.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path

from tests.planted import BUGS
from tests.planted.bugs import THIRD_PARTY, Bug, NotPlanted, copy_tree, see


def chosen(wanted: list[str]) -> list[tuple[str, Bug]]:
    """The bugs that are asked for, each with its area; all of them if nothing is."""
    every = [(area, one) for area, some in BUGS.items() for one in some]
    return [(area, one) for area, one in every if not wanted or any(w == area or w in one.name for w in wanted)]


def main(wanted: list[str]) -> int:
    """Plant what is wanted; 1 if any of it was not seen."""
    for name in THIRD_PARTY:
        importlib.import_module(name)
    missed, bugs = 0, chosen(wanted)
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        for area, planted in bugs:
            try:
                run = see(Path(folder), planted)
                print(f"seen      {run.seconds:5.1f} s  {area}: {planted.name}", flush=True)
            except (AssertionError, NotPlanted) as error:
                missed += 1
                print(f"NOT SEEN           {area}: {planted.name}: {error}", flush=True)
    print(f"{len(bugs) - missed} of {len(bugs)} planted bugs are seen")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
