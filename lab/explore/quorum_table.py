"""The tables of quorums in the documents: for one to seven voters, how many may die or lie, worked out over all sets.

python -m shoal.lab.explore.quorum_table
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from shoal.protocol.certificate import genesis
from shoal.protocol.identity import Identity, PeerId
from shoal.protocol.messages import NO_HASH, Value
from shoal.protocol.voting import FaultModel, Voting, is_quorum

MEMBERS = range(1, 8)
CRASH, LYING = FaultModel.CRASH.value, FaultModel.LYING.value
LYING_MIN_MEMBERS = 4


@cache
def reached(quorum: str, members: int, planner: int, supporters: int, leaves: int = 0) -> bool:
    """True if the voters in the bit mask `supporters` are a quorum of `members`; quorum: `crash` or `lying`."""
    peers, previous = _electorate(members, planner)
    counted, gone = ([peer for i, peer in enumerate(peers) if mask >> i & 1] for mask in (supporters, leaves))
    return is_quorum(previous, counted, gone, voting=Voting(FaultModel(quorum)))


@cache
def _electorate(members: int, planner: int) -> tuple[tuple[PeerId, ...], Value]:
    peers = tuple(Identity.from_seed(bytes([number]) * 32).peer_id for number in range(members))
    return peers, genesis(NO_HASH, [peers[planner], *(peer for peer in peers if peer != peers[planner])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Faults that a number of voters can bear under one fault model. The planner of the last round is voter 0.

    needed, needed_without: the fewest voters that are a quorum, with the planner among them and without it; None if
    there is no such quorum. deaths, deaths_without: how many may be dead whoever they are, and if the planner is not
    among them. lies: how many may lie, whoever they are, without a fork and without being needed. forkers: who can fork
    alone. forking, stalling, deciding: the fewest liars that can fork, keep the others from deciding, and decide alone,
    if they are the right ones.
    """

    quorum: str
    members: int
    needed: int
    needed_without: int | None
    deaths: int
    deaths_without: int
    lies: int
    forkers: tuple[int, ...]
    forking: int
    stalling: int
    deciding: int

    @property
    def one_forks(self) -> str:
        """Names of the voters of whom one liar can fork."""
        if not self.forkers:
            return "nobody"
        if len(self.forkers) == self.members:
            return "anybody" if self.members > 1 else "itself"
        return "the planner" if self.forkers == (0,) else ", ".join(map(str, self.forkers))


def row(quorum: str, members: int) -> Row:
    """Work out one row."""
    masks = range(1 << members)
    everyone = masks[-1]
    quorums = [mask for mask in masks if reached(quorum, members, 0, mask)]
    shared = {one & other for one in quorums for other in quorums}
    forking = [mask for mask in masks if any(not both & ~mask for both in shared)]
    stalling = [mask for mask in masks if not reached(quorum, members, 0, everyone & ~mask)]
    bad = {*forking, *stalling}
    return Row(
        quorum=quorum,
        members=members,
        needed=_fewest(mask for mask in quorums if mask & 1),
        needed_without=min((mask.bit_count() for mask in quorums if not mask & 1), default=None),
        deaths=_fewest(stalling) - 1,
        deaths_without=_fewest((mask for mask in stalling if not mask & 1), default=members) - 1,
        lies=_fewest(bad) - 1,
        forkers=tuple(i for i in range(members) if 1 << i in forking),
        forking=_fewest(forking),
        stalling=_fewest(stalling),
        deciding=_fewest(quorums),
    )


def _fewest(masks: Iterator[int] | set[int] | list[int], default: int | None = None) -> int:
    counts = [mask.bit_count() for mask in masks]
    return min(counts) if default is None else min(counts, default=default)


def rows() -> list[Row]:
    """All rows of the tables."""
    return [row(quorum, members) for quorum in (CRASH, LYING) for members in MEMBERS]


def quorums_page() -> str:
    """The table for the protocol: what is needed, and what is borne."""
    lines = [
        "| fault model | voters | quorum | deaths survived | lies survived | who can fork alone |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for one in rows():
        needed = str(one.needed)
        if one.needed_without != one.needed < one.members:
            needed += f" with the planner, {one.needed_without or 'none'} without"
        deaths = str(one.deaths)
        if one.deaths_without != one.deaths:
            deaths += f"; {one.deaths_without} with the planner up"
        lines.append(f"| `{one.quorum}` | {one.members} | {needed} | {deaths} | {one.lies} | {one.one_forks} |")
    return "\n".join(lines)


def liars_page() -> str:
    """The table for the limits: how many liars it takes."""
    lines = [
        "| voters | `crash`: to fork | to stall | to decide alone | `lying`: to fork | to stall | to decide alone |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for members in MEMBERS:
        crash, lying = row(CRASH, members), row(LYING, members)
        told = [str(n) for n in (crash.forking, crash.stalling, crash.deciding)]
        offered = members >= LYING_MIN_MEMBERS
        told += [str(n) if offered else "–" for n in (lying.forking, lying.stalling, lying.deciding)]
        lines.append(f"| {members} | {' | '.join(told)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(quorums_page(), liars_page(), sep="\n\n")
