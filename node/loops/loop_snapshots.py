"""Snapshots of a user's own training loop for a restart: the progress that no contribution holds, and nothing else.

Optimizer, schedule, random numbers and the place in the data are the user's to save, as in any loop. The daemon keeps
the contribution itself; with these two nothing of a node's work is lost or counted twice when both are started again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch

from shoal.node.pipe import SUMMARY_LIMIT_CHARS, one_line
from shoal.node.training.accounts import Accounts, SavedAccounts
from shoal.node.training.inner_state import InnerCounters, InnerState, SavedInner, SnapshotBusy, Snapshotter, Written
from shoal.node.training.random_state import RandomState
from shoal.node.training.trainer_messages import Layout, Report, Restore, Restored, Snapshot
from shoal.protocol.errors import LocalError, StorageError


class LoopSnapshots:
    """Writes them beside the training, and takes them over before the first anchor."""

    def __init__(
        self, accounts: Accounts, layout: Layout, device: torch.device, send: Callable[[Report], None]
    ) -> None:
        self._accounts = accounts
        self._layout = layout
        self._device = device
        self._send = send
        self._snapshotter = Snapshotter()

    def write(self, order: Snapshot) -> None:
        """Copy now; write, and report it, in a thread."""
        saved = self._accounts.saved(order.round)
        vectors = [(name, value) for name, value in (("kept", saved.kept), ("local", saved.local)) if value is not None]
        counters = InnerCounters(
            layout=self._layout.digest.hex(),
            round=order.round,
            steps=saved.steps,
            kept_tokens=saved.tokens,
            marked=saved.marked,
            assignment=None,
            drawn=0,
        )
        state = InnerState(vectors, counters, RandomState.capture(self._device))
        try:
            writing = self._snapshotter.take(state, Path(order.path))
        except SnapshotBusy as error:
            self._send(Written(failure=str(error)).report(order))
            return

        def write_and_report() -> None:
            written = writing.write()
            self._snapshotter.done()
            self._send(written.report(order))

        threading.Thread(target=write_and_report, name="shoal-snapshot", daemon=True).start()

    def restore(self, order: Restore) -> Restored:
        """Take over what an earlier process kept, or say why it cannot be."""
        refused = ""
        try:
            saved = SavedInner(Path(order.path))
            saved.check_layout(self._layout.digest)
            if saved.counters.round != order.round:
                raise StorageError(f"{order.path} is of round {saved.counters.round}, not {order.round}; remove it")
            if order.exact:
                self._accounts.restore(self._read(saved), spent=order.spent)
        except (StorageError, LocalError) as error:
            refused = str(error)
        except FileNotFoundError as error:
            refused = one_line(error)
        return Restored(round=order.round, path=order.path, exact=order.exact, refused=refused[:SUMMARY_LIMIT_CHARS])

    def _read(self, saved: SavedInner) -> SavedAccounts:
        vectors: dict[str, torch.Tensor] = {}
        for name in ("kept", "local"):
            if saved.has(name):
                vectors[name] = torch.zeros(self._layout.numel, dtype=torch.float32)
                saved.copy_to(name, vectors[name])
        counters = saved.counters
        return SavedAccounts(
            kept=vectors.get("kept"),
            local=vectors.get("local"),
            round=counters.round,
            steps=counters.steps,
            tokens=counters.kept_tokens,
            marked=counters.marked,
        )
