"""Plan of a fault campaign: which fault strikes which round of which swarm, all of it drawn from one seed.

A *run* is one faulted round of a swarm that lives on. Runs are dealt to *groups*, a number of peers with a strategy and
a codec each, whose swarm is started once. In some the last node lies all the while, in a swarm that withstands it, and
faults strike the others; in some each node trains by a loop of its user's own. The kinds of fault come from shuffled
decks, so that each has its share; where a fault strikes is drawn per run from (seed, number): run 137 of 200 is the
same whether the others are run or not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import msgspec

from shoal.collectives.codecs import DENSE
from shoal.lab.bench.hostile_member import LYING_KINDS
from shoal.node.options import HOLD_PHASES
from shoal.protocol.errors import ConfigError
from shoal.protocol.strategies.table import DEFAULT_STRATEGY, STRATEGIES

Company = Literal["nodes", "liar", "loops"]
"""nodes: `shoal run` as it ships. liar: the last of them lies, and the swarm withstands that. loops: each trains by a
loop of its user's own."""
Kind = Literal[
    "kill",
    "kill_lead",
    "kill_voter",
    "kill_two",
    "kill_repair",
    "stop",
    "stop_continue",
    "stop_kill",
    "stop_two",
    "cut_pair",
    "cut_all",
    "clock",
    "restore",
]
"""kill: SIGKILL of one node; _lead: of the round's first lead; _voter: of one that has voted and has no certificate;
_two: of two at once; _repair: of one, and of a second while the loss is repaired. stop: SIGSTOP until the others have
certified the round; _continue: for a while; _kill: and SIGKILL after a while; _two: one stopped, one killed. cut: all
lanes broken, the links left alone, between one and another (_pair) or all others (_all). clock: the wall clock of one
node set, forward or back. restore: as kill, and the node starts again on its folder as it was when the round began."""

CODECS: Final[tuple[str, ...]] = ("fp32", "bf16", "int8", "int4")
"""Those that campaigns draw of when nothing is said: another would make other runs of every seed."""
CERTIFYING: Final = tuple(name for name, strategy in STRATEGIES.items() if strategy.certifies)
"""Strategies whose rounds can be judged: all hold one state, and a majority certifies each."""
PEERS: Final = (3, 4, 5, 6)
LIAR_PEERS: Final = 7
"""The fewest that bear one of them gone while another lies: more than two thirds have to be there."""
WITHSTANDS_A_LIAR: Final = {"membership": {"voters": "named"}, "agreement": {"faults": "lying"}}
"""Tables of the manifest of a swarm that bears one."""
NOT_BESIDE_A_LIAR: Final = "restore"
"""A kind of fault: a named voter on an old folder signs nothing until its authority rebases."""
LOOPS_PEERS: Final = 4
LOOPED: Final = ("diloco", "streaming")
"""Strategies with which loops of one's own are struck."""
PEERS_LIMIT: Final = 16
RUN_LIMIT: Final = 10_000
PAIRED: Final = ("kill_two", "kill_repair", "stop_two")
"""Kinds that take two nodes; a swarm of three cannot bear them."""
CUTS: Final = ("cut_pair", "cut_all")
HARMLESS: Final = (*CUTS, "clock")
"""Kinds that are to keep nobody from the round, nor anything out of its sum."""
AHEAD_S: Final = (120.0, 40 * 86_400.0)
"""How far a wall clock is set: from minutes to weeks."""

KINDS: Final[tuple[Kind, ...]] = tuple(k for k in get_args(Kind) if k != "kill_repair" or "repair" in HOLD_PHASES)
STOPS_S: Final = (0.5, 12.0)
_PHASES: Final = ("reduce", "reduce", "reduce", "reduce", "reduce", "plan", "certify")
"""Most faults strike in the reduce."""
_TIMED_SHARE: Final = {True: 0.5, False: 0.15}
"""Which share of the cuts, and of other faults, strikes after a while instead of at a phase: in the training, often."""
_CUTS_LIMIT: Final = 3
_QUIET_SHARE: Final = 0.5


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One swarm of the campaign. lie: what its last node does all the while, of LYING_KINDS; empty if none lies."""

    peers: int
    codec: str
    strategy: str = DEFAULT_STRATEGY
    company: Company = "nodes"
    lie: str = ""

    @property
    def name(self) -> str:
        """Name for folders and lines."""
        others = "" if self.company == "nodes" else f"-{self.lie or self.company}"
        return f"{self.peers}x{self.strategy}-{self.codec}{others}"

    @property
    def honest(self) -> range:
        """Indices of the nodes that do not lie: those that are struck, waited for and judged."""
        return range(self.peers - (self.company == "liar"))


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One faulted round, as far as the seed says.

    order: the nodes in the order in which they are considered as victims. phase: None to strike `after` so much of an
    undisturbed round; else at `progress` of the reduce, or where another phase begins. stop_s: how long a stop lasts.
    cuts: how often lanes are cut. quiet: whether the survivors stand still while a killed node starts again; else it
    has to catch up with them. ahead_s: how far a clock is set; where it is quiet it is set right after the round.
    """

    number: int
    group: Group
    kind: Kind
    order: tuple[int, ...]
    phase: str | None
    progress: float
    after: float
    stop_s: float
    cuts: int
    quiet: bool
    ahead_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Faults that a campaign consists of. A kind named twice has twice the share; stops last between `stop_s`.

    anywhere: else they strike in the midst of a reduce, but for what has another place by its kind.
    """

    kinds: tuple[Kind, ...] = KINDS
    stop_s: tuple[float, float] = STOPS_S
    anywhere: bool = True


SHORT_MIX: Final = Mix(kinds=tuple(kind for kind in KINDS if kind != "clock"), stop_s=(0.5, 2.0), anywhere=False)
"""Without clocks: its nodes are copies of a process that has kept the true one."""


def paced(strategy: str, steps: int, step_s: float) -> tuple[int, float]:
    """(inner steps, seconds of one) with which a round of this strategy lasts as long as so many of so long."""
    chosen = STRATEGIES[strategy]
    if chosen.exchanges_gradients:
        return 1, steps * step_s
    return steps * int(str(chosen.defaults({}).get("fragments", 1))), step_s


def groups_of(
    peers: Sequence[int], codecs: Sequence[str], strategies: Sequence[str], *, short: bool = False
) -> tuple[Group, ...]:
    """Every number of peers with every strategy, which between them meet every codec; if short, each of them once.

    A strategy with a codec of its own has that. Raises ConfigError for what no swarm can have.
    """
    for count in peers:
        if not PEERS[0] <= count <= PEERS_LIMIT:
            raise ConfigError(f"a swarm of {count} nodes is none of {PEERS[0]}..{PEERS_LIMIT}; fewer bear no fault")
    for codec in codecs:
        if codec not in DENSE:
            raise ConfigError(f"--codecs: there is no codec {codec!r}; choose of {', '.join(DENSE)}")
    for name in set(strategies).difference(CERTIFYING):
        raise ConfigError(f"rounds of strategy {name!r} are not certified; choose of {', '.join(CERTIFYING)}")
    counts, names, ways = list(dict.fromkeys(peers)), list(dict.fromkeys(codecs)), list(dict.fromkeys(strategies))
    if not counts or not names or not ways:
        return ()
    rows = max(len(counts), len(names), len(ways) if short else 0)
    return tuple(
        dict.fromkeys(
            Group(
                peers=counts[row % len(counts)],
                strategy=ways[way],
                codec=STRATEGIES[ways[way]].own_codec or names[(row + shift) % len(names)],
            )
            for row in range(rows)
            for shift, way in ([(0, row % len(ways))] if short else enumerate(range(len(ways))))
        )
    )


def liars_among(peers: int, codecs: Sequence[str], strategies: Sequence[str], seed: int) -> tuple[Group, ...]:
    """A group of `peers` for each strategy, with a liar each, whose kinds come in an order by the seed.

    Raises ConfigError for what no swarm can have, or cannot bear.
    """
    strategies = list(dict.fromkeys(strategies))
    if peers < LIAR_PEERS:
        raise ConfigError(f"a swarm of {peers} nodes cannot bear a fault beside a liar; take {LIAR_PEERS} or more")
    groups = groups_of((peers,), codecs, strategies, short=False)[: len(strategies)]
    lies = random.Random(f"{seed}:lies").sample(LYING_KINDS, len(LYING_KINDS))
    return tuple(
        msgspec.structs.replace(group, company="liar", lie=lies[at % len(lies)]) for at, group in enumerate(groups)
    )


def loops_among(codecs: Sequence[str], strategies: Sequence[str]) -> tuple[Group, ...]:
    """A group for each of these strategies with which loops of one's own are struck. Raises ConfigError."""
    chosen = [name for name in dict.fromkeys(strategies) if name in LOOPED]
    groups = groups_of((LOOPS_PEERS,), codecs[: len(chosen)], chosen)[: len(chosen)]
    return tuple(msgspec.structs.replace(group, company="loops") for group in groups)


def draw_runs(seed: int, runs: int, groups: Sequence[Group], mix: Mix) -> tuple[Run, ...]:
    """All runs of a campaign, those of a group one after the other. Raises ConfigError."""
    if not 1 <= runs <= RUN_LIMIT:
        raise ConfigError(f"--runs: {runs} is not in 1..{RUN_LIMIT}")
    if not groups:
        raise ConfigError("a campaign must have a number of peers, a codec and a strategy")
    kinds: list[Kind] = []
    dealer = random.Random(f"{seed}:kinds")
    while len(kinds) < runs:
        kinds += dealer.sample(mix.kinds, len(mix.kinds))
    return tuple(
        _draw_run(random.Random(f"{seed}:{at}"), at + 1, groups[at * len(groups) // runs], kinds[at], mix)
        for at in range(runs)
    )


def _phase(rng: random.Random, timed: bool) -> str | None:
    return None if timed else rng.choice(_PHASES)


def _draw_run(rng: random.Random, number: int, group: Group, kind: Kind, mix: Mix) -> Run:
    if group.company == "liar" and kind in (*PAIRED, NOT_BESIDE_A_LIAR):
        kind = "kill"
    if kind in PAIRED and group.peers < 4:
        kind = "kill"
    timed = rng.random() < _TIMED_SHARE[kind in CUTS]
    return Run(
        number=number,
        group=group,
        kind=kind,
        order=tuple(rng.sample(group.honest, len(group.honest))),
        phase=_phase(rng, timed) if mix.anywhere else "reduce",
        progress=round(rng.random(), 3),
        after=round(rng.random(), 3),
        stop_s=round(rng.uniform(*mix.stop_s), 3),
        cuts=rng.randint(1, _CUTS_LIMIT),
        quiet=rng.random() < _QUIET_SHARE,
        ahead_s=draw_ahead_s(rng),
    )


def draw_ahead_s(rng: random.Random) -> float:
    """How far a wall clock is set: forward as often as back, by minutes as often as by days."""
    return round(rng.choice((-1, 1)) * math.exp(rng.uniform(*map(math.log, AHEAD_S))), 3)
