"""Programs of the nodes of a drawn swarm: `shoal run` as it ships, with a role, or one of the lab's in its place.

A liar lies from its first round to its last, in one of the ways of `shoal bench hostile`. It may be evicted, left out
and convicted; to the others, who are judged alone, it must be as nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from shoal.lab.bench.hostile_member import LYING_KINDS, lying_command, told_of
from shoal.lab.waiting_loop import DIED, LOOP, looping_command
from shoal.node.reporting.event_files import LOG_NAME
from shoal.node.reporting.event_log import read_kind
from shoal.node.reporting.events import CaughtUp
from shoal.protocol.identity import Identity
from shoal.testnet.nodes import Launch, node_command
from shoal.testnet.reports.report import NodeReport, Report


class Program(msgspec.Struct, frozen=True):
    """Program of one node: a kind of liar, LOOP, or its role in sharing rollouts; the other fields are of a loop."""

    kind: str
    step_s: float = 0.0
    ranks: int = 1
    dies: int = 0


ROLES: Final = ("sample", "judge")
"""Of nodes that join trainers of averaged policies, as `--rollouts` has them."""
BEHIND_ROUNDS: Final = 4
"""So many rounds behind the last one may be who follows, at the end."""
STRIKE: Final = "strike"
"""In the folder of a liar, which lies while it is there."""
VICTIM: Final = "0"


def command_of(programs: Mapping[int, Program], launch: Launch) -> list[str]:
    """The command line of a node, by its number. Blocks for a moment."""
    command, program = node_command(launch), programs.get(int(launch.data_dir.name))
    if program is None:
        return command
    if program.kind == LOOP:
        return looping_command(command, program.step_s, ranks=program.ranks, dies=program.dies)
    if program.kind in LYING_KINDS:
        strike = launch.data_dir / STRIKE
        strike.touch()
        victim = Identity.load_or_create(launch.data_dir.parent / VICTIM / "node.key")
        return lying_command(command, program.kind, strike, victim.peer_id)
    return [*command, "--rollouts", program.kind]


def liar_of(report: Report, programs: Mapping[int, Program]) -> NodeReport | None:
    """The liar among the nodes of a report; None if there is none."""
    lying = _are(programs, LYING_KINDS)
    return next((node for node in report.nodes if node.index in lying), None)


def _are(programs: Mapping[int, Program], kinds: Collection[str]) -> set[int]:
    return {index for index, program in programs.items() if program.kind in kinds}


def done_by(program: Program, home: Path) -> int | None:
    """How often a node with this folder did what strikes: lies told, ranks killed; None of one that does not strike."""
    if program.kind in LYING_KINDS:
        told = told_of(home / STRIKE)
        return told.stat().st_size if told.exists() else 0
    return int((home / DIED).exists()) if program.dies else None


def judged(report: Report, programs: Mapping[int, Program]) -> Report:
    """The report without what is no failure of such nodes.

    A liar may miss rounds, end and be convicted; who follows takes part in no round; and who lost a rank has lost its
    trainer, and got it back.
    """
    liar = liar_of(report, programs)
    following = _are(programs, ROLES)
    nodes = (replace(n, absent_at_end=False) if n.index in following else n for n in report.nodes if n is not liar)
    expected = [f"no fault struck node {i}, and its trainer died: " for i, program in programs.items() if program.dies]
    expected += [] if liar is None else [f" has proof that {liar.peer_id} lied in round "]
    of_liar = "" if liar is None else f"node {liar.index}: of its contribution"
    unverified = tuple(text for text in report.unverified if not (of_liar and text.startswith(of_liar)))
    return replace(
        report,
        unverified=unverified,
        nodes=tuple(nodes),
        unaffected_absent=tuple(i for i in report.unaffected_absent if liar is None or i != liar.index),
        alarms=tuple(alarm for alarm in report.alarms if not any(text in alarm for text in expected)),
    )


def behind(report: Report, programs: Mapping[int, Program], home: Callable[[int], Path]) -> list[str]:
    """Tell who of those that follow has not come to one of the last rounds. Blocks."""
    found = []
    for index in sorted(_are(programs, ROLES)):
        last = max((event.round for event in read_kind(home(index) / LOG_NAME, CaughtUp)), default=0)
        if last < report.scenario.rounds - BEHIND_ROUNDS:
            found.append(f"node {index} followed up to round {last} of {report.scenario.rounds}")
    return found
