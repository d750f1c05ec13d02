"""Runs the simulator's seeds in a tree with a planted bug, up to the first that sees it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests.planted.bugs import Bug, plant

SEED_LIMIT_S = 120
"""A run that has not ended by then never does."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """The seed that saw a bug, as what, and how long all seeds up to it took."""

    seed: int
    seen: str
    seconds: float


class NoEnd(Exception):
    """A run takes too long."""


def simulate(tree: Path, planted: Bug, seeds: Iterable[int]) -> Sighting | None:
    """Plant a bug in a tree, run these seeds of the simulator up to the first that sees it, and take it out again.

    Raises NotPlanted.
    """
    began = time.monotonic()
    with plant(tree, planted):
        found = _in_child(tree, list(seeds))
    return None if found is None else Sighting(*found, time.monotonic() - began)


def _in_child(tree: Path, seeds: list[int]) -> tuple[int, str] | None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            os.write(writing, json.dumps(_first_seen(tree, seeds)).encode())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        said = answer.read()
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise RuntimeError("the simulator could not be started with the bug; see above")
    found = json.loads(said)
    return None if found is None else (found[0], found[1])


def _first_seen(tree: Path, seeds: list[int]) -> tuple[int, str] | None:
    """Import what the tree has, and run it."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "shoal")]:
        del sys.modules[name]
    sys.path.insert(0, str(tree))
    from shoal.lab.simulate.scenario import random_scenario
    from shoal.lab.simulate.simulation import run_scenario

    for seed in seeds:
        try:
            with _limited():
                outcome = run_scenario(random_scenario(seed))
        except Exception as error:
            return seed, f"{type(error).__name__}: {error}"
        if outcome.violation:
            return seed, f"{outcome.violation}: {outcome.detail}"
    return None


@contextmanager
def _limited() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise NoEnd(f"not over after {SEED_LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(SEED_LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
