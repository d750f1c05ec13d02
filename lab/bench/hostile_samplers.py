"""`shoal bench hostile-samplers`: what samplers that cheat cost those that train, and how soon each is found.

Three swarms, one after the other, of real nodes with the manifest that `shoal init --workload char-policy` writes, each
held to the same share of one core: trainers and samplers; the same with two more samplers that cheat
(`shoal.lab.bench.hostile_sampler`), of two kinds; and with two of the two other kinds. The time that counts begins when
every trainer has contributed to a round and every sampler has made one.

    found       rounds of a trainer's agent from the first group of a cheat to when it is ignored, of the slower
                trainer; "stale" begins to cheat with its second policy
    struck      nodes that a trainer ignored though they did not cheat
    reward      what trainers' own completions earned in a round of an agent, summed over all rounds in the time
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import msgspec
import trio

from shoal.cli.render import ShowNow
from shoal.cli.text import count
from shoal.lab.bench.hostile_sampler import KINDS, MODULE
from shoal.lab.bench.samplers import SamplersBench, SamplersSwarm
from shoal.lab.case import Case, LongCaseOptions, Spec
from shoal.lab.fleet import untested_command
from shoal.lab.targets import Row, Target
from shoal.node.option import Option, Within
from shoal.node.reporting.events import CaughtUp, Rollouts
from shoal.protocol.identity import PeerId
from shoal.testnet.nodes import Launch
from shoal.testnet.throttle import means

TOGETHER: Final = 2
"""Cheats of a swarm, beside six samplers: one in four."""

TIMES: Final = Target(name="least reward of the trainers beside cheats, by that without them", unit="×", least=0.95)
STRUCK: Final = Target(name="nodes ignored that did not cheat", most=0)
FOUND: Final = {
    kind: Target(name=f"a sampler of the kind {kind!r} is ignored after", unit="rounds", most=20) for kind in KINDS
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileSamplersBench(Spec):
    """Options of `shoal bench hostile-samplers`."""

    trainers: Annotated[int, Option("--trainers", help="Nodes that train.", check=Within(1, 32))] = 2
    samplers: Annotated[int, Option("--samplers", help="Nodes that sample, honestly.", check=Within(1, 32))] = 6
    minutes: Annotated[
        float, Option("--minutes", help="For so long rounds count, in each swarm.", check=Within(0.1, 600))
    ] = 5.0
    share: Annotated[float, Option("--share", help="Of one core, for each node.", check=Within(0.01, 1))] = 0.2


class HostileWindow(msgspec.Struct, frozen=True, kw_only=True):
    """Account of what a swarm did in its time, with cheats of these kinds.

    reward: over the rounds of all trainers' agents; rounds: how many these were. found: by kind, None for one that a
    trainer did not ignore in the end. struck: others that a trainer ignored. taken: groups that trainers took, by the
    kind of who made them, "trainer" and "sampler" among them; refused: what they refused, by reason.
    """

    kinds: tuple[str, ...]
    reward: float
    rounds: int
    found: dict[str, int | None]
    struck: int
    taken: dict[str, int]
    refused: dict[str, int]


class HostileSamplersResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `shoal bench hostile-samplers`; means: how nodes were held to their share."""

    bench: HostileSamplersBench
    means: str
    without: HostileWindow
    beside: tuple[HostileWindow, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured values, each with its target; a cheat that was not found took infinitely long."""
        found = {kind: rounds for window in self.beside for kind, rounds in window.found.items()}
        times = min(window.reward for window in self.beside) / self.without.reward if self.without.reward else None
        return (
            TIMES.row(times),
            STRUCK.row(sum(window.struck for window in (self.without, *self.beside))),
            *(FOUND[kind].row(math.inf if rounds is None else rounds) for kind, rounds in found.items()),
        )


class HostileSamplersSwarm(SamplersSwarm):
    """Trainers, who found it, samplers, and cheats of these kinds, in an empty `folder`."""

    def __init__(self, bench: HostileSamplersBench, kinds: Sequence[str], folder: Path) -> None:
        honest = bench.trainers + bench.samplers
        self.cheats = {honest + at: kind for at, kind in enumerate(kinds)}
        super().__init__(
            SamplersBench(trainers=bench.trainers, share=bench.share),
            bench.samplers + len(kinds),
            folder,
            command=partial(command_of, bench.trainers, self.cheats),
        )

    def account(self, since: float) -> HostileWindow:
        """Everything that trainers did since then."""
        kinds = {node.peer_id: self._kind(node.index) for node in self.nodes}
        rounds = {index: [*self.journal.of(Rollouts, index)] for index in self.trainers}
        counted = [one for made in rounds.values() for one in made if one.at >= since]
        ignored = {peer for made in rounds.values() for one in made for peer in one.ignored}
        taken, refused = Counter[str](), Counter[str]()
        for one in counted:
            for origin, groups in one.origins.items():
                taken[kinds[PeerId(origin)]] += groups
            refused.update(one.rejected)
        return HostileWindow(
            kinds=tuple(self.cheats.values()),
            reward=math.fsum(one.reward or 0.0 for one in counted),
            rounds=len(counted),
            found={kind: self._rounds_until_found(index, rounds.values()) for index, kind in self.cheats.items()},
            struck=sum(kinds[PeerId(peer)] in ("trainer", "sampler") for peer in ignored),
            taken=dict(taken),
            refused=dict(refused),
        )

    def _rounds_until_found(self, cheat: int, trainers: Collection[Sequence[Rollouts]]) -> int | None:
        """Rounds that the slower trainer made from the first group that a cheat offered to when it ignored it.

        Who draws from its first policy does not cheat before it has got a second one.
        """
        peer, policies = self.node(cheat).peer_id, self.journal.of(CaughtUp, cheat)
        if self.cheats[cheat] == "stale" and len(policies) < 2:
            return None
        since = policies[1].at if self.cheats[cheat] == "stale" else -math.inf
        began = next((one.at for one in self.journal.of(Rollouts, cheat) if one.made and one.at > since), None)
        if began is None:
            return None
        took = []
        for made in trainers:
            after = [one for one in made if one.at >= began]
            found = next((at for at, one in enumerate(after) if peer in one.ignored), None)
            if found is None:
                return None
            took.append(found + 1)
        return max(took)

    def _kind(self, index: int) -> str:
        return "trainer" if index in self.trainers else self.cheats.get(index, "sampler")


def command_of(trainers: int, cheats: dict[int, str], launch: Launch) -> list[str]:
    """The command line of a node, by its number: trainers, then samplers, then cheats."""
    command, index = untested_command(launch), int(launch.data_dir.name)
    if index in cheats:
        at = command.index("shoal.cli.main")
        command[at : at + 1] = [MODULE, cheats[index]]
    return command if index < trainers else [*command, "--rollouts", "sample"]


def run(bench: HostileSamplersBench, tell: ShowNow) -> HostileSamplersResult:
    """Measure what samplers that cheat cost those that train, and how soon each is found."""
    kinds = [*KINDS]
    together = [kinds[at : at + TOGETHER] for at in range(0, len(kinds), TOGETHER)]
    without, *beside = (trio.run(_measure, bench, cheats, tell) for cheats in ((), *together))
    return HostileSamplersResult(bench=bench, means=means(), without=without, beside=tuple(beside))


async def _measure(bench: HostileSamplersBench, kinds: Sequence[str], tell: ShowNow) -> HostileWindow:
    with TemporaryDirectory(prefix="shoal-samplers-") as name:
        swarm = HostileSamplersSwarm(bench, kinds, Path(name))
        async with swarm.owned():
            honest = f"{count(bench.trainers, 'trainer')} and {count(bench.samplers, 'sampler')}"
            tell(f"{honest} begin, with {count(len(kinds), 'cheat')}")
            since = await swarm.begin()
            tell(f"rounds for {bench.minutes:g} min")
            await swarm.held(60 * bench.minutes)
            return swarm.account(since)


CASE: Final = Case(spec=HostileSamplersBench, run=run, options=LongCaseOptions)
