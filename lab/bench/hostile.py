"""`shoal bench hostile`: rounds, memory and what is certified, while one does its worst, beside a swarm left alone.

Four real nodes train with steps that wait instead of computing, so that a round lasts as long as it is to whatever else
the machine does. After some rounds left alone a stranger, a fifth member that lies, or a copy of one of the four
strikes for as many rounds; then it stops. A lying member was a founder and honest until then, so that the swarm beside
which it is measured has five members too. With `--faults lying` it is one of four, who are named voters.

    warm up ─► rounds left alone ─► the strike begins ─► as many rounds ─► it ends ─► all in one round again

Whether anything was taken over is judged afterwards, by what the four have on disk (`hostile_verdict`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import psutil  # type: ignore[import-untyped]
import trio

from shoal.cli.render import ShowNow
from shoal.lab.bench.hostile_faults import FAULTS, Struck, restart_founder
from shoal.lab.bench.hostile_member import lying_command, told_of
from shoal.lab.bench.hostile_spec import HostileBench, HostileResult, Window
from shoal.lab.bench.hostile_verdict import problems_of
from shoal.lab.campaigns.campaign_plan import WITHSTANDS_A_LIAR
from shoal.lab.case import Case
from shoal.lab.fleet import START_DEADLINE_S, Swarm, cpu_s
from shoal.lab.waiting_workload import WORKLOAD_NAME
from shoal.node.reporting.events import Certified
from shoal.protocol.errors import NetworkError
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest, validate_manifest
from shoal.testnet.check import check_swarm
from shoal.testnet.nodes import Launch, NodeProcess, Runtime, node_command

MODEL: Final = {"inputs": 256, "outputs": 128}
CHUNK_VALUES: Final = 4096
LIE_LIMIT_ROUNDS: Final = 20
"""Of five members one leads none of so many rounds in one of ninety runs."""
WARM_UP_ROUNDS: Final = 2
SAMPLE_PERIOD_S: Final = 0.25
STEPS_OF_A_ROUND: Final = 40
SLACK: Final = 3.0
"""A window is over after so many times what its rounds ought to take, however many there were."""
MACHINE_S: Final = 30.0
"""Seconds that a loaded machine may add to that."""


class HostileSwarm(Swarm):
    """The nodes of one run, in an empty `folder`; `running` starts them. The last one lies, if the kind needs that."""

    def __init__(self, bench: HostileBench, folder: Path) -> None:
        self.bench = bench
        self.strike = folder / "strike"
        self._options: dict[Path, tuple[str, ...]] = {}
        self._step = folder / "step"
        self._step.write_text(str(bench.round_s / STEPS_OF_A_ROUND))
        count = bench.honest + bench.has_liar
        super().__init__(folder, count, partial(manifest_of, bench), runtime=Runtime(command=self._command))

    def home(self, index: int) -> Path:
        """The folder of a node, whose name stands in what is found wrong."""
        return self.folder / f"node{index}"

    @property
    def honest(self) -> list[NodeProcess]:
        """Those that do not lie."""
        return self.nodes[: self.bench.honest]

    @property
    def liar(self) -> NodeProcess | None:
        """The lying member, if there is one."""
        return self.nodes[self.bench.honest] if self.bench.has_liar else None

    @property
    def swarm_hex(self) -> str:
        """The SwarmId in hex."""
        return self.manifest.swarm_id.hex()

    def _command(self, launch: Launch) -> list[str]:
        command = [*node_command(launch), "--data", str(self._step), *self._options.get(launch.data_dir, ())]
        if self.liar is not None and launch.data_dir == self.liar.folder:
            return lying_command(command, self.bench.kind, self.strike, self.nodes[0].peer_id)
        return command

    async def launch_with(self, node: NodeProcess, *options: str) -> None:
        """Start a process of `node`, which joins the first, with these options besides."""
        self._options[node.folder] = options
        await self.launch(node, join=self.nodes[0].addresses)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The nodes, once they have certified some rounds together. Raises NetworkError; no process is left behind."""
        async with self.owned():
            await self.start()
            deadline_s = START_DEADLINE_S + WARM_UP_ROUNDS * SLACK * self.bench.round_s
            await self.until(
                lambda: all(self.common_rounds(node) >= WARM_UP_ROUNDS for node in self.nodes),
                "all nodes train together",
                deadline_s,
            )
            yield

    # -- what is measured ------------------------------------------------------------------------------------

    async def window(self, paced: list[NodeProcess]) -> Window:
        """Measure so many rounds of each of `paced`, or as many as come in a few times what these ought to take."""
        began = {node.index: self._certified_at(node)[-1] for node in paced}
        memory: dict[int, int] = {}
        files: dict[int, int] = {}
        wanted, since_at, used_s = self.bench.rounds, time.time(), self._used_s()

        def since(node: NodeProcess) -> list[float]:
            return [at for at in self._certified_at(node) if at > began[node.index]]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._sample, memory, files)
            with trio.move_on_after(wanted * self.bench.round_s * SLACK + MACHINE_S):
                await self.journal.until(lambda: all(len(since(node)) >= wanted for node in paced))
            nursery.cancel_scope.cancel()
        now, after_s = time.time(), self._used_s()
        cpu = {i: round((after_s[i] - s) / (now - since_at), 3) for i, s in used_s.items() if after_s.get(i, 0) >= s}
        slowest = max(paced, key=lambda node: _round_s(began[node.index], since(node), wanted, now))
        rounds = since(slowest)[:wanted]
        round_s = _round_s(began[slowest.index], rounds, wanted, now)
        return Window(
            rounds=len(rounds), round_s=round(round_s, 3) if rounds else None, memory_bytes=memory, files=files, cpu=cpu
        )

    async def until_lied(self) -> None:
        """Wait until the lying member, if there is one, has told a lie: some lie only where they lead. Bounded."""
        if self.liar is not None:
            told = told_of(self.strike)
            with trio.move_on_after(LIE_LIMIT_ROUNDS * self.bench.round_s * SLACK + MACHINE_S):
                await self.journal.until(told.exists)

    def _used_s(self) -> dict[int, float]:
        """Processor time of the honest daemons so far, by index."""
        return {index: cpu_s([process]) for index, process in self.daemons().items() if index < self.bench.honest}

    def _certified_at(self, node: NodeProcess) -> list[float]:
        return [event.at for event in self.journal.of(Certified, node.index)]

    async def _sample(self, memory: dict[int, int], files: dict[int, int]) -> None:
        """Keep the most that the honest daemons held, until cancelled."""
        while True:
            for index, process in self.daemons().items():
                if index < self.bench.honest:
                    with contextlib.suppress(psutil.Error):
                        memory[index] = max(memory.get(index, 0), process.memory_info().rss)
                        files[index] = max(files.get(index, 0), process.num_fds())
            await trio.sleep(SAMPLE_PERIOD_S)

    async def back(self) -> float | None:
        """Seconds from now until all honest nodes have certified a round as members; None if they do not."""
        now, peers = time.time(), {node.peer_id for node in self.honest}

        def back_at(node: NodeProcess) -> float | None:
            rounds = self.journal.of(Certified, node.index)
            return next((one.at for one in rounds if one.at > now and peers <= set(one.members)), None)

        with trio.move_on_after(self.bench.back_limit_s + SLACK * self.bench.round_s + MACHINE_S):
            await self.journal.until(lambda: all(back_at(node) is not None for node in self.honest))
        times = [at for node in self.honest if (at := back_at(node)) is not None]
        return round(max(times) - now, 2) if len(times) == self.bench.honest else None


def _round_s(began: float, rounds: list[float], wanted: int, now: float) -> float:
    """The mean of the first `wanted` rounds that ended at these times; endless without any."""
    if not rounds:
        return float("inf")
    ended = rounds[wanted - 1] if len(rounds) >= wanted else now
    return (ended - began) / min(len(rounds), wanted)


def manifest_of(bench: HostileBench, founders: list[PeerId]) -> Manifest:
    """The manifest of a run's swarm."""
    tables = {
        **(WITHSTANDS_A_LIAR if bench.faults == "lying" else {}),
        "swarm": {"name": "hostile", "founders": founders, "admission": "open"},
        "workload": {"name": WORKLOAD_NAME, "options": MODEL},
        "sync": {"inner_steps": STEPS_OF_A_ROUND, "balance": False},
        "round": {"chunk_values": CHUNK_VALUES},
    }
    return validate_manifest(tables, source="the benchmark")


async def _measure(bench: HostileBench, folder: Path, tell: ShowNow) -> HostileResult:
    swarm = HostileSwarm(bench, folder)
    async with swarm.running():
        tell(f"{len(swarm.nodes)} nodes train; {bench.rounds} rounds left alone")
        restarts = bench.kind == "links"  # as it will when struck: what a restart alone costs is no stranger's doing
        undisturbed = await swarm.window(await restart_founder(swarm) if restarts else swarm.honest)
        if undisturbed.rounds < bench.rounds:
            raise NetworkError(f"left alone the nodes certify {undisturbed.rounds} rounds, not {bench.rounds}")
        struck = Struck(paced=list(swarm.honest))
        async with FAULTS[bench.kind](swarm, struck):
            tell(f"{bench.kind} begins; {bench.rounds} rounds")
            disturbed = await swarm.window(struck.paced)
            await swarm.until_lied()
        tell("it is over")
        recovered_s = await swarm.back()
        ended = tuple(node.index for node in swarm.honest if not node.alive)
    return await trio.to_thread.run_sync(_result, swarm, undisturbed, disturbed, recovered_s, ended, struck)


def _result(
    swarm: HostileSwarm,
    undisturbed: Window,
    disturbed: Window,
    recovered_s: float | None,
    ended: tuple[int, ...],
    struck: Struck,
) -> HostileResult:
    folders: dict[PeerId, Path] = {node.peer_id: node.folder for node in swarm.honest}
    liar = swarm.liar
    rounds = {(one.term, one.round) for node in swarm.honest for one in swarm.journal.of(Certified, node.index)}
    problems = problems_of(swarm.manifest, folders, None if liar is None else liar.peer_id)
    kept = undisturbed.round_s / disturbed.round_s if undisturbed.round_s and disturbed.round_s else 0.0
    return HostileResult(
        bench=swarm.bench,
        kind=swarm.bench.kind,
        rounds_ratio=round(kept, 3),
        memory_growth_bytes=_growth(undisturbed.memory_bytes, disturbed.memory_bytes),
        files_growth=_growth(undisturbed.files, disturbed.files),
        recovered_s=recovered_s,
        taken_over=bool(problems),
        problems=problems,
        wrong_values=check_swarm(swarm.witnesses, rounds).wrong_values,
        ended=ended,
        undisturbed=undisturbed,
        disturbed=disturbed,
        attacks=dict(struck.made),
    )


def _growth(before: dict[int, int], after: dict[int, int]) -> int:
    """Growth of the node that grew most."""
    return max((most - before[index] for index, most in after.items() if index in before), default=0)


def run(bench: HostileBench, tell: ShowNow) -> HostileResult:
    """Strike real nodes that train, with one stranger, lying member or copied key, and say what it cost.

    The targets: nothing is taken over, rounds keep 0.9 of their pace beside strangers and 0.7 beside a lying member
    (0.8 with --faults lying, beside three), no honest node grows by more than 64 MiB, and all are back within a minute,
    or two rounds where those are longer.
    """
    with TemporaryDirectory(prefix="shoal-bench-hostile-") as name:
        return trio.run(_measure, bench, Path(name), tell)


CASE: Final = Case(spec=HostileBench, run=run)
