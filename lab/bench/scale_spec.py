"""Specification of `shoal bench scale`, and its result beside the targets."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Annotated, Final, Literal

import msgspec

from shoal.lab.case import Spec
from shoal.lab.targets import Row, Spread, Target
from shoal.node.option import Option, Within, check_options
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest import FOUNDER_LIMIT

NOT_CERTIFIED: Final = Target(name="rounds that were not certified", most=0)
WRONG: Final = Target(name="wrong values", most=0)
FORKED: Final = Target(name="forks, and states that differ", most=0)
UNVERIFIED: Final = Target(name="what could not be verified", most=0)
ABSENT: Final = Target(name="founders that nothing struck and that missed rounds", most=0)
EVICTED: Final = Target(name="evictions of the living after the first round", most=0)
EVICTED_WHEN_STRUCK: Final = Target(name=EVICTED.name)
ROUND: Final = Target(name="a round", unit="s")
REST: Final = Target(name="processor time of a daemon at rest", unit="% of a core", most=0.5)
VOTER_KB_S: Final = {16: 8.0, 64: 30.0}
"""The most that a voter may say, by how many there are: for these numbers it was said."""
LOST: Final = Target(name="steps lost", most=0)
TWICE: Final = Target(name="steps counted twice", most=0)
WENT_ON: Final = Target(name="rounds certified while some are held, or apart", least=1)
STOOD: Final = Target(name="rounds certified by the other side, too", most=0)
TRAINED_ON: Final = Target(name="steps that the other side made meanwhile", least=1)
ONE_CHAIN: Final = Target(name="one chain after the heal", unit="s", most=10.0)
DEAD: Final = Target(name="times that one who is held was declared dead", most=0)
FULL_PACE: Final = 0.9
"""Share of the pace before that counts as all of it: rounds of one swarm left alone differ by as much."""
PACE: Final = Target(name="pace from 10 s after", unit="of that before", least=FULL_PACE)
STRUCK_LIMIT_S: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleBench(Spec):
    """Options of `shoal bench scale`. rounds: all; of those that strike some, those before, and those after."""

    nodes: Annotated[
        int, Option("--nodes", help="How many founders, each a process of its own.", check=Within(2, FOUNDER_LIMIT))
    ] = 12
    trainers: Annotated[
        Literal["wait", "regression"],
        Option("--trainers", help="What they do: steps that wait, or the smallest model there is."),
    ] = "wait"
    rounds: Annotated[
        int,
        Option(
            "--rounds",
            help="How many rounds; with --held, --stopped or --apart, how many before and how many after.",
            check=Within(2, 1000),
        ),
    ] = 6
    round_s: Annotated[
        float, Option("--round-s", help="Seconds that the steps of a round wait.", check=Within(1, 600))
    ] = 10.0
    beside_loops: Annotated[
        int, Option("--beside-loops", help="Endless loops that run beside the nodes.", check=Within(0, 64))
    ] = 0
    held: Annotated[int, Option("--held", help="How many nodes are held to a share of a core.")] = 0
    share: Annotated[float, Option("--share", help="That share.", check=Within(0.01, 1))] = 0.05
    stopped: Annotated[int, Option("--stopped", help="How many nodes are stopped by SIGSTOP.")] = 0
    apart: Annotated[
        int, Option("--apart", help="How many nodes do not reach the others; needs network namespaces.")
    ] = 0
    seconds: Annotated[
        float, Option("--seconds", help="For how long they are so.", check=Within(1, STRUCK_LIMIT_S))
    ] = 60.0

    def __post_init__(self) -> None:
        check_options(self)
        strikes = {"--held": self.held, "--stopped": self.stopped, "--apart": self.apart}
        if sum(map(bool, strikes.values())) > 1:
            raise ConfigError(f"{', '.join(strikes)} are a measurement each; give one of them")
        for option, count in strikes.items():
            if not 0 <= count < self.nodes:
                raise ConfigError(f"{option}: {count} is not in 0..{self.nodes - 1}: one node at least is left alone")
        if self.struck and self.trainers != "wait":
            raise ConfigError(f"{', '.join(strikes)} count steps, which only trainers that wait note; leave --trainers")

    @property
    def struck(self) -> range:
        """Indices of the nodes that are held, stopped or apart: the last ones."""
        return range(self.nodes - (self.held or self.stopped or self.apart), self.nodes)

    @property
    def sides(self) -> tuple[range, range]:
        """Indices of the nodes that are left alone, and of the others."""
        return range(self.struck.start), self.struck


class Sides(msgspec.Struct, frozen=True, kw_only=True):
    """Rounds of two sides that did not reach each other. rounds: that each certified, the larger number first.

    alone: steps that the other one made. one_chain_s: from the heal until all were past those rounds; None if never.
    """

    rounds: tuple[int, int]
    alone: int
    one_chain_s: float | None


class Struck(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a swarm of which some nodes were held, stopped, or apart from the others.

    means: how. certified: rounds in that time. deaths: how long each time lasted that a node left alone held one that
    is held for dead, in seconds. before_s, during_s, after_s: medians from one round to the next; None without any.
    contributors: the fewest in a round from 10 s after on.
    """

    means: str
    certified: int
    deaths: tuple[float, ...]
    before_s: float | None
    during_s: float | None
    after_s: float | None
    contributors: int
    sides: Sides | None = None

    @property
    def pace(self) -> float:
        """Share of the pace before that there is from 10 s after on."""
        return 0.0 if self.before_s is None or self.after_s is None else self.before_s / self.after_s


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of all nodes, up to the last contribution of each that counts. problems: what could not be read."""

    made: int
    lost: int
    twice: int
    problems: tuple[str, ...]


class ScaleResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `shoal bench scale`.

    not_default: settings that `shoal init` does not write. start_s: from the first start until all wait for the first
    round. missed: by founder that nothing struck, the rounds that others certified without it. links_made, links_lost,
    deaths, revivals: over all nodes. control_kb_s: sent by a node, the median. rest_percent: of a core, the median of
    the daemons, over `rest_s` in which all trainers train and none contributes. pss_mb: of a daemon, the median. load:
    of the machine, in runnable processes a core, before the start.
    """

    bench: ScaleBench
    not_default: tuple[str, ...]
    load: float
    start_s: float | None
    rounds: int
    certified: int
    wrong_values: int
    forks: int
    unverified: tuple[str, ...]
    missed: dict[int, tuple[int, ...]]
    evictions: int
    round_s: Spread | None
    links_made: int
    links_lost: int
    deaths: int
    revivals: int
    control_kb_s: float | None
    rest_percent: float | None
    rest_s: float
    pss_mb: float | None
    steps: Steps | None = None
    struck: Struck | None = None

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured values, each with its target."""
        evicted = EVICTED if self.struck is None else EVICTED_WHEN_STRUCK
        return (
            NOT_CERTIFIED.row(self.rounds - self.certified),
            WRONG.row(self.wrong_values),
            FORKED.row(self.forks),
            UNVERIFIED.row(len(self.unverified)),
            ABSENT.row(len(self.missed)),
            evicted.row(self.evictions),
            *self._undisturbed_rows,
            *self._step_rows,
            *self._struck_rows,
        )

    @property
    def _undisturbed_rows(self) -> tuple[Row, ...]:
        """Of a swarm that is left alone, whose trainers leave the processor to the daemons."""
        bench = self.bench
        if bench.trainers != "wait" or bench.beside_loops or self.struck is not None:
            return (ROUND.row(self.round_s),)
        control = Target(name="control that a voter sends", unit="kB/s", most=VOTER_KB_S.get(bench.nodes))
        return ROUND.row(self.round_s), control.row(self.control_kb_s), REST.row(self.rest_percent)

    @property
    def _step_rows(self) -> tuple[Row, ...]:
        if self.steps is None:
            return ()
        return LOST.row(self.steps.lost), TWICE.row(self.steps.twice + len(self.steps.problems))

    @property
    def _struck_rows(self) -> tuple[Row, ...]:
        if self.struck is None:
            return ()
        everyone = Target(name="contributors of every round from 10 s after", least=self.bench.nodes)
        held: tuple[Row, ...] = ()
        if self.bench.held:
            held = WENT_ON.row(self.struck.certified), DEAD.row(len(self.struck.deaths))
        if (sides := self.struck.sides) is not None:
            one_chain_s = inf if sides.one_chain_s is None else sides.one_chain_s
            held = (
                WENT_ON.row(sides.rounds[0]),
                STOOD.row(sides.rounds[1]),
                TRAINED_ON.row(sides.alone),
                ONE_CHAIN.row(one_chain_s),
            )
        return *held, PACE.row(self.struck.pace), everyone.row(self.struck.contributors)
