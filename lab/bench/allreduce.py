"""`shoal bench allreduce`: the all-reduce as it is in use, real nodes on loopback, agreement, encryption and all.

One run has up to three parts:

    timed      a swarm of N nodes goes through WARM_UP + K rounds
    faults     in the same swarm, after those: K times a node is struck in the midst of a reduce, and comes back
    inspect    another swarm, in test mode: its values and its memory, see `inspect`

What is measured of a round is said in `times`. A reduce ends when the last node has its finals decoded; how long that
takes after their arrival is measured alone (`decoding`), since nodes decode while they make the next state. Wire bytes
are what a node sent over lanes and control, per round, the mean over all peers and measured rounds.

A fault strikes the last node while it holds when half of the chunks are final there (test mode, but no other node
holds). Its delay is how much longer that round took, from the first accepted plan until the last survivor had applied,
than the median of the undisturbed rounds of the same run. With faults all nodes are in test mode, so that every value
of the struck rounds can be checked from what the survivors kept; this costs all rounds of the run the same.

A partition cuts that node off all others, whereupon it goes on by itself; it ends APART_S after the survivors have
certified the round. For it each node is in a network namespace, in the undisturbed rounds as well.
"""

from __future__ import annotations

import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import trio

from shoal.cli.render import ShowNow
from shoal.collectives.codecs import DENSE, codec
from shoal.lab.bench.decoding import decode_s
from shoal.lab.bench.inspect import TERM, Inspection, inspect, witnesses
from shoal.lab.bench.swarm import BenchSpec, BenchSwarm, running_swarm
from shoal.lab.bench.times import NodeRound, RoundTimes, median_times, read_node, round_at, times_of
from shoal.lab.case import Case, LongCaseOptions, Spec, tell_nothing
from shoal.lab.targets import Row, Spread, Target
from shoal.node.option import Option, Within, check_options
from shoal.node.options import Hold
from shoal.node.reporting.events import Certified
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.testnet.check import check_round
from shoal.testnet.faults import kill
from shoal.testnet.links.namespaces import Network, network, pairs_between
from shoal.testnet.nodes import NodeProcess

WARM_UP: Final = 2
RECOVERY_ROUNDS: Final = 2
"""After a fault: in the first the struck node takes part again, in the second it is a member again."""
STRIKE_AT: Final = 0.5
APART_S: Final = 5.0
"""Time for one that is cut off to certify something by itself, which it must not, once the others have certified."""

FaultKind = Literal["none", "sigkill", "sigstop", "partition"]
Numel = Annotated[int, Option("--numel", help="How many values.", check=Within(4096, 1 << 32))]
Iters = Annotated[int, Option("--iters", help="Measured rounds; two more warm up.", check=Within(1, 1000))]

MIB: Final = float(1 << 20)
MEASURED: Final = ("fp32", 4)
"""The codec, and how many peers, for which the targets below are set."""
BEYOND: Final = Target(name="the round beyond the reduce, fp32, 4 peers", unit="× the reduce", most=1.0, aim=0.3)
DELAYS: Final = {
    "sigkill": Target(name="SIGKILL of one of 4 in mid-reduce: added delay", unit="s", most=2.0, aim=0.5),
    "sigstop": Target(name="SIGSTOP of one of 4 in mid-reduce: added delay", unit="s", most=6.0, aim=3.0),
    "partition": Target(name="one of 4 cut off in mid-reduce: added delay", unit="s", most=6.0, aim=3.0),
}
WRONG: Final = Target(name="what was checked and is wrong", most=0)


def peak_target(numel: int | None) -> Target:
    """Target of memory: no more than the values take. numel: None where nothing says."""
    most = None if numel is None else 4 * numel / MIB
    return Target(name="peak memory per peer beyond input and output, fp32, 4 peers", unit="MiB", most=most, aim=64.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench(Spec):
    """Options of `shoal bench allreduce`, and the parts that other benchmarks leave out.

    sockets: between nodes that share no memory, as if each were on a machine of its own.
    """

    peers: Annotated[int, Option("--peers", help="How many nodes, each a process of its own.", check=Within(2, 64))] = 4
    numel: Numel = 25_000_000
    codec: Annotated[str, Option("--codec", help=f"One of {', '.join(DENSE)}.")] = "fp32"
    iters: Iters = 5
    fault: Annotated[
        FaultKind, Option("--fault", help="Strike one node in mid-reduce, after the undisturbed rounds, as often.")
    ] = "none"
    sockets: Annotated[
        bool, Option("--sockets", help="All through sockets, as between machines: nodes share no memory.")
    ] = False
    inspect: bool = True

    def __post_init__(self) -> None:
        check_options(self)
        codec(self.codec)
        if self.fault != "none" and self.peers < 3:
            raise ConfigError("--fault needs --peers 3 or more: of two, the one left may be no majority")

    @property
    def undisturbed(self) -> int:
        """The last round before any fault."""
        return WARM_UP + self.iters

    @property
    def struck_rounds(self) -> tuple[int, ...]:
        """The rounds in which a fault strikes."""
        if self.fault == "none":
            return ()
        return tuple(self.undisturbed + 1 + turn * (1 + RECOVERY_ROUNDS) for turn in range(self.iters))

    @property
    def rounds(self) -> int:
        """All rounds of the timed swarm."""
        return self.struck_rounds[-1] + RECOVERY_ROUNDS if self.struck_rounds else self.undisturbed


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """A round in which a node was struck, as the survivors saw it.

    after_s: for each of them, from the strike until it had applied. contributors, coverage: of its certificate.
    identical: they certified the same digest. exact: every value that they applied is the reference's, by bits.
    apart: the struck node certified nothing by itself while it was cut off; and RECOVERY_ROUNDS later all certified the
    same.
    """

    total_s: float
    after_s: tuple[float, ...]
    contributors: tuple[int, ...]
    coverage: tuple[float, ...]
    identical: bool
    exact: bool
    apart: bool = True


class FaultResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of all strikes. delay_s: the median. survivors_identical, exact: in every strike, see `Strike`."""

    kind: FaultKind
    delay_s: float = 0.0
    delays_s: tuple[float, ...] = ()
    survivors_identical: bool = True
    exact: bool = True
    strikes: tuple[Strike, ...] = ()


class Allreduce(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `shoal bench allreduce`. Times in seconds, medians over the measured rounds.

    median_s and times_s: from the first accepted plan until the last node has all finals, and decode_s more. breakdown:
    of a round, in which decoding is a part of working out.
    identical: all nodes certified the same digest in every undisturbed round. exact: in the round that was looked at
    every value that a node applied is the reference's, by bits. max_abs_error: the largest of its mean update, against
    the mean in float64 of what nodes had before encoding. None where it was not asked for, or the system does not tell.
    """

    peers: int
    numel: int
    codec: str
    median_s: float
    times_s: tuple[float, ...]
    decode_s: float
    round_s: float
    rounds_s: tuple[float, ...]
    beyond_reduce_s: float
    breakdown: dict[str, float]
    wire_bytes_per_peer: int
    peak_extra_bytes: int | None
    peak_growth_bytes: int | None
    max_abs_error: float | None
    identical: bool
    exact: bool | None
    encrypted: bool
    fault: FaultResult

    @property
    def ok(self) -> bool:
        """True if nothing that was checked is wrong."""
        fault = self.fault
        apart = all(strike.apart for strike in fault.strikes)
        return self.identical and self.exact is not False and fault.survivors_identical and fault.exact and apart

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured values, each with its target; most only have one at the setting `MEASURED`."""
        found = [WRONG.row(not self.ok)]
        if (self.codec, self.peers) == MEASURED:
            peak = self.peak_extra_bytes
            found.append(peak_target(self.numel).row(None if peak is None else peak / MIB))
            if self.fault.kind == "none":  # else every round is recorded meanwhile
                found.append(BEYOND.row(self.beyond_reduce_s / self.median_s))
        if self.fault.kind != "none" and self.peers == MEASURED[1]:
            found.append(DELAYS[self.fault.kind].row(Spread.of(self.fault.delays_s)))
        return tuple(found)


async def measure(bench: Bench, tell: ShowNow = tell_nothing, *, folder: Path | None = None) -> Allreduce:
    """Run the benchmark in `folder` (empty; None for a temporary one that is removed).

    Raises NetworkError, naming what a node said last, if the swarm does not get through, and ConfigError where nodes
    are to be cut off and cannot be in namespaces.
    Cancellation: all processes are ended and reaped; a temporary folder is removed.
    """
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        for name in ("timed", "inspected"):
            (folder / name).mkdir(parents=True)
        rounds, fault = await _timed(bench, folder / "timed", tell)
        inspection: Inspection | None = None
        if bench.inspect:
            tell("looking at values and memory")
            inspection = await inspect(_spec(bench), folder / "inspected")
        tell("decoding alone")
        decoding_s = await trio.to_thread.run_sync(_decoding_s, bench)
    return _result(bench, rounds, fault, inspection, decoding_s)


def _decoding_s(bench: Bench) -> float:
    chunk_values = _spec(bench).chunk_values
    return decode_s(peers=bench.peers, numel=bench.numel, chunk_values=chunk_values, codec=bench.codec)


def _spec(bench: Bench) -> BenchSpec:
    return BenchSpec(
        peers=bench.peers,
        numel=bench.numel,
        codec=bench.codec,
        rounds=bench.rounds,
        test_mode=bench.fault != "none",
        sockets=bench.sockets,
        holds={bench.peers - 1: tuple(Hold(round=r, phase="reduce", progress=STRIKE_AT) for r in bench.struck_rounds)},
    )


def _result(
    bench: Bench,
    rounds: list[list[NodeRound]],
    fault: FaultResult,
    inspection: Inspection | None,
    decoding_s: float,
) -> Allreduce:
    times = [times_of(peers) for peers in rounds[WARM_UP:]]
    reduces_s = [t.reduce_s + decoding_s for t in times]
    middle = median_times(times)
    round_s = statistics.median(t.total_s for t in times)
    sent = [
        after.sent_bytes - before.sent_bytes
        for earlier, later in zip(rounds[WARM_UP - 1 :], rounds[WARM_UP:], strict=False)
        for before, after in zip(earlier, later, strict=True)
    ]
    return Allreduce(
        peers=bench.peers,
        numel=bench.numel,
        codec=bench.codec,
        median_s=statistics.median(reduces_s),
        times_s=tuple(reduces_s),
        decode_s=decoding_s,
        round_s=round_s,
        rounds_s=tuple(t.total_s for t in times),
        beyond_reduce_s=statistics.median(t.total_s - s for t, s in zip(times, reduces_s, strict=True)),
        breakdown={name: getattr(middle, name) for name in RoundTimes.__dataclass_fields__},
        wire_bytes_per_peer=round(statistics.fmean(sent)),
        peak_extra_bytes=None if inspection is None else inspection.extra_bytes,
        peak_growth_bytes=None if inspection is None else inspection.growth_bytes,
        max_abs_error=None if inspection is None else inspection.max_abs_error,
        identical=all(len({peer.digest for peer in peers}) == 1 for peers in rounds),
        exact=None if inspection is None else inspection.exact,
        encrypted=True,  # Noise and AES-256-GCM: there is no way to run a node without
        fault=fault,
    )


@asynccontextmanager
async def _swarm(bench: Bench, folder: Path) -> AsyncIterator[BenchSwarm]:
    """The timed swarm, with its nodes in namespaces where one is to be cut off."""
    with network(bench.peers) if bench.fault == "partition" else nullcontext() as links:
        async with running_swarm(_spec(bench), folder, links) as swarm:
            yield swarm


async def _timed(bench: Bench, folder: Path, tell: ShowNow) -> tuple[list[list[NodeRound]], FaultResult]:
    """The undisturbed rounds at all nodes, from the first on, and what came of the faults."""
    tell(f"starting {bench.peers} nodes")
    async with _swarm(bench, folder) as swarm:
        for round in range(1, bench.undisturbed + 1):
            tell(f"round {round} of {bench.rounds}")
            await swarm.play(round)
            _drop_records(swarm, round)
        logs = [read_node(node.folder) for node in swarm.nodes]
        rounds = [round_at(logs, round) for round in range(1, bench.undisturbed + 1)]
        usual_s = statistics.median(times_of(peers).total_s for peers in rounds[WARM_UP:])
        strikes = [await _strike(bench, swarm, round, tell) for round in bench.struck_rounds]
    delays = tuple(strike.total_s - usual_s for strike in strikes)
    return rounds, FaultResult(
        kind=bench.fault,
        delay_s=statistics.median(delays) if delays else 0.0,
        delays_s=delays,
        survivors_identical=all(strike.identical for strike in strikes),
        exact=all(strike.exact for strike in strikes),
        strikes=tuple(strikes),
    )


async def _strike(bench: Bench, swarm: BenchSwarm, round: int, tell: ShowNow) -> Strike:
    """Strike the last node in the midst of `round`, check the round, and have the node contribute again."""
    *survivors, victim = swarm.nodes
    tell(f"round {round} of {bench.rounds}: {bench.fault}")
    swarm.open_gate(round)
    await swarm.until_holding(round, "reduce", [victim])
    struck_at = time.time()
    await _hit(bench, swarm)
    await swarm.until_certified(round, survivors)
    strike = await trio.to_thread.run_sync(_check, swarm, survivors, round, struck_at)
    apart = bench.fault != "partition" or await _stays_apart(swarm, round)
    await _bring_back(bench, swarm, round)
    await swarm.until_back(victim, round + 1)
    for recovery in range(round + 1, round + 1 + RECOVERY_ROUNDS):
        await swarm.play(recovery)
        _drop_records(swarm, recovery)
    last = swarm.certified_by(round + RECOVERY_ROUNDS).values()
    if any(event.contributors < bench.peers or victim.peer_id not in event.members for event in last):
        raise NetworkError(f"the node struck in round {round} is no contributing member {RECOVERY_ROUNDS} rounds later")
    return msgspec.structs.replace(strike, apart=apart and len({event.digest for event in last}) == 1)


async def _hit(bench: Bench, swarm: BenchSwarm) -> None:
    """Strike the last node, which holds. One that is cut off goes on."""
    victim = swarm.nodes[-1]
    if bench.fault == "sigkill":
        kill(victim)
    elif bench.fault == "sigstop":
        victim.signal(signal.SIGSTOP)
    else:
        links, pairs = _links(swarm)
        await trio.to_thread.run_sync(links.block, pairs)
        await victim.ask("release")


async def _bring_back(bench: Bench, swarm: BenchSwarm, round: int) -> None:
    """Take back what was done to the last node in `round`, as far as it can be."""
    victim = swarm.nodes[-1]
    if bench.fault == "sigkill":
        await victim.lives[-1].ended.wait()
        await swarm.launch(victim, join=swarm.nodes[0].addresses, after=round)
    elif bench.fault == "sigstop":
        victim.signal(signal.SIGCONT)
        await victim.ask("release")
    else:
        links, pairs = _links(swarm)
        await trio.to_thread.run_sync(links.unblock, pairs)


def _links(swarm: BenchSwarm) -> tuple[Network, frozenset[tuple[int, int]]]:
    """The network, and what is blocked in it for the last node to be cut off."""
    assert swarm.network is not None
    *others, victim = range(len(swarm.nodes))
    return swarm.network, pairs_between([others, [victim]])


async def _stays_apart(swarm: BenchSwarm, round: int) -> bool:
    """Leave the last node cut off for APART_S; true if it has certified neither `round` nor a later one then."""
    await swarm.live(APART_S)
    return all(event.round < round for event in swarm.journal.of(Certified, swarm.nodes[-1].index))


def _check(swarm: BenchSwarm, survivors: list[NodeProcess], round: int, struck_at: float) -> Strike:
    """Time and recompute a struck round from what the survivors logged and kept, then remove the records. Blocks."""
    peers = round_at([read_node(node.folder) for node in survivors], round)
    found = check_round(witnesses(swarm, settled=round), TERM, round)
    _drop_records(swarm, round)
    return Strike(
        total_s=times_of(peers).total_s,
        after_s=tuple(peer.certified_at - struck_at for peer in peers),
        contributors=tuple(peer.contributors for peer in peers),
        coverage=tuple(peer.coverage for peer in peers),
        identical=len({peer.digest for peer in peers}) == 1,
        exact=found.wrong_values == 0 and not found.errors and found.updates_compared >= len(survivors),
    )


def _drop_records(swarm: BenchSwarm, round: int) -> None:
    """Remove what nodes in test mode kept of a round: of large models it would fill the disk."""
    for node in swarm.nodes:
        shutil.rmtree(node.folder / "rounds" / f"{TERM}-{round}", ignore_errors=True)


def run(bench: Bench, tell: ShowNow) -> Allreduce:
    """Measure rounds of real nodes on loopback, undisturbed or struck; exits 1 if any value is wrong."""
    return trio.run(measure, bench, tell)


CASE: Final = Case(spec=Bench, run=run, sound=attrgetter("ok"), options=LongCaseOptions)
