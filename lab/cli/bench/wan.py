"""`shoal bench wan`: reductions over emulated lines, beside bare connections over the same."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Final

from shoal.cli.render import ShowNow
from shoal.lab.case import Case, LongCaseOptions
from shoal.node.options import Option
from shoal.protocol.errors import ConfigError

if TYPE_CHECKING:
    from shoal.lab.bench.wan import Wan
    from shoal.testnet.links.wan_profiles import Profile

PROFILE = "intercontinental"


@dataclass(frozen=True, slots=True, kw_only=True)
class WanOptions(LongCaseOptions):
    """What the user asked `shoal bench wan` for; None leaves it to the profile."""

    peers: Annotated[int, Option("--peers", help="How many nodes, each with a line of its own.")] = 2
    profile: Annotated[
        str, Option("--profile", help="home, continental, intercontinental or mobile.", metavar="NAME")
    ] = PROFILE
    rate: Annotated[float | None, Option("--rate", help="Of a line, in Mbit/s, up and down.")] = None
    rtt_ms: Annotated[float | None, Option("--rtt-ms", help="Round trip between two nodes, without jitter.")] = None
    loss: Annotated[float | None, Option("--loss", help="Packets lost from node to node, in percent.")] = None
    codec: Annotated[str, Option("--codec", help="fp32, bf16 or int8.")] = "fp32"
    numel: Annotated[int | None, Option("--numel", help="How many values. [so many as take about 7 s]")] = None
    seconds: Annotated[float, Option("--seconds", help="How long reductions are measured, after the first 10 s.")] = (
        30.0
    )


def _run(options: WanOptions, tell: ShowNow) -> Wan:
    """Reduce over emulated lines, beside one cubic and one BBR connection; exits 1 if nodes end up with other values.

    A line has a rate, a round trip and losses: those of --profile, or what --rate, --rtt-ms and --loss say instead.
    It takes root, iproute2 and nftables, and nothing is added to the machine's own network.
    """
    import trio

    from shoal.lab.bench.wan import WanBench, measure_wan

    bench = WanBench(
        profile=profile_from(options),
        peers=options.peers,
        codec=options.codec,
        numel=options.numel,
        seconds=options.seconds,
    )
    return trio.run(partial(measure_wan, bench, tell))


def profile_from(options: WanOptions) -> Profile:
    """The profile, with what the options say in place of its own. Raises ConfigError."""
    import msgspec

    from shoal.testnet.links.wan_profiles import profile_of

    fields = msgspec.to_builtins(profile_of(options.profile))
    if options.rate is not None:
        fields |= {"down_mbit": options.rate, "up_mbit": options.rate}
    if options.rtt_ms is not None:
        fields |= {"rtt_s": options.rtt_ms / 1000, "jitter_s": 0.0}
    if options.loss is not None:
        fields["loss"] = options.loss / 100
    try:
        from shoal.testnet.links.wan_profiles import Profile

        return msgspec.convert(fields, Profile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--rate, --rtt-ms, --loss: {error}; give Mbit/s, milliseconds and percent") from None


def to_lines(result: Wan) -> list[str]:
    """What was measured, a fact a line."""

    def rate(mbit: float | None) -> str:
        return "not measured" if mbit is None else f"{mbit:.1f} Mbit/s"

    measured = sum(round.measured for round in result.rounds)
    line = f"{result.link_share:.1%} of the line's {result.link_mbit_s:g} Mbit/s each way"
    emulator = "" if result.emulator_share is None else f", {result.emulator_share:.0%} of a core"
    return [
        f"payload    {rate(result.payload_mbit_s)}, {line}",
        f"           in {measured} reductions of {result.values} values by {result.peers} peers",
        f"           {rate(result.with_pauses_mbit_s)} with the time between them",
        f"one cubic  {rate(result.cubic_mbit_s)}",
        f"one BBR    {rate(result.bbr_mbit_s)}",
        f"eight BBR  {rate(result.many_bbr_mbit_s)} each way at once",
        f"emulator   {result.emulator}{emulator}",
        f"lanes      {' '.join(str(round.lanes) for round in result.rounds)}",
        f"sent       {' '.join(f'{round.sent_ratio:.2f}' for round in result.rounds)} times the payload",
        f"values     {'identical' if result.identical else 'NOT IDENTICAL'}",
    ]


wan: Final = Case(spec=WanOptions, run=_run, lines=to_lines, sound=attrgetter("identical"))
