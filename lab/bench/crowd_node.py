"""A node of `shoal bench crowd`: a daemon as it ships, beside which stands an agent without a model.

    python -m shoal.lab.bench.crowd_node run swarm.toml …      as `shoal run`

The agent is stubbed at the tokens: each period it makes one group of drawn texts, for the task that it was assigned,
takes others' groups, and accepts them. It runs in the daemon's process and speaks the messages that an agent process
speaks; all else is the product. Beside its event log the node notes, a JSON line each, what it made and heard of
(`Note`).
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from shoal.cli import main as command_line
from shoal.node.sapo import engine
from shoal.node.sapo.agent_messages import (
    AgentReport,
    Begin,
    Delivered,
    Judged,
    Made,
    Order,
    Pulled,
    Ready,
    RoundReport,
    Take,
)
from shoal.node.sapo.selection import Verdict
from shoal.node.sapo.tasks import TaskKind, TaskTable
from shoal.protocol.offer_book import Offer, OfferBook
from shoal.protocol.rollouts import RolloutGroup, announce_group, encode_group
from shoal.swarm import rollouts

MODULE: Final = "shoal.lab.bench.crowd_node"
NOTES_NAME: Final = "crowd.jsonl"
PERIOD_NAME: Final = "period_s"
"""File in the folder of the swarm that says how often a node makes a group."""
FAMILY: Final = "gcd"
"""A family that nodes know by name; none of its tasks is ever made."""
COMPLETIONS: Final = 4
COMPLETION_CHARS: Final = 200
REWARDS: Final = (1.0, 0.0, 1.0, 0.0)
TAKE_WAIT_S: Final = 2.0


class Note(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Note of a node at a time, in seconds since 1970.

    made, heard: the digest of a group, in hex. wanted, got: groups of others, in a round.
    """

    at: float
    made: str = ""
    heard: str = ""
    wanted: int = 0
    got: int = 0


class Notes:
    """The file of one node's notes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, **said: Any) -> None:
        """Append a note of this moment."""
        self._file.write(msgspec.json.encode(Note(at=time.time(), **said)) + b"\n")

    def close(self) -> None:
        """End the file."""
        self._file.close()


def read_notes(path: Path) -> list[Note]:
    """All whole notes of a node; none if it wrote none."""
    if not path.exists():
        return []
    *lines, _ = path.read_bytes().split(b"\n")
    return [msgspec.json.decode(line, type=Note) for line in lines]


class StubAgent:
    """Agent that draws texts. `running` it is what `running_agent` of a node's engine is."""

    pid = 0

    def __init__(self, notes: Notes, period_s: float) -> None:
        self._notes = notes
        self._period_s = period_s
        self._to_agent, self._orders = trio.open_memory_channel[Order](1024)
        self._to_daemon, self._reports = trio.open_memory_channel[AgentReport](1024)

    @asynccontextmanager
    async def running(self, threads: int, *, program: Sequence[str]) -> AsyncIterator[StubAgent]:
        """Make groups for as long as the block lasts."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._live)
            yield self
            nursery.cancel_scope.cancel()

    async def send(self, order: Order) -> None:
        """Take an order of the daemon."""
        await self._to_agent.send(order)

    async def receive(self) -> AgentReport:
        """Return the next report."""
        return await self._reports.receive()

    async def _live(self) -> None:
        begin = await self._orders.receive()
        assert isinstance(begin, Begin)
        kind = TaskKind(family=FAMILY, version="1", config=b"\x80", weight=1)
        await self._to_daemon.send(Ready(round=begin.announced, tasks=(kind,), scorable=(FAMILY,)))
        drawn = random.Random(begin.me)
        await trio.sleep(drawn.uniform(0, self._period_s))
        number, due = begin.announced, trio.current_time()
        while True:
            await self._round(begin, TaskTable((kind,)), number, drawn)
            number, due = number + 1, due + self._period_s
            await trio.sleep_until(due)

    async def _round(self, begin: Begin, table: TaskTable, number: int, drawn: random.Random) -> None:
        started = trio.current_time()
        await self._make(begin, table, number, drawn)
        await self._to_daemon.send(Take(count=max(1, begin.rollouts.external), wait_s=TAKE_WAIT_S))
        taken = [order async for order in self._delivery()]
        self._notes.write(wanted=max(1, begin.rollouts.external), got=len(taken))
        if taken:
            await self._to_daemon.send(Judged(verdicts=(Verdict(rewards=REWARDS),) * len(taken)))
        await self._to_daemon.send(
            RoundReport(
                round=number,
                reward=0.5,
                local=1,
                external=len(taken),
                informative=1 + len(taken),
                generated_tokens=COMPLETIONS,
                seconds=trio.current_time() - started,
            )
        )

    async def _make(self, begin: Begin, table: TaskTable, number: int, drawn: random.Random) -> None:
        group = RolloutGroup(
            origin=begin.me,
            round=number,
            policy_version=number,
            task=table.assigned(begin.swarm_id, begin.me, number, 0),
            completions=tuple(drawn.randbytes(COMPLETION_CHARS // 2).hex() for _ in range(COMPLETIONS)),
        )
        data = encode_group(group)
        announcement = announce_group(group, data, REWARDS)
        self._notes.write(made=announcement.digest.hex())
        await self._to_daemon.send(Made(announcement=announcement, group=data, rewards=REWARDS))

    async def _delivery(self) -> AsyncIterator[Pulled]:
        """Yield the groups that are delivered; orders that mean nothing to a stub are passed over."""
        while not isinstance(order := await self._orders.receive(), Delivered):
            if isinstance(order, Pulled):
                yield order


def note_heard(notes: Notes) -> None:
    """Have this process note what it hears of."""

    class NotedBook(OfferBook):
        def receive(self, data: bytes, **how: Any) -> Offer | None:
            offer = super().receive(data, **how)
            if offer is not None:
                notes.write(heard=offer.digest.hex())
            return offer

    vars(rollouts)["OfferBook"] = NotedBook


def _data_dir(arguments: Iterable[str]) -> Path:
    given = list(arguments)
    return Path(given[given.index("--data-dir") + 1])


def main() -> None:
    """Be a node whose agent is stubbed."""
    folder = _data_dir(sys.argv)
    notes = Notes(folder / NOTES_NAME)
    note_heard(notes)
    period_s = float((folder.parent / PERIOD_NAME).read_text())
    engine.running_agent = StubAgent(notes, period_s).running  # type: ignore[assignment]
    command_line.main()


if __name__ == "__main__":
    main()
