"""Plan of a soak's faults: one every period, drawn from one seed.

The first half of the nodes is *steady*: faults strike them too, but never end their processes, so that those can be
watched from the beginning of the soak to its end. The processes of the others end and begin again and again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, Literal, get_args

import msgspec

from shoal.lab.campaigns.campaign_plan import draw_ahead_s
from shoal.lab.campaigns.settings import MINUTES_LIMIT
from shoal.protocol.errors import ConfigError

Kind = Literal["kill", "leave", "corrupt", "stop", "cut", "partition", "halves", "slow", "clock", "restore", "move"]
"""kill: SIGKILL, and a start after a while; leave: asked to leave, and back after a while; corrupt: a bit in every file
of state flipped, then as kill. stop: SIGSTOP for a while. cut: all lanes broken. partition: nobody reaches the node for
a while; halves: two nodes and the others do not reach each other. slow: its link carries little for a while. clock: its
wall clock is set forward or back for a while. restore: its folder is copied, and after a while it is killed and started
again on the copy. move: killed, and back after a while at another address, or another port of the same."""

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
ENDING: Final = ("kill", "leave", "corrupt", "restore", "move")
"""Kinds that end a process: not for steady nodes."""
LINKED: Final = ("partition", "halves", "slow")
"""Kinds that need network namespaces."""
BESIDE: Final[tuple[Kind, ...]] = ("kill", "stop", "cut", "clock", "move")
"""Kinds that strike another node at the moment of a fault."""
BESIDE_SHARE: Final = 0.25
NODES: Final = range(3, 17)
AWAY_S: Final = (2.0, 15.0)
"""For how long a node is away, stopped or apart: from within the detector's patience to well beyond it."""
SLOW_S: Final = 20.0
SLOW_MBIT: Final = 2.0


class SoakFault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. at_s: so long after the swarm began to train; nodes: whom it strikes; lasts_s: until it is undone.

    ahead_s: how far a clock is set. beside: another, of another kind and on another node, at the same moment.
    """

    number: int
    at_s: float
    kind: Kind
    nodes: tuple[int, ...]
    lasts_s: float
    ahead_s: float = 0.0
    beside: SoakFault | None = None


def steady_of(nodes: int) -> range:
    """The nodes whose processes no fault ends."""
    return range(nodes // 2)


def draw_faults(
    seed: int, *, nodes: int, seconds: float, period_s: float, kinds: Sequence[Kind] = KINDS
) -> tuple[SoakFault, ...]:
    """The faults of a soak that lasts so long: one a period, none in the first and in the last.

    Kinds come from shuffled decks, so that each has its share. Raises ConfigError.
    """
    if nodes not in NODES:
        raise ConfigError(f"--nodes: a soak has {NODES[0]} to {NODES[-1]} of them, not {nodes}")
    if not 0 < seconds <= MINUTES_LIMIT * 60:
        raise ConfigError(f"--minutes: more than 0 and at most {MINUTES_LIMIT:.0f}")
    if not period_s > 0:
        raise ConfigError("--period: a number of seconds between two faults, more than 0")
    count = max(0, int(seconds / period_s) - 1)
    dealer = random.Random(f"{seed}:soak")
    deck: list[Kind] = []
    while len(deck) < count:
        deck += dealer.sample(kinds, len(kinds))
    found = []
    for at in range(count):
        draw = random.Random(f"{seed}:soak:{at}")
        strike = _draw(draw, at + 1, (at + 1) * period_s, deck[at], nodes)
        others = [kind for kind in BESIDE if kind in kinds and kind != strike.kind]
        if others and strike.kind not in ("partition", "halves") and draw.random() < BESIDE_SHARE:
            beside = _draw(draw, strike.number, strike.at_s, draw.choice(others), nodes, apart=strike.nodes)
            strike = msgspec.structs.replace(strike, beside=beside)
        found.append(strike)
    return tuple(found)


def _draw(
    draw: random.Random, number: int, at_s: float, kind: Kind, nodes: int, *, apart: tuple[int, ...] = ()
) -> SoakFault:
    """A fault of this kind on nodes that are none of `apart`."""
    lasts_s = SLOW_S if kind == "slow" else 0.0 if kind == "cut" else round(draw.uniform(*AWAY_S), 3)
    if kind == "halves":
        struck = tuple(sorted(draw.sample(range(nodes), nodes // 2)))
    elif kind in ENDING:
        struck = (draw.choice([node for node in range(steady_of(nodes).stop, nodes) if node not in apart]),)
    else:
        struck = (draw.choice([node for node in range(nodes) if node not in apart]),)
    ahead_s = draw_ahead_s(draw) if kind == "clock" else 0.0
    return SoakFault(number=number, at_s=round(at_s, 3), kind=kind, nodes=struck, lasts_s=lasts_s, ahead_s=ahead_s)
