"""`shoal bench join`: how fast a newcomer gets the state from several donors, and what that costs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

from shoal.cli.render import ShowNow
from shoal.lab.case import Case, CaseOptions
from shoal.node.options import Option

if TYPE_CHECKING:
    from shoal.lab.bench.join import JoinSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions(CaseOptions):
    """What the user asked `shoal bench join` for."""

    state_mb: Annotated[int, Option("--state-mb", help="Size of the state: 8 bytes per parameter.")] = 1000
    donors: Annotated[int, Option("--donors", help="How many serve it, each a process of its own.")] = 3
    repetitions: Annotated[int, Option("--repetitions", help="Measured transfers; one more warms up.")] = 9
    training: Annotated[
        bool,
        Option(
            "--training/--no-training",
            help="Also measure the donors' training rate while they serve at 100 MB/s each at most.",
        ),
    ] = True


def _run(options: JoinOptions, tell: ShowNow) -> JoinSpeed:
    """Fetch a state from several donor processes over loopback, beside bare frames over the same lanes."""
    from shoal.lab.bench.join import measure_join
    from shoal.lab.bench.join_joiner import JoinBench

    return measure_join(
        JoinBench(
            state_mb=options.state_mb,
            donors=options.donors,
            repetitions=options.repetitions,
            training=options.training,
        )
    )


def to_lines(speed: JoinSpeed) -> list[str]:
    """What was measured, a fact a line."""
    lines = [
        f"join       {speed.seconds:.2f} s: {speed.state_mb:.0f} MB from {speed.donors} donors, every chunk verified",
        f"rate       {speed.mb_per_s:.0f} MB/s, {speed.lane_ratio:.2f} of the lanes' {speed.lane_mb_per_s:.0f} MB/s",
        f"memory     {speed.extra_mb:.0f} MB beyond the state, at the joiner's peak",
    ]
    if speed.donor_rate_ratio is not None and speed.capped_mb_per_s is not None:
        lines.append(
            f"training   {speed.donor_rate_ratio:.2f} of the undisturbed rate of {speed.capped_donors} donor(s), "
            f"while the joiner got {speed.capped_mb_per_s:.0f} MB/s of {speed.cap_mb_per_s:.0f} under their caps"
        )
    return lines


join: Final = Case(spec=JoinOptions, run=_run, lines=to_lines)
