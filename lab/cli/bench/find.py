"""`shoal bench find`: how long a newcomer takes to find and join a swarm by its link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

from shoal.cli.render import ShowNow
from shoal.lab.case import Case, CaseOptions
from shoal.node.options import Option
from shoal.protocol.errors import ConfigError

if TYPE_CHECKING:
    from shoal.lab.bench.find import FindSpeed

NODES, REPETITIONS = 8, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class FindOptions(CaseOptions):
    """What the user asked `shoal bench find` for."""

    nodes: Annotated[int, Option("--nodes", help="Members of the swarm, all on this machine.")] = NODES
    repetitions: Annotated[int, Option("--repetitions", help="Newcomers, one after the other.")] = REPETITIONS


def _run(options: FindOptions, tell: ShowNow) -> FindSpeed:
    """Start a swarm on loopback, and time `shoal run LINK` from its start to its links and its first contribution."""
    if not (1 <= options.nodes <= 64 and 1 <= options.repetitions <= 100):
        raise ConfigError("--nodes must be 1 to 64, --repetitions 1 to 100")
    from shoal.lab.bench.find import measure_find

    return measure_find(nodes=options.nodes, repetitions=options.repetitions)


def to_lines(speed: FindSpeed) -> list[str]:
    """The result for people."""
    stages = list(speed.newcomers[0])
    lines = [
        f"a newcomer to a swarm of {speed.nodes} is linked after {speed.linked_s:.2f} s, with all of them after "
        f"{speed.linked_all_s:.2f} s, and contributed after {speed.contributed_s:.2f} s (medians)",
        "  ".join(f"{stage:>11}" for stage in stages),
    ]
    return lines + ["  ".join(f"{times[stage]:>11.3f}" for stage in stages) for times in speed.newcomers]


find: Final = Case(spec=FindOptions, run=_run, lines=to_lines)
