"""A swarm in a box: real engines with their real stores on disks that lose power, in one thread, on a virtual clock.

    real        Engine, Store, StateStore, StateCache, StateServer, CatchUp, Resumption, TrainingClient, Reduction,
                signatures
    stand-ins   links and lanes (calls, with delay), trainers (`box_trainer`), disks (`simulated_disk`), time

A thread of trio's would let an autojumping clock run ahead while it works, and make of one seed many courses of events:
so what the product gives to a thread is done in place, after a delay in which others go on. Everything that happens is
then a function of the seed. What the links let out is judged against the disk at that very moment (`box_witness`).
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import secrets
import traceback
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from shoal.collectives.codecs import F32
from shoal.collectives.contribution import EncodedContribution
from shoal.collectives.finals import Finals
from shoal.collectives.outer import OuterSettings, advance
from shoal.collectives.reference import reference
from shoal.collectives.state import CertifiedState
from shoal.node.rounds import participation as participation_module
from shoal.node.state import store as store_module
from shoal.node.state import tensor_files
from shoal.protocol.certificate import genesis
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest, validate_manifest
from shoal.protocol.messages import MEMBER_LIMIT, NO_HASH, Message, Value
from shoal.protocol.seats import longest_wait
from shoal.protocol.strategies.table import DEFAULT_STRATEGY
from tests.node.box_life import NUMEL, Life
from tests.node.box_net import Net
from tests.node.box_trainer import BoxTrainer
from tests.node.box_witness import Witness
from tests.node.ledger import identity
from tests.node.simulated_disk import Disk, Disks, Survival

WORK_S = (0.0, 0.004)
"""How long what a thread would do takes."""
NOTICE_S = 0.2
"""Until others notice that a node is gone, or there."""
FILES_LEFT = 200
"""By the courses of events before; each leaves some hundred until they are collected."""
LOG_LIMIT_BYTES = 2048
"""Past which agreement logs are rewritten: every round or two."""


class Box:
    """Nodes 0, 1, 2 …, the first `founders` of them the founders; `run` runs a course of events over them.

    followers: the numbers of those that follow, each with whom it dials; all others are linked with each other.
    seats: of a round, where the founders vote; the followers train, and are linked as the others while they have one.
    sites: the names of those numbers that are of one.
    """

    def __init__(
        self,
        folder: Path,
        disks: Disks,
        *,
        nodes: int = 3,
        founders: int | None = None,
        seed: int = 0,
        codec: str = "fp32",
        grace_s: float = 2.0,
        strategy: str = DEFAULT_STRATEGY,
        followers: Mapping[int, Collection[int]] | None = None,
        images: bool = False,
        seats: int | None = None,
        sites: Mapping[int, str] | None = None,
    ) -> None:
        self.seats = seats
        self.sites = sites or {}
        self.folder = folder
        self.disks = disks
        self.rng = random.Random(seed)
        self.seed = seed
        self.followers = followers or {}
        self.peers = [identity(number + 1).peer_id for number in range(nodes)]
        self.manifest = manifest_of(
            self.peers[: founders or nodes], codec, grace_s, strategy, images=images, seats=seats, sites=bool(sites)
        )
        self.witnesses = [Witness(f"node {n}", folder / f"scratch{n}") for n in range(nodes)]
        self.lives: list[Life | None] = [None] * nodes
        self.contributions: dict[bytes, EncodedContribution] = {}
        self.finals: dict[bytes, Finals] = {}
        self.values: dict[tuple[Any, int], Value] = {}
        self.adjust_trainer: Callable[[Life], None] = lambda life: None
        """Called with every life once its trainer is made."""
        self.let_out: Callable[[Life, Message], None] = lambda life, message: None
        """Called with every message that a life gives to its links."""
        self.alter_finals: Callable[[Life, Finals], Finals] = lambda life, finals: finals
        """What a life gets in place of the finals that its reduction came to."""
        self._noticed: set[tuple[int, int]] = set()
        self._links: set[frozenset[int]] = set()
        self._places = itertools.count()
        self._disk_numbers = itertools.count()

    def next_place(self) -> int:
        """Of a stretch of training."""
        place = next(self._places)
        assert place < NUMEL, "more was trained than there are places"
        return place

    # -- who lives, and who is linked with whom --------------------------------------------------------------

    def life_of(self, peer: PeerId) -> Life | None:
        """The process that runs for a peer now."""
        life = self.lives[self.peers.index(peer)]
        return life if life is not None and life.up and not life.disk.dead else None

    def living(self) -> list[Life]:
        """All processes that run."""
        return [life for life in self.lives if life is not None and life.up and not life.disk.dead]

    def node(self, number: int) -> Life:
        """The present life of a node."""
        life = self.lives[number]
        assert life is not None
        return life

    def lives_linked_to(self, life: Life) -> list[Life]:
        """Those that a life has a link to."""
        return [other for other in self.living() if frozenset((id(life), id(other))) in self._links]

    def notice(self, life: Life) -> None:
        """A life began or ended; a moment later the others know it."""
        self.net.after(self.rng.uniform(NOTICE_S / 4, NOTICE_S), self._look_around)

    def _look_around(self) -> None:
        living = self.living()
        pairs = itertools.combinations(living, 2)
        wanted = {frozenset((id(a), id(b))) for a, b in pairs if self._links_with(a, b)}
        new, self._links = wanted - self._links, wanted
        for life in living:
            life.engine.alive(frozenset(other.peer for other in self.lives_linked_to(life)))
        for a, b in itertools.permutations(living, 2):
            if frozenset((id(a), id(b))) in new:
                a.engine.linked(b.peer, (b.chain.head.term, b.chain.head.round))

    def _links_with(self, one: Life, other: Life) -> bool:
        """True if one of two dials the other."""
        if self._follows(one) or self._follows(other):
            return other.number in self.followers.get(one.number, ()) or one.number in self.followers.get(
                other.number, ()
            )
        return True

    def _follows(self, life: Life) -> bool:
        return life.number in self.followers if self.seats is None else life.engine.member.follows

    async def _keep_links(self) -> None:
        """Let links follow the chains, where these say who takes part."""
        while True:
            await trio.sleep(NOTICE_S)
            self._look_around()

    # -- a course of events ----------------------------------------------------------------------------------

    def run(self, course: Callable[[Box], Any], *, limit_s: float = 600.0) -> None:
        """Run a course of events, then check everything. limit_s: of virtual time."""

        async def main() -> None:
            with trio.fail_after(limit_s):
                async with self._running():
                    await course(self)
                    self.remember()

        _work_rng.seed(self.seed)
        trio._core._run._r.seed(self.seed)
        try:
            trio.run(main, clock=MockClock(autojump_threshold=0), strict_exception_groups=True)
        except BaseExceptionGroup as group:
            error = _first(group)
            where = "".join(traceback.format_tb(error.__traceback__)[-4:])
            raise AssertionError(f"seed {self.seed}: {error!r}\n{where}") from None
        finally:
            for life in filter(None, self.lives):
                self.disks.remove(life.disk)
            _close_files()
        self.check()

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        self.net = Net(self)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self.net.run)
            if self.seats is not None:
                nursery.start_soon(self._keep_links)
            yield
            for life in self.living():
                life.disk.faults.clear()
            nursery.cancel_scope.cancel()

    def start(self, number: int, survival: Survival = Survival.ALL) -> Life:
        """Start a node, on what survived of its disk; where that is all, only its process had ended."""
        before = self.lives[number]
        if before is None:
            disk = self._new_disk(number)
        elif survival is Survival.ALL:
            disk = before.disk
            disk.revive()
        else:
            disk = self._survivor(number, before.disk, survival)
        self.witnesses[number].back(disk)
        life = self.lives[number] = Life(self, number, disk)
        self._nursery.start_soon(life.run)
        return life

    def _new_disk(self, number: int) -> Disk:
        folder = self.folder / f"node{number}-{next(self._disk_numbers)}"
        return self.disks.add(folder, random.Random(self.rng.random()))

    def _survivor(self, number: int, before: Disk, survival: Survival) -> Disk:
        folder = self.folder / f"node{number}-{next(self._disk_numbers)}"
        self.disks.remove(before)
        before.copy_survivors(folder, survival)
        return self.disks.add(folder, random.Random(self.rng.random()))

    def start_all(self) -> None:
        """Start every node."""
        for number in range(len(self.lives)):
            self.start(number)

    async def until(self, condition: Callable[[], object], within_s: float = 120.0) -> None:
        """Return once something holds; AssertionError after so much virtual time."""
        with trio.move_on_after(within_s):
            while not condition():  # noqa: ASYNC110
                await trio.sleep(0.05)
            return
        raise AssertionError(f"seed {self.seed}: not within {within_s} s: {self.story()}")

    async def until_round(self, round: int, *numbers: int, within_s: float = 120.0) -> None:
        """Return once these nodes, or all, have certified a round and hold its state."""

        def there() -> bool:
            lives = [self.node(number) for number in numbers or range(len(self.lives))]
            return all(life.up and life.round >= round and life.state_round >= round for life in lives)

        await self.until(there, within_s)
        self.remember()

    def contributors(self, round: int) -> set[int]:
        """The numbers of those whose contributions a certified round counted."""
        self.remember()
        found = [value for (_, number), value in self.values.items() if number == round and value.plan in self.finals]
        plans = [self.finals[value.plan].plan for value in found]
        return {self.peers.index(one.peer) for plan in plans for one in plan.participants if one.weight}

    def remember(self) -> None:
        """Take note of what every living node holds for certified."""
        for life in self.living():
            for entry in life.chain.after(0, life.chain.height):
                value = entry.value
                known = self.values.setdefault((value.term, value.round), value)
                assert known.hash == value.hash, f"seed {self.seed}: round {value.round} was decided twice"

    def story(self) -> str:
        """Where everybody stands."""
        return "; ".join(
            f"{n}: "
            + ("never" if life is None else f"round {life.round}/{life.state_round} {life.ended_by or 'lives'}")
            for n, life in enumerate(self.lives)
        )

    # -- checks ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Nobody let out what its disk did not have; every certified round is exact; nothing was counted twice."""
        blames = [blame for witness in self.witnesses for blame in witness.blames]
        assert not blames, f"seed {self.seed}: " + "\n".join(blames[:5])
        self._check_values()

    def _check_values(self) -> None:
        outer, counted = OuterSettings.of(self.manifest), np.zeros(NUMEL, np.float32)
        begin = genesis(self.manifest.swarm_id, self.manifest.swarm.founders)
        states = {begin.hash: self.initial_state()}
        for (_, number), value in sorted(self.values.items(), key=lambda item: item[0]):
            if value.rollback:
                states[value.hash] = states[value.rollback.target.certificate]
                counted[:] = 0  # what was learnt since is dropped
                continue
            if value.plan == NO_HASH:  # the authority went on from the head
                states[value.hash] = states[value.base]
                continue
            finals = self.finals[value.plan]
            began = (p for p in finals.plan.participants if p.root in self.contributions)  # who did not is in nothing
            given = {p.peer: self.contributions[p.root] for p in began}
            wanted = reference(
                finals.plan, {peer: one.concatenated() for peer, one in given.items()}, finals.bitmaps
            ).finals
            assert finals.concatenated() == wanted
            assert (finals.bitmaps_root, finals.tokens) == (value.bitmaps, value.tokens)
            after, header = advance(states[value.base], finals, outer)
            assert header.digest == value.digest, f"round {number} certified another state"
            states[value.hash] = after
            self._count(finals, given, counted)
        assert counted.max() <= 1, f"seed {self.seed}: the work at {np.flatnonzero(counted > 1)} was counted twice"
        self.counted = counted

    def _count(self, finals: Finals, given: dict[PeerId, EncodedContribution], counted: F32) -> None:
        for place, participant in enumerate(finals.plan.participants):
            if participant.peer in given and self.manifest.sync.codec == "fp32":
                values = np.frombuffer(given[participant.peer].concatenated(), "<f4")
                for chunk, included in enumerate(finals.included(place)):
                    at = slice(chunk * 4096, (chunk + 1) * 4096)
                    # The share of a stretch in the mean of a site is other than one, and it stands there once.
                    counts = (values[at] != 0) if self.sites else values[at]
                    counted[at] += counts if included else 0

    def initial_state(self) -> CertifiedState:
        """S(0), as every trainer draws it."""
        trainer = BoxTrainer(NUMEL, tell=lambda event: None, next_place=self.next_place)
        values = np.random.default_rng(0).standard_normal(NUMEL).astype(np.float32)
        imaged = OuterSettings.of(self.manifest).imaged
        return CertifiedState.initial(values, trainer.layout.digest, imaged=imaged)


def _close_files() -> None:
    """Close the files of lives that are over, which lie in cycles: what comes after this test may count on low numbers.

    select(), as torch's elastic agent calls it, takes none above 1023.
    """
    if len(os.listdir("/proc/self/fd")) > FILES_LEFT:
        gc.collect()


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def manifest_of(
    founders: Sequence[PeerId],
    codec: str,
    grace_s: float,
    strategy: str,
    *,
    images: bool = False,
    seats: int | None = None,
    sites: bool = False,
) -> Manifest:
    """Rounds that wait for nobody long. images: certified digests cover the policy's image. seats: as in `Box`."""
    membership: dict[str, object] = {"voters": "named", "seats": seats, "waiting": "outside"}
    membership = {"sites": "together"} if sites else membership
    staleness = {} if seats is None else {"staleness_rounds": longest_wait(MEMBER_LIMIT, seats)}
    rollouts = {"rollouts": {"tasks": [{"family": "lcm"}], "images": True}} if images else {}
    return validate_manifest(
        {
            "swarm": {"name": "box", "founders": list(founders), "admission": "open"},
            "workload": {"name": "regression", "options": {}},
            "sync": {"strategy": strategy, "inner_steps": 1, "balance": False, "codec": codec},
            "round": {"chunk_values": 4096, "grace_s": grace_s, "reduce_deadline_s": 60.0, **staleness},
            **rollouts,
            **({} if seats is None and not sites else {"membership": membership}),
        },
        source="the test's manifest",
    )


@pytest.fixture
def disks(monkeypatch: pytest.MonkeyPatch) -> Disks:
    """The disks of a box."""
    return simulated(monkeypatch)


def simulated(monkeypatch: pytest.MonkeyPatch) -> Disks:
    """Everything that a box needs of the process: its disks, its threads, its tasks in an order of the seed's."""
    monkeypatch.setattr(store_module, "AGREEMENT_LOG_LIMIT_BYTES", LOG_LIMIT_BYTES)
    monkeypatch.setattr(participation_module, "PLAN_OUT_S", 0.0)
    monkeypatch.setattr(tensor_files, "HASH_THREADS", 1)
    monkeypatch.setattr(trio.to_thread, "run_sync", _work_in_place)
    monkeypatch.setattr(secrets, "token_bytes", _work_rng.randbytes)
    monkeypatch.setattr(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    return Disks(monkeypatch)


_work_rng = random.Random(0)


async def _work_in_place(work: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
    """Do at once what a thread would do, after a while in which others go on; uncancellable, as there."""
    await trio.lowlevel.checkpoint_if_cancelled()
    if _work_rng.random() < 0.5:
        with trio.CancelScope(shield=True):
            await trio.sleep(_work_rng.uniform(*WORK_S))
    return work(*arguments)
