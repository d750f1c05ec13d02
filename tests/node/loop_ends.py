"""Both ends of a training loop's attachment in one process: a real `ExternalTrainer`, and `join` in the test's thread.

The daemon's part of the conversation is an async function of the test's, run beside the loop in a thread of its own; an
error in it is the test's.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import torch
import trio

from shoal.node import own_loop
from shoal.node.loops.external_trainer import LOOP_WAIT_S
from shoal.node.loops.loop_client import LoopClient, attach
from shoal.node.loops.loop_messages import TRAINER_SOCKET_NAME
from shoal.node.own_loop import Swarm, join
from shoal.node.training.trainer import TrainerSpec
from shoal.node.training.trainer_messages import (
    Applied,
    Apply,
    Assignment,
    Command,
    Contribution,
    Evaluating,
    Initial,
    Layout,
    Progress,
    SyncSettings,
    Train,
    WriteInitial,
)
from shoal.protocol.identity import PeerId
from shoal.protocol.manifest import Manifest, load_manifest
from tests.node.told_trainer import ToldLoop

DEADLINE_S = 120.0
PEER = "12D3KooWA"
SHARE = Assignment(seed=0, round=1, member=0, members=1)

Event = TypeVar("Event")
Script = Callable[["DaemonEnd"], Awaitable[None]]


class DaemonEnd:
    """What a daemon does with its trainer, one order at a time."""

    def __init__(self, trainer: ToldLoop) -> None:
        self.trainer = trainer
        self.orders = 0

    async def send(self, command: Command) -> None:
        await self.trainer.send(command)

    async def expect(self, kind: type[Event] | tuple[type[Event], ...]) -> Event:
        """The next event, `Progress` and what confirms an anchor apart, which must be of `kind`."""
        async for event in self.trainer.events:
            if isinstance(event, kind):
                return event
            assert isinstance(event, Applied | Evaluating | Progress), event
        raise AssertionError("the events ended")

    async def initial(self) -> np.ndarray:
        """S(0), as the loop built it."""
        await self.send(WriteInitial())
        await self.expect(Initial)
        return self.trainer.contribution.copy()

    async def wait(self, event: threading.Event) -> None:
        """Until the loop's thread has come so far."""
        assert await trio.to_thread.run_sync(event.wait, DEADLINE_S)

    async def apply(self, anchor: np.ndarray, round: int, *, taken: int = 0, fresh: bool = False) -> None:
        await self.trainer.apply(Apply(round=round, taken=taken, fresh=fresh), anchor.copy())

    async def train(
        self, round: int, steps: int, *, contribute: bool = True, contributors: int = 0, missing: tuple[str, ...] = ()
    ) -> None:
        self.orders += 1
        await self.send(
            Train(
                round=round,
                steps=steps,
                order=self.orders,
                assignment=SHARE,
                contribute=contribute,
                contributors=contributors,
                missing=tuple(map(PeerId, missing)),
            )
        )

    async def contribution(self) -> tuple[Contribution, np.ndarray]:
        event = await self.expect(Contribution)
        return event, self.trainer.contribution.copy()

    async def contribution_and(self, kind: type[Event]) -> tuple[Contribution, np.ndarray, Event]:
        """The contribution, and one event of `kind`, which came before it or after."""
        first = await self.expect((Contribution, kind))
        delta = self.trainer.contribution.copy()
        if isinstance(first, Contribution):
            return first, delta, await self.expect(kind)
        return *(await self.contribution()), first


class StandIn:
    """In place of the daemon's process: it is in this one."""

    log_path = Path("daemon.log")
    leaves = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def attach(self, *, layout: Layout, metric: str, device: str) -> LoopClient:
        return attach(self.folder, layout=layout, metric=metric, device=device)

    @property
    def manifest(self) -> Manifest:
        return load_manifest(Path("swarm.toml"))

    def failed(self) -> bool:
        return False

    def last_words(self) -> str:
        return ""

    def status(self) -> dict[str, Any]:
        return {"round": 0, "phase": "train"}

    def ask_to_leave(self) -> None:
        pass

    def end(self) -> None:
        pass


class Ends:
    """A context: the trainer listens in `folder`, and `script` speaks for the daemon. Ends when the script has."""

    def __init__(
        self,
        folder: Path,
        script: Script,
        *,
        known: Layout | None = None,
        wait_s: float = LOOP_WAIT_S,
        timeout_s: float | None = None,
        sync: SyncSettings | None = None,
    ):
        self.folder = folder
        self._spec = TrainerSpec(workload="own-loop", sync=sync or SyncSettings())
        self._script = script
        self._known, self._wait_s = known, wait_s
        self._patience_s = timeout_s
        self._listening = threading.Event()
        self._error: BaseException | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self.abandoned = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._listening.wait(DEADLINE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._scope.cancel)
        self._thread.join(DEADLINE_S + 5)
        assert not self._thread.is_alive()
        if self._error is not None and error is None:
            raise self._error

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:  # the test's thread raises it
            self._error = error
        finally:
            self._listening.set()

    async def _main(self) -> None:
        path = self.folder / TRAINER_SOCKET_NAME
        trainer = ToldLoop(
            self._spec,
            peer_id=PEER,
            path=lambda: path,
            known=lambda: self._known,
            wait_s=self._wait_s,
            timeout_s=self._patience_s,
            on_abandoned=self.abandoned.set,
        )
        self._token = trio.lowlevel.current_trio_token()
        with trio.fail_after(DEADLINE_S), self._scope:
            async with trio.open_nursery() as nursery:
                attached = trio.Event()

                async def run() -> None:
                    await nursery.start(trainer.run)
                    attached.set()

                nursery.start_soon(run)
                while not path.exists():  # noqa: ASYNC110  nothing tells of it, for users neither
                    await trio.sleep(0.001)
                self._listening.set()
                await attached.wait()
                await self._script(DaemonEnd(trainer))
                nursery.cancel_scope.cancel()


def joining(
    folder: Path, monkeypatch: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, **settings: Any
) -> Swarm:
    """`join`, with the trainer of `Ends` in place of a daemon's process."""
    monkeypatch.setattr(own_loop, "found_or_started", lambda *args, **kwargs: StandIn(folder))
    return join(model, optimizer, "swarm.toml", data_dir=folder, **settings)


def flat(model: torch.nn.Module) -> np.ndarray:
    """The parameters that need a gradient, sorted by name, as one vector."""
    named = sorted((name, value) for name, value in model.named_parameters() if value.requires_grad)
    return np.concatenate([value.detach().numpy().reshape(-1) for _, value in named])
