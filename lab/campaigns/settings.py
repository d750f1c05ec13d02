"""Settings of campaign, chaos and soak: their options. Apart from what they set, which takes a while to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from shoal.lab.case import Spec
from shoal.node.option import Option
from shoal.protocol.errors import ConfigError

MINUTES_LIMIT: Final = 24 * 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign(Spec):
    """Options of `shoal campaign`.

    only: a single one of the runs, as the seed makes it among the others. short: each number of peers with one strategy
    in place of all, faults in the midst of a reduce alone, and nothing waits that can be done meanwhile. liar: in every
    swarm one node lies; without it in some, unless peers or short is said.
    """

    runs: Annotated[int, Option("--runs", help="How many faulted rounds.")] = 200
    seed: Annotated[int, Option("--seed", help="Which faults, where and when.")] = 1
    peers: Annotated[
        tuple[int, ...], Option("--peers", help="A number of nodes. Repeatable; 3, 4, 5 and 6 if left out.")
    ] = ()
    codecs: Annotated[tuple[str, ...], Option("--codecs", help="A codec. Repeatable; four if left out.")] = ()
    strategies: Annotated[
        tuple[str, ...],
        Option("--strategies", help="A strategy. Repeatable; all whose rounds are certified if left out."),
    ] = ()
    only: Annotated[
        int | None, Option("--only", help="Do this one of the runs, as it is among the others.", metavar="NUMBER")
    ] = None
    short: Annotated[
        bool, Option("--short", help="Each number of nodes with one strategy only, and several swarms at once.")
    ] = False
    liar: Annotated[
        bool, Option("--liar", help="Only swarms of which one node lies; else some, unless --peers or --short is said.")
    ] = False
    keep: Annotated[bool, Option("--keep", help="Keep the nodes' folders of runs that did not fail, too.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chaos(Spec):
    """Options of `shoal chaos`.

    Where no links can be struck, scenarios that strike some are passed over, and `only` may be none of those.
    """

    minutes: Annotated[float, Option("--minutes", help="For how long scenarios are begun.")] = 60.0
    seed: Annotated[int, Option("--seed", help="Which scenarios.")] = 1
    scenarios: Annotated[int | None, Option("--scenarios", help="No more than so many.")] = None
    only: Annotated[
        int | None, Option("--only", help="Do this one of the scenarios, as it is among the others.", metavar="NUMBER")
    ] = None

    def __post_init__(self) -> None:
        if not 0 < self.minutes <= MINUTES_LIMIT:
            raise ConfigError(f"--minutes: more than 0 and at most {MINUTES_LIMIT:.0f}")
        if self.scenarios is not None and self.scenarios < 1:
            raise ConfigError("--scenarios: at least one")


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak(Spec):
    """Options of `shoal soak`: `nodes` train for `minutes` with a fault every `period_s`, in steps of `step_s` each."""

    strategy: Annotated[str, Option("--strategy", help="How they synchronise, certifying each round.")] = "diloco"

    minutes: Annotated[float, Option("--minutes", help="How long.")] = 120.0
    nodes: Annotated[int, Option("--nodes", help="How many nodes.")] = 4
    seed: Annotated[int, Option("--seed", help="Which faults, and whom they strike.")] = 1
    period_s: Annotated[float, Option("--period", help="Seconds from one fault to the next.")] = 60.0
    liar: Annotated[bool, Option("--liar", help="The last node lies all the while; takes seven or more.")] = False
    step_s: float = 0.1
