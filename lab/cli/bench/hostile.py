"""`shoal bench hostile`: what one attacker costs four nodes, and whether it takes anything over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from shoal.cli.render import ShowNow
from shoal.lab.case import Case, CaseOptions
from shoal.node.options import Option

if TYPE_CHECKING:
    from shoal.lab.bench.hostile_spec import HostileResult, Window


PLACES = 256
"""As many as a node has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileOptions(CaseOptions):
    """What the user asked `shoal bench hostile` for."""

    kind: Annotated[str, Option("--kind", help="What the attacker does; see docs/commands.md.", metavar="KIND")]
    round_s: Annotated[float, Option("--round-s", help="Seconds that a node trains for one round.")] = 20.0
    rounds: Annotated[int, Option("--rounds", help="How many rounds left alone, and as many when struck.")] = 6
    places: Annotated[int, Option("--places", help="How many strangers come to each node, for kind links.")] = PLACES


def _run(options: HostileOptions, tell: ShowNow) -> HostileResult:
    """Strike four real nodes that train, with one stranger, lying fifth member or copied key, and say what it cost.

    The targets: nothing is taken over, rounds keep 0.9 of their pace beside strangers and 0.7 beside a lying member,
    no honest node grows by more than 64 MiB, and all are back within a minute.
    """
    from shoal.lab.bench.hostile import measure_hostile
    from shoal.lab.bench.hostile_spec import HostileBench

    bench = HostileBench(kind=options.kind, round_s=options.round_s, rounds=options.rounds, places=options.places)
    return measure_hostile(bench, tell)


def to_lines(result: HostileResult) -> list[str]:
    """The result for people."""
    from shoal.lab.bench.hostile_spec import KINDS

    back = "not within the time" if result.recovered_s is None else f"after {result.recovered_s:g} s"
    made = ", ".join(f"{count} {what}" for what, count in sorted(result.attacks.items())) or "nothing"
    return [
        f"{result.kind:<10} {KINDS[result.kind]}",
        f"alone      {_of(result.undisturbed)}",
        f"struck     {_of(result.disturbed)}",
        f"rounds     {result.rounds_ratio:.3f} of their pace (must: {result.bench.must:g})",
        f"memory     {result.memory_growth_bytes / (1 << 20):+.1f} MiB at most, files {result.files_growth:+d}",
        f"back       {back}",
        f"attacker   {made}",
        f"taken over {'; '.join(result.problems) or 'nothing'}; {result.wrong_values} wrong values",
        *(f"MISSED     {one}" for one in result.missed),
    ]


def _of(window: Window) -> str:
    took = "none" if window.round_s is None else f"{window.round_s:.2f} s each"
    memory = max(window.memory_bytes.values(), default=0) / (1 << 20)
    files = max(window.files.values(), default=0)
    return f"{window.rounds} rounds, {took}; {memory:.0f} MiB and {files} open files in the largest daemon"


def to_document(result: HostileResult) -> dict[str, object]:
    """The result under the names of its fields, and the targets that were missed."""
    return {**msgspec.to_builtins(result, str_keys=True), "missed": list(result.missed)}


hostile: Final = Case(spec=HostileOptions, run=_run, lines=to_lines, document=to_document)
