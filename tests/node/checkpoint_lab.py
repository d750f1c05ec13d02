"""Checkpoints for tests: a swarm of three founders, what it certified, and folders as a node writes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from shoal.collectives.state import CertifiedState
from shoal.node.state.checkpoints import CheckpointContent, write_checkpoint
from shoal.node.state.contributions import SavedWork, WorkAccount, write_work
from shoal.node.state.resumption import ResumeFiles
from shoal.node.state.state_files import write_state
from shoal.node.state.tensor_files import TensorBytes, write_tensors
from shoal.node.training.trainer_messages import Layout
from shoal.protocol.certificate import genesis
from shoal.protocol.chain import Chain
from shoal.protocol.manifest import Manifest
from shoal.protocol.messages import Term
from tests import manifests
from tests.node.ledger import Ledger, identity, state_of, vector

LAYOUT = Layout(names=("first.weight", "last.bias"), shapes=((96, 100), (400,)), numel=10_000)


def manifest_of(name: str = "checkpoints") -> Manifest:
    """Of three founders, and whatever its name is, another swarm's than that of another name."""
    founders = [identity(n).peer_id for n in (1, 2, 3)]
    return manifests.manifest_of(founders, {"round": {"chunk_values": 4096}}, name=name, admission="open")


@dataclass
class CheckpointLedger(Ledger):
    """What the founders of a manifest certified."""

    manifest: Manifest = field(default_factory=manifest_of)
    states: list[CertifiedState] = field(default_factory=lambda: [state_of(0, layout=LAYOUT.digest)])

    def empty_chain(self) -> Chain:
        return Chain(genesis(self.manifest.swarm_id, self.manifest.swarm.founders))

    def saved(self, folder: Path, round: int) -> Path:
        """The state of a round as a node saves it, in its data folder `folder`."""
        path = folder / "state" / f"{round}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_state(path, self.states[round], self.header(round))
        return path

    def resume_files(self, folder: Path, round: int, *, passed_on: bool = False) -> ResumeFiles:
        """A trainer's and a daemon's own part of a round, of numbers that name the round."""
        resume = folder / "resume"
        resume.mkdir(parents=True, exist_ok=True)
        files = ResumeFiles(
            position=(Term(), round), trainer=resume / f"0.0-{round}.trainer", work=resume / f"0.0-{round}.work"
        )
        write_tensors(files.trainer, [TensorBytes.of("first.w", vector(round))], {"trainer": f"of round {round}"})
        write_work(files.work, self.work(round, passed_on=passed_on))
        return files

    def work(self, round: int, *, passed_on: bool = False) -> SavedWork:
        account = WorkAccount(
            term=Term(),
            round=round,
            base=self.chain.value(round - 1).hash,
            root=bytes(32),
            tokens=100,
            rounds_excluded=0,
            passed_on=passed_on or msgspec.UNSET,
        )
        return SavedWork(account, np.full(self.state.numel, round, np.float32))

    def content(self, folder: Path, round: int) -> CheckpointContent:
        """A checkpoint of a round, from the files in the data folder `folder`."""
        return CheckpointContent(
            state=self.states[round],
            header=lambda: self.header(round),
            saved=folder / "state" / f"{round}.safetensors",
            entries=self.chain.after(0, round),
            manifest=self.manifest,
            layout=LAYOUT,
        )

    def checkpoint(self, folder: Path, round: int, *, keep: int = 2) -> Path:
        """Have a checkpoint of that round, and whatever it is made of, in `folder`."""
        self.saved(folder, round)
        return write_checkpoint(folder / "checkpoints", self.content(folder, round), keep=keep)


def new_ledger(rounds: int = 3, name: str = "checkpoints") -> CheckpointLedger:
    ledger = CheckpointLedger(manifest=manifest_of(name))
    ledger.certify(rounds)
    return ledger
