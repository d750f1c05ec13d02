"""Specification of `shoal bench hostile`, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Annotated, Final, Literal

import msgspec

from shoal.lab.case import Spec
from shoal.lab.targets import Row, Target
from shoal.node.option import Option, Within, check_options
from shoal.protocol.errors import ConfigError
from shoal.swarm.links import LINK_LIMIT

KINDS: Final[dict[str, str]] = {
    "ahead": "a stranger claims to be a million rounds ahead, and never answers",
    "push": "strangers push what they can do by the megabyte, before any hello",
    "multistream": "gigabytes announced, and sent, in place of a protocol's name",
    "links": "silent strangers take all places, and a founder is restarted meanwhile",
    "prune": "a stranger speaks of topics of gossip that do not exist",
    "flood": "strangers say hello 200 times a second, begin 500 handshakes, read no answers, and announce giant frames",
    "forged_leaves": "a member says, alone, that all others left",
    "electorate": "a member, where it leads, proposes strangers as members, or leaves one out",
    "viewjump": "a member invents prepare certificates, and speaks in views far ahead",
    "accuser": "a member keeps its contribution from another, and accuses that one",
    "copykey": "a copy of one node's folder runs beside it",
}
STRANGERS: Final = frozenset({"ahead", "push", "multistream", "links", "prune", "flood"})
LIARS: Final = frozenset({"forged_leaves", "electorate", "viewjump", "accuser"})
HONEST: Final = 4
"""Nodes that do not lie; one fewer where agreement withstands the one that does."""

MUST_BESIDE_STRANGERS: Final = 0.9
MUST_BESIDE_A_LIAR: Final = 0.7
MUST_WITHSTANDING_A_LIAR: Final = 0.8
GROWTH_LIMIT_MIB: Final = 64.0
BACK_LIMIT_S: Final = 60.0
UNTOUCHED: Final = Target(name="what was taken over, and wrong values", most=0)
ALIVE: Final = Target(name="honest nodes that ended", most=0)
STRUCK: Final = Target(name="what the attacker did", least=1)
FILLED: Final = Target(name="nodes of which strangers did not get all places", most=0)
KEPT: Final = Target(name="nodes of which strangers did not keep all places", most=1)
GROWTH: Final = Target(name="memory grew by", unit="MiB", most=GROWTH_LIMIT_MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileBench(Spec):
    """Options of `shoal bench hostile`. places: all that a node has, unless said otherwise.

    faults: with `lying` the founders are named voters, three of four honest if one lies; else four of five.
    """

    kind: Annotated[str, Option("--kind", help="What the attacker does; see docs/hostile.md.", metavar="KIND")]
    round_s: Annotated[
        float, Option("--round-s", help="Seconds that a node trains for one round.", check=Within(1, 600))
    ] = 20.0
    rounds: Annotated[
        int,
        Option("--rounds", help="How many rounds left alone, and as many when struck.", check=Within(2, 1000)),
    ] = 6
    places: Annotated[
        int,
        Option("--places", help="How many strangers come to each node, for kind links.", check=Within(1, LINK_LIMIT)),
    ] = LINK_LIMIT
    faults: Annotated[
        Literal["crash", "lying"],
        Option("--faults", help="What agreement withstands, as [agreement] says; `lying` with named voters."),
    ] = "crash"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"--kind must be one of {', '.join(KINDS)}")
        check_options(self)

    @property
    def must(self) -> float:
        """Share of their pace that rounds have to keep."""
        if self.kind in STRANGERS:
            return MUST_BESIDE_STRANGERS
        return MUST_WITHSTANDING_A_LIAR if self._withstands_a_liar else MUST_BESIDE_A_LIAR

    @property
    def back_limit_s(self) -> float:
        """Time after which all have certified a round together: a minute, or two rounds where those are longer."""
        return max(BACK_LIMIT_S, 2 * self.round_s)

    @property
    def has_liar(self) -> bool:
        """True if one of the founders lies."""
        return self.kind in LIARS

    @property
    def honest(self) -> int:
        """Number of the founders that do not lie."""
        return HONEST - self._withstands_a_liar

    @property
    def _withstands_a_liar(self) -> bool:
        return self.has_liar and self.faults == "lying"


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Some rounds of the honest nodes. rounds: of the slowest; round_s: the mean of its rounds, None without any.

    memory_bytes: the most that each daemon held at once, by index; files: what it had open; cpu: what it took, of one
    core.
    """

    rounds: int
    round_s: float | None
    memory_bytes: dict[int, int]
    files: dict[int, int]
    cpu: dict[int, float]


class HostileResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `shoal bench hostile`.

    Growth is of the honest node that grew most, from its peak left alone to its peak when struck.
    recovered_s: from the end of the strike until each honest node has certified a round after it, of which all are
    members; None if that did not come. attacks: what the attacker did, by what it is. problems: what shows that
    something was taken over. ended: the honest nodes whose process is gone, and should not be.
    """

    bench: HostileBench
    kind: str
    rounds_ratio: float
    memory_growth_bytes: int
    files_growth: int
    recovered_s: float | None
    taken_over: bool
    problems: tuple[str, ...]
    wrong_values: int
    ended: tuple[int, ...]
    undisturbed: Window
    disturbed: Window
    attacks: dict[str, int]

    @property
    def rows(self) -> tuple[Row, ...]:
        """Measured values, each with its target."""
        pace = Target(name="rounds kept their pace", unit="of it", least=self.bench.must)
        back = Target(name="all came back after", unit="s", most=self.bench.back_limit_s)
        return (
            UNTOUCHED.row(len(self.problems) + self.wrong_values + (self.taken_over and not self.problems)),
            ALIVE.row(len(self.ended)),
            STRUCK.row(sum(self.attacks.values())),
            *self._places,
            pace.row(self.rounds_ratio),
            GROWTH.row(self.memory_growth_bytes / (1 << 20)),
            back.row(inf if self.recovered_s is None else self.recovered_s),
        )

    @property
    def _places(self) -> tuple[Row, ...]:
        if self.kind != "links":
            return ()
        kept = self.attacks.get("nodes kept full", HONEST)
        return FILLED.row(0 if self.attacks.get("nodes full") else HONEST), KEPT.row(HONEST - kept)
