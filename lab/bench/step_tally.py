"""Steps of real nodes, each counted: those that trainers noted, beside those that certified rounds include.

The nodes train `shoal.lab.bench.tally_workload` with codec fp32: what a contribution holds is read from the values that
the swarm reduced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from shoal.collectives.commitment import chunk_hash, merkle_root
from shoal.lab.bench.tally_workload import QUANTUM, steps_made
from shoal.node.reporting.event_files import LOG_NAME
from shoal.node.reporting.event_log import read_log
from shoal.node.reporting.events import Contributed, Event
from shoal.protocol.messages import Plan
from shoal.protocol.wire import decode
from shoal.testnet.check import FILE_LIMIT_BYTES, StoredContribution, StoredFinals
from shoal.testnet.nodes import Launch, node_command

TOLERANCE: Final = 0.05
"""By how much of a step a value may be off a whole number of them: what rounding leaves, many times over."""


class NodeTally(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of one node up to the last contribution of it that a certified round includes.

    made: as its trainer noted them. counted: the least and the most that any chunk has of them over all rounds.
    alone: those that it made in a time in which others did not hear from it.
    """

    index: int
    made: int
    counted: tuple[int, int]
    alone: int
    rounds_counted: int

    @property
    def lost(self) -> int:
        """Steps that some chunk does not have."""
        return max(0, self.made - self.counted[0])

    @property
    def twice(self) -> int:
        """Steps that some chunk has too often."""
        return max(0, self.counted[1] - self.made)


def noting_command(launch: Launch) -> list[str]:
    """The command line of a real node whose workload notes its steps in the node's folder."""
    return [*node_command(launch), "--data", str(launch.data_dir)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLog:
    """Log of one node: its events, when it announced its contribution to a round, and when it made its steps."""

    index: int
    peer_id: str
    folder: Path
    events: Sequence[Event]
    made_at: Mapping[int, float]
    steps: Sequence[float]

    def between(self, begin: float, end: float) -> int:
        """Number of steps made in that time."""
        return sum(begin <= at <= end for at in self.steps)


def read_node(index: int, peer_id: str, folder: Path) -> NodeLog:
    """Read what is left of a node in its folder. Blocks."""
    events = list(read_log(folder / LOG_NAME))
    return NodeLog(
        index=index,
        peer_id=peer_id,
        folder=folder,
        events=events,
        made_at={event.round: event.at for event in events if isinstance(event, Contributed)},
        steps=steps_made(folder),
    )


def kept_plan(told: Sequence[NodeLog], number: int) -> tuple[Plan, StoredFinals] | None:
    """The certified plan of a round and its finals, as some node kept them."""
    for node in told:
        folder = node.folder / "rounds" / f"0.0-{number}"
        if (folder / "applied").exists():
            plan = decode((folder / "plan").read_bytes(), Plan)
            return plan, decode((folder / "finals").read_bytes(), StoredFinals, limit_bytes=FILE_LIMIT_BYTES)
    return None


def tally(
    node: NodeLog, told: Sequence[NodeLog], rounds: int, apart: tuple[float, float], problems: list[str]
) -> NodeTally:
    """The node's steps: those that its trainer noted, beside those that certified rounds include.

    apart: from when to when steps are counted as made alone. What is noted in `problems`: a contribution that cannot be
    read, and values that are no whole number of steps.
    """
    counted = np.zeros(1, np.int64)
    until, included_rounds = 0.0, 0
    for number in range(1, rounds + 1):
        found = kept_plan(told, number)
        if found is None:
            problems.append(f"round {number}: no node kept its plan")
            continue
        bits = _included(found[0], found[1], node.peer_id)
        if not any(bits):
            continue
        included_rounds += 1
        steps = _steps_in(node, found[0], number, problems)
        counted = counted + np.where(bits, steps, 0)
        if number not in node.made_at:
            problems.append(f"round {number}: node {node.index} has no word of its contribution")
        until = max(until, node.made_at.get(number, 0.0))
    return NodeTally(
        index=node.index,
        made=sum(at <= until for at in node.steps),
        counted=(int(counted.min()), int(counted.max())),
        alone=node.between(*apart),
        rounds_counted=included_rounds,
    )


def counted_tokens(plan: Plan, finals: StoredFinals) -> dict[str, int]:
    """Tokens of everyone whose contribution is in some chunk of a round."""
    return {one.peer: one.tokens for one in plan.participants if any(_included(plan, finals, one.peer))}


def _included(plan: Plan, finals: StoredFinals, peer_id: str) -> list[bool]:
    """True for each chunk that has the peer's contribution in it."""
    place = next((at for at, one in enumerate(plan.participants) if one.peer == peer_id and one.weight), None)
    if place is None:
        return [False] * len(finals.bitmaps)
    return [bool(int.from_bytes(bitmap, "little") >> place & 1) for bitmap in finals.bitmaps]


def _steps_in(node: NodeLog, plan: Plan, number: int, problems: list[str]) -> np.ndarray:
    """Number of steps in each chunk of the node's contribution, ``(chunks,) int64``."""
    root = next(one.root for one in plan.participants if one.peer == node.peer_id)
    for path in sorted((node.folder / "rounds" / f"0.0-{number}").glob("contribution*")):
        stored = decode(path.read_bytes(), StoredContribution, limit_bytes=FILE_LIMIT_BYTES)
        if merkle_root([chunk_hash(chunk) for chunk in stored.chunks]) == root:
            return np.array([_steps_of(chunk, number, node.index, problems) for chunk in stored.chunks], np.int64)
    problems.append(f"round {number}: node {node.index} did not keep what it contributed")
    return np.zeros(-(-plan.numel // plan.chunk_values), np.int64)


def _steps_of(chunk: bytes, number: int, index: int, problems: list[str]) -> int:
    """The steps in one chunk of an fp32 contribution; the vector's first value takes no part."""
    steps = np.frombuffer(chunk, "<f4")[1:] / QUANTUM
    found = round(float(np.median(steps)))
    if not np.all(np.abs(steps - found) <= TOLERANCE):
        problems.append(f"round {number}: node {index} contributed values that are no whole number of steps")
    return found
