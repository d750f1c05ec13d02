"""`shoal bench samplers`: what nodes that only sample give to those that train, where policies are averaged.

Two swarms, one after the other, of real nodes with the manifest that `shoal init --workload char-policy` writes: some
trainers with samplers beside them, and as many trainers alone. Every node, its agent and all else of it, is held to
the same share of one core. Both begin with the policy of the same warm-up; the time that counts begins when every
trainer has contributed to a round and every sampler has made one.

Before that it shows what would take a sampler from one policy to the next (`policy_updates`).

    reward          what trainers' own completions earned in a round of an agent, summed over all rounds in the time
    update bytes    all that came to a sampler over lanes, for each round that it followed
    policy bytes    a whole policy in bf16
    memory          of a sampler's daemon (PSS), that of its agent with the policy apart
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import trio

from shoal.cli.render import ShowNow
from shoal.cli.text import count
from shoal.lab.bench.policy_updates import UpdateSizes, measure_updates
from shoal.lab.case import Case, LongCaseOptions, Spec
from shoal.lab.fleet import Swarm, pss_mb, untested_command
from shoal.lab.shipped import init_tables
from shoal.lab.targets import Row, Target
from shoal.node.control_client import FetchedStatus
from shoal.node.option import Option, Within
from shoal.node.reporting.events import Certified, Rollouts
from shoal.node.sapo.policies import BUILT_IN
from shoal.node.state.checkpoints import LAYOUT, read_layout
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest import Manifest, validate_manifest
from shoal.testnet.nodes import Launch, Runtime
from shoal.testnet.throttle import means

BEGIN_DEADLINE_S: Final = 900.0
"""Until all have made a round: the first founder's warm-up, in which all share the machine."""
BF16_BYTES: Final = 2
NOTHING: Final = FetchedStatus(times=0, bytes=0)

TIMES: Final = Target(name="reward of the trainers beside that of as many alone", unit="×", least=1.5, aim=2.5)
MEMORY: Final = Target(name="memory of a sampler's daemon", unit="MiB", most=120)
SMALL_RATE: Final = 1e-6
RATES: Final = (1e-3, 1e-4, 1e-5, SMALL_RATE)
CHANGES: Final = Target(
    name="by values alone, no swarm: what changed in bf16 in a step at 1e-6, beside the whole policy",
    unit="×",
    most=1 / 20,
    aim=1 / 100,
)
CHANGED: Final = Target(
    name="what a sampler fetched for an update by what changed in bf16, beside the whole policy", unit="×"
)
CHANGED_LITTLE: Final = Target(name="the same, for one step at 1e-6", unit="×", most=1 / 20, aim=1 / 100)
UPDATE: Final = Target(name="what came to a sampler for a round, beside the whole policy in bf16", unit="×")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplersBench(Spec):
    """Options of `shoal bench samplers`."""

    trainers: Annotated[int, Option("--trainers", help="Nodes that train.", check=Within(1, 32))] = 2
    samplers: Annotated[int, Option("--samplers", help="Nodes that only sample.", check=Within(1, 32))] = 6
    minutes: Annotated[
        float, Option("--minutes", help="For so long rounds count, with samplers and without.", check=Within(0.1, 600))
    ] = 10.0
    lr: Annotated[
        float, Option("--lr", help="Learning rate of the trainers; 0: what init writes.", check=Within(0, 1))
    ] = 0.0
    inner_steps: Annotated[
        int,
        Option("--inner-steps", help="An agent's steps between rounds; 0: what init writes.", check=Within(0, 1024)),
    ] = 0
    share: Annotated[float, Option("--share", help="Of one core, for each node.", check=Within(0.01, 1))] = 0.2


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Account of what a swarm did in its time.

    reward: over the rounds of all trainers' agents; rounds: how many these were; certified: rounds of the swarm;
    taken: groups of others that trainers took. update_bytes: for each round that a sampler followed, the median of
    them, None where none came further; fetched: what samplers fetched in the time, by what it was; memory_mb: of their
    daemons, the largest, None without samplers.
    """

    reward: float
    rounds: int
    certified: int
    taken: int
    policy_bytes: int
    update_bytes: float | None
    memory_mb: float | None
    fetched: dict[str, FetchedStatus] = {}


class SamplersResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `shoal bench samplers`; means: how nodes were held to their share.

    updates: one step at each of RATES, and the steps of a round at the manifest's.
    """

    bench: SamplersBench
    means: str
    updates: tuple[UpdateSizes, ...] = ()
    alone: Window
    beside: Window

    @property
    def times(self) -> float | None:
        """Reward with samplers ÷ without; None where there was none."""
        return self.beside.reward / self.alone.reward if self.alone.reward else None

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured values, each with its target."""
        update, memory = self.beside.update_bytes, self.beside.memory_mb
        changes = self.beside.fetched.get("changes")
        return (
            TIMES.row(self.times),
            MEMORY.row(None if memory is None else memory * 1e6 / 2**20),
            UPDATE.row(None if update is None else update / self.beside.policy_bytes),
            (CHANGED_LITTLE if (self.bench.lr, self.bench.inner_steps) == (SMALL_RATE, 1) else CHANGED).row(
                None if changes is None else changes.bytes / changes.times / self.beside.policy_bytes
            ),
            CHANGES.row(next((one.changes_bytes / one.whole_bytes for one in self.updates if _is_small(one)), None)),
        )


def _is_small(update: UpdateSizes) -> bool:
    return (update.rate, update.steps) == (SMALL_RATE, 1)


class Followed(NamedTuple):
    """The round whose state a sampler has, the bytes that it has received, and what it has fetched."""

    round: int
    received: int
    fetched: dict[str, FetchedStatus]


class SamplersSwarm(Swarm):
    """Trainers, who found it, and samplers, in an empty `folder`."""

    def __init__(
        self, bench: SamplersBench, samplers: int, folder: Path, *, command: Callable[[Launch], list[str]] | None = None
    ) -> None:
        """command: of each node, in place of that of a trainer or a sampler as they ship."""
        self.share = bench.share
        self.trainers = range(bench.trainers)
        self.samplers = range(bench.trainers, bench.trainers + samplers)
        runtime = Runtime(command=command or partial(_command, len(self.trainers)))
        manifest = partial(samplers_manifest, bench.trainers, lr=bench.lr, inner_steps=bench.inner_steps)
        super().__init__(folder, bench.trainers + samplers, manifest, runtime=runtime)

    def has_begun(self) -> bool:
        """True if every trainer has certified a round, and every sampler has made one."""
        journal = self.journal
        return all(journal.of(Certified, index) for index in self.trainers) and all(
            journal.of(Rollouts, index) for index in self.samplers
        )

    async def begin(self) -> float:
        """Start all, and wait until all have made a round; returns when that was (wall clock). Raises NetworkError."""
        await self.start()
        await self.until(self.has_begun, "all have made a round", BEGIN_DEADLINE_S)
        return self.journal.entries[-1].event.at

    async def held(self, seconds: float) -> None:
        """Hold every node to its share for so long. Raises NetworkError if one ends by itself."""
        for node in self.nodes:
            node.throttle(self.share)
        await self.live(seconds)

    async def followed(self) -> dict[int, Followed]:
        """Rounds and bytes that samplers tell, by index; of one that does not answer in time nothing."""
        found = {}
        for index in self.samplers:
            with suppress(NetworkError):
                status: Any = await self.node(index).ask("status")
                fetched = msgspec.convert(status["fetched"], dict[str, FetchedStatus])
                found[index] = Followed(status["round"], status["bytes"]["received"], fetched)
        return found

    def window(self, since: float, before: Mapping[int, Followed], after: Mapping[int, Followed]) -> Window:
        """Everything that was done since then. before, after: as samplers told it at the begin and now. Blocks."""
        rounds = [one for index in self.trainers for one in self.journal.of(Rollouts, index) if one.at >= since]
        certified = {
            one.round for index in self.trainers for one in self.journal.of(Certified, index) if one.at >= since
        }
        daemons = self.daemons()
        came = [
            (after[index].received - one.received) / (after[index].round - one.round)
            for index, one in before.items()
            if index in after and after[index].round > one.round
        ]
        return Window(
            reward=math.fsum(one.reward or 0.0 for one in rounds),
            rounds=len(rounds),
            certified=len(certified),
            taken=sum(one.external for one in rounds),
            policy_bytes=BF16_BYTES * read_layout(self.node(0).folder / LAYOUT).numel,
            update_bytes=statistics.median(came) if came else None,
            memory_mb=max(pss_mb(daemons[index] for index in self.samplers if index in daemons), default=None),
            fetched=_difference(before, after),
        )


def _difference(before: Mapping[int, Followed], after: Mapping[int, Followed]) -> dict[str, FetchedStatus]:
    """Everything that was fetched from `before` to `after`, by what it was."""
    found: dict[str, FetchedStatus] = {}
    for index in before.keys() & after.keys():
        for what, now in after[index].fetched.items():
            was, sums = before[index].fetched.get(what, NOTHING), found.get(what, NOTHING)
            times, size = sums.times + now.times - was.times, sums.bytes + now.bytes - was.bytes
            if times:
                found[what] = FetchedStatus(times=times, bytes=size)
    return found


def samplers_manifest(trainers: int, peers: list[PeerId], *, lr: float = 0.0, inner_steps: int = 0) -> Manifest:
    """The manifest of `shoal init --workload char-policy`, of which the trainers are the founders.

    lr, inner_steps: in place of what it writes, unless 0.
    """
    tables = init_tables("samplers", peers[:trainers], workload=next(iter(BUILT_IN)))
    if lr:
        tables["inner"]["lr"] = lr
    if inner_steps:
        tables["sync"]["inner_steps"] = inner_steps
    return validate_manifest(tables, source="the benchmark")


def _command(trainers: int, launch: Launch) -> list[str]:
    command = untested_command(launch)
    return command if int(launch.data_dir.name) < trainers else [*command, "--rollouts", "sample"]


def run(bench: SamplersBench, tell: ShowNow) -> SamplersResult:
    """Measure what nodes that only sample add to the reward of those that train and average their policies."""
    tell("what an update of the policy takes")
    manifest = samplers_manifest(1, [Identity.generate().peer_id])
    a_round = manifest.inner.lr, manifest.sync.inner_steps
    updates = tuple(measure_updates(manifest, [*((rate, 1) for rate in RATES), a_round]))
    alone, beside = (trio.run(_measure, bench, samplers, tell) for samplers in (0, bench.samplers))
    return SamplersResult(bench=bench, means=means(), updates=updates, alone=alone, beside=beside)


async def _measure(bench: SamplersBench, samplers: int, tell: ShowNow) -> Window:
    with TemporaryDirectory(prefix="shoal-samplers-") as name:
        swarm = SamplersSwarm(bench, samplers, Path(name))
        async with swarm.owned():
            tell(f"{count(bench.trainers, 'trainer')} and {count(samplers, 'sampler')} begin")
            since = await swarm.begin()
            tell(f"rounds for {bench.minutes:g} min")
            before = await swarm.followed()
            await swarm.held(60 * bench.minutes)
            after = await swarm.followed()
            return await trio.to_thread.run_sync(swarm.window, since, before, after)


def to_document(result: SamplersResult) -> dict[str, object]:
    """The result under the names of its fields, and what others read of it by name."""
    beside = result.beside
    return {
        "reward": beside.reward,
        "reward_trainers_alone": result.alone.reward,
        "update_bytes": beside.update_bytes,
        "policy_bytes": beside.policy_bytes,
        "sampler_extra_bytes": None if beside.memory_mb is None else round(beside.memory_mb * 1e6),
        **msgspec.to_builtins(result),
    }


CASE: Final = Case(spec=SamplersBench, run=run, document=to_document, options=LongCaseOptions)
