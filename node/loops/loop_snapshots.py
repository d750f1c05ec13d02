"""Snapshots of a user's own training loop for a restart: the progress that no contribution holds, and nothing else.

Optimizer, schedule, random numbers and the place in the data are the user's to save, as in any loop. The daemon keeps
the contribution itself; with these two nothing of a node's work is lost or counted twice when both are started again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from shoal.node.training.accounts import Accounts
from shoal.node.training.inner_state import InnerState, SavedInner, Snapshotter, Written, take_up
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
        """Copy now; write, and report it, in a thread. One amid a round only while it is amid one."""
        began = time.perf_counter()
        if order.midway and not self._accounts.amid_round:
            self._send(Written(failure="nothing is to be kept now").report(order))
            return
        saved = self._accounts.saved(order.round, midway=order.midway)
        state = InnerState.of(saved, self._layout, self._device)
        self._snapshotter.save(state, order, self._send, began=began)

    def withdraw(self) -> None:
        """A contribution is to be reported: what is in it is in no snapshot amid the round from here on."""
        self._snapshotter.withdraw()

    def restore(self, order: Restore) -> Restored:
        """Take over what an earlier process kept, or say why it cannot be."""

        def use(saved: SavedInner) -> None:
            saved.check_layout(self._layout.digest)
            if order.exact:
                try:
                    self._accounts.restore(saved.accounts(self._layout.numel), spent=order.spent)
                except LocalError as error:
                    raise StorageError(str(error)) from error

        return take_up(order, use)
