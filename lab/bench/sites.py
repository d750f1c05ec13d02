"""`shoal bench sites`: what goes over the uplinks of places whose nodes contribute together, and apart.

    apart      rounds that nothing disturbs
    together   as many rounds ─► a delegate is killed in mid-reduce ─► rounds ─► then another node elsewhere ─► rounds

Both are real nodes, each place behind an uplink that its nodes share (network namespaces). The manifest is the one that
`shoal init` writes, but for what `not_default` tells: a round is one step of values that are drawn, and begins for all
at once, when nobody has anything more to say of the one before.

Bytes are those that the kernel counted on the uplinks, in both directions, from before the first round until all have
begun the round after the last: whatever the nodes say to each other, and nothing that stays within a place. What a node
sends to another place is on two uplinks. Every value is computed again from what the nodes kept.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
import trio

from shoal.cli.render import ShowNow
from shoal.lab.bench.scale_rows import evictions
from shoal.lab.bench.scale_spec import ABSENT, EVICTED, FORKED, NOT_CERTIFIED, UNVERIFIED, WRONG
from shoal.lab.bench.step_tally import NodeLog, counted_tokens, kept_plan, read_node
from shoal.lab.bench.swarm import SEED, BenchSpec, BenchSwarm, running_swarm
from shoal.lab.bench.synthetic import TOKENS, WORKLOAD_NAME
from shoal.lab.case import Case, LongCaseOptions, Spec, tell_nothing
from shoal.lab.fleet import load_per_core
from shoal.lab.shipped import init_tables, not_default
from shoal.lab.targets import Row, Spread, Target
from shoal.node.option import Option, Within, check_options
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.manifest import Manifest, validate_manifest
from shoal.testnet.faults import FaultRecord, kill
from shoal.testnet.links.namespaces import Network, Uplink, network, why_not
from shoal.testnet.nodes import NodeProcess
from shoal.testnet.reports.report import count_forks
from shoal.testnet.run_record import RunRecord
from shoal.testnet.scenario import Fault

PROGRESS: Final = 0.4
"""Share of its finals that the node has which stands still when one is killed."""
AFTER: Final = 2
"""Rounds after each kill."""
CODEC: Final = "int8"
Sites = Literal["apart", "together"]

SHARE: Final = "bytes over the uplinks a round, together to apart"
NOT_COUNTED: Final = Target(name="steps that no certified round has, but for those of rounds with a kill", most=0)
WENT_ON: Final = Target(name="rounds after a kill without the work of who is left in its place", most=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SitesBench(Spec):
    """Options of `shoal bench sites`. rounds: of each swarm, that nothing disturbs."""

    places: Annotated[int, Option("--places", help="How many places, each behind an uplink.", check=Within(2, 8))] = 3
    nodes: Annotated[int, Option("--nodes", help="How many nodes of each place.", check=Within(2, 8))] = 2
    rate: Annotated[float, Option("--rate", help="Of an uplink, in Mbit/s, up and down.", check=Within(1, 10_000))] = (
        100.0
    )
    numel: Annotated[int, Option("--numel", help="How many values the model has.", check=Within(4096, 64_000_000))] = (
        4_000_000
    )
    rounds: Annotated[int, Option("--rounds", help="How many rounds are counted, each way.", check=Within(2, 100))] = 6

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def uplinks(self) -> tuple[Uplink, ...]:
        """One of each place, whose nodes are next to each other."""
        return tuple(
            Uplink(nodes=tuple(range(place * self.nodes, (place + 1) * self.nodes)), rate_mbit=self.rate)
            for place in range(self.places)
        )

    @property
    def all_nodes(self) -> int:
        """The nodes of all places."""
        return self.places * self.nodes


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """One node killed in the reduction of a round. left: those of its place that are, by index.

    took_s: what that round took. tokens: that it has, one of each node's step: those of the place are the delegate's,
    and lost with it where it had not sent all. without: later rounds that have no work of who is left.
    """

    node: int
    delegate: bool
    round: int
    left: tuple[int, ...]
    took_s: float
    tokens: int
    without: int


class SitesRun(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of one swarm. uplink_bytes: a round, by uplink; round_s: of those rounds, from their step on.

    rounds: that were to be certified. uncounted: steps that those of them without a kill do not have.
    """

    uplink_bytes: tuple[float, ...]
    round_s: Spread
    rounds: int
    certified: int
    wrong_values: int
    forks: int
    unverified: tuple[str, ...]
    missed: dict[int, tuple[int, ...]]
    evictions: int
    uncounted: int
    kills: tuple[Kill, ...] = ()

    @property
    def round_mb(self) -> float:
        """Bytes that all uplinks carry a round, in MB."""
        return sum(self.uplink_bytes) / 1e6


class SitesResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `shoal bench sites`. not_default: settings that `shoal init` does not write. load: as of scale."""

    bench: SitesBench
    not_default: tuple[str, ...]
    load: float
    apart: SitesRun
    together: SitesRun

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured values, each with its target."""
        bench, runs = self.bench, (self.apart, self.together)
        said = f"one drawn step of {bench.numel:,} values a round, {bench.places} places of {bench.nodes}"
        share = Target(name=f"{said}: {SHARE}", most=0.6, aim=0.5)
        return (
            share.row(self.together.round_mb / self.apart.round_mb),
            Target(name="bytes over the uplinks a round, apart", unit="MB").row(self.apart.round_mb),
            Target(name="the same, together", unit="MB").row(self.together.round_mb),
            Target(name="a round from its step on, apart", unit="s").row(self.apart.round_s),
            Target(name="the same, together", unit="s").row(self.together.round_s),
            *(Target(name=_told(one), unit="s").row(one.took_s) for one in self.together.kills),
            NOT_CERTIFIED.row(sum(one.rounds - one.certified for one in runs)),
            WENT_ON.row(sum(one.without for one in self.together.kills)),
            NOT_COUNTED.row(sum(one.uncounted for one in runs)),
            WRONG.row(sum(one.wrong_values for one in runs)),
            FORKED.row(sum(one.forks for one in runs)),
            UNVERIFIED.row(sum(len(one.unverified) for one in runs)),
            ABSENT.row(sum(len(one.missed) for one in runs)),
            EVICTED.row(sum(one.evictions for one in runs)),
        )


def _told(one: Kill) -> str:
    return f"the round in which {'a delegate' if one.delegate else 'another node'} is killed"


def sites_manifest(bench: SitesBench, sites: Sites, founders: list[PeerId]) -> Manifest:
    """The manifest of a swarm that is measured."""
    tables: dict[str, Any] = init_tables("sites", founders)
    tables["workload"] |= {"name": WORKLOAD_NAME, "seed": SEED, "options": {"numel": bench.numel}}
    tables["sync"] |= {"inner_steps": 1, "balance": False}
    if sites == "together":
        tables["membership"] = {"sites": sites}
    return validate_manifest(tables, source="the benchmark")


# -- one swarm -----------------------------------------------------------------------------------------------


class SitesSwarm:
    """Rounds of one running swarm, one after the other, and the kills in them."""

    def __init__(self, bench: SitesBench, swarm: BenchSwarm) -> None:
        self.bench = bench
        self.swarm = swarm
        self.took_s: list[float] = []
        self.alive: list[frozenset[int]] = []
        """By round: those that were not killed until it was over."""
        self.kills: list[tuple[int, int, bool]] = []
        """Node, round, and whether it was the delegate."""

    @property
    def next_round(self) -> int:
        """The round that begins next."""
        return len(self.took_s) + 1

    @property
    def living(self) -> list[NodeProcess]:
        """The nodes that were not killed."""
        return [node for node in self.swarm.nodes if node.struck is None]

    def place_of(self, index: int) -> list[NodeProcess]:
        """The living of a place, its delegate first: as long as nobody is late that is the first by PeerId."""
        first = index - index % self.bench.nodes
        return sorted(
            (node for node in self.living if first <= node.index < first + self.bench.nodes),
            key=lambda node: node.peer_id,
        )

    async def play(self, *, count: int) -> None:
        """Let so many rounds be made. Raises NetworkError."""
        for _ in range(count):
            began = time.time()
            number = self.next_round
            self.swarm.open_gate(number)
            await self._until_over(number, began)

    async def play_with_kill(self, place: int, *, delegate: bool) -> None:
        """Kill a node of a place while its delegate stands still in the reduction of the next round."""
        stands, *others = self.place_of(place * self.bench.nodes)
        victim, number = stands if delegate else others[-1], self.next_round
        await stands.ask("hold", f"{number}:reduce:{PROGRESS}")
        began = time.time()
        self.swarm.open_gate(number)
        await self.swarm.until_holding(number, "reduce", [stands])
        kill(victim)
        fault = Fault(kind="kill", node=victim.index, round=number, phase="reduce", progress=PROGRESS)
        self.swarm.faults.append(FaultRecord(fault=fault, at=time.time(), done=True))
        self.kills.append((victim.index, number, delegate))
        if victim is not stands:
            await stands.ask("release")
        await self._until_over(number, began)

    async def _until_over(self, number: int, began: float) -> None:
        await self.swarm.until_certified(number, self.living)
        self.took_s.append(max(event.at for event in self.swarm.certified_by(number).values()) - began)
        self.alive.append(frozenset(node.index for node in self.living))


async def measure_sites(bench: SitesBench, sites: Sites, folder: Path, tell: ShowNow = tell_nothing) -> SitesRun:
    """Run one swarm in an empty folder, with kills where its nodes contribute together.

    Raises ConfigError where there can be no namespaces, NetworkError if the swarm does not get through the rounds that
    nothing disturbs. Cancellation: all processes are ended and all namespaces removed.
    """
    if (reason := why_not()) is not None:
        raise ConfigError(f"uplinks take network namespaces, and {reason}")
    rounds = bench.rounds + 2 * (1 + AFTER) * (sites == "together")
    spec = BenchSpec(
        peers=bench.all_nodes,
        numel=bench.numel,
        codec=CODEC,
        rounds=1 + rounds,
        test_mode=True,
        manifest=partial(sites_manifest, bench, sites),
        sites={index: f"place{index // bench.nodes}" for index in range(bench.all_nodes) if sites == "together"},
    )
    tell(f"{bench.all_nodes} nodes start, {sites}")
    with network(bench.all_nodes, bench.uplinks) as links:
        async with running_swarm(spec, folder, links) as running:
            swarm = SitesSwarm(bench, running)
            await swarm.play(count=1)  # lanes are made in it
            carried = await _count(swarm, links, tell)
            took_s = Spread.of(swarm.took_s[1:])
            if sites == "together":
                await _go_through_kills(swarm, tell)
            record = running.record(1 + rounds)
    return await trio.to_thread.run_sync(partial(_run_of, swarm, record, carried=carried, round_s=took_s))


async def _count(swarm: SitesSwarm, links: Network, tell: ShowNow) -> tuple[float, ...]:
    """Bytes that each uplink carries in a round, the mean over the rounds that are counted."""
    rounds, before = swarm.bench.rounds, links.uplink_bytes()
    for number in range(rounds):
        tell(f"round {1 + number} of {rounds}", number / rounds)
        await swarm.play(count=1)
    after = links.uplink_bytes()
    return tuple((last - first) / rounds for first, last in zip(before, after, strict=True))


async def _go_through_kills(swarm: SitesSwarm, tell: ShowNow) -> None:
    """Kill a delegate, and a node that is none in another place; ends early where a round is not certified."""
    try:
        for place, delegate in ((0, True), (1, False)):
            tell(f"in place {place} {'the delegate' if delegate else 'another node'} is killed")
            await swarm.play_with_kill(place, delegate=delegate)
            await swarm.play(count=AFTER)
    except NetworkError as error:
        tell(str(error))


# -- what came of it -----------------------------------------------------------------------------------------


def _run_of(swarm: SitesSwarm, record: RunRecord, *, carried: tuple[float, ...], round_s: Spread) -> SitesRun:
    """The outcome of a swarm whose processes have ended. Blocks while it reads what the nodes kept."""
    check = swarm.swarm.check(record)
    logs = [read_node(node.index, node.peer_id, node.folder) for node in swarm.swarm.nodes]
    counted = {number: _tokens(logs, number) for number in range(1, swarm.next_round)}
    struck = {node for node, _, _ in swarm.kills}
    return SitesRun(
        uplink_bytes=carried,
        round_s=round_s,
        rounds=record.scenario.rounds,
        certified=len({number for _, number in record.certified_rounds()}),
        wrong_values=check.wrong_values,
        forks=count_forks(record.decided()),
        unverified=check.errors,
        missed={index: ones for index, ones in record.missed().items() if ones},
        evictions=evictions(record, struck),
        uncounted=_uncounted(swarm, counted),
        kills=tuple(_kill_of(swarm, counted, one) for one in swarm.kills),
    )


def _tokens(logs: list[NodeLog], number: int) -> dict[int, int]:
    """Tokens in a certified round, by whose contribution they are in."""
    kept = kept_plan(logs, number)
    tokens = {} if kept is None else counted_tokens(*kept)
    return {log.index: tokens[log.peer_id] for log in logs if log.peer_id in tokens}


def _uncounted(swarm: SitesSwarm, counted: Mapping[int, Mapping[int, int]]) -> int:
    """Steps that rounds without a kill do not have: one of each who lives."""
    disturbed = {number for _, number, _ in swarm.kills}
    made = {number: TOKENS * len(alive) for number, alive in enumerate(swarm.alive, 1) if number not in disturbed}
    return sum(max(0, tokens - sum(counted[number].values())) for number, tokens in made.items())


def _kill_of(swarm: SitesSwarm, counted: Mapping[int, Mapping[int, int]], one: tuple[int, int, bool]) -> Kill:
    node, number, delegate = one
    left = tuple(other.index for other in swarm.place_of(node))
    later = [tokens for after, tokens in counted.items() if after > number]
    return Kill(
        node=node,
        delegate=delegate,
        round=number,
        left=left,
        took_s=swarm.took_s[number - 1] if number <= len(swarm.took_s) else inf,
        tokens=sum(counted.get(number, {}).values()),
        without=sum(tokens.keys().isdisjoint(left) for tokens in later),
    )


def run(bench: SitesBench, tell: ShowNow) -> SitesResult:
    """Count what goes over the uplinks of places whose nodes contribute together, beside the same nodes apart.

    Then a delegate is killed in the middle of a reduction, and later a node of another place that is none: no round is
    to be lost, and who is left in the place is to go on. Every value is computed again from what the nodes kept. It
    takes root, iproute2 and nftables, and nothing is added to the machine's own network.
    """
    load = load_per_core()
    with TemporaryDirectory(prefix="shoal-bench-sites-") as name:
        found = {}
        for sites in get_args(Sites):
            folder = Path(name) / sites
            folder.mkdir()
            found[sites] = trio.run(measure_sites, bench, sites, folder, tell)
    founder = Identity.generate().peer_id
    return SitesResult(
        bench=bench,
        not_default=not_default(sites_manifest(bench, "apart", [founder])),
        load=load,
        apart=found["apart"],
        together=found["together"],
    )


CASE: Final = Case(spec=SitesBench, run=run, options=LongCaseOptions)
