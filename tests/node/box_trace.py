"""Traces of swarms in a box: everything that their nodes do, in order, whatever their parts are called inside.

What a node lets out, does to its disk, orders of its trainer and of its reductions, and tells its user is one line
each. A box is a function of its seed and of the order of sets (so PYTHONHASHSEED is 0 here), and two builds of the node
that decide alike have the same traces. The digests of those of today are in `traces.txt`; `python -m
tests.node.box_trace` makes them anew, for a change that is meant to decide otherwise. With `--into FOLDER` it writes
the traces themselves, to be compared, and records nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from blake3 import blake3

from shoal.node.outcome import PhaseChanged
from shoal.protocol.inputs import Amend, GoBack, GoOnWithout, SetPaused, Wanted, Withdraw
from shoal.protocol.messages import Certificate, Message
from shoal.protocol.wire import canonical
from tests.node import swarm_in_a_box
from tests.node.box_life import Life
from tests.node.box_net import BoxLinks
from tests.node.box_reduce import BoxReduce
from tests.node.box_trainer import BoxTrainer
from tests.node.simulated_disk import Disk, Disks, Survival
from tests.node.swarm_in_a_box import Box
from tests.node.test_box_failures import killed_at_random

FILE = Path(__file__).with_name("traces.txt")
FIXED_ORDER = {**os.environ, "PYTHONHASHSEED": "0"}
WHIM_S = (0.2, 2.0)
WHIMS = 3
NUMBERED = r"\.\d+\.partial$"


class Trace(list[str]):
    """Lines, as they are made."""

    @property
    def digest(self) -> str:
        """Of all of them."""
        return blake3("\n".join(self).encode()).hexdigest(16)


def _mark(thing: object) -> str:
    """A few letters for a message or an argument. Certificates of one value are the same, whoever signed them."""
    if isinstance(thing, Certificate):
        return f"Certificate {thing.value.hash.hex()[:12]}"
    if isinstance(thing, Message):
        return f"{type(thing).__name__} {blake3(canonical(thing)).hexdigest(6)}"
    if isinstance(thing, msgspec.Struct):
        shown = ((name, getattr(thing, name)) for name in thing.__struct_fields__)
        told = (f"{name}={value}" for name, value in shown if name not in ("path", "swarm"))
        return f"{type(thing).__name__} {' '.join(told)}" if len(thing.__struct_fields__) < 12 else type(thing).__name__
    return blake3(repr(thing).encode()).hexdigest(4) if isinstance(thing, frozenset | bytes) else ""


class _Told(list[Any]):
    """What the user is told, noted as it comes."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def append(self, told: Any) -> None:
        phase = f" {told.phase} {told.round}" if isinstance(told, PhaseChanged) else ""
        self._note(f"tells {type(told).__name__}{phase}")
        super().append(told)


@contextmanager
def traced(patch: pytest.MonkeyPatch) -> Iterator[Trace]:
    """Inside, everything that nodes in boxes do is noted."""
    trace = Trace()

    def note(number: object, what: str) -> None:
        trace.append(f"{number} {what}")

    def before(owner: type[Any], name: str, told: Callable[..., tuple[object, str]]) -> None:
        plain = getattr(owner, name)

        def noted(self: Any, *arguments: Any, **options: Any) -> Any:
            note(*told(self, *arguments, **options))
            return plain(self, *arguments, **options)

        patch.setattr(owner, name, noted)

    def lets_out(links: Any, message: Message, peers: Sequence[str]) -> tuple[object, str]:
        to = ",".join(str(links._life.box.peers.index(peer)) for peer in peers)
        return links._life.number, f"says {_mark(message)} to {to}"

    def builds(life: Life, store: object) -> tuple[object, str]:
        life.told = _Told(partial(note, life.number))
        return life.number, "is built"

    def counts(disk: Disk, what: str, name: str) -> tuple[object, str]:
        """Numbers of partial files go on from course to course."""
        return disk.root.name.removeprefix("node"), f"disk {what} {re.sub(NUMBERED, '.partial', name)}"

    before(Disk, "count", counts)
    before(BoxLinks, "_let_out", lets_out)
    before(BoxTrainer, "send", lambda trainer, order: (trainer._tell.__self__.number, f"orders {_mark(order)}"))
    before(Life, "build", builds)
    for name in ("start", "repair", "close_off", "stop", "forget", "fetch"):
        told = partial(_reduces, name)
        before(BoxReduce, name, told)
    yield trace


def _reduces(name: str, reduce: Any, *arguments: Any) -> tuple[object, str]:
    return reduce._life.number, f"reduction {name} {' '.join(_mark(argument) for argument in arguments)}".rstrip()


# -- courses of events ---------------------------------------------------------------------------------------------


async def grows(box: Box) -> None:
    """Three founders; then a fourth node joins, leaves, and comes back."""
    for number in range(3):
        box.start(number)
    await box.until_round(2, 0, 1, 2)
    life = box.start(3)
    await box.until(lambda: 3 in box.contributors(box.node(0).round))
    life.engine.ask_to_leave()
    await life.over.wait()
    await trio.sleep(box.rng.uniform(0, 1))
    box.start(3)
    await box.until_round(box.node(0).round + 2)


async def goes_back_and_amends(box: Box) -> None:
    """A user rolls back, another amends, and the authority goes on without a node that is gone for good."""
    box.start_all()
    await box.until_round(3)
    node = box.node(0)
    await node.engine.obey(GoBack(1))
    await box.until(lambda: all(life.up and life.chain.head.term.rollbacks == 1 for life in box.lives if life))
    await box.until(lambda: all(life.state_round >= 3 for life in box.lives if life))
    other = box.node(1)
    for order in (Amend(("round.grace_s=1.5",)), Withdraw(Wanted), Amend(("round.grace_s=1.5",))):
        await other.engine.obey(order)
    await box.until_round(node.round + 1)
    for number in (1, 2):
        box.node(number).cut()
        await box.node(number).over.wait()
    await box.until(lambda: node.engine.phase == "no quorum")
    head = node.chain.head
    await node.engine.obey(GoOnWithout(frozenset(box.peers[1:])))
    await box.until(lambda: node.chain.head.term.rebases == 1 and node.round >= head.round + 2)
    box.start(1, Survival.SYNCED)
    box.start(2, Survival.SOME)
    await box.until_round(node.round + 2)


async def has_whims(box: Box) -> None:
    """Users pause, go on, leave and return; processes are killed; links are slow for a while."""
    rng = random.Random(box.seed)
    box.start_all()
    await box.until_round(1)
    for _ in range(WHIMS):
        number = rng.randrange(len(box.lives))
        await rng.choice((_pauses, _leaves, _is_killed, _is_slow))(box, number, rng)
        await trio.sleep(rng.uniform(*WHIM_S))
    await box.until_round(max(life.round for life in box.living()) + 2)


async def _pauses(box: Box, number: int, rng: random.Random) -> None:
    life = box.node(number)
    life.engine.put(SetPaused(True))
    await trio.sleep(rng.uniform(*WHIM_S))
    life.engine.put(SetPaused(False))


async def _leaves(box: Box, number: int, rng: random.Random) -> None:
    life = box.node(number)
    life.engine.ask_to_leave()
    await life.over.wait()
    await trio.sleep(rng.uniform(*WHIM_S))
    box.start(number, Survival.ALL)


async def _is_killed(box: Box, number: int, rng: random.Random) -> None:
    life = box.node(number)
    life.cut()
    await life.over.wait()
    await trio.sleep(rng.uniform(*WHIM_S))
    box.start(number, rng.choice((Survival.SYNCED, Survival.SOME)))


async def _is_slow(box: Box, number: int, rng: random.Random) -> None:
    me = box.peers[number]
    box.net.slow = {(me, other): rng.uniform(0.5, 3.0) for other in box.peers}
    await trio.sleep(rng.uniform(*WHIM_S))
    box.net.hasten()


COURSES: dict[str, tuple[Callable[[Box], Awaitable[None]], int, int, range]] = {
    "killed at random": (killed_at_random, 3, 3, range(300, 308)),
    "grows": (grows, 4, 3, range(2)),
    "goes back and amends": (goes_back_and_amends, 3, 3, range(2)),
    "has whims": (has_whims, 4, 3, range(3)),
}
"""By name: what happens, to how many nodes of which so many are founders, with which seeds."""


def trace_of(name: str, seed: int, folder: Path, disks: Disks, patch: pytest.MonkeyPatch) -> Trace:
    """Everything that is done in one course of events."""
    course, nodes, founders, _ = COURSES[name]
    with traced(patch) as trace:
        Box(folder, disks, nodes=nodes, founders=founders, seed=seed, grace_s=1.0).run(course)
    return trace


def main() -> None:
    """Make traces, tell their digests, and record them if they are all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, help="write the traces themselves, and record nothing")
    parser.add_argument("--only", default="", help="of courses whose name has this; records nothing")
    arguments = parser.parse_args()
    lines = []
    for name, (*_, seeds) in COURSES.items():
        for seed in seeds:
            if arguments.only not in f"{name} {seed}":
                continue
            with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
                trace = trace_of(name, seed, Path(folder), swarm_in_a_box.simulated(patch), patch)
            lines.append(f"{name}\t{seed}\t{len(trace)}\t{trace.digest}")
            print(lines[-1], flush=True)
            if arguments.into is not None:
                arguments.into.mkdir(parents=True, exist_ok=True)
                (arguments.into / f"{name}-{seed}.txt").write_text("\n".join(trace) + "\n", "utf-8")
    if arguments.into is None and not arguments.only:
        FILE.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    if sys.flags.hash_randomization:
        os.execve(sys.executable, [sys.executable, "-m", "tests.node.box_trace", *sys.argv[1:]], FIXED_ORDER)
    main()
