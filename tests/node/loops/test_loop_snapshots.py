"""What a loop of its user's own keeps amid a round: the progress that no contribution holds, for any later anchor."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.node.loops.loop_snapshots import LoopSnapshots
from shoal.node.training.accounts import Accounts
from shoal.node.training.flat_parameters import FlatParameters
from shoal.node.training.inner_state import SPARE
from shoal.node.training.trainer_messages import Report, Restore, Restored, Snapshot, Snapshotted

pytestmark = pytest.mark.usefixtures("one_torch_thread")


class Loop:
    """A model of three values with its accounts, and what was said to the daemon."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(3, 1, bias=False)
        flat = FlatParameters(self.model)
        self.accounts = Accounts(flat)
        self.said: list[Report] = []
        self.answered = threading.Event()
        self.snapshots = LoopSnapshots(self.accounts, flat.layout, torch.device("cpu"), self._send)

    def _send(self, report: Report) -> None:
        self.said.append(report)
        self.answered.set()

    def learn(self, value: float, tokens: int) -> None:
        with torch.no_grad():
            self.model.weight += value
        self.accounts.count(tokens)

    def write(self, path: Path) -> Snapshotted:
        self.answered.clear()
        self.snapshots.write(Snapshot(round=1, path=str(path), base=b"anchor"))
        assert self.answered.wait(60)
        report = self.said[-1]
        assert isinstance(report, Snapshotted)
        return report


def test_progress_is_kept_amid_a_round_and_added_to_a_later_anchor(tmp_path: Path) -> None:
    loop, path = Loop(), tmp_path / "midway"
    loop.accounts.apply(np.array([1, 2, 3], np.float32), round=1)
    assert loop.write(path).failure == "nothing is to be kept now"
    loop.learn(0.5, tokens=7)
    written = loop.write(path)
    assert (written.failure, written.midway) == ("", True)
    loop.accounts.contribute(np.zeros(3, np.float32), 2)
    assert loop.write(path).failure == "nothing is to be kept now"

    again = Loop()
    order = Restore(path=str(path), round=1, exact=True, midway=True)
    assert again.snapshots.restore(order) == Restored(round=1, path=str(path), exact=True, tokens=7)
    again.accounts.apply(np.array([4, 4, 4], np.float32), round=3)
    np.testing.assert_array_equal(again.accounts.local().numpy(), [4.5, 4.5, 4.5])
    assert (again.accounts.tokens, again.accounts.steps) == (7, 0)


def test_what_is_contributed_meanwhile_is_not_put_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, path = Loop(), tmp_path / "midway"
    loop.accounts.apply(np.zeros(3, np.float32), round=1)
    loop.learn(0.5, tokens=7)
    begin, begun = threading.Thread.start, list[threading.Thread]()
    monkeypatch.setattr(threading.Thread, "start", lambda thread: begun.append(thread))  # it waits for its turn
    loop.snapshots.write(Snapshot(round=1, path=str(path), base=b"anchor"))
    monkeypatch.setattr(threading.Thread, "start", begin)
    loop.snapshots.withdraw()
    begun[0].start()
    assert loop.answered.wait(60)
    assert isinstance(loop.said[0], Snapshotted)
    assert "nothing that a contribution holds" in loop.said[0].failure
    assert {file.name for file in tmp_path.iterdir()} <= {SPARE}
