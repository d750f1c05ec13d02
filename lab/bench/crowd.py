"""`shoal bench crowd`: many real daemons that share rollouts, and how much of what is announced each of them hears.

    each joins one that is there ─► has a neighbour ─► groups for so many minutes ─► one more, for the last to be heard

The nodes are copies of one process that has imported everything (`shoal.lab.fork_client`), so what they share of that
counts once among them in PSS. Their agents have no model (`shoal.lab.bench.crowd_node`). All clocks are one.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import msgspec
import trio

from shoal.cli.render import ShowNow
from shoal.cli.text import count
from shoal.lab.bench.crowd_node import FAMILY, MODULE, NOTES_NAME, PERIOD_NAME, Note, read_notes
from shoal.lab.case import Case, LongCaseOptions, Spec
from shoal.lab.fleet import Swarm, control_rate_kb_s, cpu_s, pss_mb, untested_command
from shoal.lab.fork_client import forking
from shoal.lab.targets import Row, Spread, Target
from shoal.node.option import Option, Within
from shoal.node.reporting.events import AgentStarted, Linked, Lost, Rollouts
from shoal.node.sapo.policies import BUILT_IN
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest, validate_manifest
from shoal.protocol.neighbours import NEIGHBOUR_LIMIT
from shoal.testnet.nodes import Launch, NodeProcess, Runtime

SOON_S: Final = 60.0
"""Within this time a group is to be heard of."""
WAVE_NODES: Final = 8
"""Nodes that are started at once."""
SETTLE_DEADLINE_S: Final = 600.0
POLL_S: Final = 0.5
"""Between two looks at a node's log: fifty a second of each of a hundred nodes would be what is measured."""
PRELOAD: Final = ("shoal.cli.commands", "shoal.cli.run", "shoal.node.node", "typer.main", MODULE)

HEARD: Final = Target(name="of the group heard by fewest, nodes that heard it within 60 s", unit="of all", least=0.99)
MEMORY: Final = Target(name="memory of the largest daemon (PSS)", unit="MB", most=120, aim=70)
LINKS: Final = Target(name="links of a node", most=NEIGHBOUR_LIMIT + 1)
"""One more for a moment: a founder has the place that was just promised to a stranger."""
PULLED: Final = Target(name="groups that came of those wanted", unit="of all")
DELAY: Final = Target(name="announced to heard, median", unit="s")
LATE: Final = Target(name="announced to heard, 99 in 100", unit="s")
CONTROL: Final = Target(name="sent by a node", unit="kB/s")
CPU: Final = Target(name="processor of a daemon", unit="of a core")


@dataclass(frozen=True, slots=True, kw_only=True)
class CrowdBench(Spec):
    """Options of `shoal bench crowd`."""

    nodes: Annotated[int, Option("--nodes", help="How many daemons.", check=Within(2, 1024))] = 128
    minutes: Annotated[
        float, Option("--minutes", help="For so long groups are made and counted.", check=Within(0.1, 600))
    ] = 10.0
    period_s: Annotated[
        float, Option("--period-s", help="Seconds from a node's group to its next.", check=Within(1, 3600))
    ] = 60.0
    external: Annotated[
        int, Option("--external", help="Groups of others that a node pulls in that time.", check=Within(1, 64))
    ] = 2


class CrowdResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `shoal bench crowd`.

    groups: that were made in the time. heard: share of (group, other node) in which it was heard within 60 s, and
    least_heard that of the group for which it is least. delay: seconds from the agent to another's book, over all that
    were heard of; pulled: share of the groups that nodes wanted and got. memory_mb: PSS of each daemon. links: of each
    node at the end, most_links of one at any time. control_kb_s: sent by a node, by its own count at the ends of its
    rounds; cpu: its share of a core, both while groups were made.
    """

    bench: CrowdBench
    settled_s: float
    groups: int
    heard: float
    least_heard: float
    delay_median_s: float
    delay_p99_s: float
    pulled: float
    memory_mb: Spread
    links: Spread
    most_links: int
    control_kb_s: Spread | None
    cpu: Spread

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured values, each with its target."""
        return (
            HEARD.row(self.least_heard),
            MEMORY.row(self.memory_mb.most),
            LINKS.row(self.most_links),
            PULLED.row(self.pulled),
            DELAY.row(self.delay_median_s),
            LATE.row(self.delay_p99_s),
            CONTROL.row(self.control_kb_s),
            CPU.row(self.cpu),
        )


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """Groups made in a time, and what others heard of them."""

    groups: int
    heard: float
    least_heard: float
    delays_s: tuple[float, ...]


def heard_by_all(notes: Sequence[Sequence[Note]], since: float, until: float) -> Heard:
    """Collect what all nodes heard of the groups that any of them made between these times. notes: of each node.

    Without any group nothing was heard.
    """
    heard = [{note.heard: note.at for note in of_one if note.heard} for of_one in notes]
    shares: list[float] = []
    delays_s: list[float] = []
    for maker, of_one in enumerate(notes):
        others = [book for node, book in enumerate(heard) if node != maker]
        for note in of_one:
            if note.made and since <= note.at < until:
                took_s = [book[note.made] - note.at for book in others if note.made in book]
                shares.append(sum(delay <= SOON_S for delay in took_s) / len(others))
                delays_s += took_s
    return Heard(
        groups=len(shares),
        heard=statistics.fmean(shares) if shares else 0.0,
        least_heard=min(shares, default=0.0),
        delays_s=tuple(sorted(delays_s)),
    )


def pulled_share(notes: Sequence[Sequence[Note]], since: float, until: float) -> float:
    """Share of the groups that nodes wanted between these times, and got; 0 where none wanted any."""
    rounds = [note for of_one in notes for note in of_one if note.wanted and since <= note.at < until]
    return sum(note.got for note in rounds) / sum(note.wanted for note in rounds) if rounds else 0.0


def links_over_time(changes: Iterable[Linked | Lost]) -> tuple[int, int]:
    """Count a node's links at the end of these changes, and the most that it had."""
    linked: set[str] = set()
    most = 0
    for change in changes:
        (linked.add if isinstance(change, Linked) else linked.discard)(change.peer)
        most = max(most, len(linked))
    return len(linked), most


def at_share(ordered: Sequence[float], share: float) -> float:
    """The number that this share of the ordered ones does not exceed; infinity of none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("inf")


class CrowdSwarm(Swarm):
    """Daemons whose agents are stubbed."""

    def __init__(self, bench: CrowdBench, folder: Path, runtime: Runtime) -> None:
        super().__init__(folder, bench.nodes, lambda peers: _manifest(bench, peers), runtime=runtime)
        (folder / "nodes" / PERIOD_NAME).write_text(str(bench.period_s))

    async def start_in_waves(self) -> None:
        """Start the first node, then others, some at a time, which join one of those that listen. Raises NetworkError.

        Each is told of one member, as by somebody who is in already: with one for all, that one's hellos are measured.
        """
        drawn = random.Random(0)
        first, *others = self.nodes
        await self.launch(first)
        await self.until(lambda: bool(first.addresses), "the first node listens", SETTLE_DEADLINE_S)
        there = [first]
        for wave in (others[at : at + WAVE_NODES] for at in range(0, len(others), WAVE_NODES)):
            for node in wave:
                await self.launch(node, join=drawn.choice(there).addresses)
            await self.until(lambda w=wave: all(node.addresses for node in w), "nodes listen", SETTLE_DEADLINE_S)  # type: ignore[misc]
            there += wave

    def is_settled(self) -> bool:
        """True if each node has a neighbour, and its agent. What it takes to have more is part of what is measured."""
        links, agents = dict.fromkeys(range(len(self.nodes)), 0), set()
        for entry in self.journal.entries:
            if isinstance(entry.event, Linked | Lost):
                links[entry.node] += 1 if isinstance(entry.event, Linked) else -1
            elif isinstance(entry.event, AgentStarted):
                agents.add(entry.node)
        return len(agents) == len(links) and min(links.values()) > 0

    def links_of(self, node: NodeProcess) -> tuple[int, int]:
        """The number of links that a node has, and the most that it had."""
        return links_over_time(
            entry.event
            for entry in self.journal.entries
            if entry.node == node.index and isinstance(entry.event, Linked | Lost)
        )


def _manifest(bench: CrowdBench, peers: Sequence[PeerId]) -> Manifest:
    tables = {
        "swarm": {"name": "crowd", "founders": list(peers[:1]), "admission": "open"},
        "workload": {"name": next(iter(BUILT_IN))},
        "sync": {"strategy": "rollouts"},
        "rollouts": {"tasks": [{"family": FAMILY}], "local": 1, "external": bench.external},
    }
    return validate_manifest(tables, source="the benchmark")


def _command(launch: Launch) -> list[str]:
    command = untested_command(launch)
    command[command.index("shoal.cli.main")] = MODULE
    return [*command, "--log-level", "warning"]


def run(bench: CrowdBench, tell: ShowNow) -> CrowdResult:
    """Many daemons that share rollouts, without models: how much of what is announced each hears, and what it costs."""
    with TemporaryDirectory(prefix="shoal-crowd-") as folder:
        return trio.run(_measure, bench, Path(folder), tell, strict_exception_groups=True)


async def _measure(bench: CrowdBench, folder: Path, tell: ShowNow) -> CrowdResult:
    async with forking(PRELOAD) as forked:
        runtime = Runtime(command=_command, start=forked.start, poll_s=POLL_S)
        swarm = CrowdSwarm(bench, folder, runtime)
        async with swarm.owned():
            tell(f"{count(bench.nodes, 'daemon')} join")
            began = trio.current_time()
            await swarm.start_in_waves()
            await swarm.until(swarm.is_settled, "each node has a neighbour", SETTLE_DEADLINE_S)
            settled_s = trio.current_time() - began
            tell(f"groups for {bench.minutes:g} min, {settled_s:.0f} s after the start")
            await swarm.live(bench.period_s)  # each agent comes to its first group
            window = await _watch(swarm, bench, tell)
            return _sum_up(bench, swarm, settled_s, window)


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """The time in which groups counted, on the clock of the nodes' notes; cpu_s and memory_mb of each daemon."""

    since: float
    until: float
    cpu_s: tuple[float, ...]
    memory_mb: tuple[float, ...]


async def _watch(swarm: CrowdSwarm, bench: CrowdBench, tell: ShowNow) -> Window:
    since, before = time.time(), [cpu_s([process]) for process in swarm.daemons().values()]
    await swarm.live(60 * bench.minutes)
    until, after = time.time(), [cpu_s([process]) for process in swarm.daemons().values()]
    tell("the last groups are on their way")
    await swarm.live(SOON_S)
    return Window(
        since=since,
        until=until,
        cpu_s=tuple(later - earlier for earlier, later in zip(before, after, strict=True)),
        memory_mb=tuple(pss_mb(swarm.daemons().values())),
    )


def _sum_up(bench: CrowdBench, swarm: CrowdSwarm, settled_s: float, window: Window) -> CrowdResult:
    notes = [read_notes(node.folder / NOTES_NAME) for node in swarm.nodes]
    found = heard_by_all(notes, window.since, window.until)
    links = [swarm.links_of(node) for node in swarm.nodes]
    seconds = window.until - window.since
    rates = (
        control_rate_kb_s([e for e in swarm.journal.of(Rollouts, node.index) if window.since <= e.at <= window.until])
        for node in swarm.nodes
    )
    return CrowdResult(
        bench=bench,
        settled_s=round(settled_s, 1),
        groups=found.groups,
        heard=round(found.heard, 6),
        least_heard=round(found.least_heard, 6),
        delay_median_s=round(at_share(found.delays_s, 0.5), 3),
        delay_p99_s=round(at_share(found.delays_s, 0.99), 3),
        pulled=pulled_share(notes, window.since, window.until),
        memory_mb=Spread.of(window.memory_mb),
        links=Spread.of(at_end for at_end, _ in links),
        most_links=max(most for _, most in links),
        control_kb_s=Spread.of_any(rate for rate in rates if rate is not None),
        cpu=Spread.of(used / seconds for used in window.cpu_s),
    )


CASE: Final = Case(spec=CrowdBench, run=run, options=LongCaseOptions)
