"""`shoal bench wan`: reductions of real nodes over emulated lines, and how much of a line's rate carries payload.

One after another, in one network:

    one cubic connection, one BBR connection     bare sockets from the first node to the second, BARE_S each
    MANY BBR connections each way at once        what the emulation and TCP carry in both directions together
    rounds of N nodes, until seconds of reductions are measured

*Payload* are encoded contributions and finals, without proofs, frames, cipher or headers: in a round of N peers each
sends 2 (N - 1) / N of its values' encoded bytes, and receives as much. The rate of a reduction is what a peer sends
per second of its *reduce phase*, from the first peer that accepted the plan to the last that had all finals decoded
(`times`). `payload_mbit_s` is the payload of all measured reductions over the time of their reduce phases, of
those that began at least WARM_UP_S after the first one. So it is a rate in one direction; in a butterfly both are used
at once. `with_pauses_mbit_s` is over all of the time instead, from the first measured plan to the last peer's finals:
in between nodes draw, check, agree and adopt.

`link_mbit_s` is what a line carries of Ethernet frames. Of a full frame 1448 of 1514 bytes are TCP's payload, so
95.6 % of the rate is the most that any program can have.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Final

import msgspec
import trio

from shoal.cli.render import ShowNow
from shoal.collectives.codecs import codec
from shoal.lab.bench.swarm import BenchSpec, BenchSwarm, running_swarm
from shoal.lab.bench.times import NodeRound, read_node, round_at, times_of
from shoal.lab.case import Case, LongCaseOptions, Spec, tell_nothing
from shoal.lab.targets import Row, Target
from shoal.node.option import Option, Within, check_options
from shoal.protocol.errors import ConfigError, NetworkError
from shoal.testnet.links.namespaces import Network, has_netem, network, why_not
from shoal.testnet.links.wan_profiles import Profile, profile_of, uplinks_of

WARM_UP_S: Final = 10.0
BARE_S: Final = 10.0
MANY: Final = 8
REDUCE_S: Final = 7.0
"""About how long one reduction takes on a line that is full."""
NUMEL_LIMITS: Final = (4096, 64_000_000)
ROUNDS_LIMIT: Final = 200
PORT: Final = 5201
SHARE: Final = Target(name="payload of reductions, each way", unit="of the line", least=0.85)
DIFFERENT: Final = Target(name="rounds after which nodes hold different values", most=0)

_Bare = tuple[float | None, float | None, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WanBench(Spec):
    """Options of `shoal bench wan`; None leaves it to the profile. bare_s: 0 leaves bare connections out."""

    peers: Annotated[
        int, Option("--peers", help="How many nodes, each with a line of its own.", check=Within(2, 16))
    ] = 2
    profile: Annotated[
        str, Option("--profile", help="home, continental, intercontinental or mobile.", metavar="NAME")
    ] = "intercontinental"
    rate: Annotated[float | None, Option("--rate", help="Of a line, in Mbit/s, up and down.")] = None
    rtt_ms: Annotated[float | None, Option("--rtt-ms", help="Round trip between two nodes, without jitter.")] = None
    loss: Annotated[float | None, Option("--loss", help="Packets lost from node to node, in percent.")] = None
    codec: Annotated[str, Option("--codec", help="fp32, bf16 or int8.")] = "fp32"
    numel: Annotated[
        int | None,
        Option("--numel", help="How many values. [so many as take about 7 s]", check=Within(*NUMEL_LIMITS)),
    ] = None
    seconds: Annotated[
        float,
        Option("--seconds", help="How long reductions are measured, after the first 10 s.", check=Within(1, 600)),
    ] = 30.0
    warm_up_s: float = WARM_UP_S
    bare_s: float = BARE_S

    def __post_init__(self) -> None:
        check_options(self)
        if codec(self.codec).stochastic:
            raise ConfigError("--codec: choose fp32, bf16 or int8, whose size and cost say all that is asked here")
        _ = self.line

    @property
    def line(self) -> Profile:
        """The profile, with what the options say in place of its own. Raises ConfigError."""
        fields = msgspec.to_builtins(profile_of(self.profile))
        if self.rate is not None:
            fields |= {"down_mbit": self.rate, "up_mbit": self.rate}
        if self.rtt_ms is not None:
            fields |= {"rtt_s": self.rtt_ms / 1000, "jitter_s": 0.0}
        if self.loss is not None:
            fields["loss"] = self.loss / 100
        try:
            return msgspec.convert(fields, Profile)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--rate, --rtt-ms, --loss: {error}; give Mbit/s, milliseconds and percent") from None

    @property
    def values(self) -> int:
        """Number of values in a reduction."""
        if self.numel is not None:
            return self.numel
        each = codec(self.codec).encoded_bytes(1 << 20) / (1 << 20) * _share(self.peers)
        wanted = int(self.line.link_mbit * 1e6 / 8 * REDUCE_S / each)
        return min(max(wanted, NUMEL_LIMITS[0]), NUMEL_LIMITS[1])

    @property
    def payload_bytes(self) -> int:
        """Bytes that a peer sends in a reduction, the mean over all peers."""
        return round(codec(self.codec).encoded_bytes(self.values) * _share(self.peers))


def _share(peers: int) -> float:
    """Bytes a peer sends, in its encoded values: the parts that others own, and its own part's final to all of them."""
    return 2 * (peers - 1) / peers


class WanRound(msgspec.Struct, frozen=True, kw_only=True):
    """One reduction. at_s: since the first one's plan. lanes: from the first node to all others, after it.

    sent_ratio: what peers sent, over lanes and control, to what they had to; far above 1 if payloads went twice.
    """

    at_s: float
    reduce_s: float
    payload_mbit_s: float
    lanes: int
    sent_ratio: float
    measured: bool


class Wan(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `shoal bench wan`; rates in one direction, in Mbit/s. None: not asked for.

    many_bbr_mbit_s: of MANY connections each way at once, the mean of both ways. emulator_share: of one core, while
    nodes reduced; None where the kernel does it.
    """

    payload_mbit_s: float
    link_mbit_s: float
    cubic_mbit_s: float | None
    bbr_mbit_s: float | None
    link_share: float
    with_pauses_mbit_s: float
    many_bbr_mbit_s: float | None
    peers: int
    values: int
    codec: str
    profile: Profile
    emulator: str
    emulator_share: float | None
    identical: bool
    rounds: tuple[WanRound, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured values, each with its target."""
        return SHARE.row(self.link_share), DIFFERENT.row(not self.identical)


async def measure_wan(bench: WanBench, tell: ShowNow = tell_nothing, *, folder: Path | None = None) -> Wan:
    """Run the benchmark in `folder` (empty; None for a temporary one).

    Raises ConfigError where lines cannot be emulated, NetworkError if the swarm does not get through.
    Cancellation: all processes are ended and all namespaces removed.
    """
    reason = why_not()
    if reason is not None:
        raise ConfigError(f"emulated lines take network namespaces, and {reason}")
    with (
        tempfile.TemporaryDirectory(prefix="shoal-bench-wan-") as made,
        network(bench.peers, uplinks_of(bench.line, bench.peers)) as links,
    ):
        bare = await _bare(bench, links, tell)
        return await _reduce(bench, links, folder or Path(made), tell, bare)


async def _bare(bench: WanBench, links: Network, tell: ShowNow) -> _Bare:
    """Mbit/s of one cubic, one BBR, and MANY BBR connections each way."""
    if not bench.bare_s:
        return None, None, None
    tell("one cubic connection")
    cubic = await _streams(links, [(0, 1)], 1, "cubic", bench.bare_s)
    tell("one BBR connection")
    bbr = await _streams(links, [(0, 1)], 1, "bbr", bench.bare_s)
    tell(f"{MANY} BBR connections each way")
    return cubic, bbr, await _streams(links, [(0, 1), (1, 0)], MANY, "bbr", bench.bare_s)


async def _streams(
    links: Network, ways: list[tuple[int, int]], connections: int, congestion_control: str, seconds: float
) -> float:
    """Mbit/s that arrive over bare connections, the mean over `ways`. Cancellation leaves the processes to `links`."""
    rates: list[float] = []

    def stream(port: int, sender: int, receiver: int) -> None:
        host = links.place(receiver).host
        numbers = [host, str(port), str(connections), str(seconds)]
        module = [sys.executable, "-m", "shoal.lab.bench.wan_streams"]
        receive = [*links.place(receiver).enter, *module, "receive", *numbers]
        send = [*links.place(sender).enter, *module, "send", *numbers, congestion_control]
        with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiving:
            assert receiving.stdout is not None
            receiving.stdout.readline()
            with subprocess.Popen(send) as sending:
                said = receiving.stdout.readline()
                sending.kill()
        if not said:
            raise NetworkError(f"no {congestion_control} connection between the namespaces; see above")
        rates.append(float(said) * 8 / 1e6)

    async with trio.open_nursery() as nursery:
        for port, way in enumerate(ways, PORT):
            nursery.start_soon(partial(trio.to_thread.run_sync, stream, port, *way, abandon_on_cancel=True))
    return sum(rates) / len(rates)


async def _reduce(
    bench: WanBench,
    links: Network,
    folder: Path,
    tell: ShowNow,
    bare: _Bare,
) -> Wan:
    spec = BenchSpec(
        peers=bench.peers,
        numel=bench.values,
        codec=bench.codec,
        rounds=ROUNDS_LIMIT,
    )
    tell(f"starting {bench.peers} nodes")
    async with running_swarm(spec, folder, links) as swarm:
        found = RoundTally(bench)
        busy_s, began = links.emulator_cpu_s(), time.monotonic()
        for round in range(1, ROUNDS_LIMIT + 1):
            tell(f"round {round}" + (f": {found.rounds[-1].payload_mbit_s:.0f} Mbit/s" if found.rounds else ""))
            await swarm.play(round)
            found.add(_peers(swarm, round), links.lanes(0))
            if found.enough:
                break
        share = (links.emulator_cpu_s() - busy_s) / (time.monotonic() - began)
    payload = found.payload_mbit_s
    return Wan(
        payload_mbit_s=payload,
        link_mbit_s=bench.line.link_mbit,
        cubic_mbit_s=bare[0],
        bbr_mbit_s=bare[1],
        link_share=payload / bench.line.link_mbit,
        with_pauses_mbit_s=found.with_pauses_mbit_s,
        many_bbr_mbit_s=bare[2],
        peers=bench.peers,
        values=bench.values,
        codec=bench.codec,
        profile=bench.line,
        emulator="netem" if has_netem() else "relay",
        emulator_share=None if has_netem() else share,
        identical=found.identical,
        rounds=tuple(found.rounds),
    )


def _peers(swarm: BenchSwarm, round: int) -> list[NodeRound]:
    return round_at([read_node(node.folder) for node in swarm.nodes], round)


class RoundTally:
    """Tally of the rounds of one run."""

    def __init__(self, bench: WanBench) -> None:
        self.rounds: list[WanRound] = []
        self.identical = True
        self._bench = bench
        self._began_at = 0.0
        self._sent_bytes = 0

    def add(self, peers: list[NodeRound], lanes: int) -> None:
        planned_at, reduce_s = min(peer.planned_at for peer in peers), times_of(peers).reduce_s
        if not self.rounds:
            self._began_at = planned_at
        self.identical &= len({peer.digest for peer in peers}) == 1
        at_s = planned_at - self._began_at
        before, self._sent_bytes = self._sent_bytes, sum(peer.sent_bytes for peer in peers)
        self.rounds.append(
            WanRound(
                at_s=at_s,
                reduce_s=reduce_s,
                payload_mbit_s=_mbit(self._bench.payload_bytes, reduce_s),
                lanes=lanes,
                sent_ratio=(self._sent_bytes - before) / (len(peers) * self._bench.payload_bytes),
                measured=at_s >= self._bench.warm_up_s,
            )
        )

    @property
    def _measured(self) -> list[WanRound]:
        return [round for round in self.rounds if round.measured]

    @property
    def enough(self) -> bool:
        return sum(round.reduce_s for round in self._measured) >= self._bench.seconds

    @property
    def payload_mbit_s(self) -> float:
        measured = self._measured
        return _mbit(self._bench.payload_bytes * len(measured), sum(round.reduce_s for round in measured))

    @property
    def with_pauses_mbit_s(self) -> float:
        first, last = self._measured[0], self._measured[-1]
        return _mbit(self._bench.payload_bytes * len(self._measured), last.at_s + last.reduce_s - first.at_s)


def _mbit(size: int, seconds: float) -> float:
    return size * 8 / 1e6 / seconds


def run(bench: WanBench, tell: ShowNow) -> Wan:
    """Reduce over emulated lines, beside one cubic and one BBR connection; exits 1 if nodes end up with other values.

    A line has a rate, a round trip and losses: those of --profile, or what --rate, --rtt-ms and --loss say instead.
    It takes root, iproute2 and nftables, and nothing is added to the machine's own network.
    """
    return trio.run(measure_wan, bench, tell)


CASE: Final = Case(spec=WanBench, run=run, sound=attrgetter("identical"), options=LongCaseOptions)
