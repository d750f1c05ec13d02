"""Fault of one run on a living swarm: chosen, struck at its point, and taken back afterwards.

A node that is to be struck in a phase holds at that very point, and no other does. A kill between vote and certificate
has no point to hold at: the victim's log is watched instead, and the record says whether the certificate was faster.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio

from shoal.lab.campaigns.campaign_plan import HARMLESS, PAIRED, Run
from shoal.lab.campaigns.campaign_swarm import LivingSwarm
from shoal.lab.fleet import START_DEADLINE_S
from shoal.node.reporting.event_files import LOG_NAME
from shoal.node.reporting.event_log import LogTail
from shoal.node.reporting.events import CaughtUp, Certified, Voted
from shoal.protocol.messages import Value
from shoal.protocol.voting import is_quorum, lead
from shoal.testnet import faults, scenario
from shoal.testnet.nodes import NodeProcess
from shoal.testnet.scenario import Kind

POINT_DEADLINE_S: Final = 30.0
SECOND_POINT_S: Final = 0.5
"""Time for which the first of two victims holds for the second, which may never come to its point without it."""
WATCH_S: Final = 0.002
CUT_PERIOD_S: Final = 0.03


@dataclass(slots=True, kw_only=True, eq=False)
class CarriedFault:
    """Fault of a run as it was done. at: wall clock; held_s: how long the first victim stood still for it before."""

    victims: tuple[NodeProcess, ...]
    point: str = ""
    at: float = 0.0
    held_s: float = 0.0

    def text(self, run: Run) -> str:
        """`kill_lead node 2 at reduce 0.41`."""
        who = " and ".join(str(node.index) for node in self.victims)
        return f"{run.kind} node {who} {self.point}"


class Fault:
    """The fault of one run, in the round `gate`, at whose beginning all nodes hold."""

    def __init__(self, run: Run, swarm: LivingSwarm, gate: int) -> None:
        self._run = run
        self._swarm = swarm
        self._gate = gate
        head = swarm.head()
        self.strike = CarriedFault(victims=self._victims(head))
        self._phases: list[str] = []
        harmless = run.kind in HARMLESS
        self.survivors = tuple(n for n in swarm.honest if harmless or n not in self.strike.victims)

    def _victims(self, head: Value) -> tuple[NodeProcess, ...]:
        nodes, run = self._swarm.nodes, self._run
        order = [nodes[index] for index in run.order]
        if run.kind == "kill_lead" and (leads := [node for node in order if node.peer_id == lead(head, 0)]):
            return tuple(leads)  # else a liar leads
        if run.kind in PAIRED:
            pairs = [(a, b) for a in order for b in order if a is not b]
            for pair in pairs:
                if is_quorum(head, [node.peer_id for node in nodes if node not in pair]):
                    return pair
        return (order[0],)

    # -- striking --------------------------------------------------------------------------------------------

    async def let_go(self) -> float:
        """Set the victims' holds and let all nodes go on; returns when (wall clock). Raises NetworkError."""
        run, victims = self._run, self.strike.victims
        points = [] if run.phase is None or run.kind == "kill_voter" else [run.phase] * len(victims)
        if run.kind == "kill_repair":
            points = ["reduce", "repair"][: len(victims)]
        if run.kind == "restore":
            await faults.copy_folder(self._fault("restore", victims[0]), self._swarm)
        for node, phase in zip(victims, points, strict=False):
            await node.ask("hold", f"{self._gate}:{phase}:{run.progress if phase == 'reduce' else 0}")
        released_at = time.time()
        await self._swarm.ask_all(self._swarm.asked(), "release")
        self._phases = points
        return released_at

    async def carry_out(self) -> None:
        """Wait for the moment and strike. What lasts (a stop) has ended when this returns, but for `take_back`."""
        await self._until_moment()
        self.strike.at = time.time()
        action = _ACTIONS[self._run.kind]
        await action(self)

    async def _until_moment(self) -> None:
        run, strike = self._run, self.strike
        if run.kind == "kill_voter":
            voted = await until_voted(strike.victims[0].folder / LOG_NAME, self._gate)
            strike.point = "after its vote" if voted else "after its certificate"
        elif not self._phases:
            wait_s = run.after * self._swarm.calm_s
            strike.point = f"after {wait_s:.2f} s"
            await trio.sleep(wait_s)
        else:
            strike.point = f"at {self._phases[0]}" + (f" {run.progress:.2f}" if self._phases[0] == "reduce" else "")
            await self._until_holding()

    async def _until_holding(self) -> None:
        first, *second = self.strike.victims
        met = partial(self._swarm.holding, first, self._gate, self._phases[0])
        with trio.move_on_after(POINT_DEADLINE_S):
            await self._swarm.journal.until(lambda: met() is not None or self._over())
        holding = met()
        if holding is None:
            self.strike.point += ", which it never came to"
            return
        if second and self._phases[1] == self._phases[0]:
            with trio.move_on_after(SECOND_POINT_S):
                await self._swarm.journal.until(
                    lambda: self._swarm.holding(second[0], self._gate, self._phases[1]) is not None
                )
        self.strike.held_s = time.time() - holding.at

    def _over(self) -> bool:
        """True if the round was certified before the point was met."""
        return any(self._swarm.certificate(node, self._gate) is not None for node in self.survivors)

    async def _strike(self, kind: Kind, *victims: NodeProcess) -> None:
        """Strike these as a scenario calls it; all victims where none are named."""
        for node in victims or self.strike.victims:
            await faults.strike(self._fault(kind, node), self._swarm)

    def _fault(self, kind: Kind, node: NodeProcess, ahead_s: float | None = None) -> scenario.Fault:
        return scenario.Fault(kind=kind, round=self._gate, node=node.index, ahead_s=ahead_s)

    async def _kill(self) -> None:
        await self._strike("kill")

    async def _kill_repair(self) -> None:
        first, *second = self.strike.victims
        await self._strike("kill", first)
        for node in second:
            at_repair = partial(self._swarm.holding, node, self._gate, "repair")
            with trio.move_on_after(POINT_DEADLINE_S):
                await self._swarm.journal.until(lambda met=at_repair: met() is not None or self._over())  # type: ignore[misc]
            self.strike.point += " and at repair" if at_repair() is not None else ", with nothing to repair"
            await self._strike("kill", node)

    async def _stop(self) -> None:
        await self._strike("stop")

    async def _stop_continue(self) -> None:
        await self._stop()
        await trio.sleep(self._run.stop_s)
        await self.take_back()

    async def _stop_kill(self) -> None:
        await self._stop()
        await trio.sleep(self._run.stop_s)
        await self._kill()

    async def _stop_two(self) -> None:
        first, *second = self.strike.victims
        await self._strike("stop", first)
        for node in second:
            await self._strike("kill", node)

    async def _cut(self) -> None:
        (victim,) = self.strike.victims
        first = next(self._swarm.nodes[index] for index in self._run.order if index != victim.index)
        all_others = [node for node in self._swarm.nodes if node is not victim]
        peers = [node.peer_id for node in ([first] if self._run.kind == "cut_pair" else all_others)]
        broken = 0
        for cut in range(self._run.cuts):
            await trio.sleep(CUT_PERIOD_S if cut else 0)
            reply = await victim.ask("cut", *peers)
            broken += len(msgspec.convert(reply["cut"], list[str]))
        self.strike.point += f", lanes to peers cut {broken} times"
        await self._swarm.release([victim])

    async def _set_clock(self) -> None:
        (victim,) = self.strike.victims
        await faults.strike(self._fault("clock", victim, self._run.ahead_s), self._swarm)
        self.strike.point += f", its clock set {self._run.ahead_s:+,.0f} s"
        await self._swarm.release([victim])

    # -- afterwards ------------------------------------------------------------------------------------------

    async def take_back(self) -> None:
        """Continue the stopped victims, start the killed ones, and set clocks right. Raises NetworkError."""
        swarm = self._swarm
        if self._run.kind in ("clock", "restore"):
            await self._get_over(*self.strike.victims)
            return
        killed = [node for node in self.strike.victims if node.struck == "killed"]
        quiet = self.survivors if killed and self._run.quiet else ()
        if quiet:
            await swarm.stand_still(quiet)
        for node in self.strike.victims:
            if node in killed:
                await swarm.revive(node)
                continue
            if node.stopped:
                await self._strike("continue", node)
            await swarm.release([node])
        if quiet:
            await swarm.until(lambda: all(map(swarm.began_round, killed)), "who was killed is back", START_DEADLINE_S)
            await swarm.release(quiet)

    async def _get_over(self, victim: NodeProcess) -> None:
        """See that the node goes on; where it had no peace, under a clock that is right or on an old folder."""
        if self._run.kind == "restore":
            fault = self._fault("restore", victim)
            await faults.strike(fault, self._swarm)
        else:
            fault = self._fault("clock", victim, 0.0)
            if self._run.quiet:
                await faults.strike(fault, self._swarm)
        await faults.until_whole(fault, self._swarm)


_ACTIONS: Final = {
    "kill": Fault._kill,
    "kill_lead": Fault._kill,
    "kill_voter": Fault._kill,
    "kill_two": Fault._kill,
    "kill_repair": Fault._kill_repair,
    "stop": Fault._stop,
    "stop_continue": Fault._stop_continue,
    "stop_kill": Fault._stop_kill,
    "stop_two": Fault._stop_two,
    "cut_pair": Fault._cut,
    "cut_all": Fault._cut,
    "clock": Fault._set_clock,
    "restore": Fault._kill,
}


async def until_voted(log: Path, round: int) -> bool:
    """Wait until the node of this log has voted in a round; False if it has its certificate already, or never votes.

    Looks far more often than the journal does: between vote and certificate there are milliseconds.
    """
    tail = LogTail(log)
    with trio.move_on_after(POINT_DEADLINE_S):
        while True:
            told = [e for e in tail.read() if isinstance(e, Voted | Certified | CaughtUp) and e.round == round]
            if told:
                return all(isinstance(event, Voted) for event in told)
            await trio.sleep(WATCH_S)
    return False
