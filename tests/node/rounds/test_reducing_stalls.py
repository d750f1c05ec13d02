"""Reduction drivers that accuse whoever stalls, and nobody else."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest

from shoal.collectives.stalls import LATE_S, STALL_S
from shoal.node.node import Node
from shoal.node.options import NodeConfig
from shoal.node.reporting.event_log import EventLog
from shoal.node.rounds.pace import Stall
from shoal.node.state.store import Store
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.messages import Plan
from shoal.swarm.lanes.frame import FrameHeader, FrameKind
from tests.manifests import manifest_of
from tests.node.ledger import identity
from tests.node.rounds.reducing_lab import NOBODY, STEP_S, Clock, Mesh, clock
from tests.waiting import until

__all__ = ["clock"]


def test_a_node_accuses_later_where_most_of_its_members_answer_late(tmp_path: Path) -> None:
    manifest = manifest_of([identity(1).peer_id], {"workload": {"name": "regression"}})
    config = NodeConfig(manifest=manifest, data_dir=tmp_path / "node")
    with Store(config.data_dir) as store, contextlib.closing(EventLog(tmp_path / "events.jsonl")) as log:
        parts = Node(config, store, log, lambda _: None).parts
        assert parts.reduce._late_s == parts.members.late_s


# -- stalls --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late_s", [0.0, 3.0])
async def test_who_owes_a_contribution_and_is_silent_is_accused_by_who_runs_late_itself_only_later(
    tmp_path: Path, clock: Clock, late_s: float
) -> None:
    mesh = Mesh(tmp_path, 3, late_s=late_s)
    me, mute = mesh.peers[0], mesh.peers[2]
    waits = frozenset({me})  # it says that it waits before others lose patience, also while it accuses
    mesh.lose = lambda sender, header: sender == mute
    async with mesh.running():
        mesh.start(mesh.plan())
        driver = mesh.drivers[0]
        reduction = driver._reduction
        assert reduction is not None
        await until(lambda: reduction.waiting_for().contributions == {mute})
        assert driver.stalled() is None
        await clock.pass_time(mesh, STALL_S + late_s - 0.5)
        assert driver.stalled() == (Stall(NOBODY, waits) if late_s else None)
        await clock.pass_time(mesh, 1.0)
        # The other's finals are missing too, since it waits for the mute one itself; they are late only later.
        assert driver.stalled() == Stall(frozenset({mute}), waits)
        assert driver.stalled() is None  # not told again at once
        await clock.pass_time(mesh, LATE_S)
        assert driver.stalled() == Stall(frozenset({mute}), frozenset({mesh.peers[1]}) | waits)
        await clock.pass_time(mesh, STALL_S)
        assert driver.stalled() == Stall(frozenset({mute}), frozenset({mesh.peers[1]}) | waits)
        driver.stop()
        assert driver.stalled() is None


async def test_who_takes_nothing_of_what_is_queued_is_accused(tmp_path: Path, clock: Clock) -> None:
    mesh = Mesh(tmp_path, 3)
    deaf = mesh.peers[2]
    mesh.lose = lambda sender, header: sender == deaf
    async with mesh.running():
        mesh.start(mesh.plan(weightless=(2,)))  # it owes no contribution
        mesh.lanes[0].queued[deaf] = 1
        await clock.pass_time(mesh, STALL_S + 0.5)
        stall = mesh.drivers[0].stalled()
        assert stall is not None
        assert stall.peers == {deaf}


async def test_who_owes_only_finals_gets_longer(tmp_path: Path, clock: Clock) -> None:
    mesh = Mesh(tmp_path, 3)
    owner = mesh.peers[1]
    mesh.lose = lambda sender, header: sender == owner and header.kind is FrameKind.FINAL
    async with mesh.running():
        mesh.start(mesh.plan())
        driver = mesh.drivers[0]
        reduction = driver._reduction
        assert reduction is not None
        await until(lambda: reduction.final_chunks == 2)
        assert reduction.waiting_for().finals == {owner}
        await clock.pass_time(mesh, STALL_S + LATE_S - 0.5)
        assert driver.stalled() is None
        await clock.pass_time(mesh, 1.0)
        assert driver.stalled() == Stall(NOBODY, frozenset({owner}))


async def test_plans_of_other_leads_double_the_stall_deadline_until_the_round_is_over(
    tmp_path: Path, clock: Clock
) -> None:
    mesh = Mesh(tmp_path, 3)
    mesh.lose = lambda sender, header: sender == mesh.peers[2]
    driver, mute = mesh.drivers[0], {mesh.peers[2]}

    async def accuses_after(plan: Plan) -> float:
        mesh.start(plan)
        await until(lambda: driver._reduction is not None and driver._reduction.waiting_for().contributions == mute)
        began = clock.ahead_s
        while not driver._stall.peers:
            await clock.pass_time(mesh, STEP_S)
        return clock.ahead_s - began

    async with mesh.running():
        assert await accuses_after(mesh.plan()) < STALL_S + 0.5
        second = msgspec.structs.replace(mesh.plan(), view=1)
        assert 2 * STALL_S - 0.5 < await accuses_after(second) < 2 * STALL_S + 0.5
        for one in mesh.drivers:
            one.forget()
        assert await accuses_after(msgspec.structs.replace(mesh.plan(), round=2)) < STALL_S + 0.5


async def test_finished_reduction_accuses_nobody(tmp_path: Path, clock: Clock) -> None:
    mesh = Mesh(tmp_path, 2)
    async with mesh.running():
        assert mesh.drivers[0].stalled() is None
        mesh.start(mesh.plan())
        await until(lambda: all(mesh.done))
        await clock.pass_time(mesh, STALL_S + LATE_S + 1)
        assert [driver.stalled() for driver in mesh.drivers] == [None, None]


async def test_peer_without_a_lane_stalls_and_others_go_on(tmp_path: Path, clock: Clock) -> None:
    mesh = Mesh(tmp_path, 3)
    mesh.unreachable = {mesh.peers[2]}
    mesh.lose = lambda sender, header: sender == mesh.peers[2]
    async with mesh.running():
        mesh.start(mesh.plan())
        reduction = mesh.drivers[0]._reduction
        assert reduction is not None
        await until(lambda: reduction.waiting_for().contributions == {mesh.peers[2]})
        assert mesh.drivers[0].unreachable == {mesh.peers[2]}
        await clock.pass_time(mesh, STALL_S + 0.5)
        assert mesh.drivers[0].stalled() == Stall(frozenset({mesh.peers[2]}), frozenset({mesh.peers[0]}))


async def test_peer_to_whom_a_lane_takes_long_keeps_the_others_waiting_for_nothing(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, 3)
    slow, dials = mesh.peers[2], mesh.lanes[0].ensure

    async def ensure(peer: PeerId, *, deadline_s: float) -> None:
        if peer == slow and not arrived:
            await until(lambda: arrived)  # as long as it takes
            raise NetworkError("no lane yet")
        await dials(peer, deadline_s=deadline_s)

    arrived: list[PeerId] = []
    mesh.lanes[0].ensure = ensure

    def note(sender: PeerId, header: FrameHeader) -> bool:
        if sender == mesh.peers[0] and header.kind is FrameKind.CONTRIBUTION:
            arrived.append(sender)
        return False

    mesh.lose = note
    async with mesh.running():
        mesh.start(mesh.plan())
        await until(lambda: arrived)  # it posts to who is there
