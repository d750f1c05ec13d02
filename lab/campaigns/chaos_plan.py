"""Plan of a chaos campaign: scenarios of a few faults each, whose kinds and phases come from one shuffled deck.

A *move* is a fault of some kind in some phase with whatever has to go with it: a repair needs a loss in the same round,
a transfer somebody who joins, and who was stopped for an open time is continued. Every pair of kind and phase is a card
of the deck; the deck is dealt out before it is shuffled again, so that no pair is left out. Scenario 7 of a seed is the
same whether the others are run or not, and on whatever machine: where links cannot be struck, the scenarios that strike
some are left out and the others are what they are elsewhere.

Swarms are dealt from a deck of their own: every strategy of ordinary nodes, those that withstand a liar with one among
them (`chaos_swarm`), and others. Some have more nodes than they need, or nodes behind routers, or lines like those of
homes or of a continent, or two nodes that never reach each other. Where rounds have no such phase a fault strikes when
one begins.

A swarm must be able to survive what is drawn: so many nodes that those who are lost for good, or until some later
round, are never half of those that are left.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar, get_args

from msgspec.structs import replace

from shoal.lab.bench.hostile_member import LYING_KINDS
from shoal.lab.campaigns.campaign_plan import (
    CERTIFYING,
    CODECS,
    NOT_BESIDE_A_LIAR,
    WITHSTANDS_A_LIAR,
    draw_ahead_s,
    paced,
)
from shoal.lab.campaigns.chaos_swarm import ROLES, Program
from shoal.lab.waiting_loop import LOOP
from shoal.lab.waiting_workload import WORKLOAD_NAME
from shoal.node.loops.loop_messages import OWN_LOOP
from shoal.protocol.errors import ConfigError
from shoal.protocol.manifest_rollouts import DEFAULT_POLICY, REPLAYED
from shoal.protocol.strategies.table import STRATEGIES
from shoal.testnet.links.wan_profiles import PROFILES, uplinks_of
from shoal.testnet.scenario import Fault, Kind, Phase, Scenario

Card = tuple[Kind, Phase]
T = TypeVar("T")
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
"""A move named `continue` is a stop that lasts until then, `heal` a partition that does, `resume` a pause."""
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
Company = Literal["nodes", "liar", "loops", "ranks", "samplers"]
"""nodes: `shoal run` as it ships. liar: the last of them lies, and the swarm withstands that. loops: each trains by a
loop of its user's own. ranks: the same, and of one node that is two processes, of which one is killed. samplers: nodes
average their policies; one beside them only samples, one only judges."""
SWARMS: Final[tuple[tuple[str, Company], ...]] = (
    *((name, "nodes") for name in STRATEGIES),
    *((name, "liar") for name in CERTIFYING),
    ("diloco", "loops"),
    ("streaming", "loops"),
    ("diloco", "ranks"),
    ("diloco", "samplers"),
)
"""The deck of swarms."""
LOSING: Final = ("kill", "leave", "continue", "pause", "resume")
"""Moves in which a node is gone for good, or until some later round."""
LASTING: Final = ("stop", "restart", "throttle", "slow", "full", "restore", "move")
"""Kinds of a single node that are undone after a while."""
BESIDE: Final[tuple[Kind, ...]] = ("restart", "stop", "cut", "throttle", "full", "clock", "restore", "move")
"""Kinds that strike another node at the point of a move."""
BESIDE_SHARE: Final = 0.5
BESIDE_LEAST: Final = 5
"""So many nodes that are not lost can bear two faults at once, be one of them a loss."""
ENDING: Final = ("continue", "heal", "resume")
"""Kinds that end what began some rounds before."""

NODES: Final = (3, 4, 5)
MORE_NODES: Final = (0, 0, 0, 1, 3, 7, 11)
"""So many more than a swarm needs to survive what strikes it, of ordinary nodes."""
LIARS: Final = 1
RANKS: Final = 2
POLICY: Final = {"width": 32, "layers": 1, "heads": 2, "warm_up_updates": 40}
"""Small, and taught little: else several agents on a busy machine learn for longer than all rounds take."""
POLICY_STEPS: Final = 2
"""Of an agent from round to round."""
KEYS: Final[dict[Company, dict[str, Any]]] = {
    "liar": WITHSTANDS_A_LIAR,
    "loops": {"workload": OWN_LOOP, "options": {}},
    "ranks": {"workload": OWN_LOOP, "options": {}},
    "samplers": {
        "workload": DEFAULT_POLICY,
        "options": POLICY,
        "inner_steps": POLICY_STEPS,
        "rollouts": dict(REPLAYED),
    },
}
"""Keys of a scenario in which a company differs from ordinary nodes."""
MOVES: Final = 3
FIRST_ROUND: Final = 2
GAP: Final = 4
"""Rounds from one move to the next."""
LATER: Final = 2
"""So many rounds after its beginning a stop, a pause or a partition ends, and who was corrupted starts on its disk."""
ROUNDS: Final = FIRST_ROUND + GAP * MOVES + LATER
SCENARIO_LIMIT: Final = 100_000
QUICKER: Final = 5
"""Rounds of rollouts are so much shorter than others, and so many more."""
LINES: Final = ("near", "near", "near", "routers", "home", "continental", "pair")
"""pair: two of the nodes never reach each other."""
PAIR_NODES: Final = 6
"""So many that others remain by whom two reach each other."""

AWAY_S: Final = (1.0, 10.0)
RIGHT_SHARE: Final = 0.3
"""Share of the wrong clocks that are set right again after a while."""
SLOW_MBIT: Final = (1.0, 8.0)
CPU_SHARE: Final = (0.05, 0.5)
LANES_SHARE: Final = 0.3
"""Which share of the partitions keeps only lanes apart."""
INNER_STEPS: Final = 20
STEP_S: Final = 0.1
MODEL: Final = {"inputs": 320, "outputs": 128}
"""41,088 parameters: eleven chunks of CHUNK_VALUES, and rounds of two or three seconds."""
CHUNK_VALUES: Final = 4096


DECK: Final[tuple[Card, ...]] = tuple((kind, phase) for kind in KINDS for phase in PHASES)


def hand(seed: int, number: int) -> tuple[Card, ...]:
    """The cards of scenario `number`, counted from 1. Raises ConfigError."""
    if not 1 <= number <= SCENARIO_LIMIT:
        raise ConfigError(f"--only: the scenarios of a campaign are 1 to {SCENARIO_LIMIT}, not {number}")
    return tuple(_dealt(f"{seed}:chaos:deck", DECK, place) for place in range((number - 1) * MOVES, number * MOVES))


def _dealt(seed: str, deck: Sequence[T], place: int) -> T:
    """The card at this place, where the deck is dealt out again and again, shuffled each time."""
    deals, place = divmod(place, len(deck))
    return random.Random(f"{seed}:{deals}").sample(deck, len(deck))[place]


def swarm_of(seed: int, number: int) -> tuple[str, Company]:
    """(strategy, whose nodes they are) of scenario `number`."""
    return _dealt(f"{seed}:chaos:swarms", SWARMS, number - 1)


def programs_of(seed: int, number: int) -> dict[int, Program]:
    """Programs that nodes of scenario `number` run in place of `shoal run`, by their indices."""
    name, company = swarm_of(seed, number)
    draw, scenario = random.Random(f"{seed}:chaos:{number}:programs"), draw_scenario(seed, number)
    if company == "liar":
        return {scenario.nodes - 1: Program(draw.choice(LYING_KINDS))}
    if company == "samplers":
        return {scenario.nodes + at: Program(kind) for at, kind in enumerate(ROLES)}
    programs: dict[int, Program] = {}
    if company in ("loops", "ranks"):
        _, step_s = paced(name, INNER_STEPS, STEP_S)
        programs = dict.fromkeys(range(scenario.places), Program(LOOP, step_s=step_s))
    if company == "ranks":
        dies = draw.randint(FIRST_ROUND, ROUNDS // 2)
        programs[draw.randrange(scenario.nodes)] = Program(LOOP, step_s=step_s, ranks=RANKS, dies=dies)
    return programs


def _size(drawn: Sequence[Card], company: Company, draw: random.Random) -> int:
    """Number of nodes that survive these moves, and some more."""
    if company == "liar":  # more than two thirds of the voters have to be there, and a voter never is none any more
        # Until it starts on its disk anew, what one computes may be wrong whose state was corrupted: it lies too.
        lost = sum(kind in ("kill", "leave", "continue", "heal", "corrupt") for kind, _ in drawn)
        return 3 * (LIARS + lost) + 1
    losses = sum(kind in LOSING for kind, _ in drawn)
    few, some, more = NODES
    needed = some if losses or any(kind == "heal" for kind, _ in drawn) else few
    needed = more if losses > 1 or any(phase == "repair" for _, phase in drawn) else needed
    return needed + draw.choice(MORE_NODES)


def draw_scenario(seed: int, number: int) -> Scenario:
    """Scenario `number` of a campaign. Raises ConfigError."""
    draw = random.Random(f"{seed}:chaos:{number}")
    name, company = swarm_of(seed, number)
    drawn = [borne(card, company) for card in hand(seed, number)]
    nodes = _size(drawn, company, draw)
    struck = nodes - LIARS if company == "liar" else nodes
    order = draw.sample(range(struck), struck)
    roles = ROLES if company == "samplers" else ()
    cast = _Cast(nodes=nodes, order=order, draw=draw, company=company, joined=len(roles))
    for move, card in enumerate(sorted(drawn, key=lambda card: card[1] != "transfer")):  # who joins takes its time
        cast.move(card, FIRST_ROUND + move * GAP)
    seed_of_run, codec = draw.randrange(2**31), draw.choice(CODECS)
    lines = _lines(draw, nodes)
    if (pair := lines.pop("pair", None)) is not None:
        cast.faults.append(pair)
    cast.faults += [Fault(kind="join", node=nodes + at, round=1) for at in range(len(roles))]
    if roles:
        again, away_s = draw.randint(FIRST_ROUND, ROUNDS - GAP), round(draw.uniform(*AWAY_S), 2)
        cast.faults.append(Fault(kind="restart", node=nodes, round=again, duration_s=away_s))
    if STRATEGIES[name].shares_rollouts:
        return Scenario(
            nodes=nodes,
            rounds=ROUNDS * QUICKER,
            seed=seed_of_run,
            strategy=name,
            options=dict(POLICY),
            faults=tuple(
                replace(fault, round=fault.round * QUICKER, phase=None, progress=None) for fault in cast.faults
            ),
            **lines,
        )
    inner_steps, step_s = paced(name, INNER_STEPS, STEP_S)
    return Scenario(
        nodes=nodes,
        rounds=ROUNDS,
        seed=seed_of_run,
        strategy=name,
        codec=None if STRATEGIES[name].exchanges_models else STRATEGIES[name].own_codec or codec,
        round={"chunk_values": CHUNK_VALUES},
        **{
            "workload": WORKLOAD_NAME,
            "options": {**MODEL, "step_s": step_s},
            "inner_steps": inner_steps,
            **KEYS.get(company, {}),
        },
        faults=tuple(cast.faults if STRATEGIES[name].certifies else map(_without_votes, cast.faults)),
        **lines,
    )


def borne(card: Card, company: Company) -> Card:
    """The card as such a swarm bears it."""
    kind, phase = card
    return ("restart", phase) if (kind, company) == (NOT_BESIDE_A_LIAR, "liar") else card


def _without_votes(fault: Fault) -> Fault:
    """The same, where nothing is repaired and no state is fetched while others go on: when a round begins."""
    return replace(fault, phase=None, progress=None) if fault.phase in ("repair", "transfer") else fault


def _lines(draw: random.Random, nodes: int) -> dict[str, Any]:
    """Keys of a scenario by which some of the nodes reach the others otherwise than on one machine."""
    line = draw.choice(LINES)
    some = tuple(sorted(draw.sample(range(1, nodes), nodes // 2)))
    if line == "routers":
        return {"behind_routers": some}
    if line == "pair" and nodes >= PAIR_NODES:
        one, other = draw.sample(range(nodes), 2)
        return {"pair": Fault(kind="partition", round=1, groups=((one,), (other,)))}
    if line in PROFILES:
        return {"uplinks": tuple(uplinks_of(PROFILES[line], nodes)[index] for index in some)}
    return {}


@dataclass(slots=True, kw_only=True)
class _Cast:
    """Nodes that a scenario can strike. order: the order in which they are; who is lost is not struck again."""

    nodes: int
    order: list[int]
    draw: random.Random
    company: Company
    faults: list[Fault] = field(default_factory=list)
    joined: int = 0

    def move(self, card: Card, round: int) -> None:
        """The faults of one move, which begins in `round`."""
        kind, phase = card
        at = round + LATER if kind in ENDING else round
        progress = {
            "reduce": self._between(0.05, 0.95),
            "transfer": self._between(0.0, 0.9),
        }.get(phase)
        target = None
        if phase == "repair":
            self._lose_another(at)
        elif phase == "transfer":
            newcomer = self._newcomer(at)
            target = None if kind in (*ENDING, "corrupt", "restore") else newcomer
        point = Fault(kind="join", round=at, phase=phase, progress=progress)
        self._strike(kind, round, point, target)
        bears_two = phase not in ("repair", "transfer") and len(self.order) >= BESIDE_LEAST
        if bears_two and self.draw.random() < BESIDE_SHARE:
            self._strike_beside(kind, round, point)

    def _strike_beside(self, kind: Kind, round: int, at: Fault) -> None:
        """Another fault at this point, not on the node just struck, nor on the one that holds if none is."""
        node = next(node for node in self.order if node not in (self.order[-1], min(self.order)))
        self.order.remove(node)
        self.order.append(node)
        beside = self.draw.choice([other for other in BESIDE if other != kind])
        beside, _ = borne((beside, "train"), self.company)
        self._strike_one(beside, round, at, node, self._between(*AWAY_S))

    def _lose_another(self, round: int) -> None:
        """A loss to repair: a node that comes back by itself."""
        away_s = self._between(*AWAY_S)
        progress = self._between(0.1, 0.6)
        self._add(
            Fault(kind="restart", node=self._next(), round=round, phase="reduce", progress=progress, duration_s=away_s)
        )

    def _newcomer(self, round: int) -> int:
        """Have a node join, which has a state to fetch; returns its index."""
        self.joined += 1
        index = self.nodes + self.joined - 1
        self._add(Fault(kind="join", node=index, round=round, phase="train"))
        return index

    def _strike(self, kind: Kind, round: int, at: Fault, target: int | None) -> None:
        """A fault of this kind at the point of `at`, with what has to come before and after it."""
        away_s = self._between(*AWAY_S)
        if kind == "join":
            self.joined += 1
            self._add(replace(at, node=self.nodes + self.joined - 1))
        elif kind == "heal":
            self._add(Fault(kind="partition", round=round, phase="train", groups=self._one_and_others(self._last())))
            self._add(replace(at, kind=kind))
        elif kind == "partition":
            what = "lanes" if self.draw.random() < LANES_SHARE else "all"
            groups = self._halves() if target is None else self._one_and_others(target)
            self._add(replace(at, kind=kind, groups=groups, traffic=what, duration_s=away_s))
        else:
            self._strike_one(kind, round, at, self._next() if target is None else target, away_s)

    def _strike_one(self, kind: Kind, round: int, at: Fault, node: int, away_s: float) -> None:
        """The same, of a kind that strikes a single node."""
        if kind == "continue":
            self._add(Fault(kind="stop", node=node, round=round, phase="train"))
        elif kind == "resume":
            self._add(Fault(kind="pause", node=node, round=round, phase="train"))
        rate_mbit = self._between(*SLOW_MBIT) if kind == "slow" else None
        cpu_share = self._between(*CPU_SHARE) if kind == "throttle" else None
        ahead_s = draw_ahead_s(self.draw) if kind == "clock" else None
        right = kind == "clock" and self.draw.random() < RIGHT_SHARE
        lasts_s = away_s if kind in LASTING or right else None
        what: dict[str, Any] = {"rate_mbit": rate_mbit, "cpu_share": cpu_share, "ahead_s": ahead_s}
        self._add(replace(at, kind=kind, node=node, duration_s=lasts_s, **what))
        if kind == "corrupt":
            self._add(Fault(kind="restart", node=node, round=at.round + LATER, duration_s=AWAY_S[0]))
        elif kind == "pause":
            self._add(Fault(kind="resume", node=node, round=at.round + LATER, phase="train"))
        if kind in ("kill", "leave") and node in self.order:
            self.order.remove(node)

    def _add(self, fault: Fault) -> None:
        self.faults.append(fault)

    def _next(self) -> int:
        """Return the next node to strike: of those that are not lost, the one not struck for the longest time."""
        node = self.order.pop(0)
        self.order.append(node)
        return node

    def _last(self) -> int:
        """The same, but never the node that holds for faults that strike no single one: the first of those left."""
        node = max(self.order)
        self.order.remove(node)
        self.order.append(node)
        return node

    def _halves(self) -> tuple[tuple[int, ...], ...]:
        if self.draw.random() < 1 / 2:
            return self._one_and_others(self._next())
        some = self.draw.sample(range(self.nodes), self.nodes // 2)
        return tuple(sorted(some)), tuple(index for index in range(self.nodes) if index not in some)

    def _one_and_others(self, node: int) -> tuple[tuple[int, ...], ...]:
        return (node,), tuple(index for index in range(self.nodes) if index != node)

    def _between(self, least: float, most: float) -> float:
        return round(self.draw.uniform(least, most), 2)
