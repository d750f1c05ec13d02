"""Writes the files of a round again and again, and is killed at another instant each time.

Run as ``python -m tests.node.checkpoint_writer FOLDER KILLS SEED``: makes FOLDER/0, FOLDER/1, … alike, with everything
of rounds 1 and 2 in them; in each a child process writes round 3 and, after a drawn number of lines of code, gets
SIGKILL. Every write is cut in small pieces, so that there are instants with half a file. Prints how many lines the
writing takes, and by line: which round each was killed at, or that it finished.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.collectives.state import StateHeader
from shoal.node.state import store, tensor_files
from shoal.node.state.checkpoints import write_checkpoint
from shoal.node.state.resumption import Resumption
from shoal.node.state.state_files import write_state
from shoal.protocol.messages import Term
from tests.node.checkpoint_lab import CheckpointLedger, new_ledger

PIECE_BYTES = 8192


def write_round(ledger: CheckpointLedger, folder: Path, header: StateHeader) -> None:
    """As a node does: the trainer's part and its own, the state, and a checkpoint of all, in place of the oldest."""
    round = header.round
    ledger.resume_files(folder, round)
    write_state(folder / "state" / f"{round}.safetensors", ledger.states[round], header)
    resumption = Resumption(folder, send=_nobody, on_progress=lambda _: None, always=lambda _: True)
    resumption.forget_old((Term(), round))
    write_checkpoint(folder / "checkpoints", ledger.content(folder, round), keep=2)
    (folder / "state" / f"{round - 2}.safetensors").unlink()


async def _nobody(_: object) -> None: ...


class Countdown:
    """Counts the lines of code that run; kills this process at the last."""

    def __init__(self, lines: int) -> None:
        self.lines = lines

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Countdown:
        if event == "line":
            self.lines -= 1
            if self.lines == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return self


def main(folder: Path, kills: int, seed: int) -> None:
    store.SYNC_BYTES = PIECE_BYTES
    tensor_files.HASH_THREADS = 1  # threads do not come along into a forked process
    ledger = new_ledger()
    header = ledger.header(3)
    template = folder / "template"
    for round in (1, 2):
        ledger.checkpoint(template, round)
    scratch = folder / "count"
    shutil.copytree(template, scratch)
    counter = Countdown(1 << 60)
    sys.settrace(counter)
    write_round(ledger, scratch, header)
    sys.settrace(None)
    total = (1 << 60) - counter.lines
    print(total)
    drawn = random.Random(seed)
    for number in range(kills):
        shutil.copytree(template, folder / str(number))
        at = drawn.randint(1, total)
        child = os.fork()
        if child == 0:
            sys.settrace(Countdown(at))
            write_round(ledger, folder / str(number), header)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(at, os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
