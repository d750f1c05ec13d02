"""`python -m tests.planted`: plant one bug after the other, and run the test that has to see it.

Words after it choose areas, or bugs by a part of their name. With `--seeds 300` the simulator's seeds 1 to 300 have to
see what is chosen, in place of a test, and the first that does is printed. Each worker has a tree of its own.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.planted import BUGS
from tests.planted.bugs import THIRD_PARTY, Bug, NotPlanted, copy_tree, see
from tests.planted.member import SEEDS
from tests.planted.simulated import simulate


def chosen(wanted: list[str], *, seeds: bool) -> list[tuple[str, Bug]]:
    """The bugs that are asked for, each with its area; all of them if nothing is.

    seeds: of what the simulator sees; "member" are then those of other areas too.
    """
    every = [(area, one) for area, some in BUGS.items() for one in some]
    if seeds:
        every = [("member" if one.name in SEEDS else area, one) for area, one in every]

    def is_wanted(word: str, area: str, one: Bug) -> bool:
        return word == area if word in BUGS else word in one.name

    return [(area, one) for area, one in every if not wanted or any(is_wanted(word, area, one) for word in wanted)]


def look(tree: Path, planted: Bug, seeds: int | None) -> str:
    """Plant a bug, and say how it was seen. Raises AssertionError if it was not, NotPlanted."""
    if seeds is None and planted.test:
        return f"{see(tree, planted).seconds:5.1f} s"
    some = range(1, seeds + 1) if seeds is not None else (SEEDS[planted.name],)
    seen = simulate(tree, planted, some)
    assert seen is not None, f"by none of {len(some)} seeds"
    return f"{seen.seconds:5.1f} s, seed {seen.seed} ({seen.seen})"


def in_own_tree(folder: Path, area: str, planted: Bug, seeds: int | None) -> tuple[bool, str]:
    """Plant a bug in this worker's tree below `folder`; whether it was seen, and a line about it."""
    tree = folder / str(os.getpid())
    if not tree.exists():
        copy_tree(tree)
    try:
        return True, f"seen      {area}: {planted.name}: {look(tree, planted, seeds)}"
    except (AssertionError, NotPlanted) as error:
        return False, f"NOT SEEN  {area}: {planted.name}: {error}"


def main(arguments: list[str]) -> int:
    """Plant what is wanted; 1 if any of it was not seen."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("--seeds", type=int, help="of the simulator, from 1 on")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("wanted", nargs="*")
    asked = parser.parse_args(arguments)
    for name in THIRD_PARTY:
        importlib.import_module(name)
    bugs = chosen(asked.wanted, seeds=asked.seeds is not None)
    forked = multiprocessing.get_context("fork")  # with all that was imported above
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(asked.workers, forked) as workers:
        looks = [workers.submit(in_own_tree, Path(folder), area, planted, asked.seeds) for area, planted in bugs]
        missed = 0
        for done in looks:
            seen, line = done.result()
            missed += not seen
            print(line, flush=True)
    print(f"{len(bugs) - missed} of {len(bugs)} planted bugs are seen")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
